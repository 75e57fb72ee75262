"""Prices of several parts of a fleet, and of several ranges of ratios, worked out together."""

from __future__ import annotations

import numpy as np
import pytest
from synth_cases import FLEETS, STEPS, model, space

from shardwright.cost.model import CostModel
from shardwright.cost.moves import strategies
from shardwright.cost.subfleet import subfleet
from shardwright.synth.prices.lists import Catalogue, PriceList
from shardwright.synth.prices.tables import Prices
from shardwright.synth.search.solve import SpaceSolver


def together(step: str) -> tuple[SpaceSolver, list[CostModel], Prices]:
    """Floors on every fleet, on a part of one, and in a range of the largest ratio, of one catalogue."""
    catalogue, solver = Catalogue(), SpaceSolver(space(step))
    part = CostModel(subfleet(FLEETS["nodes"](), (0, 1), "part"))
    models = [*(model(name) for name in FLEETS), part]
    some = [Prices.floors(PriceList(each, catalogue)) for each in models]
    ranged = Prices.floors(PriceList(models[1], catalogue), (0.4, 0.6))
    return solver, [*models, models[1]], Prices.of_all([*some, ranged])


@pytest.mark.parametrize("step", STEPS)
def test_prices_worked_out_together_are_those_worked_out_alone(step: str) -> None:
    solver, models, several = together(step)
    tables = several.tables(solver.factors)
    bounds = solver.bounds(several)
    assert len(bounds) == len(models)
    for number, costs in enumerate(models):
        ranged = (0.4, 0.6) if number == len(models) - 1 else None
        alone = Prices.floors(PriceList(costs), ranged)
        for factor, table, own in zip(solver.factors, tables, alone.tables(solver.factors), strict=True):
            mine = table[number] if table.ndim > len(factor.domains) else table
            np.testing.assert_allclose(mine, own, rtol=1e-12)
        least = solver.bound(alone)
        assert bounds[number] <= least * (1 + 1e-9)
        one = several.one(number)
        assert solver.bound(one) == pytest.approx(least, rel=1e-9)
        assert solver.solve(one).seconds == pytest.approx(solver.solve(alone).seconds, rel=1e-9)


def test_bounds_without_large_tables_are_exact_for_small_steps() -> None:
    solver, _, several = together("mlp")
    least = [solver.bound(several.one(number)) for number in range(len(solver.bounds(several)))]
    np.testing.assert_allclose(solver.bounds(several), least, rtol=1e-9)


@pytest.mark.parametrize("name", FLEETS)
def test_many_tensors_cost_what_each_does(name: str) -> None:
    topology, nbytes = model(name).topology, [0, 7, 4096, 10**7]
    for strategy in strategies().values():
        together = strategy.prices(topology, nbytes, topology.classes)
        for k, each in enumerate(nbytes):
            cost = strategy.price(topology, each, topology.classes)
            for share in (0.0, 0.3, 1.0):
                shares = np.full(topology.classes, share)
                both = together.take(np.array([k])).per_device(shares, np.arange(topology.classes))[0]
                np.testing.assert_allclose(both, cost.per_class(shares), rtol=1e-12)
