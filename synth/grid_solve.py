"""The best program on two mesh axes at one set of prices.

    messages --> bound, and one for every value --> values that may matter --> exact elimination

First messages are passed until the bound hardly rises (`shardwright.synth.dual`). Then all values are left out
that cost more than a little above the bound; what is left is solved exactly. If the program found costs no
more than what was left out does at least, it is the best there is. Else what it costs says what may be left
out, and what is left is solved once more.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from shardwright.ir.errors import PlanError
from shardwright.synth.dual import Dual, Star
from shardwright.synth.factors import Factor, Use
from shardwright.synth.pricing import Prices
from shardwright.synth.solve import Solution, Solver
from shardwright.synth.space import Space

#: Sweeps after which the bound is taken as it is.
MOST_SWEEPS = 200

#: Parts of the bound above which values are left out, tried one after another.
_MARGINS = (1e-3, 1e-2, 5e-2, 0.3, 2.0)

#: Tables of the restricted problem may have so many cells.
MOST_CELLS = 1 << 21


class GridSolver:
    """Solves a space on two axes at any prices.

    Attributes:
        factors: all factors, by number.
    """

    def __init__(self, space: Space, extra: Sequence[Use] = ()) -> None:
        numbers: dict[Factor, int] = {}
        self._uses = [(numbers.setdefault(u.factor, len(numbers)), u.scope) for u in (*space.uses, *extra)]
        self._domains = [choice.domain for choice in space.choices]
        self._sizes = [len(domain) for domain in self._domains]
        self.factors = tuple(numbers)

    def solve(self, prices: Prices, stop: Callable[[], bool] = lambda: False) -> Solution:
        """The cheapest program at `prices`, and a bound on all: equal where the search ended by itself.

        Raises:
            PlanError: no assignment is possible at all.
        """
        stars = prices.stars(self.factors)
        dual = Dual(self._domains, self._sizes, self._uses, stars)
        dual.raise_bound(lambda bound, gain: gain < 2e-5 * bound, MOST_SWEEPS, stop)
        bound, excess = dual.bound(), dual.excess()
        best: Solution | None = None
        for margin in _MARGINS:
            above = margin * bound if best is None else best.seconds * (1 + 1e-12) - bound
            kept = [np.flatnonzero(over <= above) for over in excess]
            found = self._restricted(stars, [kept[shade] for shade in dual.shade_of], stop)
            if found is None:
                continue
            exact = found.bound_s >= found.seconds
            if best is None or found.seconds < best.seconds:
                best = found
            if exact and found.seconds <= bound + above:
                return Solution(found.assignment, found.seconds, found.seconds, found.expanded, found.width)
            if not exact or stop():
                break
        if best is None:
            raise PlanError(
                place="search",
                reason="no program of this space carries out the step",
                remedy="Please report the step: its rules contradict each other",
            )
        return Solution(best.assignment, best.seconds, min(bound, best.seconds), best.expanded, best.width)

    def _restricted(
        self, stars: Sequence[Star], kept: Sequence[NDArray[np.intp]], stop: Callable[[], bool]
    ) -> Solution | None:
        """The best assignment of some values of every choice; None where there is none."""
        if any(not len(values) for values in kept):
            return None
        names: dict[bytes, int] = {}
        name = [names.setdefault(values.tobytes(), len(names)) for values in kept]
        numbers: dict[tuple[int, ...], int] = {}
        tables: list[NDArray[np.float64]] = []
        uses: list[tuple[int, tuple[int, ...]]] = []
        for factor, scope in self._uses:
            key = (factor, *[name[v] for v in scope])
            if key not in numbers:
                numbers[key] = len(numbers)
                tables.append(stars[factor].table([kept[v] for v in scope]))
            uses.append((numbers[key], scope))
        domains = [(id(domain), n) for domain, n in zip(self._domains, name, strict=True)]
        solver = Solver(domains, [len(values) for values in kept], uses, MOST_CELLS)
        found = solver.solve(tables, stop=stop)
        if found is None or not math.isfinite(found.seconds):
            return None
        assignment = tuple(int(values[v]) for values, v in zip(kept, found.assignment, strict=True))
        return Solution(assignment, found.seconds, found.bound_s, found.expanded, found.width)
