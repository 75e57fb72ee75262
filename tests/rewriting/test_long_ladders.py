"""Which rungs of a long ladder of rewritings are planned: a few, and by what these cost a few others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import pytest
from rewriting_cases import fleet, layered

from shardwright import Plan
from shardwright.api import synthesize_traced
from shardwright.cost.model import CostModel
from shardwright.ir.rewrites.rewriting import rewriting_of
from shardwright.ir.trace import Traced, trace
from shardwright.memory.ladder import Ladder
from shardwright.memory.rivals import unlimited_s
from shardwright.synth.stretches import RECOMPUTING, ladder


def test_of_a_long_ladder_a_low_rung_that_fits_is_taken() -> None:
    """Not the one that keeps least, where the devices have room for more; nor one that does not fit."""
    step, args = layered(False, layers=6)
    traced = trace(step, *args)
    free = synthesize_traced(traced, fleet=fleet(), recompute="off", microbatches=1)
    least = synthesize_traced(traced, fleet=fleet(), recompute="all", microbatches=1)
    assert len(ladder(traced.graph, CostModel(fleet()))) > 8
    budget = (max(free.memory_bytes) + max(least.memory_bytes)) // 2
    found = synthesize_traced(traced, fleet=fleet(f"{budget} B"), microbatches=1)
    assert found.fits and max(found.memory_bytes) <= budget
    assert found.cost_s <= least.cost_s * (1 + 1e-9)


class Known:
    """Plans each rung at a cost of its own, or says that it does not fit."""

    def __init__(self, plan: Plan, costs: Sequence[float], room: int = 0) -> None:
        self.made, self.costs, self.room = plan, costs, room
        self.tried: list[int] = []

    def of(self, rungs: Ladder) -> None:
        self.rungs = [rung.stretches for rung in rungs.rungs]

    def plan(self, traced: Traced, rival_s: float = np.inf, **options: Any) -> Plan | None:
        rung = self.rungs.index(rewriting_of(traced).recompute)
        self.tried.append(rung)
        cost_s = self.costs[rung]
        return None if cost_s >= rival_s or rung < self.room else self.made.but(cost_s=cost_s, bound_s=cost_s)

    def unfinished(self, traced: Traced) -> bool:
        return False


def long_ladder(speeds: tuple[int, ...] = (3, 1)) -> tuple[Ladder, Plan]:
    """A ladder of more rungs than are all tried, without a planner; and some plan."""
    step, args = layered(False, layers=6)
    traced = trace(step, *args)
    made = synthesize_traced(traced, fleet=fleet(speeds=speeds), recompute="off", microbatches=1)
    rungs = Ladder(traced, fleet(speeds=speeds), RECOMPUTING, 1, cast(Any, None), lambda: False)
    assert len(rungs.rungs) > 8
    return rungs, made


def test_where_a_rung_is_much_cheaper_others_below_it_are_tried_as_well() -> None:
    """What goes to host memory may cost many times as much as what is computed again."""
    for growth, more in ((8.0, True), (1.005, False)):
        rungs, made = long_ladder()
        last = len(rungs.rungs) - 1
        costs = [growth**n for n in range(last + 1)]
        planner = Known(made, costs, room=1)
        rungs.planner = cast(Any, planner)
        planner.of(rungs)
        rungs.known[last] = best = made.but(cost_s=costs[last], bound_s=costs[last])
        found = rungs.below(best, 0.0)
        assert found is not None
        assert (len(planner.tried) > 3) == more
        assert (found.cost_s == costs[1]) == more


@pytest.mark.parametrize("speeds", [(3,), (3, 1)])
def test_on_one_device_a_rung_says_what_others_cost(speeds: tuple[int, ...]) -> None:
    """On several, what computing again takes is no less than was thought."""
    rungs, made = long_ladder(speeds)
    last = len(rungs.rungs) - 1
    seconds = [rung.seconds for rung in rungs.rungs]
    # It takes half as long as was thought.
    costs = [1.0 + 0.5 * each for each in seconds]
    planner = Known(made, costs)
    rungs.planner = cast(Any, planner)
    planner.of(rungs)
    rungs.worth = 0.0
    rungs.known[last] = best = made.but(cost_s=costs[last], bound_s=costs[last])
    rungs.below(best, 1.0)
    as_thought = 0.5 if len(speeds) == 1 else 1.0
    highest = max(n for n in range(last) if 1.0 + as_thought * seconds[n] < costs[last])
    assert planner.tried[0] == highest


@pytest.mark.parametrize("cheap", [True, False])
def test_above_a_rung_that_frees_too_little_others_are_tried_if_they_may_be_rivals(cheap: bool) -> None:
    """That no program of it is one does not say whether those are too dear that fit, or all of them."""
    rungs, made = long_ladder()
    last = len(rungs.rungs) - 1
    free_s, most_s = unlimited_s(made), rungs.rungs[last].seconds
    planner = Known(made, [free_s] * (last + 1), room=last)
    rungs.planner = cast(Any, planner)
    planner.of(rungs)
    assert most_s > 0
    found = rungs.that_fits(made, 2 * (free_s + most_s) if cheap else free_s)
    if cheap:
        assert found is not None and planner.tried[-1] == last and 1 < len(planner.tried) <= 3
    else:
        assert found is None and len(planner.tried) == 1


class Lacking(Known):
    """None of whose plans fits: each try leaves a part of the bytes that were lacking before it."""

    def __init__(self, plan: Plan, limits: Sequence[float], lacks: float, leaves: float) -> None:
        super().__init__(plan, [])
        self.limits, self.lacks, self.leaves = limits, lacks, leaves

    def lacking(self) -> Plan:
        need = [
            int(limit + self.lacks * share)
            for limit, share in zip(self.limits, self.made.ratios, strict=True)
        ]
        return self.made.but(fits=False, memory_bytes=need)

    def plan(self, traced: Traced, rival_s: float = np.inf, **options: Any) -> Plan | None:
        self.tried.append(self.rungs.index(rewriting_of(traced).recompute))
        self.lacks *= self.leaves
        return self.lacking()


@pytest.mark.parametrize(("leaves", "further"), [(0.1, True), (0.5, False)])
def test_a_rung_that_leaves_little_of_what_was_lacking_is_not_the_last(leaves: float, further: bool) -> None:
    """A little more is tried, which should do."""
    rungs, made = long_ladder()
    lacks = min(rung.freed_bytes for rung in rungs.rungs) / 2
    planner = Lacking(made, rungs.limits, lacks, leaves)
    rungs.planner = cast(Any, planner)
    planner.of(rungs)
    assert rungs.briefly(planner.lacking()) is None
    assert planner.tried == list(range(len(planner.tried)))
    assert (3 < len(planner.tried) < len(rungs.rungs)) if further else len(planner.tried) == 3
