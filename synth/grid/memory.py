"""Programs on two mesh axes within the devices' memory, and what none of them can be cheaper than.

As on one axis (`synth/memory/budgets.py`, `within.py`) memory enters the search as rent, see
`synth/grid/rent.py`. What fills the fullest device of a program that does not fit pays, too, when the search
goes on. The linear programs of the shares know nothing of memory: where theirs do not fit, shares in
proportion to it are tried, and shares between both (`synth/grid/capped.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import NamedTuple

import numpy as np

from shardwright.cost.share_cost import Floats
from shardwright.ir.graph import Value
from shardwright.synth.grid.candidate import GridCandidate, Pricing
from shardwright.synth.grid.capped import capped
from shardwright.synth.grid.crowd import crowd
from shardwright.synth.grid.rent import GridRents, least_portions, portions
from shardwright.synth.grid.solve import GridSolver, Solvers
from shardwright.synth.grid.weighing import Weighing
from shardwright.synth.memory.rent import too_small
from shardwright.synth.memory.within import WORTH_A_LOOK
from shardwright.synth.prices.tables import Prices
from shardwright.synth.programs.judge import MOST_LOOKS
from shardwright.synth.search.solution import Solution
from shardwright.synth.space.factors import Factor, Use

#: Rents tried, as multiples of (cost of the best program / memory of all devices). Far higher ones drown what
#: programs cost in what `_ENOUGH` leaves open.
_SCALES = tuple(4.0**k for k in range(-2, 5))

#: Times that the range of rents around the least one that helps is cut in two.
_HALVINGS = 2

#: Rents at which a bound is looked for; the first, as a part of what would do if one were as good as all of
#: it; and the part of a bound by which it is not worth looking for a better one.
_ASCENTS, _FIRST, _HARDLY = 3, 0.25, 2e-3

#: What does not fit under the highest rent is given up where more that pays it makes it no smaller than this.
_LESS = 0.9

#: What memory may add to the cost of a program, as a part of it, before others are looked for that fit.
NEARLY_FREE = 1e-3

#: Shares at which a program is looked at to find those nearest to what it likes that fit.
_SHIFTS = 4

#: What takes more than so many times the memory by the model hardly fits as it will run; what takes more as
#: it will run is not made to fit by other shares alone.
_NEARLY = 1.1

#: How far a rented program may be from the best under its rent, as a part of what it costs.
_ENOUGH = 1e-3


class _Tangent(NamedTuple):
    """Of a concave function: what it is somewhere, and how fast it rises there."""

    at_s: float
    value_s: float
    slope: float

    def at(self, at_s: float) -> float:
        """What the function is elsewhere at most."""
        return self.value_s + self.slope * (at_s - self.at_s)

    def meets(self, other: _Tangent) -> float:
        """Where a rising and a falling tangent meet; between them, though values may be known roughly."""
        at_s = self.at_s + (other.at(self.at_s) - self.value_s) / (self.slope - other.slope)
        return min(max(at_s, self.at_s), other.at_s)


class GridRenting:
    """Looks for programs that fit.

    Args:
        weighing: makes programs of solutions.
        extra: factors that pin choices.
        solvers: known ones, see `GridSolver`.
    """

    def __init__(self, weighing: Weighing, extra: Sequence[Use] = (), solvers: Solvers | None = None) -> None:
        self.weighing = weighing
        self.graph, self.space, self.grid = weighing.graph, weighing.space, weighing.grid
        self.judge, self.timer, self.limits = weighing.judge, weighing.timer, weighing.limits
        self._rents: GridRents | None = None
        self.searches = self.expanded = 0
        self._extra, self._solvers = tuple(extra), solvers
        self._crowd: tuple[Value, ...] = ()
        self._made: GridSolver | None = None
        self._latest: tuple[int, ...] | None = None
        #: The cheapest program under rent, of the latest, that does not quite fit by the model.
        self._almost: GridCandidate | None = None
        #: By ratios and rent, what was found with what pays rent so far.
        self._solved: dict[tuple[tuple[float, ...], float], Solution] = {}

    @property
    def rents(self) -> GridRents:
        """What tensors pay, of what pays so far."""
        if self._rents is None:
            self._rents = GridRents(self.graph, self.space, self._crowd)
        return self._rents

    @property
    def _of_memory(self) -> tuple[float, ...]:
        """Shares in proportion to memory."""
        limits = self.limits.nbytes
        return tuple([limit / sum(limits) for limit in limits])

    def fitting(
        self,
        best: GridCandidate,
        pricing: Pricing,
        most_s: float,
        hopeless: Callable[[], bool] = lambda: False,
    ) -> GridCandidate:
        """The best that fits as it will run, or else the smallest found.

        Args:
            best: what costs least if memory is no limit.
            pricing: knows what costs what, and which shares a program likes.
            most_s: a program that costs more is of no use.
            hopeless: whether none that fits costs less; asked once, where the smallest do not say so.
        """
        free, before, given_up = best, math.inf, cache(hopeless)
        sure: GridCandidate | None = None
        for rounds in range(MOST_LOOKS + 1):
            if rounds and not best.fits and not (best.over < before * _LESS and self._crowded(best)):
                break
            before = best.over if rounds else before
            seen = self._seen(best)
            if seen.fits or rounds == MOST_LOOKS or self.timer.late() or best.cost_s >= most_s:
                best = seen
                break
            if rounds and best.fits:
                moved = self._moved(seen)
                sure = moved if sure is None or moved.beats(sure) else sure
            if best.fits or not rounds:
                self.judge.learn(seen.memory, best.ratios, best.memory, rounds)
            again = replace(free, over=self.judge.over(free.memory, free.ratios))
            best = self._rented(again, pricing, most_s, given_up)
            almost = self._almost
            if almost is not None and not (best.fits and best.cost_s * (1 - WORTH_A_LOOK) < almost.cost_s):
                seen = self._seen(almost)  # the model takes some programs for larger than they are
                sure = seen if seen.fits and (sure is None or seen.beats(sure)) else sure
        return best if sure is None or not sure.fits or best.beats(sure) else sure

    def _seen(self, found: GridCandidate) -> GridCandidate:
        """A program as it will run."""
        with self.timer.ratios():
            seen = self.judge.peaks(found.program, found.ratios, found.memory)
        return replace(found, memory=seen, over=self.judge.excess(seen))

    def _moved(self, found: GridCandidate) -> GridCandidate:
        """A program that is too large for some devices, as it will run, with less for these; or as it is."""
        if found.over > _NEARLY or found.ratios == self._of_memory:
            return found
        with self.timer.ratios():
            sure = self.weighing.weighed(found.solution, found.prices, found.program, self._of_memory)
        sure, there = self._seen(sure), found
        for _ in range(_SHIFTS if sure.fits else 0):
            ratios = capped(
                there.ratios, sure.ratios, there.memory.bytes, sure.memory.bytes, self.limits.nbytes
            )
            with self.timer.ratios():
                there = self.weighing.weighed(found.solution, found.prices, found.program, ratios)
            there = self._seen(there)
            if there.fits:
                return there
        return sure if sure.fits else found

    def _crowded(self, best: GridCandidate) -> bool:
        """Have what fills the fullest device pay rent, too; whether that is any more than before."""
        device = int((np.asarray(best.memory.bytes) / self.limits.nbytes).argmax())
        more = dict.fromkeys((*self._crowd, *crowd(best.program, self.graph, best.ratios, device)))
        if len(more) == len(self._crowd):
            return False
        self._crowd = tuple(more)
        self._rents = self._made = None
        self._solved.clear()
        return True

    def _rented(
        self, best: GridCandidate, pricing: Pricing, most_s: float, given_up: Callable[[], bool]
    ) -> GridCandidate:
        """The cheapest program under rent that fits by the model, or else the smallest."""
        limits = self.limits.nbytes
        if too_small(self.graph, limits):
            return best
        unit, free_s = best.cost_s / sum(limits), best.cost_s
        liked, of_memory = best.ratios, self._of_memory
        best, paid = self._spread(best, of_memory), 0.0
        if best.fits and best.cost_s <= free_s * (1 + NEARLY_FREE):
            return best
        too_dear = nearly = False
        self._almost = None

        def at(scale: float, ratios: tuple[float, ...]) -> bool:
            """Whether the best program under a rent fits at the shares that it was searched for with."""
            nonlocal best, paid, too_dear, nearly
            prices = pricing.prices(ratios)
            solution = self._solve(prices, ratios, scale * unit)
            with self.timer.ratios():
                here = self.weighing.candidate(solution, prices, ratios)
            if not here.fits:
                _, here = self.weighing.spared(here)
            for each in (here, self._spread(here, of_memory)):
                if each.beats(best):
                    best, paid = each, scale
            # The higher the rent, the more the best program under it costs without.
            too_dear = too_dear or (not here.fits and here.cost_s >= most_s)
            if not here.fits and here.over <= _NEARLY:
                nearly = True
                if self._almost is None or here.cost_s < self._almost.cost_s:
                    self._almost = here
            return here.fits

        low, high, base = -1, len(_SCALES) - 1, liked
        found = at(_SCALES[high], liked)
        # What pays most need not be smallest: what it drowns in rent takes what is not rented.
        while not found and nearly and high >= 2 and not (too_dear or self.timer.late()):
            high -= 2
            found = at(_SCALES[high], liked)
        if not found and of_memory != liked and not self.timer.late():
            base, high = of_memory, len(_SCALES) - 1
            found = at(_SCALES[high], of_memory)
        if not found and not best.fits:
            return best
        if not (best.fits and best.cost_s < most_s) and given_up():
            return best
        while found and high - low > 1 and not (too_dear or self.timer.late()):
            middle = (low + high) // 2
            low, high = (low, middle) if at(_SCALES[middle], base) else (middle, high)
        if best.cost_s >= most_s:
            return best
        least, most = (_SCALES[low] if low >= 0 else 0.0), _SCALES[high]
        for _ in range(_HALVINGS if found else 0):
            if self.timer.late():
                break
            scale = math.sqrt(least * most) if least else most / 4
            least, most = (least, scale) if at(scale, base) else (scale, most)
        if best.ratios not in (liked, of_memory) and not self.timer.late():
            at(paid, best.ratios)
        likes, _ = pricing.best_ratios(best.solution, best.prices, best.ratios)
        return self._shifted(best, likes)

    def _spread(self, found: GridCandidate, ratios: tuple[float, ...]) -> GridCandidate:
        """A program at shares between those that it has and others, if it fits there alone; or as it is."""
        if found.fits or found.ratios == ratios:
            return found
        with self.timer.ratios():
            there = self.weighing.weighed(found.solution, found.prices, found.program, ratios)
        if not there.fits:
            _, there = self.weighing.spared(there)
        return self._shifted(there, found.ratios) if there.fits else found

    def _shifted(self, found: GridCandidate, liked: tuple[float, ...]) -> GridCandidate:
        """A program that fits, at shares as near to those that it likes as fit."""
        if not found.fits:
            return found
        budgets = self.judge.budgets[self.grid.model.class_of]
        ratios = liked
        for _ in range(_SHIFTS):
            with self.timer.ratios():
                there = self.weighing.weighed(found.solution, found.prices, found.program, ratios)
            if there.fits:
                return there if there.beats(found) else found
            has, needs = found.memory.bytes, there.memory.bytes
            ratios = capped(there.ratios, found.ratios, needs, has, budgets)
        return found

    def bound(self, floors: Prices, ideal: Solution, loose_s: float, cost_s: float) -> float:
        """A lower bound on the cost of every program that fits, whatever its ratios.

        Rent for what the best program without a limit lacks makes a bound, concave in how high it is. Its
        tangents say where to look next, and how high it may get at most (Kelley 1960).

        Args:
            floors: what every instruction costs at least.
            ideal: the best program at these prices.
            loose_s: a bound already.
            cost_s: of a program that fits.
        """
        limits, portion = self.limits.nbytes, least_portions(self.grid.mesh)
        budgets = np.array([sum(limits), min(limits)])
        excess = self.rents.excess(ideal.assignment, portion, limits)
        lacks = np.maximum(excess / budgets, 0.0)
        best = min(loose_s, cost_s)
        if not lacks.any() or ideal.seconds >= cost_s:
            return best
        way = lacks / lacks.max() / budgets  # bytes times this: how much they are of the budgets
        low = _Tangent(0.0, ideal.seconds, float(excess @ way))
        high: _Tangent | None = None
        at_s = _FIRST * (cost_s - low.value_s) / low.slope
        for _ in range(_ASCENTS):
            if self.timer.late() or best >= cost_s * (1 - _ENOUGH):
                break
            rents = self.rents.seconds(portion, *(at_s * way), kept=False)
            found = self._search(floors, rents)
            constant_s = self.rents.constant_s(np.array([at_s * way, (0.0, 0.0)]), limits)
            best = max(best, found.bound_s + constant_s)
            slope = float(self.rents.excess(found.assignment, portion, limits) @ way)
            here = _Tangent(at_s, found.seconds + constant_s, slope)
            low, high = (here, high) if slope > 0 else (low, here)
            at_s = 2 * at_s if high is None else low.meets(high)
            if high is not None and low.at(at_s) <= best * (1 + _HARDLY):
                break
        return min(best, cost_s)

    def _solve(self, prices: Prices, ratios: tuple[float, ...], rent_s: float) -> Solution:
        """The cheapest program with `rent_s` per byte on all devices, and as much for all of the smallest."""
        key = ratios, rent_s
        if key not in self._solved:
            portion = portions(self.grid.mesh, ratios, self.limits.smallest)
            rents = self.rents.seconds(portion, rent_s, rent_s * len(self.limits.nbytes), kept=True)
            self._solved[key] = self._search(prices, rents)
        return self._solved[key]

    def _search(self, prices: Prices, rents: Mapping[Factor, Floats]) -> Solution:
        with self.timer.search():
            if self._made is None:
                self._made = GridSolver(self.space, (*self._extra, *self.rents.uses), self._solvers)
            known = self._latest
            # How high a rent should be is a guess: the best program under it need not be proven so.
            found = self._made.solve(prices, self.timer.late, known, _ENOUGH, rents=rents, rounds=1)
        self.searches, self.expanded = self.searches + 1, self.expanded + found.expanded
        self._latest = found.assignment
        return found
