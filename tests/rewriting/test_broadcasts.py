"""Broadcasts that are the same in every iteration, or for every piece: made where they are read."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rewriting_cases import evaluated, fleet

from shardwright import synthesize
from shardwright.ir.graph import Graph, Value
from shardwright.ir.regions import scan_counts
from shardwright.ir.rewrites.rewriting import Rewriting, rewritten
from shardwright.ir.trace import trace

LAYERS, ROWS, TOKENS, WIDTH = 3, 12, 5, 4


def masked(scan: bool) -> tuple[Any, Any]:
    """Layers that mask scores, with a mask that is the same for all rows of the batch."""

    def layer(x: Any, w: Any) -> Any:
        scores = jnp.einsum("btd,bsd->bts", x @ w, x)
        scores = jnp.where(jnp.tril(jnp.ones((TOKENS, TOKENS), bool)), scores, -1e9)
        return x + jnp.einsum("bts,bsd->btd", jax.nn.softmax(scores), x)

    def step(w: Any, x: Any) -> Any:
        def loss_of(w: Any) -> Any:
            if scan:
                last, _ = jax.lax.scan(lambda x, w: (layer(x, w), None), x, w)
            else:
                last = x
                for each in w:
                    last = layer(last, each)
            return jnp.mean(last**2)

        loss, gradient = jax.value_and_grad(loss_of)(w)
        return jax.tree.map(lambda p, g: p - 0.1 * g, w, gradient), loss

    rng = np.random.default_rng(0)
    w = (0.5 * rng.normal(size=(LAYERS, WIDTH, WIDTH))).astype(np.float32)
    x = rng.normal(size=(ROWS, TOKENS, WIDTH)).astype(np.float32)
    return step, (w if scan else list(w), x)


def sizes(graph: Graph) -> list[int]:
    """Elements of what scans have handed in for every iteration as it is."""
    scans = [e for e in graph.equations if e.primitive == "scan"]
    operands = [atom for e in scans for atom in e.inputs[: scan_counts(e.params)[0]]]
    return [atom.type.size for atom in operands if isinstance(atom, Value)]


def test_scans_broadcast_masks_themselves() -> None:
    """JAX's differentiation has them made before the scan, as large as all scores."""
    step, args = masked(scan=True)
    scores = ROWS * TOKENS * TOKENS
    closed = jax.make_jaxpr(step)(*args)
    scans = [e for e in closed.jaxpr.eqns if e.primitive.name == "scan"]
    assert any(v.aval.size == scores for e in scans for v in e.invars[: scan_counts(e.params)[0]])
    found = sizes(trace(step, *args).graph)
    assert found and max(found) == TOKENS * TOKENS
    assert synthesize(step, *args, fleet=fleet()).verify(step, *args).ok


def begins(w: Any, x: Any) -> Any:
    """What every layer reads is where the first one begins, too."""
    start = jnp.zeros(x.shape)

    def layer(h: Any, w: Any) -> Any:
        new = jnp.tanh(h @ w + x)
        return jnp.where(new > 0.1, new, start), None

    return jax.lax.scan(layer, start, w)[0]


def walked(w: Any, x: Any) -> Any:
    """What every layer reads is walked over, too."""
    rows = jnp.broadcast_to(x[None], (LAYERS, *x.shape))
    return jax.lax.scan(lambda h, w: (jnp.tanh(h @ w[0] + w[1] + (rows * h).mean(0)), None), x, (w, rows))[0]


def chained(w: Any, x: Any) -> Any:
    """A broadcast of a broadcast, both read by every layer."""
    row = jnp.broadcast_to(x[0, 0], (1, 1, WIDTH))
    full = jnp.broadcast_to(row, x.shape)
    return jax.lax.scan(lambda h, w: (jnp.tanh(h @ w + full) * row, None), x, w)[0]


@pytest.mark.parametrize("layers", [begins, walked, chained])
def test_what_is_broadcast_may_be_read_elsewhere(layers: Any) -> None:
    _, (w, x) = masked(scan=True)

    def step(w: Any, x: Any) -> Any:
        loss, gradient = jax.value_and_grad(lambda w: jnp.mean(layers(w, x) ** 2))(w)
        return w - 0.1 * gradient, loss

    assert synthesize(step, w, x, fleet=fleet()).verify(step, w, x).ok


@pytest.mark.parametrize("scan", [True, False])
def test_a_piece_of_a_broadcast_is_a_broadcast(scan: bool) -> None:
    """In micro-batches the mask of the whole batch is nowhere made, neither before their loop nor in it."""
    step, args = masked(scan)
    traced = rewritten(trace(step, *args), Rewriting(microbatches=4))
    wanted = [np.asarray(x) for x in jax.tree.leaves(jax.jit(step)(*args))]
    got = evaluated(traced, jax.tree.leaves(args))
    assert all(np.allclose(a, b, rtol=1e-5, atol=1e-6) for a, b in zip(got, wanted, strict=True))
    masks = [v for e in traced.graph.all_equations() for v in e.outputs if v.type.dtype == "bool"]
    assert masks and max(v.type.size for v in masks) == ROWS // 4 * TOKENS * TOKENS
