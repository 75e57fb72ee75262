"""What tests of plans share: tiny steps of all kinds, slow devices, and equality up to rounding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shardwright import (
    Fleet,
)

Step = Callable[..., Any]


def array(*shape: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def fleet(*mflops: float, bandwidth: str = "400 GB/s", latency: str = "100 ns") -> Fleet:
    """Devices so slow, on links so fast, that even tiny tensors are worth cutting."""
    devices = [
        {
            "type": {
                "name": f"slow-{speed:g}",
                "flops": f"{speed} MFLOP/s",
                "memory_bandwidth": f"{2 * speed} MB/s",
                "memory": "1 GB",
            }
        }
        for speed in mflops
    ]
    link = {"link": {"bandwidth": bandwidth, "latency": latency}} if len(mflops) > 1 else {}
    return Fleet.from_dict({"name": "slow", "nodes": [{"devices": devices, **link}]})


def mlp_loss(params: Any, x: Any, y: Any) -> Any:
    hidden = jnp.tanh(x @ params["w1"] + params["b1"])
    return jnp.mean((hidden @ params["w2"] - y) ** 2)


def mlp_step(params: Any, momentum: Any, x: Any, y: Any) -> Any:
    loss, gradients = jax.value_and_grad(mlp_loss)(params, x, y)
    momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, gradients)
    return jax.tree.map(lambda p, m: p - 0.1 * m, params, momentum), momentum, {"loss": loss}


def mlp(batch: int = 12, width: int = 16) -> tuple[Step, tuple[Any, ...]]:
    params = {"w1": array(8, width), "b1": array(width, seed=1), "w2": array(width, 4, seed=2)}
    momentum = jax.tree.map(np.zeros_like, params)
    return mlp_step, (params, momentum, array(batch, 8, seed=3), array(batch, 4, seed=4))


def assert_same(got: Any, wanted: Any, rtol: float = 1e-5) -> None:
    """Equal up to rounding, relative to the largest element of each leaf."""
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        assert a.dtype == b.dtype
        assert np.abs(np.asarray(a) - np.asarray(b)).max() <= rtol * np.abs(b).max()


def dropout() -> tuple[Step, tuple[Any, ...]]:
    """State with a typed key that every step splits."""

    def step(w: Any, key: Any, x: Any) -> Any:
        key, use = jax.random.split(key)

        def loss_of(w: Any) -> Any:
            h = jnp.tanh(x @ w)
            return jnp.mean(jnp.where(jax.random.bernoulli(use, 0.5, h.shape), h / 0.5, 0.0) ** 2)

        loss, gradient = jax.value_and_grad(loss_of)(w)
        return w - 0.1 * gradient, key, loss

    return step, (array(8, 16), jax.random.key(7), array(12, 8, seed=1))


def dropout_raw() -> tuple[Step, tuple[Any, ...]]:
    step, (w, _, x) = dropout()
    return step, (w, jax.random.PRNGKey(7), x)


def scan() -> tuple[Step, tuple[Any, ...]]:
    def step(ws: Any, x: Any) -> Any:
        def loss_of(ws: Any) -> Any:
            h, _ = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, ws)
            return jnp.mean(h**2)

        loss, gradient = jax.value_and_grad(loss_of)(ws)
        return ws - 0.1 * gradient, loss

    return step, (0.3 * array(3, 16, 16), array(12, 16, seed=1))


def while_() -> tuple[Step, tuple[Any, ...]]:
    def step(w: Any, x: Any) -> Any:
        count, h = jax.lax.while_loop(
            lambda s: (jnp.sum(s[1] ** 2) > 1e-3) & (s[0] < 5),
            lambda s: (s[0] + 1, jnp.tanh(s[1] @ w)),
            (0, x),
        )
        return w * 0.9, h, count

    return step, (0.1 * array(16, 16), array(12, 16, seed=1))


def while_of_a_batch() -> tuple[Step, tuple[Any, ...]]:
    """A root for each of a batch, by Newton's method: each of them is found in an iteration of its own."""

    def root(a: Any) -> Any:
        return jax.lax.while_loop(lambda s: jnp.abs(s * s - a) > 1e-4 * a, lambda s: (s + a / s) / 2, a)

    def step(w: Any, x: Any) -> Any:
        roots = jax.vmap(root)(1 + jnp.sum((x @ w) ** 2, axis=1))
        return w * 0.9, roots, jnp.mean(roots)

    return step, (array(16, 16), array(12, 16, seed=1))


def cond() -> tuple[Step, tuple[Any, ...]]:
    def step(w: Any, x: Any) -> Any:
        h = jax.lax.cond(
            jnp.sum(x) > 0, lambda a, b: jnp.tanh(a @ b), lambda a, b: (a * 2) @ jnp.cos(b), x, w
        )
        return w * 0.9, jnp.mean(h)

    return step, (array(16, 16), array(12, 16, seed=1))


STEPS: dict[str, Callable[[], tuple[Step, tuple[Any, ...]]]] = {
    "dropout": dropout,
    "dropout with a raw key": dropout_raw,
    "scan": scan,
    "while": while_,
    "while of a batch": while_of_a_batch,
    "cond": cond,
}
