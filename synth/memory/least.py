"""The least rent at which a program fits into memory, for `within.py`.

What is best at a rent between two others lies below the line through their costs and bytes, if there is
anything: the slope of that line is the rent to ask for next. Lines are of programs at the same ratios. At
first they are the best program without rent, which is too large, and one at a rent at which something fits.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from shardwright.cost.bill import charges
from shardwright.synth.memory.between import between
from shardwright.synth.memory.budgets import SCALES, Renting
from shardwright.synth.memory.lean import LITTLE, in_turn
from shardwright.synth.memory.rent import too_small
from shardwright.synth.prices.tables import Prices
from shardwright.synth.programs.emit import emit
from shardwright.synth.search.solution import Solution
from shardwright.synth.shares.turns import Candidate, Turns, candidate

#: What fits is this near, as a fraction, to what does not by less rent: near enough.
_SETTLED = 0.005

#: Rents tried at most between none and one that makes a program fit; two of them this near are the same.
_MOST_RENTS, _NARROW = 8, 1.05

#: Times that program and ratios are found for one another under one rent.
_TURNS = 2


class _Point(NamedTuple):
    """A program that was found under rent: at which ratios, its cost without rent, its bytes, and itself."""

    ratios: tuple[float, ...]
    cost_s: float
    nbytes: float
    assignment: tuple[int, ...] = ()


class LeastRent:
    """The cheapest program found under rent that fits, or else the smallest.

    Args:
        turns: the search so far.
        found: the best program without rent.
        renting: makes programs smaller.
        rival_s: what a plan that fits costs already.

    Attributes:
        best: what was found so far.
    """

    def __init__(self, turns: Turns, found: Candidate, renting: Renting, rival_s: float = math.inf) -> None:
        self._turns, self._found, self._renting, self._rival_s = turns, found, renting, rival_s
        limits = renting.limits.nbytes
        self._unit = renting.unit_s = renting.unit_s or found.cost_s / sum(limits)
        self._by_memory = tuple(limit / sum(limits) for limit in limits)
        self.best = found
        self._tried: dict[tuple[tuple[int, ...], tuple[float, ...]], tuple[bool, float]] = {}
        # What programs cost that are too large at the highest rent so far: those that fit cost no less, at
        # these ratios (a program of fewer bytes that cost less would have been found).
        self._under_s = 0.0
        # The program that was found last under rent; whether it was known.
        self._point, self._again = _Point(found.ratios, math.inf, math.inf), False

    def search(self) -> Candidate:
        """Search; see the module's docstring."""
        if too_small(self._renting.graph, self._renting.limits.nbytes):
            for scale in SCALES[3:5]:  # what lacks least is all that can be asked for
                if self._turns.stop() or self._fits(scale):
                    break
            return self.best
        top = self._enough()
        if top is not None:
            self._narrow(top)
        return self.best

    def _enough(self) -> int | None:
        """Number of a rent at which a program fits; None where none does at the highest."""
        renting, last = self._renting, len(SCALES) - 1
        top = min(renting.helped + 1, last) if renting.helped else last
        if renting.enough:
            top = SCALES.index(LITTLE)
        if self._fits(SCALES[top]):
            return top
        # Where the highest rent makes nothing small enough, a lower one hardly does.
        if top < last and self._fits(SCALES[last]):
            return last
        # By units as they are dealt at these ratios, what is small enough may look no smaller than by shares.
        renting.dealt = not renting.dealt and self._fits_dealt(SCALES[last])
        return last if renting.dealt else None

    def _fits_dealt(self, scale: float) -> bool:
        """See `_fits`, with rent for the units that a device is dealt."""
        self._renting.dealt = True
        return self._fits(scale)

    def _narrow(self, top: int) -> None:
        """Lower the rent as long as something fits."""
        turns, renting, ratios, last = self._turns, self._renting, self._found.ratios, len(SCALES) - 1
        above = self._point
        # Without rent the best program is known, and too large.
        with turns.timer.search():
            solution, _ = turns.search(ratios)
            nbytes = renting.nbytes(solution.assignment, ratios)
            below = _Point(ratios, solution.seconds, nbytes, solution.assignment)
        least, most = 0.0, SCALES[top]
        for _ in range(_MOST_RENTS):
            if self._settled() or most <= least * _NARROW or (not least and self._as_cheap(above)):
                break
            scale, known = (least * most) ** 0.5 if least else most / 16, False
            if below.ratios == above.ratios and below.nbytes > above.nbytes:
                slope = (above.cost_s - below.cost_s) / (below.nbytes - above.nbytes) / self._unit
                scale, known = (slope, True) if least < slope < most else (scale, False)
            if self._fits(scale):
                most, above = scale, self._point
            else:
                least, below = scale, self._point
            if known and self._again:
                break
        renting.helped = next(n for n, scale in enumerate(SCALES) if scale >= most or n == last)
        if self.best.fits and not self._settled():
            at, least = self.best.ratios, (above.assignment, self.best)
            self.best = between(turns, renting, at, below.assignment, least, self._weighed)

    def _weighed(self, solution: Solution, prices: Prices, ratios: tuple[float, ...]) -> Candidate:
        """See `_candidate`."""
        return self._candidate(solution, prices, ratios)[0]

    def _as_cheap(self, point: _Point) -> bool:
        """Whether what fits costs hardly more than the best program without rent does at its ratios."""
        if point.ratios == self._found.ratios:
            return False  # that one is known, and too large
        with self._turns.timer.search():
            solution, _ = self._turns.search(point.ratios)
        return point.cost_s <= solution.seconds * (1 + _SETTLED)

    def _settled(self) -> bool:
        """Whether more of this finds nothing that is worth it."""
        least_s = min(self._rival_s, self.best.cost_s if self.best.fits else math.inf)
        return self._turns.stop() or self._under_s >= (1 - _SETTLED) * least_s

    def _fits(self, scale: float) -> bool:
        """Whether a program fits at that rent; the best so far is kept."""
        fits, least_s = self._turns_from(self.best.ratios, scale)
        if not fits and not self.best.fits and self._by_memory != self.best.ratios:
            fits, other_s = self._turns_from(self._by_memory, scale)
            least_s = min(least_s, other_s)
        if not fits:
            self._under_s = max(self._under_s, least_s)
        return fits

    def _turns_from(self, ratios: tuple[float, ...], scale: float) -> tuple[bool, float]:
        """Whether a program fits at a rent, from these ratios on; the least cost of one."""
        turns, renting, rent_s = self._turns, self._renting, scale * self._unit
        fits, least_s = False, math.inf
        for turn in range(_TURNS):
            with turns.timer.search():
                prices = Prices.at(turns.listed, ratios)
                solution = renting.solve(prices, ratios, rent_s, turns.stop)
                turns.searches, turns.expanded = turns.searches + 1, turns.expanded + solution.expanded
            key = solution.assignment, ratios
            if not turn:
                nbytes = renting.nbytes(solution.assignment, ratios)
                cost_s = solution.seconds - rent_s * nbytes
                self._point = _Point(ratios, cost_s, nbytes, solution.assignment)
                self._again = key in self._tried
            if key in self._tried:
                known, cost_s = self._tried[key]
                return fits or known, min(least_s, cost_s)
            here, near = self._candidate(solution, prices, ratios)
            fits, least_s = fits or here.fits, min(least_s, here.cost_s)
            self._tried[key] = here.fits, here.cost_s
            better = here.beats(self.best) if here.fits or self.best.fits else here.over < self.best.over
            self.best = here if better else self.best
            if near == ratios:
                break
            ratios = near
        return fits, least_s

    def _candidate(
        self, solution: Solution, prices: Prices, ratios: tuple[float, ...]
    ) -> tuple[Candidate, tuple[float, ...]]:
        """The program of a solution, at its best ratios and in an order that needs little; those ratios."""
        turns = self._turns
        with turns.timer.ratios():
            program = emit(turns.space, solution.assignment, prices, turns.extra)
            items = charges(program, self._renting.graph, turns.model)
            memory = turns.judge.footprint(program)
            near, cost_s = turns.best_ratios(items, ratios, memory)
            here = candidate(turns, program, near, items, memory, cost_s)
        if not here.fits and near != ratios:
            # Nothing in the linear program keeps the ratios small where its program cannot fit.
            there = candidate(turns, program, ratios, items, memory)
            here = there if there.over < here.over else here
        if not here.fits:
            in_order = in_turn(turns, here)
            here = in_order if in_order is not None and in_order.over < here.over else here
        return here, near
