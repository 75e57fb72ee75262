"""What a program is handed and hands out: no order of its instructions needs less, other placements do."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from synth_cases import fleet, shape
from test_segments import adam

from shardwright.cost.fleet import Fleet
from shardwright.cost.memory.liveness import at_the_end, footprint
from shardwright.cost.model import CostModel
from shardwright.ir.donation import donating
from shardwright.ir.trace import trace
from shardwright.synth.freely import Free, freely
from shardwright.synth.space.space import Space
from shardwright.synth.timer import Timer

WIDTH, BATCH = 64, 512


def found_on(devices: Fleet) -> Free:
    weights = [shape(WIDTH, WIDTH)] * 4
    graph = trace(adam, weights, weights, weights, shape(BATCH, WIDTH)).graph
    return freely(graph, Space(graph), CostModel(devices), Timer())


@pytest.mark.parametrize("donated", [False, True])
def test_it_counts_what_comes_and_what_goes_once(donated: bool) -> None:
    def step(w: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        loss = jnp.sum(x @ w)
        return w - 0.1 * loss, loss, loss, x

    graph = donating(trace(step, shape(8, 4), shape(16, 8)), donated).graph
    free = freely(graph, Space(graph), CostModel(fleet((1,))), Timer())
    program, ratios = free.best.program, np.array(free.best.ratios)
    # The weights, the batch, which is handed on, and the loss; the new weights lie where the old ones did.
    least = 4 * (8 * 4 + 16 * 8 + 1 + (0 if donated else 8 * 4))
    assert at_the_end(program, graph).peak(ratios) == least
    assert footprint(program, graph).peak(ratios) >= least


def test_where_that_is_too_much_something_else_is_made_smaller() -> None:
    ample = found_on(fleet((1,) * 4, memory="1 GB"))
    program, ratios, graph = ample.best.program, ample.best.ratios, ample.turns.judge.graph
    least = float(at_the_end(program, graph).peak(np.array(ratios)).max())
    peak = float(footprint(program, graph).peak(np.array(ratios)).max())
    for part in (1.01, 0.99):
        short = found_on(fleet((1,) * 4, memory=f"{round(part * least)} B"))
        assert short.found.cost_s == pytest.approx(ample.found.cost_s, rel=1e-9)
        assert (short.best.program == program) == (part > 1)
        assert (short.over < 0.9 * peak / (part * least)) == (part < 1)
        assert short.over == pytest.approx(short.best.over, rel=1e-9)
