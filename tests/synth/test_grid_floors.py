"""Prices on two mesh axes: floors below them, over all shares and over ranges of them, and tangents."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product
from typing import Any

import jax
import numpy as np
import pytest
from grid_cases import FLEETS, arguments, fleet, graph, listed, shares, train_step
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.cost.grid.floor import Ranges, level, products_of_largest
from shardwright.cost.grid.model import GridModel
from shardwright.cost.grid.prices import (
    features,
    tangent_in_both,
    tangent_in_devices,
    tangent_in_nodes,
)
from shardwright.cost.model import CostModel
from shardwright.ir.trace import trace
from shardwright.synth.grid.alternate import GridSearch
from shardwright.synth.grid.choice import GridChoosing
from shardwright.synth.grid.part import GridPart
from shardwright.synth.grid.pricing import GridPriceList, grid_floors, grid_prices
from shardwright.synth.grid.ranges import Tightening
from shardwright.synth.grid.ratios import per_class
from shardwright.synth.grid.solve import GridSolver
from shardwright.synth.grid.turns import GridTurns
from shardwright.synth.prices.tables import Prices
from shardwright.synth.search.narrow.search import MOST_ROUNDS
from shardwright.synth.search.solution import Solution
from shardwright.synth.shares.bounds import ENOUGH
from shardwright.synth.space.space import Space
from shardwright.synth.timer import Timer


@pytest.mark.parametrize("name", FLEETS)
@settings(max_examples=15)
@given(data=st.data())
def test_floors_are_below_every_price(name: str, data: st.DataObject) -> None:
    _, _, prices = listed(name)
    exact = grid_prices(prices, data.draw(shares(name))).seconds
    floors = grid_floors(prices).seconds
    assert len(floors) > 500
    assert (floors <= exact * (1 + 1e-9) + 1e-12).all()


@pytest.mark.parametrize("counts", [(3,), (2, 3), (1, 2, 2)])
def test_water_levels_are_the_least_that_any_shares_cost(counts: tuple[int, ...]) -> None:
    """Nodes of one kind have everything, two kinds a level in closed form, more a search for it."""
    random = np.random.default_rng(len(counts))
    kinds, steps = len(counts), 60
    constant = random.exponential(size=(40, kinds, 3))
    slope = random.normal(size=constant.shape) * random.integers(0, 2, size=constant.shape)
    dealt = [each for each in product(range(steps + 1), repeat=kinds) if sum(each) == steps]
    for low, high in ((0.0, 1.0), (0.2, 0.7))[:kinds]:
        within = np.array(Ranges(low, high).of_kinds(kinds))
        shares = np.array(dealt) / steps
        shares = shares[((shares >= within[:, 0] - 1e-9) & (shares <= within[:, 1] + 1e-9)).all(axis=1)]
        at = constant[:, None] + slope[:, None] * (shares / counts)[None, :, :, None]
        least = at.max(axis=(2, 3)).min(axis=1)
        found = level(constant, slope, np.array(counts), within)
        step = np.abs(slope).max(axis=(1, 2)) * 2 / steps
        assert (found <= least + 1e-9).all() and (found >= least - step).all()


@settings(max_examples=300)
@given(
    terms=st.lists(st.sampled_from((0.0, 0.1, 0.5, 1.0, 4.0)), min_size=8, max_size=8),
    falling=st.sampled_from(((), (2,), (3,), (2, 3))),
    units=st.lists(st.integers(0, 6), min_size=2, max_size=5).filter(any),
    share=st.floats(0.0, 1.0),
)
def test_products_count_at_the_largest_device_where_that_is_certain(
    terms: list[float], falling: tuple[int, ...], units: list[int], share: float
) -> None:
    """One node of alike devices, whatever it has and however its devices share that."""
    signed = np.array([-t if feature in falling else t for feature, t in enumerate(terms)])
    q = np.array(units) / sum(units)
    slowest = float((signed @ features(np.full(len(q), share), q)).max())
    one, slope, of_q, of_both = signed[:4]
    least = 1 / len(q)
    more, steeper = products_of_largest(signed[None, :, None], np.array([[least]]))
    floor = one + slope * share + (of_q + of_both * share) * least + more[0, 0] + steeper[0, 0] * share
    assert floor <= slowest + 1e-12


@pytest.mark.parametrize("name", list(FLEETS)[:2])
@settings(max_examples=15)
@given(data=st.data())
def test_every_price_is_above_the_floors_of_some_range(name: str, data: st.DataObject) -> None:
    """Ranges halved and halved again still cover all shares."""
    _, _, prices = listed(name)
    mesh = prices.grid.mesh
    ratios = data.draw(shares(name))
    exact = grid_prices(prices, ratios).seconds
    units = data.draw(st.sampled_from([0, 12, 24, 48, 64]))
    ranges = [Ranges(units=units, dealt=(0, units))]
    for _ in range(3):
        at = data.draw(st.floats(0.1, 0.9))
        ranges = [half for each in ranges for half in each.halves(at, (1, len(mesh.nodes)))]
    # What was cut at some share has to be looked at on one side of it only.
    ranges = [each for each in ranges if each.low <= each.high and each.dealt[0] <= each.dealt[1]]
    assert any((grid_floors(prices, each).seconds <= exact * (1 + 1e-9) + 1e-12).all() for each in ranges)


THREE_KINDS = fleet(((40, 2),), ((20, 1),), ((10, 3),))


@settings(max_examples=25)
@given(data=st.data())
def test_ranges_of_the_shares_of_every_kind_cover_all_shares(data: st.DataObject) -> None:
    grid = GridModel(CostModel(THREE_KINDS))
    prices = GridPriceList(grid)
    GridSolver(Space(graph(), grid.mesh.nodes)).solve(grid_floors(prices))
    kinds = len(grid.mesh.kind_counts)
    parts = data.draw(st.lists(st.floats(0.02, 1.0), min_size=kinds, max_size=kinds))
    of_nodes = np.array(parts) / sum(parts)
    ratios = grid.mesh.ratios(of_nodes, grid.mesh.even()[1])
    exact = grid_prices(prices, ratios).seconds
    ranges = [Ranges()]
    for _ in range(4):
        kind, part = data.draw(st.integers(0, kinds - 1)), data.draw(st.floats(0.1, 0.9))
        halves: list[Ranges] = []
        for each in ranges:
            low, high = each.of_kinds(kinds)[kind]
            halves += each.cut(kind, low + part * (high - low), kinds)
        ranges = halves

    def within(each: Ranges) -> bool:
        ends = each.of_kinds(kinds)
        return all(
            low - 1e-9 <= share <= high + 1e-9 for (low, high), share in zip(ends, of_nodes, strict=True)
        )

    mine = [each for each in ranges if within(each)]
    assert mine
    for each in mine:
        floors = grid_floors(prices, each).seconds
        assert (floors <= exact * (1 + 1e-6) + 1e-12).all()
    # Cutting says more of what is left.
    least = grid_floors(prices).seconds
    assert all((grid_floors(prices, each).seconds >= least * (1 - 1e-9) - 1e-15).all() for each in ranges)


def test_a_wide_certificate_is_raised_by_ranges_of_every_kind_and_stays_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    where = fleet(((40, 2),), ((20, 2),), ((10, 3),), network="10 Gbit/s")
    step = trace(train_step, *jax.eval_shape(lambda: arguments(960, 256))).graph
    monkeypatch.setattr("shardwright.synth.grid.ranges.MOST_PIECES", 0)
    listed = GridPriceList(GridModel(CostModel(where)))
    search = GridSearch(step, Space(step, listed.grid.mesh.nodes), listed, Timer())
    plan = search.plan()
    raised = search.sharpened(plan.cost_s)
    assert plan.bound_s * (1 + 5e-3) < raised <= plan.cost_s * (1 + 1e-9)
    solver, random = GridSolver(Space(step, listed.grid.mesh.nodes)), np.random.default_rng(0)
    for _ in range(20):
        parts = random.dirichlet(np.ones(3))
        ratios = listed.grid.mesh.ratios(parts, listed.grid.mesh.even()[1])
        assert raised <= solver.solve(grid_prices(listed, ratios)).bound_s * (1 + 1e-9)


def test_what_is_dearer_than_a_rival_is_bounded_by_ranges_only_for_a_certificate(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    where = fleet(((40, 2),), ((20, 2),), ((10, 3),), network="10 Gbit/s")
    step = trace(train_step, *jax.eval_shape(lambda: arguments(960, 256))).graph
    enough = 1e-3
    for module in ("alternate", "choice", "ranges"):
        monkeypatch.setattr(f"shardwright.synth.grid.{module}.ENOUGH", enough)
    members = tuple(range(len(where.devices)))
    alone, beside = (GridChoosing(step, where, Timer(), [members]) for _ in range(2))
    plan = alone.below()
    assert plan is not None
    rival_s = (1 - 3 * enough) * plan.found.cost_s
    beside.below(rival_s)
    rough_s = beside.bound_s
    assert beside.parts[0].cost_s > rival_s and rough_s < rival_s * (1 - enough)
    beside.settle(rival_s, fitting=False)
    assert beside.bound_s == rough_s
    beside.settle(rival_s, fitting=True)
    assert rough_s * (1 + enough) < beside.bound_s <= plan.found.cost_s


def test_ranges_are_cut_until_the_bound_is_what_was_asked_for() -> None:
    """Not only until it is within the gap of that: then nothing would say that a rival is within it."""
    where = fleet(((40, 2),), ((20, 2),), ((10, 3),))
    step = trace(train_step, *jax.eval_shape(lambda: arguments(960, 256))).graph
    listed = GridPriceList(GridModel(CostModel(where)))
    turns = GridTurns(Space(step, listed.grid.mesh.nodes), listed, Timer(), ())
    ideal = turns.solve(listed.floors)
    best = turns.take(listed.grid.mesh.ratios(*listed.grid.mesh.even()))
    dear = replace(best, cost_s=2 * best.cost_s)
    content_s = 1.01 * ideal.bound_s
    assert ideal.bound_s > content_s * (1 - ENOUGH)
    found = Tightening(turns, ideal, dear).run(dear, content_s)
    assert turns.bound_s >= content_s or turns.bound_s >= found.cost_s * (1 - ENOUGH)
    assert ideal.bound_s < turns.bound_s


def test_beside_a_rival_ratios_are_searched_thoroughly_only_if_that_may_be_beaten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    where = fleet(((40, 2),), ((20, 2),), network="10 Gbit/s")
    step = trace(train_step, *jax.eval_shape(lambda: arguments(960, 256))).graph
    listed = GridPriceList(GridModel(CostModel(where)))
    space = Space(step, listed.grid.mesh.nodes)
    searched: list[int] = []
    solve = GridTurns.solve

    def noted(self: GridTurns, prices: Prices, *given: Any, rounds: int = MOST_ROUNDS) -> Solution:
        if prices is not listed.floors:
            searched.append(rounds)
        return solve(self, prices, *given, rounds=rounds)

    monkeypatch.setattr(GridTurns, "solve", noted)
    monkeypatch.setattr("shardwright.synth.grid.ranges.MOST_PIECES", 0)

    def plan(most_s: float) -> tuple[float, set[int]]:
        searched.clear()
        found = GridSearch(step, space, listed, Timer()).plan(most_s)
        return found.cost_s, set(searched)

    cost_s, rounds = plan(math.inf)
    assert rounds == {MOST_ROUNDS}
    assert plan(0.9 * cost_s) == (pytest.approx(cost_s, rel=1e-2), {1})
    assert plan(1.1 * cost_s) == (pytest.approx(cost_s, rel=1e-9), {1, MOST_ROUNDS})


def test_a_bound_that_was_good_enough_is_raised_where_it_no_longer_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    where = fleet(((40, 2),), ((20, 2),), network="10 Gbit/s")
    step = trace(train_step, *jax.eval_shape(lambda: arguments(960, 256))).graph
    members = tuple(range(len(where.devices)))
    targets: list[float] = []
    bound = GridSearch.bound

    def noted(self: GridSearch, target_s: float = math.inf, *, roughly: bool = False) -> float:
        targets.append(target_s)
        return bound(self, target_s, roughly=roughly)

    monkeypatch.setattr(GridSearch, "bound", noted)
    alone, twice = (GridChoosing(step, where, Timer(), [members]) for _ in range(2))
    plan = alone.below()
    assert plan is not None and math.inf in targets
    targets.clear()
    (known,), (part,) = alone.parts, twice.parts
    assert isinstance(known, GridPart) and isinstance(part, GridPart)
    low_s = 1.1 * known.arithmetic_s
    assert low_s < plan.found.bound_s
    assert twice.below(low_s) is None and len(targets) == 1 and targets[0] <= low_s
    assert part.search is not None
    assert part.search.short_of(plan.found.cost_s) and not part.search.short_of(low_s)
    again = twice.below()
    assert targets[1] == math.inf and not part.search.short_of(math.inf)
    assert again is not None and again.found.cost_s == pytest.approx(plan.found.cost_s, rel=1e-9)
    assert again.found.bound_s == pytest.approx(plan.found.bound_s, rel=1e-3)


@pytest.mark.parametrize("name", FLEETS)
@settings(max_examples=10)
@given(data=st.data())
def test_tangents_touch_where_they_are_taken(name: str, data: st.DataObject) -> None:
    _, _, prices = listed(name)
    mesh = prices.grid.mesh
    r, q = per_class(data.draw(shares(name)), mesh)
    stack = prices.stack()
    there = np.einsum("kfrc,fc->krc", stack.terms, _features(r, q))
    for tangent, at in ((tangent_in_nodes, r), (tangent_in_devices, q)):
        constant, slope = tangent(stack, r, q)
        assert np.allclose(constant + slope * at, there, rtol=1e-9, atol=1e-15)
    if not r.all():
        return
    constant, in_r, in_s = tangent_in_both(stack, r, q)
    assert np.allclose(constant + in_r * r + in_s * r * q, there, rtol=1e-9, atol=1e-15)
    # As r and s = rq change, the cost changes by the slopes, but for what is small beside the change.
    by_r, by_s = 1e-6 * r, 1e-6 * r * (1 - q)
    near = np.einsum("kfrc,fc->krc", stack.terms, _features(r + by_r, (r * q + by_s) / (r + by_r)))
    assert np.allclose(near - there, in_r * by_r + in_s * by_s, rtol=1e-4, atol=1e-9 * there.max())


def _features(r: Any, q: Any) -> Any:
    rq = r * q
    return np.stack([r**0, r, q, rq, r - r * r, q - q * q, rq - rq * rq, rq * (1 - q)])


@pytest.mark.parametrize("name", FLEETS)
def test_no_floor_is_below_nothing(name: str) -> None:
    """A conversion that earned something would be made for ever."""
    _, _, prices = listed(name)
    assert grid_floors(prices).seconds.min() >= 0.0


@pytest.mark.parametrize("name", FLEETS)
def test_floors_do_not_depend_on_how_many_instructions_are_dealt_at_once(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, _, prices = listed(name)
    together = grid_floors(prices).seconds
    monkeypatch.setattr("shardwright.cost.grid.floor._CELLS", 1)
    assert np.array_equal(grid_floors(prices).seconds, together)
