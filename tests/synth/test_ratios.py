"""The ratio LP by optimality conditions and by other solvers; rounding by exact re-costing."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog
from synth_cases import fleet, ratios

from shardwright.cost.bill import Cut, Item, seconds
from shardwright.cost.memory.liveness import Footprint
from shardwright.cost.model import CostModel
from shardwright.cost.share_cost import ShareCost
from shardwright.synth.shares.ratios import solve_ratios
from shardwright.synth.shares.rounding import round_ratios

MODELS = {
    "two classes": CostModel(fleet((4, 1, 1))),
    "three classes": CostModel(fleet((4, 2, 1, 1))),
    "one class": CostModel(fleet((2, 2))),
}


@st.composite
def bills(draw: st.DrawFn, model: CostModel, products: bool = False) -> list[Item]:
    """Kernels that are proportional to the share, with and without a floor, and exchanges."""
    classes = len(model.counts)
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    items: list[Item] = []
    for _ in range(draw(st.integers(1, 6))):
        rows = int(rng.integers(1, 3))
        constant, linear = rng.exponential(1e-4, (rows, classes)), rng.exponential(1e-3, (rows, classes))
        kind = rng.integers(4)
        if kind == 0:
            constant, linear = constant + linear, -linear  # a ring of exact stretches
        if kind == 1:
            linear = np.zeros_like(linear)
        product = rng.exponential(1e-3, (rows, classes)) if products and kind == 2 else np.zeros_like(linear)
        units = int(rng.choice([3, 8, 12, 64]))
        items.append(
            Item(
                "item", ShareCost(constant, linear, product), float(rng.integers(1, 5)), Cut(units, 1), False
            )
        )
    return items


def affine_total(items: list[Item], at: np.ndarray, shares: np.ndarray) -> float:
    """The LP's objective, evaluated."""
    total = 0.0
    for item in items:
        constant, slope = item.cost.affine_at(at)
        total += item.weight * float((constant + slope * shares).max())
    return total


def by_hand(items: list[Item], model: CostModel, at: np.ndarray, memory: Footprint | None):
    """The same LP, written with one t per item and solved by scipy."""
    classes, n = len(model.counts), len(items)
    rows: list[np.ndarray] = []
    right: list[float] = []
    for k, item in enumerate(items):
        constant, slope = item.cost.affine_at(at)
        for r, c in itertools.product(range(constant.shape[0]), range(classes)):
            row = np.zeros(classes + n)
            row[c], row[classes + k] = slope[r, c], -1.0
            rows.append(row)
            right.append(-constant[r, c])
    for c in range(classes if memory is not None else 0):
        for fixed, shared in zip(memory.fixed, memory.shared, strict=True):
            row = np.zeros(classes + n)
            row[c] = shared / model.types[c].memory_bytes
            rows.append(row)
            right.append(1 - fixed / model.types[c].memory_bytes)
    objective = np.concatenate([np.zeros(classes), [item.weight for item in items]])
    equal = np.concatenate([model.counts, np.zeros(n)])
    bounds = [(0, None)] * classes + [(None, None)] * n
    return linprog(objective, np.array(rows), right, equal[None], [1.0], bounds, method="highs")


@pytest.mark.parametrize("name", MODELS)
@given(data=st.data(), limited=st.booleans())
@settings(max_examples=40)
def test_lp_is_optimal(name: str, data: st.DataObject, limited: bool) -> None:
    model = MODELS[name]
    items = data.draw(bills(model, products=True))
    at = np.full(len(model.counts), 1 / model.counts.sum())
    memory = Footprint(np.array([1e9, 2e9]), np.array([6e9, 1e9])) if limited else None
    found, other = solve_ratios(items, model, at, memory), by_hand(items, model, at, memory)
    assert found.ok == (other.status == 0)
    if not found.ok:
        return
    assert (found.shares >= 0).all()
    assert model.counts @ found.shares == pytest.approx(1.0, abs=1e-9)
    if memory is not None:
        limit = [kind.memory_bytes for kind in model.types]
        assert (memory.peak(found.shares) <= np.array(limit) * (1 + 1e-6)).all()
    # Primal: the shares cost what the LP says. Dual: another solver proves that no less is possible.
    assert affine_total(items, at, found.shares) == pytest.approx(found.seconds, rel=1e-6)
    dual = float(other.ineqlin.marginals @ other.ineqlin.residual)
    assert dual == pytest.approx(0.0, abs=1e-9)  # complementary slackness of the witness
    assert found.seconds == pytest.approx(other.fun, rel=1e-6)


@pytest.mark.parametrize("name", ["two classes", "three classes"])
@settings(max_examples=20)
@given(data=st.data())
def test_no_point_of_a_grid_is_better(name: str, data: st.DataObject) -> None:
    model = MODELS[name]
    items = data.draw(bills(model))
    classes = len(model.counts)
    found = solve_ratios(items, model, np.full(classes, 0.1))
    steps = 40
    for cut in itertools.product(range(steps + 1), repeat=classes - 1):
        if sum(cut) <= steps:
            whole = np.array([*cut, steps - sum(cut)]) / steps / model.counts
            assert affine_total(items, whole, whole) >= found.seconds * (1 - 1e-6)


def test_share_proportional_work_is_shared_in_proportion_to_speed() -> None:
    model = MODELS["three classes"]  # speeds 4, 2, 1, 1
    cost = ShareCost(np.zeros((1, 3)), np.array([[1 / 4, 1 / 2, 1.0]]), np.zeros((1, 3)))
    found = solve_ratios([Item("dot", cost, 1.0, Cut(64, 1), False)], model, np.full(3, 0.25))
    assert found.shares == pytest.approx([4 / 8, 2 / 8, 1 / 8], abs=1e-6)
    assert found.seconds == pytest.approx(1 / 8, rel=1e-6)


def test_nothing_that_varies_means_even_shares() -> None:
    model = MODELS["two classes"]
    found = solve_ratios(
        [Item("fixed", ShareCost.fixed([1.0, 2.0]), 3.0, None, False)], model, np.full(2, 1 / 3)
    )
    assert found.ok and found.seconds == 6.0
    assert found.shares == pytest.approx([1 / 3, 1 / 3])


def test_memory_rows_bind_where_they_must() -> None:
    model = CostModel(fleet((4, 1), memory="1 GB"))
    cost = ShareCost(np.zeros((1, 2)), np.array([[0.25, 1.0]]), np.zeros((1, 2)))
    items = [Item("dot", cost, 1.0, Cut(64, 1), False)]
    assert solve_ratios(items, model, np.full(2, 0.5)).shares == pytest.approx([0.8, 0.2], abs=1e-6)
    memory = Footprint(np.array([1e8]), np.array([1.5e9]))  # a device may hold 0.9 / 1.5 of what is shared
    bound = solve_ratios(items, model, np.full(2, 0.5), memory)
    assert bound.shares == pytest.approx([0.6, 0.4], abs=1e-6)
    assert bound.seconds == pytest.approx(0.4, rel=1e-6)
    too_much = solve_ratios(items, model, np.full(2, 0.5), Footprint(np.array([0.0]), np.array([2.5e9])))
    assert not too_much.ok and "infeasible" in too_much.status and too_much.shares.size == 0
    whole = solve_ratios(items, model, np.full(2, 0.5), Footprint(np.array([2e9]), np.array([0.0])))
    assert not whole.ok


@pytest.mark.parametrize("name", MODELS)
@settings(max_examples=40)
@given(data=st.data())
def test_rounding_never_makes_it_worse(name: str, data: st.DataObject) -> None:
    model = MODELS[name]
    items = data.draw(bills(model, products=True))
    weights = np.array(data.draw(ratios(len(model.counts))))
    shares = weights / float(model.counts @ weights)

    def price(at: tuple[float, ...]) -> tuple[bool, float]:
        return False, seconds(items, model, at)

    rounded = round_ratios(items, model, shares, price)
    assert sum(rounded) == pytest.approx(1.0, abs=1e-12)
    assert min(rounded) >= 0
    start = tuple(float(shares[c]) for c in model.class_of)
    assert price(rounded) <= price(start)
    assert price(rounded) <= price((1 / len(start),) * len(start))


def test_rounding_finds_the_best_whole_units() -> None:
    model = CostModel(fleet((4, 2, 1)))
    cost = ShareCost(np.zeros((1, 3)), np.array([[1 / 4, 1 / 2, 1.0]]), np.zeros((1, 3)))
    items = [Item("heads", cost, 1.0, Cut(12, 1), False)]

    def price(at: tuple[float, ...]) -> tuple[bool, float]:
        return False, seconds(items, model, at)

    grid = [(a, b, 12 - a - b) for a in range(13) for b in range(13 - a)]
    best = min(price(tuple(n / 12 for n in cut)) for cut in grid)
    assert price(round_ratios(items, model, np.array([4, 2, 1]) / 7, price)) == best


def test_rounding_prefers_what_fits() -> None:
    model = CostModel(fleet((4, 1)))
    cost = ShareCost(np.zeros((1, 2)), np.array([[0.25, 1.0]]), np.zeros((1, 2)))
    items = [Item("dot", cost, 1.0, Cut(10, 1), False)]

    def price(at: tuple[float, ...]) -> tuple[bool, float]:
        return at[0] > 0.55, seconds(items, model, at)

    assert round_ratios(items, model, np.array([0.8, 0.2]), price) == (0.5, 0.5)
