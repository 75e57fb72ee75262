"""Small training steps and the placements their inputs may start in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shardwright.ir.graph import Graph
from shardwright.ir.placement import Placement, R, Shard

Step = Callable[..., Any]
Params = dict[str, jax.Array]


def array(*shape: int, seed: int = 0, dtype: Any = np.float32) -> Any:
    """A reproducible normal array."""
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


def mlp_loss(params: Params, x: jax.Array, y: jax.Array) -> jax.Array:
    hidden = jnp.tanh(x @ params["w1"] + params["b1"])
    return jnp.mean((hidden @ params["w2"] - y) ** 2)


def mlp() -> tuple[Step, tuple[Any, ...]]:
    """SGD with momentum on a two-layer perceptron; batch 9."""

    def step(
        params: Params, momentum: Params, x: jax.Array, y: jax.Array
    ) -> tuple[Params, Params, jax.Array]:
        loss, gradients = jax.value_and_grad(mlp_loss)(params, x, y)
        momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, gradients)
        return jax.tree.map(lambda p, m: p - 0.1 * m, params, momentum), momentum, loss

    params = {"w1": array(6, 8), "b1": array(8, seed=1), "w2": array(8, 4, seed=2)}
    return step, (params, jax.tree.map(np.zeros_like, params), array(9, 6, seed=3), array(9, 4, seed=4))


def scanned() -> tuple[Step, tuple[Any, ...]]:
    """Layers under scan, forward and backward (a reversed scan), stacked parameters as scanned operands."""

    def loss_of(weights: jax.Array, x: jax.Array) -> jax.Array:
        def layer(h: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
            h = jnp.tanh(h @ w)
            return h, h.sum()

        h, sums = jax.lax.scan(layer, x, weights)
        return (h**2).mean() + 1e-3 * sums.sum()

    def step(weights: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        loss, gradient = jax.value_and_grad(loss_of)(weights, x)
        return weights - 0.1 * gradient, loss

    return step, (0.5 * array(3, 5, 5), array(7, 5, seed=1))


def controlled() -> tuple[Step, tuple[Any, ...]]:
    """A while whose condition reads a reduced value, a cond, and a scan of length zero."""

    def step(x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        def more(state: tuple[jax.Array, jax.Array]) -> jax.Array:
            return (jnp.sum(state[1] ** 2) < 400.0) & (state[0] < 20)

        count, grown = jax.lax.while_loop(
            more, lambda s: (s[0] + 1, s[1] * 1.25 + jnp.mean(s[1], axis=0)), (0, x)
        )
        chosen = jax.lax.cond(count > 3, lambda a, b: a @ b, lambda a, b: jnp.sin(a) @ b * 2.0, grown, y)
        nothing, empty = jax.lax.scan(lambda c, v: (c + v.sum(), c * 2.0), chosen.sum(), jnp.zeros((0, 3)))
        return grown, chosen, nothing + empty.sum() + count

    return step, (array(7, 5), array(5, 4, seed=1))


def batched() -> tuple[Step, tuple[Any, ...]]:
    """A while under vmap: every row draws with a key of its own, and ends in an iteration of its own."""

    def step(x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        def grow(row: jax.Array, bound: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
            def turn(state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
                count, row, key = state
                key, now = jax.random.split(key)
                return count + 1, row * 1.25 + jax.random.uniform(now, row.shape), key

            count, grown, _ = jax.lax.while_loop(
                lambda state: jnp.sum(state[1] ** 2) < bound, turn, (jnp.int32(0), row, key)
            )
            return count, grown

        keys = jax.random.split(jax.random.key(0), len(x))
        counts, grown = jax.vmap(grow)(x, jnp.sum(x * 4, axis=1) ** 2, keys)
        return grown, grown @ y, counts

    return step, (array(7, 5), array(5, 4, seed=1))


def summed(width: int = 5) -> tuple[Step, tuple[Any, ...]]:
    """Sums over pieces of a batch, begun and carried on in all ways that there are.

    A sum that is carried once more as it was; a sum of its own; two that begin with one tensor; one that
    begins with an argument, one with a number; and what is made anew, and handed on twice.
    """

    def step(w: jax.Array, x: jax.Array, v: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        def piece(carry: tuple[jax.Array, ...], rows: jax.Array) -> tuple[tuple[jax.Array, ...], jax.Array]:
            late, alone, one, other, moved, size, _, _, _ = carry
            h = jnp.tanh(rows @ w)
            g = rows.T @ h
            sums = late + g, alone + 3 * g, one - g, other + 2 * g, 0.9 * moved, size + jnp.sum(h)
            return (*sums, g, g, late), jnp.mean(rows)

        zeros, ones = jnp.zeros_like(w), jnp.ones_like(w)
        others = [jnp.full_like(w, number) for number in (2, 3, 4)]
        begun = ones / 5, zeros, ones, ones, v, jnp.float32(0.0), *others
        (late, alone, one, other, moved, *rest), means = jax.lax.scan(piece, begun, x)
        return moved + alone, (late, one, other, *rest, means)

    return step, (0.5 * array(6, width), array(4, 7, 6, seed=1), array(6, width, seed=2))


def nested(width: int = 5) -> tuple[Step, tuple[Any, ...]]:
    """Sums over pieces of a batch of what a loop over layers makes, added up by that loop row by row."""

    def step(w: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        def piece(sums: jax.Array, rows: jax.Array) -> tuple[jax.Array, jax.Array]:
            def layer(carry: tuple[jax.Array, ...], xs: tuple[jax.Array, ...]) -> tuple[Any, None]:
                (h, sums), (weights, number) = carry, xs
                after = jnp.tanh(h @ weights)
                row = jax.lax.dynamic_index_in_dim(sums, number, keepdims=False) + h.T @ after
                return (after, jax.lax.dynamic_update_index_in_dim(sums, row, number, 0)), None

            (h, sums), _ = jax.lax.scan(layer, (rows, sums), (w, jnp.arange(len(w))))
            return sums, jnp.mean(h)

        sums, means = jax.lax.scan(piece, 0.5 * w, x)
        return w + sums, means

    return step, (0.1 * array(6, width, width), array(4, 7, width, seed=1))


def half() -> tuple[Step, tuple[Any, ...]]:
    """bfloat16 activations with float32 master weights."""

    def loss_of(w: jax.Array, x: jax.Array) -> jax.Array:
        h = jax.nn.relu(x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16))
        return jnp.mean(h.astype(jnp.float32) ** 2)

    def step(w: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        loss, gradient = jax.value_and_grad(loss_of)(w, x)
        return w - 0.1 * gradient, loss

    return step, (array(6, 5), array(8, 6, seed=1))


STEPS: dict[str, Callable[[], tuple[Step, tuple[Any, ...]]]] = {
    "mlp": mlp,
    "scanned": scanned,
    "controlled": controlled,
    "batched": batched,
    "summed": summed,
    "half": half,
}


def starts(graph: Graph) -> dict[str, list[Placement]]:
    """Input placements: data parallel, parameters sharded too, everything cut on its last dimension."""
    ranks = [value.type.rank for value in graph.inputs]
    state = set(graph.state.values())
    return {
        "replicated": [R] * len(ranks),
        "data": [R if i in state or not rank else Shard(0) for i, rank in enumerate(ranks)],
        "zero": [Shard(0) if rank else R for rank in ranks],
        "last": [Shard(rank - 1) if rank else R for rank in ranks],
    }
