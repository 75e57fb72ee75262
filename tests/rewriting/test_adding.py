"""What a scan stacks up is added to that of other pieces by the scan itself, row by row."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rewriting_cases import compiled_bytes, evaluated, fleet, layered

from shardwright import synthesize
from shardwright.ir.graph import Graph
from shardwright.ir.regions import stacked_results
from shardwright.ir.rewrites import adding
from shardwright.ir.rewrites.microbatch import microbatched
from shardwright.ir.trace import trace

LAYERS, WIDTH, PIECES = 6, 128, 4
WEIGHTS = [(LAYERS, WIDTH, 2 * WIDTH), (LAYERS, 2 * WIDTH, WIDTH)]


def stacked_up(graph: Graph) -> list[tuple[int, ...]]:
    """Shapes of what scans within the loop over pieces stack up."""
    (loop,) = (e for e in graph.equations if e.regions)
    scans = [e for region in loop.regions for e in region.equations if e.regions]
    return [e.outputs[k].type.shape for e in scans for k in sorted(stacked_results(e))]


def one_after_another(patch: pytest.MonkeyPatch) -> None:
    """As without it: the rows of a piece are stacked up, and added when the scan is over."""
    patch.setattr(adding, "added_inside", lambda equations, sums: [])


def test_gradients_of_layers_are_not_stacked_up_first(monkeypatch: pytest.MonkeyPatch) -> None:
    step, args = layered(scan=True, layers=LAYERS, width=WIDTH, batch=16)
    traced, flat = trace(step, *args), jax.tree.leaves(args)
    within = microbatched(traced, PIECES)
    one_after_another(monkeypatch)
    after = microbatched(traced, PIECES)
    assert set(WEIGHTS) <= set(stacked_up(after.graph))
    assert set(WEIGHTS).isdisjoint(stacked_up(within.graph))
    for got, expected, wanted in zip(
        evaluated(within, flat), evaluated(after, flat), jax.tree.leaves(jax.jit(step)(*args)), strict=True
    ):
        np.testing.assert_array_equal(got, expected)
        np.testing.assert_allclose(got, wanted, rtol=2e-5, atol=2e-6)


def test_what_is_read_within_the_loop_is_there_at_once() -> None:
    """A sum over rows that the step hands out, and of which it computes something else, too."""

    def step(w: Any, x: Any) -> Any:
        def loss_of(w: Any) -> Any:
            h, sums = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), (h * h).sum(0)), x, w)
            return jnp.mean(h**2), (sums, 3 * sums[1])

        (loss, more), gradient = jax.value_and_grad(loss_of, has_aux=True)(w)
        return w - 0.1 * gradient, loss, *more

    rng = np.random.default_rng(0)
    args = 0.3 * rng.normal(size=(3, 4, 4)), rng.normal(size=(12, 4))
    args = tuple(x.astype(np.float32) for x in args)
    found = microbatched(trace(step, *args), 2)
    assert (3, 4) in stacked_up(found.graph) and (3, 4, 4) not in stacked_up(found.graph)
    for got, wanted in zip(evaluated(found, list(args)), jax.jit(step)(*args), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=2e-5, atol=2e-6)


def test_what_one_piece_stacks_up_takes_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the planner's figures, and by XLA's; what comes after the loop takes its part of it again."""
    step, args = layered(scan=True, layers=LAYERS, width=WIDTH, batch=16)
    weights = sum(4 * int(np.prod(shape)) for shape in WEIGHTS)

    def planned() -> tuple[int, int]:
        plan = synthesize(step, *args, fleet=fleet(speeds=(1,)), microbatches=PIECES, recompute="all")
        arguments = sum(each.nbytes for each in jax.tree.leaves(args))
        return max(plan.memory_bytes), compiled_bytes(plan) + arguments

    within, compiled = planned()
    one_after_another(monkeypatch)
    after, compiled_after = planned()
    assert within == pytest.approx(compiled, rel=0.1)
    assert after == pytest.approx(compiled_after, rel=0.1)
    assert after - within > 0.4 * weights
    assert compiled_after - compiled > 0.4 * weights
