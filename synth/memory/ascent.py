"""The greatest value of a concave function of some multipliers, by cutting planes.

Every program that was found is a plane above the function: what it costs, and how that changes with the
multipliers. The next multipliers are where the least of the planes is highest; how high that is says what is
left to be found (Kelley 1960).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from scipy.optimize import linprog

from shardwright.cost.share_cost import Floats

#: Multipliers looked at first, as parts of a unit each; while the best lies at that edge, so many times more.
#: (What memory costs where it is short is rarely more than the first.)
_EDGE, _FURTHER, _FURTHEST = 1 / 16, 16.0, 4.0**7


class Ascent:
    """Planes above a function of multipliers, each at least 0.

    Args:
        used: of every multiplier, whether it may be other than 0; more of them may be later.

    Attributes:
        at: where the least of the planes is highest.
        most: how high it is there; no multipliers up to the edge reach more.
    """

    def __init__(self, used: Sequence[bool]) -> None:
        self.used = np.array(used)
        self._planes: list[tuple[float, Floats]] = []
        self._edge = _EDGE
        self.at: Floats = np.zeros(len(used))
        self.most = np.inf

    def cut(self, value: float, slope: Floats) -> None:
        """Add the plane of a program.

        Args:
            value: what it costs at multipliers `at`, what they cost included.
            slope: how that changes with each, those that are not used included.
        """
        if ((self.at >= self._edge) & (slope > 0)).any() and self._edge < _FURTHEST:
            self._edge *= _FURTHER
        self._planes.append((value - float(slope @ self.at), slope))
        self.aim()

    def aim(self) -> None:
        """Find where the least of the planes is highest."""
        scale = max(abs(each) for each, _ in self._planes) or 1.0
        rows = np.array([[*-slope, 1.0] for _, slope in self._planes])
        rows[:, :-1] /= scale
        found = linprog(
            [*np.zeros(len(self.used)), -1.0],
            A_ub=rows,
            b_ub=np.array([each / scale for each, _ in self._planes]),
            bounds=[*((0.0, self._edge if used else 0.0) for used in self.used), (None, None)],
        )
        if found.status == 0:
            self.at, self.most = np.asarray(found.x[:-1]), float(found.x[-1]) * scale
        else:
            self.most = -np.inf  # numbers of too many magnitudes: leave it at what was found
