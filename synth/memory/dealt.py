"""All ratios that deal whole units, and what programs cost and take at all of them at once: for `pool.py`."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from shardwright.cost.bill import Item, counted
from shardwright.cost.memory.liveness import Footprint
from shardwright.cost.model import CostModel
from shardwright.cost.share_cost import Floats, ShareCost
from shardwright.ir.placement import lengths

#: Ways to deal the units of an axis at most; where they are so few, units are parted, into so many at most.
_MOST, _FEW, _FINER = 5000, 600, 8

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


def can_be_listed(units: int, classes: int) -> bool:
    """Whether all ways to deal so many units to so many classes of devices can be listed."""
    return _ways(units, classes) <= _MOST


class Dealt:
    """Vectors of ratios, and programs at all of them.

    Args:
        model: gives device classes; devices of one class share its part evenly.
        axes: units of axes, dealt in every way, which must be few enough; see `can_be_listed`.
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
        every = list(dict.fromkeys(itertools.chain(more, *(_on_grid(axis, members) for axis in axes))))
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


def _on_grid(units: int, classes: Sequence[Sequence[int]]) -> Iterator[tuple[float, ...]]:
    """All ways to deal so many units as shares per device, and those of parts of units if there are few."""
    finer = (units * times for times in range(_FINER, 1, -1))
    many = next((parts for parts in finer if _ways(parts, len(classes)) <= _FEW), units)
    even = [
        [
            tuple(part / many for part in lengths(total, 1, (1 / len(some),) * len(some)))
            for total in range(many + 1)
        ]
        for some in classes
    ]
    order = np.argsort([device for some in classes for device in some])
    for totals in _deals(many, len(classes)):
        flat = [share for kind, total in zip(even, totals, strict=True) for share in kind[total]]
        yield tuple([flat[place] for place in order])


def _ways(units: int, classes: int) -> int:
    """In how many ways units can be dealt to classes."""
    return math.comb(units + classes - 1, classes - 1)


def _deals(units: int, classes: int) -> Iterator[tuple[int, ...]]:
    """Ways to deal units to classes, in lexical order."""
    if classes == 1:
        yield (units,)
        return
    for first in range(units + 1):
        for rest in _deals(units - first, classes - 1):
            yield (first, *rest)
