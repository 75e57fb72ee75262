"""The one cost object: the bound below it, the LP's rows touching it, its water level."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy.optimize import linprog

from shardwright.cost.share_cost import ShareCost

# Seconds of one order of magnitude, as the rows of one instruction are; zeros are common.
_seconds = st.one_of(st.just(0.0), st.floats(0.01, 10.0))
_slopes = st.one_of(st.just(0.0), st.floats(0.01, 10.0), st.floats(-5.0, -0.01))


@st.composite
def costs(draw: st.DrawFn, slopes: st.SearchStrategy[float] = _slopes) -> ShareCost:
    shape = draw(st.tuples(st.integers(1, 3), st.integers(1, 4)))
    return ShareCost(
        draw(arrays(np.float64, shape, elements=_seconds)),
        draw(arrays(np.float64, shape, elements=slopes)),
        draw(arrays(np.float64, shape, elements=_seconds)),
    )


@st.composite
def fleets(draw: st.DrawFn, cost: ShareCost) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Devices per class, the class of every device, and shares per device."""
    classes = cost.constant.shape[1]
    counts = np.array(draw(st.lists(st.integers(1, 5), min_size=classes, max_size=classes)))
    class_of = np.repeat(np.arange(classes), counts)
    weights = np.array(draw(st.lists(_seconds, min_size=len(class_of), max_size=len(class_of)).filter(any)))
    return counts, class_of, weights / weights.sum()


@given(st.data())
def test_minorant_is_nowhere_above(data: st.DataObject) -> None:
    cost = data.draw(costs())
    _, class_of, shares = data.draw(fleets(cost))
    constant, linear = cost.minorant()
    below = (constant[:, class_of] + linear[:, class_of] * shares).max(axis=0)
    assert (below <= cost.per_device(shares, class_of) + 1e-12).all()


@given(st.data())
def test_affine_rows_touch_the_cost_and_stay_above_it(data: st.DataObject) -> None:
    cost = data.draw(costs())
    classes = cost.constant.shape[1]
    at = np.array(data.draw(st.lists(st.floats(0, 1), min_size=classes, max_size=classes)))
    constant, slope = cost.affine_at(at)
    assert (constant + slope * at).max(axis=0) == pytest.approx(cost.per_class(at), abs=1e-12)
    # s (1 - s) is concave: its tangent is an upper bound, and so is the maximum over rows.
    other = np.array(data.draw(st.lists(st.floats(0, 1), min_size=classes, max_size=classes)))
    assert ((constant + slope * other).max(axis=0) >= cost.per_class(other) - 1e-9).all()
    # Tangent, not only touching: the difference quotient of every row is the slope.
    step = 1e-6

    def rows(s: np.ndarray) -> np.ndarray:
        return cost.constant + cost.linear * s + cost.product * s * (1 - s)

    assert (rows(at + step) - rows(at)) / step == pytest.approx(slope, abs=1e-4)


@given(st.data())
def test_affine_without_products_is_the_cost_itself(data: st.DataObject) -> None:
    whole = data.draw(costs())
    cost = ShareCost(whole.constant, whole.linear, np.zeros_like(whole.product))
    constant, slope = cost.affine_at(np.full(cost.constant.shape[1], 0.3))
    assert (constant == cost.constant).all() and (slope == cost.linear).all()


@given(st.data())
def test_floor_is_below_every_share(data: st.DataObject) -> None:
    cost = data.draw(costs())
    counts, class_of, shares = data.draw(fleets(cost))
    floor = cost.floor(counts)
    assert floor <= float(cost.per_device(shares, class_of).max()) + 1e-9
    # Vertices: everything on one device.
    for device in range(len(class_of)):
        assert floor <= float(cost.per_device(np.eye(len(class_of))[device], class_of).max()) + 1e-9


def water_level(cost: ShareCost, counts: np.ndarray) -> float:
    """The least maximum of the minorant's rows over all shares, by an LP written out by hand.

    By symmetry devices of one class have equal shares in some optimum of a convex problem.
    """
    constant, linear = cost.minorant()
    rows, classes = constant.shape
    above = np.array(
        [[*(linear[r, c] * (np.arange(classes) == c)), -1.0] for r in range(rows) for c in range(classes)]
    )
    limit = -constant.reshape(-1)
    found = linprog(
        [*np.zeros(classes), 1.0],
        A_ub=above,
        b_ub=limit,
        A_eq=[[*counts, 0.0]],
        b_eq=[1.0],
        bounds=[(0, None)] * classes + [(None, None)],
        method="highs",
    )
    assert found.status == 0, found.message
    return float(found.fun)


@given(st.data(), st.sampled_from(["rising", "falling", "constant"]))
def test_floor_is_tight_where_rows_agree(data: st.DataObject, kind: str) -> None:
    slopes = {"rising": st.floats(0.01, 10.0), "falling": st.floats(-5.0, -0.01), "constant": st.just(0.0)}[
        kind
    ]
    cost = data.draw(costs(slopes))
    counts, _, _ = data.draw(fleets(cost))
    assert cost.floor(counts) == pytest.approx(water_level(cost, counts), rel=1e-6)


@given(st.data())
def test_floor_never_passes_the_water_level(data: st.DataObject) -> None:
    cost = data.draw(costs())
    counts, _, _ = data.draw(fleets(cost))
    assert cost.floor(counts) <= water_level(cost, counts) + 1e-6


def test_share_proportional_times_have_the_closed_form() -> None:
    seconds = np.array([[2.0, 6.0]])
    cost = ShareCost(np.zeros((1, 2)), seconds, np.zeros((1, 2)))
    # 1 / sum over devices of 1 / t: one device of two seconds, three of six.
    assert cost.floor(np.array([1, 3])) == pytest.approx(1 / (1 / 2 + 3 / 6))


@given(st.data())
def test_floor_within_a_range_is_below_every_share_in_it(data: st.DataObject) -> None:
    cost = data.draw(costs())
    counts, class_of, shares = data.draw(fleets(cost))
    largest = float(shares.max())
    low, high = largest * data.draw(st.floats(0, 1)), largest + (1 - largest) * data.draw(st.floats(0, 1))
    assert cost.floor_within(counts, low, high) <= float(cost.per_device(shares, class_of).max()) + 1e-9


def test_an_exchange_that_is_free_for_one_device_alone_is_not_free_for_many() -> None:
    one = np.ones((1, 1))
    cost = ShareCost(0 * one, 0 * one, one)  # s (1 - s): an all-to-all
    four = np.array([4])
    assert cost.floor(four) == 0.0
    assert cost.floor_within(four, 0.25, 0.5) == pytest.approx(0.25 * 0.75)
    assert cost.floor_within(four, 0.25, 1.0) == 0.0
    proportional = ShareCost(0 * one, one, 0 * one)
    assert proportional.floor_within(four, 0.6, 1.0) == pytest.approx(0.6)
    ring = ShareCost(one, -one, 0 * one)  # all but the own stretch
    assert ring.floor_within(np.array([1]), 0.25, 0.3) == pytest.approx(0.7)
    assert ring.floor_within(four, 0.25, 0.3) == ring.floor(four) == pytest.approx(0.75)


def test_what_a_fast_device_may_not_take_the_slow_ones_must() -> None:
    # A device ten times as fast as the other two: by itself it would take 10 / 12 of the work.
    cost = ShareCost(np.zeros((1, 2)), np.array([[1.0, 10.0]]), np.zeros((1, 2)))
    counts = np.array([1, 2])
    assert cost.floor(counts) == pytest.approx(10 / 12)
    assert cost.floor(counts, most=0.5) == pytest.approx(0.25 * 10)
    assert cost.floor_within(counts, 0.4, 0.5) == pytest.approx(0.25 * 10)
    assert cost.floor_within(counts, 0.9, 1.0) == pytest.approx(0.9)


def dealt(cost: ShareCost, counts: np.ndarray, units: int, most: int) -> float:
    """The least maximum over all ways to deal whole units to devices, each of which takes up to `most`."""
    class_of = np.repeat(np.arange(len(counts)), counts)
    ways = itertools.product(range(most + 1), repeat=len(class_of))
    shares = [np.array(way) / units for way in ways if sum(way) == units]
    return min((float(cost.per_device(each, class_of).max()) for each in shares), default=float("inf"))


@st.composite
def deals(draw: st.DrawFn, cost: ShareCost) -> tuple[np.ndarray, int, int]:
    """Devices per class, four at most; units of an axis, and how many of them a device takes at most."""
    classes = cost.constant.shape[1]
    counts = np.array(draw(st.lists(st.integers(1, 4 // classes), min_size=classes, max_size=classes)))
    units = draw(st.integers(1, 6))
    return counts, units, draw(st.integers(1, units))


@given(st.data())
def test_floor_in_units_is_below_every_way_to_deal_them(data: st.DataObject) -> None:
    cost = data.draw(costs())
    counts, units, most = data.draw(deals(cost))
    least = dealt(cost, counts, units, most)
    assert cost.floor(counts, most / units, units) <= least * (1 + 1e-9) + 1e-9
    assert cost.floor(counts, most / units, units) >= cost.floor(counts, most / units)


@given(st.data(), st.sampled_from(["rising", "falling"]))
def test_floor_in_units_is_the_best_way_to_deal_them(data: st.DataObject, kind: str) -> None:
    whole = data.draw(costs({"rising": st.floats(0.01, 10.0), "falling": st.floats(-5.0, -0.01)}[kind]))
    cost = ShareCost(whole.constant, whole.linear, np.zeros_like(whole.product))
    counts, units, _ = data.draw(deals(cost))
    assert cost.floor(counts, 1.0, units) == pytest.approx(dealt(cost, counts, units, units), rel=1e-9)


def test_few_units_cost_more_than_any_fraction() -> None:
    # A fast device and three slow ones: sixteen units in fractions balance at 9.6 : 2.13 each.
    cost = ShareCost(np.zeros((1, 2)), np.array([[2.0, 9.0]]), np.zeros((1, 2)))
    counts = np.array([1, 3])
    assert cost.floor(counts) == pytest.approx(1.2)
    assert cost.floor(counts, 1.0, 16) == pytest.approx(10 / 16 * 2.0)
    assert cost.floor(counts, 9 / 16, 16) == pytest.approx(3 / 16 * 9.0)


@given(st.data())
def test_per_device_is_per_class_spread_out(data: st.DataObject) -> None:
    cost = data.draw(costs())
    _, class_of, _ = data.draw(fleets(cost))
    classes = cost.constant.shape[1]
    shares = np.array(data.draw(st.lists(st.floats(0, 1), min_size=classes, max_size=classes)))
    assert (cost.per_device(shares[class_of], class_of) == cost.per_class(shares)[class_of]).all()
    assert cost.exact(shares) == float(cost.per_class(shares).max())


def test_free_and_fixed() -> None:
    assert ShareCost.free(3).exact(np.array([0.2, 0.3, 0.5])) == 0.0
    fixed = ShareCost.fixed([1.0, 3.0])
    assert not fixed.varies
    assert fixed.exact(np.array([0.0, 1.0])) == fixed.floor(np.array([1, 2])) == 3.0
