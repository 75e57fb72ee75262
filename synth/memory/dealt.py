"""All ratios that deal whole units, and what programs cost and take at all of them at once: for `pool.py`."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from functools import cache

import numpy as np
from numpy.typing import NDArray

from shardwright.cost.bill import Item, counted
from shardwright.cost.memory.liveness import Footprint
from shardwright.cost.model import CostModel
from shardwright.cost.share_cost import Floats, ShareCost
from shardwright.ir.placement import lengths

#: Vectors on a grid at most: a finer one is made coarser; with so few, it is made finer, so many times.
_MOST, _FEW, _FINER = 5000, 600, 8

#: Units of an axis up to which rounding shares to whole ones may cost more than a coarse grid does.
_SHORT = 512

#: Levels to which memory is filled.
_LEVELS = 64


def filled(speeds: Sequence[float], memory: Sequence[float]) -> list[tuple[float, ...]]:
    """Shares that computing likes, none larger than memory has room for: from ample room to none to spare.

    What a device has no room for goes to those that have, by their speed.

    Args:
        speeds: share of every device if memory were no limit.
        memory: its part of all memory.
    """
    wanted, room, found = np.array(speeds), np.array(memory), list[tuple[float, ...]]()
    most = float((wanted / room).max())
    for level in np.linspace(most, 1.0, _LEVELS, endpoint=False)[1:].tolist():
        shares, full = wanted, np.zeros(len(room), dtype=bool)
        while (over := shares > level * room * (1 + 1e-9)).any():
            full |= over
            rest = np.where(full, 0.0, wanted)
            left = max(1 - level * float(room[full].sum()), 0.0)
            shares = np.where(full, level * room, rest * left / max(float(rest.sum()), 1e-300))
        if abs(float(shares.sum()) - 1) < 1e-9:  # else only devices that computing has no use for have room
            found.append(tuple(shares.tolist()))
    return found


def worth_dealing(units: int, classes: int) -> bool:
    """Whether to look at ways to deal units to classes of devices, and not at shares that are rounded then.

    That is where all ways can be listed, or where rounding matters.
    """
    return units <= _SHORT or math.comb(units + classes - 1, classes - 1) <= _MOST


class Dealt:
    """Vectors of ratios, and programs at all of them.

    Args:
        model: gives device classes; devices of one class share its part evenly.
        axes: units of axes: they are dealt in every way, or as finely as is affordable.
        units: of all axes that may be cut: of vectors that cut all of them alike the first stands for all.
        more: vectors that come first.

    Attributes:
        vectors: shares per device.
        largest: (vectors, classes): the largest share of a device of each class.
    """

    def __init__(
        self,
        model: CostModel,
        axes: Sequence[int],
        units: Sequence[int],
        more: Sequence[tuple[float, ...]],
    ) -> None:
        self._class_of = model.class_of
        members = [list(each.members) for each in model.classes]
        every = list(dict.fromkeys(itertools.chain(more, *(_on_grid(axis, members, more) for axis in axes))))
        self._dealt: dict[int, NDArray[np.int64]] = {}
        self._ratios: Floats = np.array(every)
        rows = np.hstack([self._deal(each) for each in units])
        alike: dict[bytes, int] = {}
        for at, row in enumerate(rows):
            alike.setdefault(row.tobytes(), at)
        kept = list(alike.values())
        self.vectors = [every[at] for at in kept]
        self._ratios, self._dealt = self._ratios[kept], {}
        self.largest: Floats = np.stack([self._ratios[:, some].max(axis=1) for some in members], axis=1)
        self._seconds: dict[tuple[bytes, bytes, bytes, int], Floats] = {}

    def seconds(self, items: Sequence[Item]) -> Floats:
        """(vectors,): cost_s of a bill without ratios of its own, as `Tally.seconds`."""
        total = np.zeros(len(self.vectors))
        for item, times in counted(items):
            units = item.cut.units if item.cut is not None and item.cost.varies else 0
            total += item.weight * times * self._slowest(item.cost, units)
        return total

    def peaks(self, memory: Footprint) -> Floats:
        """(vectors, classes): bytes that a device of every class needs at most, by the model."""
        shared = memory.shared[:, None, None] * self.largest
        return (memory.fixed[:, None, None] + shared).max(axis=0)

    def _slowest(self, cost: ShareCost, units: int) -> Floats:
        """Seconds of the slowest device for an instruction that cuts so many units (0: none)."""
        key = cost.constant.tobytes(), cost.linear.tobytes(), cost.product.tobytes(), units
        if key not in self._seconds:
            shares = self._deal(units) / units if units else self._ratios
            constant, linear, product = (
                each[:, None, self._class_of] for each in (cost.constant, cost.linear, cost.product)
            )
            rows = constant + linear * shares + product * shares * (1 - shares)
            self._seconds[key] = rows.max(axis=(0, 2))
        return self._seconds[key]

    def _deal(self, units: int) -> NDArray[np.int64]:
        """(vectors, devices): units of every device, as `shardwright.ir.placement.deal` has it."""
        if units not in self._dealt:
            ideal = units * self._ratios
            whole = np.floor(ideal + 1e-9).astype(np.int64)
            left = units - whole.sum(axis=1)
            some = np.flatnonzero(left > 0)
            order = np.argsort(np.round(whole[some] - ideal[some], 9), axis=1, kind="stable")
            more = np.arange(whole.shape[1]) < left[some, None]
            whole[some[:, None], order] += more
            self._dealt[units] = whole
        return self._dealt[units]


def _on_grid(
    units: int, classes: Sequence[Sequence[int]], more: Sequence[tuple[float, ...]]
) -> Iterator[tuple[float, ...]]:
    """Ways to deal so many units as shares per device: all, or those between some vectors.

    If need be of fewer units: of as many as can be dealt in few enough ways.
    """
    counts = np.array([len(some) for some in classes])
    held = np.array([[sum(ratios[device] for device in some) for some in classes] for ratios in more])
    # Axes of other sizes round otherwise: between the vectors of one there are others.
    all_of_them = np.zeros(len(counts)), np.ones(len(counts))
    ways = [(units * times, *all_of_them, _FEW) for times in range(_FINER, 1, -1)]
    ways.append((units, *all_of_them, _MOST))
    fewer = [int(units * 0.9**times) for times in range(100)]
    ways += [(max(each, 1), held.min(axis=0), held.max(axis=0), _MOST) for each in fewer]
    many, found = 1, None
    for many, least, most, limit in ways:
        found = _deals(many, least, most, limit)
        if found is not None:
            break

    @cache
    def even(total: int, count: int) -> tuple[float, ...]:
        return tuple([part / many for part in lengths(total, 1, (1 / count,) * count)])

    order = np.argsort([device for some in classes for device in some])
    for totals in found or ():
        flat = [
            share for total, some in zip(totals, classes, strict=True) for share in even(total, len(some))
        ]
        yield tuple([flat[place] for place in order])


def _deals(units: int, least: Floats, most: Floats, limit: int) -> list[tuple[int, ...]] | None:
    """Ways to deal units to classes whose shares lie between these, a unit more or less; None if too many."""
    low = np.maximum(np.floor(least * units) - 1, 0).astype(int).tolist()
    high = np.minimum(np.ceil(most * units) + 1, units).astype(int).tolist()
    found: list[tuple[int, ...]] = [()]
    for c in range(len(low)):
        last, longer = c == len(low) - 1, []
        for some in found:
            left = units - sum(some)
            first = max(low[c], left if last else left - sum(high[c + 1 :]))
            longer += [(*some, n) for n in range(first, min(high[c], left - sum(low[c + 1 :])) + 1)]
            if len(longer) > limit:
                return None
        found = longer
    return found
