"""From the LP's shares to ratios whose rounded stretches are good: local search over single units.

Every axis is cut by largest remainder (`ir.placement.lengths`), so ratios that look alike may give the
slowest device one unit more. The axis whose rounding costs most sets the grid: whole units of it are
moved from one device class to another while the exact, re-costed program gets cheaper.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np

from shardwright.cost.bill import Item, counted
from shardwright.cost.model import CostModel
from shardwright.cost.share_cost import Floats, ShareCost
from shardwright.ir.placement import lengths

_MOST_MOVES = 16

#: Price of ratios per device: what does not fit is worse than whatever fits; then exact seconds.
Price: TypeAlias = Callable[[tuple[float, ...]], tuple[bool, float]]


def round_ratios(items: Sequence[Item], model: CostModel, shares: Floats, price: Price) -> tuple[float, ...]:
    """Ratios per device near `shares` per class at which `price` is least.

    Args:
        items: the program's bill, to find the axis that matters.
        model: gives device classes.
        shares: share of one device of each class.
        price: of ratios per device; anything that compares, such as (does not fit, exact seconds).
    """
    start = tuple(float(shares[c]) for c in model.class_of)
    units = _dominant_units(items, model, start)
    if not units:
        return start
    even = (1.0 / len(start),) * len(start)
    best = min((start, _on_grid(start, units), even), key=price)
    cost = price(best)
    for _ in range(_MOST_MOVES):
        better = min(_moves(best, units, model), key=price, default=best)
        if not price(better) < cost:
            break
        best, cost = better, price(better)
    return best


def _on_grid(ratios: Sequence[float], units: int) -> tuple[float, ...]:
    return tuple(n / units for n in lengths(units, 1, ratios))


def _dominant_units(items: Sequence[Item], model: CostModel, ratios: Sequence[float]) -> int:
    """Number of units of the cut axis on which most seconds are spent."""
    exact = np.asarray(ratios)
    weights: dict[tuple[int, int], float] = {}
    costs: dict[int, ShareCost] = {}
    for item, count in counted(items):
        if item.cut is not None:
            key = (item.cut[0] // item.cut[1], id(item.cost))
            costs[key[1]] = item.cost
            weights[key] = weights.get(key, 0.0) + item.weight * count
    slowest = {which: float(cost.per_device(exact, model.class_of).max()) for which, cost in costs.items()}
    spent: dict[int, float] = {}
    for (units, which), weight in weights.items():
        spent[units] = spent.get(units, 0.0) + weight * slowest[which]
    return max(spent, key=lambda units: (spent[units], -units), default=0)


def _moves(ratios: tuple[float, ...], units: int, model: CostModel) -> list[tuple[float, ...]]:
    """All ways to move one unit from a device of one class to a device of another (or of the same)."""
    counts = lengths(units, 1, ratios)
    found: dict[tuple[int, ...], None] = {}
    givers: dict[tuple[int, int], int] = {}
    takers: dict[tuple[int, int], int] = {}
    for device, (kind, have) in enumerate(zip(model.class_of, counts, strict=True)):
        if have:
            givers.setdefault((int(kind), have), device)
        takers.setdefault((int(kind), have), device)
    for giver in givers.values():
        for taker in takers.values():
            if giver != taker:
                moved = list(counts)
                moved[giver] -= 1
                moved[taker] += 1
                found[tuple(moved)] = None
    return [tuple(n / units for n in moved) for moved in found]
