"""Pools of programs for small steps: the cheapest pair that fits, against all pairs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from synth_cases import fleet, shape
from test_budgets import GRAPHS, limited

from shardwright.cost.fleet import Fleet
from shardwright.cost.memory.liveness import Peaks, footprint
from shardwright.cost.model import CostModel
from shardwright.cost.share_cost import Floats
from shardwright.ir.graph import Graph
from shardwright.ir.placement import deal
from shardwright.ir.program import Program
from shardwright.ir.trace import trace
from shardwright.synth.freely import freely
from shardwright.synth.memory import dealt as dealing
from shardwright.synth.memory import pool
from shardwright.synth.memory.dealt import Dealt, worth_dealing
from shardwright.synth.memory.pool import Pool
from shardwright.synth.space.space import Space
from shardwright.synth.timer import Timer


def pool_of(graph: Graph, devices: Fleet, look: Any = None) -> Pool | None:
    return freely(graph, Space(graph), CostModel(devices), Timer(), look=look).pool


def taken_with_room(graph: Graph) -> Floats:
    """Bytes that the best plan takes on both devices where they have room for anything."""
    best = freely(graph, Space(graph), CostModel(fleet((4, 1))), Timer()).best
    return footprint(best.program, graph).peak(np.asarray(best.ratios))


@pytest.mark.parametrize("part", [0.95, 0.8, 0.65])
@pytest.mark.parametrize("name", GRAPHS)
def test_nothing_in_a_pool_that_fits_is_cheaper(name: str, part: float) -> None:
    step, args = GRAPHS[name]
    graph = trace(step, *args).graph
    taken = taken_with_room(graph)
    made = pool_of(graph, limited(tuple(part * max(taken) for _ in taken)))
    assert made is not None
    found = made.cheapest()
    fitting = [
        float(each.seconds[(each.peaks <= made._limits).all(axis=1)].min(initial=math.inf))
        for each in made._known.values()
    ]
    least = min(fitting, default=math.inf)
    assert (math.inf if found is None else found[0].cost_s) == least
    if found is not None:
        assert found[0].fits and found[1].bytes[0] <= part * max(taken)
        assert made.cheapest(least * 1.001) is not None
        assert made.cheapest(least * 0.999) is None


def test_few_looks_say_how_large_a_share_each_device_has_room_for() -> None:
    """The model takes all for half as large as it is, and there are 2,000 ways to deal the rows."""
    step = lambda w, x: (w - 0.1 * (x.T @ (x @ w)), x @ w)  # noqa: E731
    graph = trace(step, shape(16, 16), shape(2000, 16)).graph
    looks: list[tuple[float, ...]] = []

    def look(program: Program, ratios: Any) -> tuple[int, ...]:
        looks.append(tuple(ratios))
        return tuple(int(2 * b) for b in footprint(program, graph).peak(np.asarray(ratios)))

    taken = taken_with_room(graph)
    made = pool_of(graph, limited((1.3 * max(taken),) * 2), look)
    assert made is not None
    found = made.cheapest()
    assert found is not None and isinstance(found[1], Peaks) and found[1].seen
    least = min(
        float(each.seconds[(2 * each.peaks <= made._limits).all(axis=1)].min(initial=math.inf))
        for each in made._known.values()
    )
    assert found[0].cost_s == pytest.approx(least, rel=1e-3)
    # One ratio after the other they are 1,120.
    assert len(looks) < 600


def test_what_looks_say_of_the_model_goes_for_programs_that_nobody_looks_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The model is right about all: of what it has for too large, eight looks are enough."""
    step, args = GRAPHS["descent"]
    graph = trace(step, *args).graph
    taken = max(taken_with_room(graph))

    def found_at(part: float) -> tuple[float, int]:
        """What the cheapest that fits costs, and looks at programs until it is found."""
        looks: list[Program] = []

        def look(program: Program, ratios: Any) -> tuple[int, ...]:
            looks.append(program)
            return tuple(int(b) for b in footprint(program, graph).peak(np.asarray(ratios)))

        made = pool_of(graph, limited((part * taken,) * 2), look)
        assert made is not None
        found = made.cheapest()
        return math.inf if found is None else found[0].cost_s, len(looks)

    parts = 0.8, 0.5
    learned = [found_at(part) for part in parts]
    monkeypatch.setattr(pool, "_LEARNED", math.inf)
    every = [found_at(part) for part in parts]
    assert [cost_s for cost_s, _ in learned] == [cost_s for cost_s, _ in every]
    assert sum(looks for _, looks in learned) < sum(looks for _, looks in every)


@pytest.mark.parametrize(("units", "speeds"), [(7, (3.0, 1.0)), (5, (2.0, 2.0, 1.0)), (4, (3.0, 2.0, 1.0))])
def test_whole_units_are_dealt_in_every_way(units: int, speeds: tuple[float, ...]) -> None:
    model = CostModel(fleet(speeds))
    even = (1 / len(speeds),) * len(speeds)
    every = Dealt(model, [units], [units], [even]).vectors
    ways = itertools.product(range(units + 1), repeat=len(model.classes))
    shares = [deal(units, np.asarray(ratios)) for ratios in every]
    dealt = {tuple(int(sum(own[d] for d in each.members)) for each in model.classes) for own in shares}
    assert dealt == {way for way in ways if sum(way) == units}


def test_a_step_whose_shares_may_as_well_be_rounded_has_no_pool() -> None:
    assert worth_dealing(4999, 2) and not worth_dealing(5000, 2)
    assert worth_dealing(512, 3) and not worth_dealing(513, 3)
    (step, _), rows = GRAPHS["descent"], 6000
    graph = trace(step, shape(96, 96), shape(rows, 96)).graph
    assert pool_of(graph, limited((1e6, 1e6))) is None


def test_short_axes_are_dealt_on_a_coarse_grid_where_the_ways_are_too_many() -> None:
    """Those between what computing and memory would like: of four kinds of devices 10.8 million in all."""
    model = CostModel(fleet((4.0, 3.0, 2.0, 1.0)))
    more = [(0.4, 0.3, 0.2, 0.1), (0.25,) * 4]
    every = Dealt(model, [400], [400], more).vectors
    assert 1000 < len(every) <= 5002 and set(more) <= set(every)
    low, high = np.min(more, axis=0) - 0.05, np.max(more, axis=0) + 0.05
    assert all((low <= shares).all() and (shares <= high).all() for shares in np.array(every))


def test_a_long_axis_on_alike_devices_is_dealt_in_its_one_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What alike devices get of totals that no way has is not worked out: there are as many as units."""
    dealt: list[int] = []
    lengths = dealing.lengths

    def counted(size: int, unit: int, ratios: Sequence[float]) -> tuple[int, ...]:
        dealt.append(size)
        return lengths(size, unit, ratios)

    monkeypatch.setattr(dealing, "lengths", counted)
    model = CostModel(fleet((2.0, 2.0, 2.0)))
    assert Dealt(model, [10**7], [10**7], [(1 / 3,) * 3]).vectors[0] == pytest.approx((1 / 3,) * 3)
    assert len(dealt) <= 1
