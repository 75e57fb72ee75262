"""What the best program at the floors of all prices likes: where devices are alike, and elsewhere."""

from __future__ import annotations

from unittest import mock

import pytest
from synth_cases import FLEETS, STEPS, fleet, space, traced

from shardwright.cost.fleet import Fleet
from shardwright.cost.model import CostModel
from shardwright.synth.prices.lists import PriceList
from shardwright.synth.prices.tables import Prices
from shardwright.synth.programs.judge import Judge
from shardwright.synth.search.priced import SpaceSolver
from shardwright.synth.search.solution import Solution
from shardwright.synth.shares.turns import Found, Turns
from shardwright.synth.timer import Timer

LINK = {"bandwidth": "130 GB/s", "latency": "5 us"}

#: On these four, nothing costs less under shares of its own than at even ones.
ALIKE = Fleet.from_dict(
    {"name": "alike", "nodes": [{"count": 1, "devices": {"type": "V100-16GB", "count": 4}, "link": LINK}]}
)


def liked(step: str, on: Fleet, part: float = 1.0) -> tuple[Turns, Solution, Prices, Found]:
    """Turns, the best program at so large a part of the floors, these prices, and what it likes."""
    costs = CostModel(on)
    floors = Prices.floors(PriceList(costs))
    if part < 1:
        whole = floors
        floors = Prices(whole.list, lambda *lines: part * whole.work_out(*lines))
    solver = SpaceSolver(space(step))
    ideal = solver.solve(floors)
    assert isinstance(floors.list, PriceList)
    judge = Judge(traced(step).graph, costs)
    turns = Turns(space(step), floors.list, Timer(), solver, lambda: False, judge)
    return turns, ideal, floors, turns.like(ideal, floors)


@pytest.mark.parametrize("step", STEPS)
def test_on_devices_that_are_alike_nobody_looks_for_ratios(step: str) -> None:
    turns, ideal, floors, found = liked(step, ALIKE)
    assert "ledger" not in vars(turns)  # no bill was added up
    even = (0.25,) * 4
    ratios, cost_s = turns.best_ratios(turns.ledger.bill(ideal.assignment, floors), even)
    assert found.ratios == ratios == even
    assert found.cost_s == pytest.approx(cost_s, rel=1e-10)
    assert turns.search(even)[0] is ideal


@pytest.mark.parametrize(("on", "part"), [(fleet((4, 2)), 1.0), (ALIKE, 0.9)], ids=["unlike", "lower"])
@pytest.mark.parametrize("step", STEPS)
def test_where_floors_are_lower_ratios_are_looked_for(step: str, on: Fleet, part: float) -> None:
    turns, ideal, floors, found = liked(step, on, part)
    even = (1 / len(on.devices),) * len(on.devices)
    wanted = turns.best_ratios(turns.ledger.bill(ideal.assignment, floors), even)
    assert (found.ratios, found.cost_s) == wanted
    assert found.cost_s >= ideal.seconds / part * (1 - 1e-9)


@pytest.mark.parametrize("name", FLEETS)
@pytest.mark.parametrize("step", STEPS)
def test_what_the_floors_like_is_searched_for_again_where_something_costs_less(step: str, name: str) -> None:
    """The program of the floors, at the ratios that it likes, is kept only if no other costs less there."""
    turns, _, _, found = liked(step, FLEETS[name]())
    solution, prices = turns.search(found.ratios, found)
    least_s = SpaceSolver(space(step)).solve(Prices.at(turns.listed, found.ratios)).seconds
    assert solution.seconds == solution.bound_s == pytest.approx(least_s, rel=1e-9)
    tables = ((prices.table(use.factor), use.scope) for use in space(step).uses)
    paid = sum(float(table[tuple(solution.assignment[c] for c in scope)]) for table, scope in tables)
    assert paid == pytest.approx(least_s, rel=1e-9)
    assert turns.search(found.ratios) == (solution, prices)


def test_equal_bills_have_one_linear_program() -> None:
    turns, ideal, floors, found = liked("mlp", fleet((4, 2)))
    with mock.patch.object(Turns, "best_ratios", side_effect=AssertionError("looked for again")):
        assert turns.like(ideal, floors) == found
