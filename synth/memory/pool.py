"""Programs of a small step within memory: one pool of them, whatever the memory.

Which programs there are to choose from, and at which ratios, follows from the step, its prices, and how the
devices' memories compare with each other; from how large they are it does not. Less memory only takes pairs
of a program and ratios away, and so never makes the best that is left cheaper.

    with rent   programs that rents from next to none to far too much find, at ratios that are likely to be
                good: those of the best without a limit, those to start from, and by memory; then at the
                ratios that are best by the model within ever less memory
    in order    programs by what they cost with next to no rent: rent finds corners, and misses some between
    in turn     the same with less in memory at a time (`sparing.py`), and less handed on between compiled
                segments (`joined.py`, `anew.py`)
    ratios      all that deal whole units, and those between what computing and what memory would like
                (`dealt.py`)

Where memory does not bind, the search without a limit goes on from the cheapest pair of all (`Pool.likes`).
Within memory, the cheapest pair that fits as it will run is taken. Which pairs are worth a look the model
says, once a look at the program where it costs least has said how far the model is off.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from shardwright.cost.bill import Item, charges
from shardwright.cost.memory.liveness import Footprint, Peaks, at_the_end, footprint
from shardwright.cost.share_cost import Floats
from shardwright.ir.program import Program
from shardwright.synth.memory.anew import anew
from shardwright.synth.memory.budgets import Renting
from shardwright.synth.memory.dealt import Dealt, filled, worth_dealing
from shardwright.synth.memory.joined import joined
from shardwright.synth.memory.sparing import Sparing
from shardwright.synth.prices.tables import Prices
from shardwright.synth.programs.emit import emit
from shardwright.synth.shares.turns import Billed, Candidate, Found, Turns, starts

#: Steps of no more choices are small.
FEW_CHOICES = 40

#: Rents, as multiples of what the best program costs over the bytes that it takes on all devices.
_RENTS = tuple(2.0**k for k in range(-8, 10))

#: Programs in order, at each of the ratios to start from.
_IN_ORDER = 40

#: Parts of what the best program takes for which the best ratios are searched from.
_LEVELS = (0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.65, 0.6, 0.55, 0.5)

#: See `Pool.tighter`.
_STEP = 0.95

#: Axes whose units are dealt: those on which most time is spent.
_AXES = 2

#: The model takes programs for so much larger than they are at most; and at some ratios for so much more than
#: at others.
_FEARED, _UNEVENLY = 1.5, 1.07

#: Looks at programs after which what they said of the model at most goes for all others, too.
_LEARNED = 8

#: Looks at a program in vain after which it is asked how large a share every device has room for.
_PATIENCE = 3


@dataclass(slots=True, eq=False)
class _Member:
    """A program of the pool.

    Attributes:
        program: in some order of its instructions.
        items: its bill.
        memory: its footprint.
        seconds: (vectors,): what it costs at all ratios.
        peaks: (vectors, classes): what it takes there by the model.
        ends: (vectors, classes): what of that is there at the end.
        cheapest: where it costs least.
        spared: whether it is another one with less in memory at a time.
        leanest: the same with least in memory at a time, once that was asked for.
        left: ratios at which it may fit, the cheapest first.
        alive: ratios at which no look has shown yet that it does not.
        failed: looks that have.
    """

    program: Program
    items: list[Item]
    memory: Footprint
    seconds: Floats
    peaks: Floats
    ends: Floats
    cheapest: int
    spared: bool
    leanest: tuple[_Member, ...] = ()
    left: Iterator[int] = field(default_factory=lambda: iter(()))
    alive: NDArray[np.bool_] = field(init=False)
    failed: int = 0

    def __post_init__(self) -> None:
        self.alive = np.ones(len(self.seconds), dtype=bool)


class Pool:
    """The programs; see the module's docstring.

    Args:
        turns: the search so far.
        free: what it found if memory were no limit.
        renting: makes programs smaller.
        program: the cheapest at the ratios that were found.
        axes: units of the axes on which it spends most time.
    """

    def __init__(
        self, turns: Turns, free: Found, renting: Renting, program: Program, axes: Sequence[int]
    ) -> None:
        self._turns, self._renting, self._limits = turns, renting, turns.judge.limits
        model, memory = turns.model, renting.limits.nbytes
        self._part = 1 / len(model.class_of)
        self._known: dict[Program, _Member] = {}
        self._filled = False
        self._looks, self._too_much = 0, 0.0
        by_speed = [tuple(float(each[c]) for c in model.class_of) for each in starts(model)]
        by_memory = tuple(limit / sum(memory) for limit in memory)
        self._first = list(dict.fromkeys([free.ratios, by_memory, *by_speed]))
        units = {size for value in renting.graph.values() for size in value.type.shape if size > 1}
        likely = [each for speeds in self._first for each in filled(speeds, by_memory)]
        self._dealt = Dealt(model, axes, sorted(units | set(axes)) or [1], [*self._first, *likely])
        self._best = self._add(program)
        # Tensors of no elements take no memory, and starting their kernels takes time.
        self._unit_s = free.cost_s / max(float(self._best.peaks[0] @ model.counts), 1.0)

    @classmethod
    def of(cls, turns: Turns, free: Found, renting: Renting) -> Pool | None:
        """The pool; None where the units of an axis are so many that shares may as well be rounded."""
        model = turns.model
        solution, prices = turns.search(free.ratios)
        program = emit(turns.space, solution.assignment, prices, turns.extra)
        spent: dict[int, float] = {}
        for item in charges(program, renting.graph, model):
            if item.cut is not None:
                spent[item.cut.units] = spent.get(item.cut.units, 0.0) + item.seconds(model, free.ratios)
        axes = sorted(spent, key=lambda units: (-spent[units], units))[:_AXES]
        if not all(worth_dealing(units, len(model.classes)) for units in axes):
            return None
        return cls(turns, free, renting, program, axes)

    def likes(self) -> tuple[float, ...]:
        """The ratios of the cheapest pair, if memory were no limit."""
        self._fill()
        best = min(self._known.values(), key=lambda member: float(member.seconds[member.cheapest]))
        return self._dealt.vectors[best.cheapest]

    def cheapest(self, rival_s: float = math.inf) -> tuple[Candidate, Peaks] | None:
        """The cheapest pair that fits as it will run; None if there is none, or none as cheap as a rival.

        The judge then knows how far the model is off about it.
        """
        # The best program of all where it is, if it fits: nothing else need be searched.
        peaks = self._look(self._best, 0)
        if self._turns.judge.excess(peaks) <= 1:
            return self._candidate(self._best, 0, peaks)
        self._fill()
        number = itertools.count()
        queue = [(float(m.seconds[m.cheapest]), next(number), m, -1) for m in self._known.values()]
        heapq.heapify(queue)
        while queue and not self._turns.stop():
            cost_s, _, member, at = heapq.heappop(queue)
            if cost_s > rival_s * (1 + 1e-9):
                break
            if at < 0:
                cheap = member.seconds <= rival_s * (1 + 1e-9)
                member.alive[:], member.failed = True, 0
                member.left = self._worth_a_look(member, cheap)
                for other in self._leaner(member, cheap):
                    entry = float(other.seconds[other.cheapest]), next(number), other, -1
                    heapq.heappush(queue, entry)
            elif self._turns.judge.excess(peaks := self._look(member, at)) <= 1:
                return self._candidate(member, at, peaks)
            else:
                member.failed += 1
                if member.failed == _PATIENCE:
                    self._narrow(member)
            at = next((at for at in member.left if member.alive[at]), -1)
            if at >= 0:
                heapq.heappush(queue, (float(member.seconds[at]), next(number), member, at))
        return None

    def below(self, cost_s: float, ratios: tuple[float, ...]) -> list[Billed]:
        """Programs that cost less at some ratios; in leaner orders if they are known.

        Of those that cost the same everywhere, the one that takes least by the model.
        """
        every = self._known.values()
        least: dict[bytes, tuple[float, _Member]] = {}
        for each in [member for member in every if member.spared] or every:
            if each.seconds[each.cheapest] < cost_s:
                taken = float((each.peaks / self._limits).max(axis=1).min())
                known = least.get(key := each.seconds.tobytes())
                if known is None or taken < known[0]:
                    least[key] = taken, each
        return [Billed(each.program, ratios, each.items, each.memory) for _, each in least.values()]

    def tighter(self, look: Callable[[Candidate], None]) -> None:
        """Look at the cheapest within less memory: the next power of `_STEP` of what the best needs.

        Meanwhile the judge judges by that memory.
        """
        judge = self._turns.judge
        limits, budgets = judge.limits, judge.budgets
        over = judge.excess(self._look(self._best, 0))
        power = math.floor(math.log(1 / over) / math.log(_STEP) + 1)
        judge.limits = judge.budgets = self._limits = limits * (_STEP**power * over)
        found = self.cheapest()
        if found is not None:
            look(found[0])
        judge.limits, judge.budgets, self._limits = limits, budgets, limits

    def _fill(self) -> None:
        """Search for programs, see the module's docstring."""
        if self._filled:
            return
        self._filled = True
        most = float((self._best.peaks[0] / self._limits).max())
        for ratios in self._first:
            self._search(ratios, in_order=True)
        done, parts = set(self._first), list[Floats]()
        for level in _LEVELS:
            ratios = self._likely(most * level, parts)
            if not self._turns.stop() and ratios is not None and ratios not in done:
                done.add(ratios)
                self._search(ratios)

    def _search(self, ratios: tuple[float, ...], *, in_order: bool = False) -> None:
        """Programs that rents find, and those in order."""
        turns, renting = self._turns, self._renting
        found: list[tuple[int, ...]] = []
        with turns.timer.search():
            prices = Prices.at(turns.listed, ratios)
            rents = [scale * self._unit_s for scale in _RENTS]
            for solution in renting.solve_each(prices, ratios, rents, turns.stop):
                turns.searches, turns.expanded = turns.searches + 1, turns.expanded + solution.expanded
                found.append(solution.assignment)
            if in_order:
                for scale in _RENTS[:9:8]:
                    cheap = renting.in_order(prices, ratios, scale * self._unit_s)
                    found += [assignment for assignment, _ in itertools.islice(cheap, _IN_ORDER)]
        with turns.timer.ratios():
            for assignment in dict.fromkeys(found):
                self._add(emit(turns.space, assignment, prices, turns.extra))

    def _likely(self, most: float, parts: list[Floats]) -> tuple[float, ...] | None:
        """The ratios of the cheapest pair that takes no more than this part of the memory by the model.

        Args:
            most: the part.
            parts: what every program takes of it at all ratios, as far as that was worked out.
        """
        best: tuple[float, int] | None = None
        for number, member in enumerate(self._known.values()):
            if number == len(parts):
                parts.append((member.peaks / self._limits).max(axis=1))
            within = np.flatnonzero(parts[number] <= most)
            if len(within):
                at = int(within[member.seconds[within].argmin()])
                best = min(best or (math.inf, 0), (float(member.seconds[at]), at))
        return None if best is None else self._dealt.vectors[best[1]]

    def _leaner(self, member: _Member, cheap: NDArray[np.bool_]) -> Sequence[_Member]:
        """The same with less in memory at a time, as far as it is new; none where none of it may fit.

        They cost no less, and so only ratios count at which the program itself is cheap enough. Where all
        that can be gathered again is, and that is too large, so is what keeps some of it.
        """
        if member.spared or (member.leanest and not self._may_fit(member.leanest, cheap)):
            return ()
        sparing, new = Sparing(member.program, self._renting.graph), list[_Member]()
        if not sparing.possible:
            return ()

        def add(program: Program) -> _Member:
            if program not in self._known:
                new.append(self._add(program, spared=True))
            return self._known[program]

        def with_less(program: Program) -> tuple[_Member, ...]:
            """The program, and handing on less from one compiled segment to the next."""
            together = joined(program, self._renting.graph, self._part)
            rest = anew(together, self._renting.graph, self._part)
            return tuple([add(each) for each in (program, together, rest)])

        most = len(sparing.gathers)
        leanest = with_less(sparing.again(most))
        first = sparing.again(0)
        add(first)
        if fits := self._may_fit(leanest, cheap):
            with_less(first)
            for count in range(1, most):
                add(sparing.again(count))
        for each in (member, *new):
            each.leanest = leanest
        return new if fits else ()

    def _may_fit(self, some: Sequence[_Member], cheap: NDArray[np.bool_]) -> bool:
        """Whether any of some programs may, at any ratios that are cheap enough."""
        return any(next(self._worth_a_look(each, cheap), None) is not None for each in some)

    def _add(self, program: Program, *, spared: bool = False) -> _Member:
        member = self._known.get(program)
        if member is None:
            items = charges(program, self._renting.graph, self._turns.model)
            # Also where everything fits: which programs there are does not depend on that.
            memory = footprint(program, self._turns.judge.graph)
            seconds, peaks = self._dealt.seconds(items), self._dealt.peaks(memory)
            ends = self._dealt.peaks(at_the_end(program, self._turns.judge.graph))
            cheapest = int(seconds.argmin())
            member = _Member(program, items, memory, seconds, peaks, ends, cheapest, spared)
            self._known[program] = member
        return member

    def _worth_a_look(self, member: _Member, cheap: NDArray[np.bool_]) -> Iterator[int]:
        """Ratios that are cheap enough at which a program may fit, the cheapest first."""
        may = cheap & (member.ends <= self._limits * _UNEVENLY).all(axis=1)
        if not may.any() or float((member.peaks / self._limits).max(axis=1).min()) > self._feared:
            return
        first = int(np.where(may, member.seconds, np.inf).argmin())
        part = self._by_class(self._look(member, first)) / np.maximum(member.peaks[first], 1.0)
        may = np.flatnonzero(may & (member.peaks * part <= self._limits * _UNEVENLY).all(axis=1))
        yield from may[np.argsort(member.seconds[may], kind="stable")].tolist()

    @property
    def _feared(self) -> float:
        """For how much larger than they are the model takes programs, by the looks so far."""
        return min(_FEARED, self._too_much * _UNEVENLY) if self._looks >= _LEARNED else _FEARED

    def _look(self, member: _Member, at: int) -> Peaks:
        """What a program takes at some ratios, as it will run."""
        turns, ratios = self._turns, self._dealt.vectors[at]
        with turns.timer.ratios():
            peaks = turns.judge.peaks(member.program, ratios, member.memory, sure=True)
        taken = self._by_class(peaks)
        self._looks += 1
        self._too_much = max(self._too_much, float((member.peaks[at] / np.maximum(taken, 1.0)).max()))
        seen = taken / self._limits
        worst = int(seen.argmax())
        if seen[worst] > 1:
            # A device with a larger share takes no less.
            member.alive &= self._dealt.largest[:, worst] < self._dealt.largest[at, worst]
        return peaks

    def _narrow(self, member: _Member) -> None:
        """Leave out the ratios by which a device has a larger share than fits: found by halving."""
        alive = member.alive.copy()
        for c in range(len(self._limits)):
            largest = self._dealt.largest[:, c]
            shares = np.unique(largest[alive])
            low, high = 0, len(shares)
            while low < high and not self._turns.stop():
                middle = (low + high) // 2
                there = np.flatnonzero(alive & (largest == shares[middle]))
                at = int(there[member.seconds[there].argmin()])
                if self._by_class(self._look(member, at))[c] <= self._limits[c]:
                    low = middle + 1
                else:
                    high = middle
            if high < len(shares):
                member.alive &= largest < shares[high]

    def _by_class(self, peaks: Peaks) -> Floats:
        """The most that a device of every class takes."""
        taken, class_of = np.asarray(peaks.bytes, dtype=np.float64), self._turns.model.class_of
        return np.array([taken[class_of == c].max() for c in range(len(self._limits))])

    def _candidate(self, member: _Member, at: int, peaks: Peaks) -> tuple[Candidate, Peaks]:
        ratios, cost_s = self._dealt.vectors[at], float(member.seconds[at])
        over = self._turns.judge.excess(peaks)
        return Candidate(
            member.program, ratios, cost_s, True, tuple(member.items), member.memory, over
        ), peaks
