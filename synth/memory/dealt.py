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
from shardwright.cost.share_cost import CostStack, Floats, ShareCost
from shardwright.ir.placement import lengths

#: Vectors on a grid at most: a finer one is made coarser; with so few, it is made finer, so many times.
_MOST, _FEW, _FINER = 5000, 600, 8


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
        every = list(dict.fromkeys(itertools.chain(more, *(_on_grid(axis, members) for axis in axes))))
        self._dealt: dict[int, NDArray[np.int64]] = {}
        self._ratios: Floats = np.array(every)
        _, kept = np.unique(np.hstack([self._deal(each) for each in units]), axis=0, return_index=True)
        kept.sort()
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
            if units:
                shares = np.arange(units + 1) / units
                each = [
                    ShareCost(cost.constant[:, [c]], cost.linear[:, [c]], cost.product[:, [c]])
                    for c in range(cost.constant.shape[1])
                ]
                table = np.stack([one.per_class(shares) for one in each])
                self._seconds[key] = table[self._class_of, self._deal(units)].max(axis=1)
            else:
                stack = CostStack.of([cost])
                self._seconds[key] = np.array(
                    [stack.exact(ratios, self._class_of)[0] for ratios in self._ratios]
                )
        return self._seconds[key]

    def _deal(self, units: int) -> NDArray[np.int64]:
        """(vectors, devices): units of every device, as `shardwright.ir.placement.deal` has it."""
        if units not in self._dealt:
            ideal = units * self._ratios
            whole = np.floor(ideal + 1e-9).astype(np.int64)
            order = np.argsort(np.round(whole - ideal, 9), axis=1, kind="stable")
            self._dealt[units] = whole + (np.argsort(order, axis=1) < (units - whole.sum(axis=1))[:, None])
        return self._dealt[units]


def _on_grid(units: int, classes: Sequence[Sequence[int]]) -> Iterator[tuple[float, ...]]:
    """All ways to deal so many units, or as many as can be dealt in few enough ways, as shares per device."""
    more = len(classes) - 1
    # Axes of other sizes round otherwise: between the vectors of one there are others.
    units = next(
        (units * k for k in range(_FINER, 1, -1) if math.comb(units * k + more, more) <= _FEW), units
    )
    while math.comb(units + more, more) > _MOST:
        units -= 1
    even = [
        [
            tuple(part / units for part in lengths(total, 1, (1 / len(some),) * len(some)))
            for total in range(units + 1)
        ]
        for some in classes
    ]
    order = np.argsort([device for some in classes for device in some])
    for bars in itertools.combinations(range(units + more), more):
        ends = itertools.pairwise((-1, *bars, units + more))
        flat = [
            share for kind, (left, right) in zip(even, ends, strict=True) for share in kind[right - left - 1]
        ]
        yield tuple([flat[place] for place in order])
