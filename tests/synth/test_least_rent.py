"""The least rent at which a program fits: rents are lowered as long as that may make it cheaper."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
from synth_cases import attention, fleet

from shardwright.cost.model import CostModel
from shardwright.ir.trace import trace
from shardwright.synth.freely import freely
from shardwright.synth.memory import within
from shardwright.synth.memory.budgets import Limits, Renting
from shardwright.synth.memory.least import LeastRent
from shardwright.synth.search.solution import Solution
from shardwright.synth.space.space import Space
from shardwright.synth.timer import Timer


@pytest.mark.parametrize(
    ("speeds", "memory", "ratios"), [((16, 2), "254 kB", (0.3, 0.7)), ((2, 8), "118 kB", (0.4, 0.6))]
)
def test_no_rent_is_lowered_where_none_at_all_is_no_cheaper(
    speeds: tuple[float, ...], memory: str, ratios: tuple[float, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is too large at its ratios fits at others under rent; at those it costs what is best without."""
    function, args = attention()
    graph, model = trace(function, *args).graph, CostModel(fleet(speeds, memory=memory))
    free = freely(graph, Space(graph), model, Timer())
    rents: list[float] = []
    solve = Renting.solve

    def solving(self: Renting, prices: Any, at: Any, rent_s: float, *others: Any) -> Solution:
        rents.append(rent_s)
        return solve(self, prices, at, rent_s, *others)

    monkeypatch.setattr(Renting, "solve", solving)
    too_large = replace(free.best, ratios=ratios, fits=False, over=3.0)
    best = LeastRent(free.turns, too_large, free.renting(Limits.of(model))).search()
    assert best.fits and best.ratios != ratios
    assert len(rents) <= 5, "seven more were, each a sixteenth of the one before"
    free_s = free.turns.search(best.ratios)[0].seconds
    assert best.cost_s <= free_s * (1 + 0.005)


def test_where_nothing_fits_by_shares_units_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    function, args = attention()
    graph, model = trace(function, *args).graph, CostModel(fleet((16, 2), memory="254 kB"))
    free = freely(graph, Space(graph), model, Timer())
    fits = LeastRent._fits
    for never in (False, True):
        renting, by_units = free.renting(Limits.of(model)), list[bool]()

        def fitting(
            self: LeastRent, scale: float, by: list[bool] = by_units, of: Renting = renting, no: bool = never
        ) -> bool:
            by.append(of.dealt)
            return fits(self, scale) and of.dealt and not no

        monkeypatch.setattr(LeastRent, "_fits", fitting)
        best = LeastRent(free.turns, replace(free.best, fits=False, over=3.0), renting).search()
        assert by_units[:2] == [False, True] and renting.dealt == (not never)
        assert never or (best.fits and all(by_units[1:]))


def test_no_rent_is_tried_on_where_what_fits_costs_no_less_than_a_rival(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    function, args = attention()
    graph, model = trace(function, *args).graph, CostModel(fleet((1, 1), memory="300 kB"))
    free = freely(graph, Space(graph), model, Timer())
    dearest = replace(free.best, cost_s=2 * free.best.cost_s, fits=True)
    tried: dict[float, int] = {}
    for over_rival in (0.5, 0.99, 1.5):
        rents: list[float] = []

        def fitting(self: LeastRent, scale: float, rents: list[float] = rents) -> bool:
            """Whatever pays less than at first is too large, and costs half of what is not."""
            self._turns_from(self.best.ratios, scale)
            rents.append(scale)
            self.best = dearest
            self._under_s = 0.0 if len(rents) == 1 else free.best.cost_s
            return len(rents) == 1

        monkeypatch.setattr(LeastRent, "_fits", fitting)
        too_large = replace(free.best, fits=False, over=3.0)
        rival_s = over_rival * dearest.cost_s
        LeastRent(free.turns, too_large, free.renting(Limits.of(model)), rival_s).search()
        tried[over_rival] = len(rents)
    # Beside a rival that costs as much, what is too large at the second rent proves that nothing beats it.
    assert tried[0.5] == 2
    assert tried[0.99] == tried[1.5] > 2, "where something between may be cheaper, rents are lowered on"


@pytest.mark.parametrize("over", [1.2, 1.6])
def test_whether_anything_fits_is_asked_at_shares_by_memory_as_well(
    over: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The best program may like shares at which nothing fits."""
    asked: list[tuple[float, ...]] = []

    def smallest_at(turns: Any, found: Any, renting: Any, ratios: tuple[float, ...]) -> Any:
        asked.append(ratios)
        return SimpleNamespace(over=over if ratios == (1.0, 0.0) else 1.1)

    monkeypatch.setattr(within, "_smallest_at", smallest_at)
    found = SimpleNamespace(ratios=(1.0, 0.0))
    renting = SimpleNamespace(limits=Limits((30.0, 10.0), 1))
    least = within._smallest(cast(Any, None), cast(Any, found), cast(Any, renting))
    assert least.over == (1.2 if over == 1.2 else 1.1)
    assert asked == [(1.0, 0.0), (0.75, 0.25)][: 1 if over == 1.2 else 2]
