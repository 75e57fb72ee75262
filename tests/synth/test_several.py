"""Prices of several parts of a fleet, and of several ranges of ratios, worked out together."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from synth_cases import FLEETS, STEPS, model, space

from shardwright.cost.model import CostModel
from shardwright.cost.moves import strategies
from shardwright.cost.subfleet import subfleet
from shardwright.synth.memory.budgets import Limits, Renting
from shardwright.synth.prices.lists import Catalogue, PriceList
from shardwright.synth.prices.tables import Prices, Several
from shardwright.synth.search import solve
from shardwright.synth.search.fold import cook, fold
from shardwright.synth.search.priced import SpaceSolver
from shardwright.synth.search.prune import prune


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


@pytest.mark.parametrize("step", STEPS)
def test_closer_bounds_are_bounds(step: str) -> None:
    solver, models, several = together(step)
    first = solver.bounds(several)
    assert isinstance(several.list, Several)
    some = range(1, len(models))
    closer = solver.closer([several.list.prices[number] for number in some])
    assert len(closer) == len(some)
    for number, bound_s in zip(some, closer, strict=True):
        assert first[number] * (1 - 1e-9) <= bound_s <= solver.bound(several.one(number)) * (1 + 1e-9)


@pytest.mark.parametrize("step", STEPS)
def test_the_least_of_several_prices_bounds_each(step: str) -> None:
    solver, models, several = together(step)
    assert isinstance(several.list, Several)
    some = several.list.prices
    joined = Prices.of_all([some[0], Prices.least_of(some[1:])])
    first, other = solver.bounds(joined)
    assert first == pytest.approx(solver.bounds(several)[0], rel=1e-9)
    lines = np.minimum.reduce([several.seconds[number] for number in range(1, len(models))])
    np.testing.assert_allclose(joined.seconds[1], lines[: joined.seconds.shape[1]], rtol=1e-12)
    assert other <= min(solver.bound(several.one(number)) for number in range(1, len(models))) * (1 + 1e-9)


@given(seed=st.integers(0, 2**32 - 1), rare=st.sampled_from([0.0, 0.2, 0.9]), kinds=st.integers(2, 4))
@settings(deadline=None)
def test_what_matters_at_any_of_several_prices_is_kept(seed: int, rare: float, kinds: int) -> None:
    rng = np.random.default_rng(seed)
    uses, sizes = [(0, (0, 1, 2)), (1, (0, 2)), (2, (1, 2)), (3, (1,))], [kinds, 5, 3]
    made = [rng.integers(0, 3, [6, *[sizes[v] for v in scope]]).astype(float) for _, scope in uses]
    made = [np.where(rng.random(table.shape) < rare, np.inf, table) for table in made]
    made[1] = made[1][0]  # the same at all prices
    folded = fold(range(3), uses)
    cooked = cook(folded, made)
    kept = prune(folded, sizes, cooked)

    def best(number: int, values: Sequence[Sequence[int]]) -> float:
        tables = [t[number] if t.ndim > len(scope) else t for t, (_, scope) in zip(made, uses, strict=True)]
        pairs = list(zip(tables, uses, strict=True))
        return min(
            sum(float(table[tuple([at[v] for v in scope])]) for table, (_, scope) in pairs)
            for at in itertools.product(*values)
        )

    for number in range(6):
        assert best(number, [left.tolist() for left in kept.values]) == best(number, list(map(range, sizes)))


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


@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize("step", STEPS)
def test_rents_solved_together_lead_to_what_each_leads_to(
    monkeypatch: pytest.MonkeyPatch, step: str, at_once: bool
) -> None:
    if not at_once:
        monkeypatch.setattr(solve, "_TOGETHER", -1)
    costs, programs = model("nodes"), space(step)
    renting = Renting(programs.root.graph, programs, Limits.of(costs))
    ratios = (1 / len(costs.class_of),) * len(costs.class_of)
    prices = Prices.at(PriceList(costs), ratios)
    unit_s = renting.solve(prices, ratios, 0.0, lambda: False).seconds / sum(renting.limits.nbytes)
    rents = [unit_s * 10.0**power for power in range(-2, 9, 2)]
    found = renting.solve_each(prices, ratios, rents, lambda: False)
    for rent_s, solution in zip(rents, found, strict=True):
        alone = renting.solve(prices, ratios, rent_s, lambda: False)
        assert solution.seconds == pytest.approx(alone.seconds, rel=1e-9)
        assert solution.bound_s <= solution.seconds
    assert len({solution.assignment for solution in found}) > 1
