"""The least rent at which a program fits: rents are lowered as long as that may make it cheaper."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from synth_cases import attention, fleet

from shardwright.cost.model import CostModel
from shardwright.ir.trace import trace
from shardwright.synth.freely import freely
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
