"""The one cost object that search, LP, re-costing and bound all read.

For an instruction, device class c holding the share s of the sharded axis takes

    t_c(s) = max over rows r of  constant[r, c] + linear[r, c] s + product[r, c] s (1 - s)      seconds

and the instruction takes the maximum over the devices. Rows say "compute or memory, whichever is
slower". `product` (not negative) is for exchanges between two sharded placements: what a device holds
of one and lacks of the other. Everything else derives from these three arrays, so that no two parts
of the planner can price one instruction differently.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Floats: TypeAlias = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class ShareCost:
    """Seconds of one instruction as a function of the shares; arrays are (rows, classes)."""

    constant: Floats
    linear: Floats
    product: Floats

    @staticmethod
    def free(classes: int) -> ShareCost:
        """An instruction that costs nothing."""
        zero = np.zeros((1, classes))
        return ShareCost(zero, zero, zero)

    @staticmethod
    def fixed(seconds: Sequence[float]) -> ShareCost:
        """An instruction whose time per class does not depend on the shares."""
        row = np.asarray([seconds], dtype=np.float64)
        return ShareCost(row, np.zeros_like(row), np.zeros_like(row))

    @property
    def varies(self) -> bool:
        """Whether the shares matter."""
        return bool(self.linear.any() or self.product.any())

    def per_class(self, shares: Floats) -> Floats:
        """Seconds of every class at `shares` (one per class, or any columns the arrays broadcast to)."""
        return (self.constant + self.linear * shares + self.product * shares * (1 - shares)).max(axis=0)

    def exact(self, shares: Floats) -> float:
        """Seconds of the instruction at `shares`, one per class."""
        return float(self.per_class(shares).max())

    def per_device(self, shares: Floats, class_of: NDArray[np.int64]) -> Floats:
        """Seconds of every device at `shares`, one per device; `class_of` is the class of each."""
        constant, linear, product = (
            self.constant[:, class_of],
            self.linear[:, class_of],
            self.product[:, class_of],
        )
        return (constant + linear * shares + product * shares * (1 - shares)).max(axis=0)

    def affine_at(self, shares: Floats) -> tuple[Floats, Floats]:
        """Rows `(constant, linear)` equal to the cost at `shares` and tangent to it there."""
        slope = self.linear + self.product * (1 - 2 * shares)
        return self.constant + self.product * shares * shares, slope

    def minorant(self) -> tuple[Floats, Floats]:
        """Affine rows `(constant, linear)` nowhere above the cost, for shares between zero and one."""
        return self.constant, self.linear

    def floor(self, counts: NDArray[np.int64], most: float = 1.0) -> float:
        """The least the instruction can cost under any shares of all devices, zeros included.

        The minimum over { s >= 0, counts . s = 1 } of the minorant's maximum: a water level. With rows
        that rise, class c stays below level t while s_c <= room_c(t) = min_r (t - constant) / linear, and
        the level is where the rooms cover the axis. With rows that fall (a ring sends all but the own
        stretch), s_c must reach need_c(t), and the level is where the needs use the axis up. Rooms are
        concave and needs convex in t, so Newton's steps from below never pass the level: stopping early
        leaves a bound.

        Args:
            counts: devices per class.
            most: no device has a larger share than this.
        """
        constant, linear = self.minorant()
        level = float(np.where(linear < 0, constant + linear, constant).max())
        rising = _rising_level(constant, linear, counts, level, most)
        return max(rising, _falling_level(constant, linear, counts, level))

    def floor_within(self, counts: NDArray[np.int64], least: float, most: float) -> float:
        """The least the instruction can cost if the largest share of a device is between `least` and `most`.

        Some device has a share in that range, and no device has more: the others must take the rest. Rows
        are affine or concave in the share, so that each is least at an end of its range.
        """

        def rows(share: float) -> Floats:
            return self.constant + self.linear * share + self.product * share * (1 - share)

        at_most = rows(most)
        somebody = float(np.minimum(rows(least), at_most).max(axis=0).min())
        everybody = float(np.minimum(rows(0.0), at_most).max())
        return max(somebody, everybody, self.floor(counts, most))


_STEPS = 16


def _rising_level(
    constant: Floats, linear: Floats, counts: NDArray[np.int64], level: float, most: float
) -> float:
    rising = linear > 0
    if not rising.any():
        return level
    slope = np.where(rising, linear, 1.0)
    classes = np.arange(constant.shape[1])
    for _ in range(_STEPS):
        room = np.where(rising, (level - constant) / slope, most)
        tightest = room.argmin(axis=0)
        capacity = np.minimum(room[tightest, classes], most)
        missing = 1.0 - float((counts * capacity).sum())
        if missing <= 1e-12:
            break
        gain = np.where(
            (capacity < most) & rising[tightest, classes], counts / slope[tightest, classes], 0.0
        ).sum()
        if gain <= 0:
            break
        level += missing / float(gain)
    return level


def _falling_level(constant: Floats, linear: Floats, counts: NDArray[np.int64], level: float) -> float:
    falling = linear < 0
    if not falling.any():
        return level
    slope = np.where(falling, -linear, 1.0)
    classes = np.arange(constant.shape[1])
    for _ in range(_STEPS):
        need = np.where(falling, (constant - level) / slope, 0.0)
        largest = need.argmax(axis=0)
        demand = np.maximum(need[largest, classes], 0.0)
        excess = float((counts * demand).sum()) - 1.0
        if excess <= 1e-12:
            break
        level += excess / float((np.where(demand > 0, counts / slope[largest, classes], 0.0)).sum())
    return level
