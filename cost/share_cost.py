"""The one cost object that search, LP, re-costing and bound all read.

For an instruction, device class c holding the share s of the sharded axis takes

    t_c(s) = max over rows r of  constant[r, c] + linear[r, c] s + product[r, c] s (1 - s)      seconds

and the instruction takes the maximum over the devices. Rows say "compute or memory, whichever is
slower". `product` (not negative) is for exchanges between two sharded placements: what a device holds
of one and lacks of the other. Everything else derives from these three arrays, so that no two parts
of the planner can price one instruction differently. A `CostStack` does the same for many instructions
at once.
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

    def floor(self, counts: NDArray[np.int64], most: float = 1.0, units: int = 0) -> float:
        """The least the instruction can cost under any shares; see `CostStack.floor`."""
        return float(CostStack.of([self]).floor(counts, most, np.array([units]))[0])

    def floor_within(self, counts: NDArray[np.int64], least: float, most: float) -> float:
        """The least it can cost if the largest share is in a range; see `CostStack.floor_within`."""
        return float(CostStack.of([self]).floor_within(counts, least, most)[0])


@dataclass(frozen=True, slots=True, eq=False)
class CostStack:
    """Costs of many instructions; arrays are (instructions, rows, classes)."""

    constant: Floats
    linear: Floats
    product: Floats

    @staticmethod
    def of(costs: Sequence[ShareCost]) -> CostStack:
        """Stack costs of equal classes; those with fewer rows repeat their first."""
        rows = max((cost.constant.shape[0] for cost in costs), default=1)

        def stacked(arrays: Sequence[Floats]) -> Floats:
            if not arrays:
                return np.zeros((0, rows, 1))
            full = [
                a if len(a) == rows else np.concatenate([a, a[:1].repeat(rows - len(a), 0)]) for a in arrays
            ]
            return np.stack(full)

        return CostStack(
            stacked([cost.constant for cost in costs]),
            stacked([cost.linear for cost in costs]),
            stacked([cost.product for cost in costs]),
        )

    @staticmethod
    def joined(stacks: Sequence[CostStack]) -> CostStack:
        """Stacks of equal classes one after another; those with fewer rows repeat their first."""
        rows = max((stack.constant.shape[1] for stack in stacks), default=1)

        def padded(array: Floats) -> Floats:
            return np.concatenate([array, array[:, :1].repeat(rows - array.shape[1], 1)], axis=1)

        stacks = [stack for stack in stacks if len(stack.constant)] or stacks[:1]
        return CostStack(
            np.concatenate([padded(stack.constant) for stack in stacks]),
            np.concatenate([padded(stack.linear) for stack in stacks]),
            np.concatenate([padded(stack.product) for stack in stacks]),
        )

    def take(self, which: NDArray[np.intp]) -> CostStack:
        """The stack of some of the instructions."""
        return CostStack(self.constant[which], self.linear[which], self.product[which])

    def exact(self, shares: Floats, class_of: NDArray[np.int64]) -> Floats:
        """Seconds of every instruction: the slowest of devices of classes `class_of` with `shares`.

        Args:
            shares: (devices,), the same for all instructions. Devices of equal class and share count once,
                so that callers may leave out all but one of them.
            class_of: (devices,).
        """
        return self.per_device(shares, class_of).max(axis=1)

    def per_device(self, shares: Floats, class_of: NDArray[np.int64]) -> Floats:
        """(instructions, devices): seconds of each; see `exact`."""
        constant, linear = self.constant[:, :, class_of], self.linear[:, :, class_of]
        product = self.product[:, :, class_of]
        return (constant + linear * shares + product * (shares * (1 - shares))).max(axis=1)

    def floor(
        self, counts: NDArray[np.int64], most: Floats | float = 1.0, units: NDArray[np.int64] | None = None
    ) -> Floats:
        """The least every instruction can cost under any shares of all devices, zeros included.

        The minimum over { s >= 0, counts . s = 1 } of the minorant's maximum: a water level. With rows
        that rise, class c stays below level t while s_c <= room_c(t) = min_r (t - constant) / linear, and
        the level is where the rooms cover the axis. With rows that fall (a ring sends all but the own
        stretch), s_c must reach need_c(t), and the level is where the needs use the axis up. Rooms are
        concave and needs convex in t, so Newton's steps from below never pass the level: stopping early
        leaves a bound. An axis is dealt in whole units: from there on the level rises to where the next
        device could take one unit more (or do with one less), until they are all dealt.

        Args:
            counts: devices per class.
            most: no device has a larger share than this; one number, or one per instruction.
            units: of the axis that each instruction cuts; 0, or None for all, for shares of any size.
        """
        level = np.where(self.linear < 0, self.constant + self.linear, self.constant).max(axis=(1, 2))
        most = np.broadcast_to(np.asarray(most, dtype=np.float64), level.shape)
        level = np.maximum(self._rising_level(counts, level, most), self._falling_level(counts, level))
        if units is None:
            return level
        few = np.flatnonzero((units > 0) & (units <= _FEW * counts.sum()) & np.isfinite(level))
        if len(few):
            level[few] = self.take(few)._level_in_units(counts, level[few], most[few], units[few])
        return level

    def floor_within(
        self,
        counts: NDArray[np.int64],
        least: Floats | float,
        most: Floats | float,
        units: NDArray[np.int64] | None = None,
    ) -> Floats:
        """The least every instruction can cost if the largest share of a device is within a range.

        Some device has a share between `least` and `most` (one number, or one per instruction), and no
        device has more: the others must take the rest. Rows are affine or concave in the share, so that
        each is least at an end of its range.
        """
        size = len(self.constant)
        least = np.broadcast_to(np.asarray(least, dtype=np.float64), size)
        most = np.broadcast_to(np.asarray(most, dtype=np.float64), size)

        def rows(share: Floats) -> Floats:
            s = share[:, None, None]
            return self.constant + self.linear * s + self.product * (s * (1 - s))

        at_most = rows(most)
        somebody = np.minimum(rows(least), at_most).max(axis=1).min(axis=1)
        everybody = np.minimum(self.constant, at_most).max(axis=(1, 2))
        return np.maximum(np.maximum(somebody, everybody), self.floor(counts, most, units))

    def _rising_level(self, counts: NDArray[np.int64], level: Floats, most: Floats) -> Floats:
        rising = self.linear > 0
        steep = np.flatnonzero(rising.any(axis=(1, 2)))
        if not len(steep):
            return level
        rising, constant = rising[steep], self.constant[steep]
        most = most[steep, None]
        slope = np.where(rising, self.linear[steep], 1.0)
        result = level.copy()
        for _ in range(_STEPS):
            found = result[steep]
            room = np.where(rising, (found[:, None, None] - constant) / slope, most[:, None, :])
            tightest = room.argmin(axis=1)[:, None]
            capacity = np.minimum(np.take_along_axis(room, tightest, 1)[:, 0], most)
            missing = 1.0 - (counts * capacity).sum(axis=1)
            grows = (capacity < most) & np.take_along_axis(rising, tightest, 1)[:, 0]
            gain = np.where(grows, counts / np.take_along_axis(slope, tightest, 1)[:, 0], 0.0).sum(axis=1)
            active = np.flatnonzero((missing > 1e-12) & (gain > 0))
            if not len(active):
                break
            # Most are there after two or three steps; the others go on by themselves.
            steep, most, rising = steep[active], most[active], rising[active]
            constant, slope = constant[active], slope[active]
            result[steep] = found[active] + missing[active] / gain[active]
        return result

    def _falling_level(self, counts: NDArray[np.int64], level: Floats) -> Floats:
        falling = self.linear < 0
        steep = np.flatnonzero(falling.any(axis=(1, 2)))
        if not len(steep):
            return level
        falling, constant = falling[steep], self.constant[steep]
        slope = np.where(falling, -self.linear[steep], 1.0)
        result = level.copy()
        for _ in range(_STEPS):
            found = result[steep]
            need = np.where(falling, (constant - found[:, None, None]) / slope, 0.0)
            largest = need.argmax(axis=1)[:, None]
            demand = np.maximum(np.take_along_axis(need, largest, 1)[:, 0], 0.0)
            excess = (counts * demand).sum(axis=1) - 1.0
            active = np.flatnonzero(excess > 1e-12)
            if not len(active):
                break
            fall = np.where(demand > 0, counts / np.take_along_axis(slope, largest, 1)[:, 0], 0.0).sum(axis=1)
            steep, falling = steep[active], falling[active]
            constant, slope = constant[active], slope[active]
            result[steep] = found[active] + excess[active] / fall[active]
        return result

    def _level_in_units(
        self, counts: NDArray[np.int64], level: Floats, most: Floats, units: NDArray[np.int64]
    ) -> Floats:
        """The level, raised until the axes can be dealt in whole units.

        Below it, a device of a class takes no more units than its rising rows allow, and no fewer than its
        falling rows ask for.
        """
        level, left = level.copy(), np.arange(len(level))
        for _ in range(_STEPS):
            whole, top = units[left, None], np.floor(units[left, None] * most[left, None] + 1e-9)
            constant, linear = self.constant[left], self.linear[left]
            rising, falling = linear > 0, linear < 0
            crossing = (
                (level[left, None, None] - constant) / np.where(linear == 0, 1.0, linear) * whole[:, None]
            )
            room = np.floor(np.where(rising, crossing, np.inf).min(axis=1) + 1e-9)
            room = np.minimum(room, top)
            need = np.maximum(np.ceil(np.where(falling, crossing, 0.0).max(axis=1) - 1e-9), 0.0)
            # What each would take with one unit more, and with one less, than the level lets it have.
            more = np.where(rising, constant + linear * ((room + 1) / whole)[:, None], -np.inf).max(axis=1)
            less = np.where(falling, constant + linear * ((need - 1) / whole)[:, None], -np.inf).max(axis=1)
            short, over = room @ counts < whole[:, 0], need @ counts > whole[:, 0]
            taken = np.where(room < top, more, np.inf).min(axis=1)
            spared = np.where(need > 0, less, np.inf).min(axis=1)
            higher = np.maximum(np.where(short, taken, -np.inf), np.where(over, spared, -np.inf))
            active = np.isfinite(higher) & (higher > level[left])
            if not active.any():
                break
            left = left[active]
            level[left] = higher[active]
        return level


_STEPS = 16

#: Axes of up to so many units per device are dealt in whole units; with more the error is small.
_FEW = 16
