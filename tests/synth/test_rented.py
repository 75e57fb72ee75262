"""Programs that rents find: the same list whatever the memory, from the cheapest to smaller ones."""

from __future__ import annotations

import numpy as np
import pytest
from synth_cases import attention, fleet

from shardwright.cost.bill import bill, seconds
from shardwright.cost.memory.liveness import footprint
from shardwright.cost.model import CostModel
from shardwright.ir.program import verify
from shardwright.ir.trace import trace
from shardwright.synth.alternate import freely
from shardwright.synth.memory.budgets import Limits
from shardwright.synth.memory.rented import Rented, rented
from shardwright.synth.space.space import Space
from shardwright.synth.timer import Timer

SPEEDS = (4, 2, 1)


def test_the_list_does_not_depend_on_the_memory_and_reaches_from_cheap_to_small() -> None:
    function, args = attention()
    graph = trace(function, *args).graph
    space = Space(graph)

    def listed(memory: str) -> tuple[list[Rented], float]:
        model = CostModel(fleet(SPEEDS, memory=memory))
        free = freely(graph, space, model, Timer())
        return list(rented(free.turns, free.found, free.renting(Limits.of(model)))), free.found.cost_s

    # The best program takes 150 kB on its fullest device: memory is short, more and more.
    some, free_s = listed("120 kB")
    for memory in ("80 kB", "60 kB"):
        assert [(r.program, r.ratios) for r in listed(memory)[0]] == [(r.program, r.ratios) for r in some]
    model = CostModel(fleet(SPEEDS))
    costs = [seconds(bill(each.program, graph, model), model, each.ratios) for each in some]
    taken = [float(footprint(r.program, graph).peak(np.array(r.ratios)).sum()) for r in some]
    for each in some:
        verify(each.program, graph)
    assert min(costs) == pytest.approx(free_s, rel=1e-2)
    assert min(taken) < 0.95 * taken[int(np.argmin(costs))]
