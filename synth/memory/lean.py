"""Programs with less in memory at a time, before anything dearer is looked for.

Of programs that cost alike rent of next to nothing picks the smaller one (`leaner`). The order of its
instructions, and gathers done again, then make it as small as need be (`synth/memory/sparing.py`): by the
model alone (`in_turn`), or as the program will run, with what the model learns from each look (`spared`).
Where that is not enough, less is handed on between compiled segments (`synth/memory/joined.py`, `anew.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from shardwright.cost.bill import Item, bill
from shardwright.cost.memory.liveness import Footprint, Peaks
from shardwright.ir.program import Program
from shardwright.synth.memory.anew import anew
from shardwright.synth.memory.between import between
from shardwright.synth.memory.budgets import Renting
from shardwright.synth.memory.joined import joined
from shardwright.synth.memory.sparing import Sparing
from shardwright.synth.prices.tables import Prices
from shardwright.synth.programs.emit import emit
from shardwright.synth.search.solution import Solution
from shardwright.synth.shares.turns import Candidate, Turns, candidate

#: What memory costs where programs cost nearly alike: all of it, as a part of a step's cost; one of `SCALES`.
LITTLE = 1 / 16

#: Up to this part of the memory, by the model, what takes more than it had to will fit as it runs, too; and
#: by what part dearer it is left as it is.
_SURELY, AS_CHEAP = 0.95, 0.005

#: This part of them more gathers again than need be is near enough.
_NEARLY = 32

#: Looks at programs with less in memory at a time.
_LOOKS = 4

#: What gathering again, or other ratios, make dearer by more than this part is tried handing on less instead.
_DEARER = 0.01

#: The model is off by a like part about programs of one step, but for this part of it.
_LITTLE_OFF = 1.1

#: By the model, what is handed on less should make a program smaller by this part at least.
_LESS = 1e-3

#: What needs more than so many times the memory that there is does not fit by handing on less; that takes
#: longer than most ways to change a step, unless it is for little more than there is.
HANDED_ON, BRIEFLY = 1.5, 1.1


def leaner(turns: Turns, found: Candidate, renting: Renting, free_s: float) -> Candidate:
    """The best program at the same ratios where memory costs a little.

    Where that fits and is dearer than the best without a limit, one in which no more pays than need be.

    Args:
        turns: the search so far.
        found: what was found.
        renting: makes programs smaller.
        free_s: what the best program costs without a limit.
    """
    ratios, rent_s = found.ratios, LITTLE * found.cost_s / sum(renting.limits.nbytes)
    with turns.timer.search():
        prices = Prices.at(turns.listed, ratios)
        solution = renting.solve(prices, ratios, rent_s, turns.stop)
        turns.searches, turns.expanded = turns.searches + 1, turns.expanded + solution.expanded

    def weighed(solution: Solution, prices: Prices, ratios: tuple[float, ...]) -> Candidate:
        with turns.timer.ratios():
            program = emit(turns.space, solution.assignment, prices, turns.extra)
            items, memory = bill(program, renting.graph, turns.model), turns.judge.footprint(program)
            here = candidate(turns, program, ratios, items, memory)
            return replace(here, fits=here.over <= _SURELY)

    small = weighed(solution, prices, ratios)
    if small.fits and small.cost_s > free_s * (1 + AS_CHEAP):
        large, _ = turns.search(ratios)
        least = solution.assignment, small
        small = between(turns, renting, ratios, large.assignment, least, weighed)
    return replace(small, fits=small.over <= 1)


class InTurn:
    """A program in the order of its equations, so many gathers done again; `most` is how many there are."""

    def __init__(self, turns: Turns, ratios: tuple[float, ...], sparing: Sparing) -> None:
        self.turns, self.ratios, self.sparing = turns, ratios, sparing
        self.most = len(sparing.gathers)
        self._known: dict[int, tuple[Program, list[Item], Footprint]] = {}

    def weighed(self, count: int) -> Candidate:
        """At the best ratios by the model's present budgets."""
        turns, graph = self.turns, self.turns.judge.graph
        with turns.timer.ratios():
            if count not in self._known:
                program = self.sparing.again(count)
                items, memory = bill(program, graph, turns.model), turns.judge.footprint(program)
                self._known[count] = program, items, memory
            program, items, memory = self._known[count]
            near, cost_s = turns.best_ratios(items, self.ratios, memory)
            return candidate(turns, program, near, items, memory, cost_s)

    def fewest(self, low: int) -> tuple[int, Candidate]:
        """About as few gathers again as fit by the model, from so many on; or else all of them."""
        less = self.weighed(low)
        if less.fits or low >= self.most:
            return low, less
        high, more = self.most, self.weighed(self.most)
        while more.fits and high - low > 1 + self.most // _NEARLY:
            # Each frees about as much as the next.
            part = (less.over - 1) / max(less.over - more.over, 1e-12)
            middle = min(max(low + math.ceil(part * (high - low)), low + 1), high - 1)
            here = self.weighed(middle)
            low, less, high, more = (low, less, middle, here) if here.fits else (middle, here, high, more)
        return high, more

    def looked_at(
        self, program: Program, ratios: tuple[float, ...], most: float = math.inf
    ) -> tuple[Candidate, Peaks] | None:
        """Another order of it as it will run, at ratios or those at which it should fit by that look.

        None where the model has it need more than `most` times the memory.
        """
        turns, judge, learned = self.turns, self.turns.judge, self.turns.judge.budgets
        with turns.timer.ratios():
            memory = judge.footprint(program)
            if judge.feared(memory, ratios) > most:
                return None
            items = bill(program, judge.graph, turns.model)
            here = candidate(turns, program, ratios, items, memory)
            peaks = judge.peaks(program, ratios, memory, sure=True)
            over = judge.excess(peaks)
            if over > 1 and len(turns.model.types) > 1:
                judge.learn(peaks, ratios, memory, 0)
                near, cost_s = turns.best_ratios(items, ratios, memory)
                there = candidate(turns, program, near, items, memory, cost_s)
                judge.budgets = learned
                seen = judge.peaks(program, near, memory, sure=True)
                if judge.excess(seen) < over:
                    here, peaks, over = there, seen, judge.excess(seen)
        return replace(here, fits=over <= 1, over=over), peaks


def ordered(turns: Turns, program: Program, ratios: tuple[float, ...]) -> InTurn | None:
    """A program in the order of its equations; None where that is not known how."""
    sparing = Sparing(program, turns.judge.graph)
    return InTurn(turns, ratios, sparing) if sparing.possible else None


def in_turn(turns: Turns, found: Candidate) -> Candidate | None:
    """The same with less in memory at a time, by the model; None where that is not known how."""
    several = ordered(turns, found.program, found.ratios)
    if several is None:
        return None
    here = several.weighed(0)
    return here if here.fits or not several.most else several.weighed(several.most)


def in_least(turns: Turns, program: Program, ratios: tuple[float, ...]) -> Candidate | None:
    """A program with the least in memory at a time, whatever that costs; None where that is not known how."""
    several = ordered(turns, program, ratios)
    return None if several is None else several.weighed(several.most)


def hardly_fits(turns: Turns, found: Candidate) -> bool:
    """Whether a program should need far too much memory in any order, whatever it hands on, by the model."""
    most = HANDED_ON * _LITTLE_OFF
    if found.over <= most:
        return False
    here = in_least(turns, found.program, found.ratios)
    return here is None or here.over > most


def spared(
    several: InTurn,
    found: Candidate,
    seen: Peaks | None = None,
    *,
    feared: float = math.inf,
    most: float = HANDED_ON,
) -> tuple[Candidate, Peaks]:
    """The cheapest of these that fits as it will run, or else the smallest.

    Args:
        several: the program in the order of its equations.
        found: the program.
        seen: what a look said of it, if there was one.
        feared: what the model has need more than so many times the memory is not looked at.
        most: up to this multiple of the memory it is also tried to hand on less, which takes longest.
    """
    turns, judge = several.turns, several.turns.judge
    learned = judge.budgets
    count = rounds = 0
    before: tuple[float, ...] | None = None
    while True:
        count, here = several.fewest(count)
        # With nothing left to be gathered again, what the model learned may still say better ratios.
        ended = count >= several.most and before is not None and here.ratios == before
        before = here.ratios
        with turns.timer.ratios():
            peaks = None if rounds else _unspared(several, here, found, seen)
            sure = feared == math.inf
            peaks = peaks or judge.peaks(here.program, here.ratios, here.memory, sure=sure, feared=feared)
        over = judge.excess(peaks)
        here = replace(here, fits=over <= 1, over=over)
        alike = len(turns.model.types) == 1 and count >= several.most
        if here.fits or alike or ended or not peaks.seen or rounds + 1 == _LOOKS or turns.stop():
            judge.budgets = learned
            if here.fits and here.cost_s > found.cost_s * (1 + _DEARER):
                return _instead(several, here, peaks)
            tried = peaks.seen and not here.fits and here.over <= most
            return _handing_on(several, here, peaks) if tried else (here, peaks)
        judge.learn(peaks, here.ratios, here.memory, rounds)
        rounds += 1


def _unspared(several: InTurn, here: Candidate, found: Candidate, seen: Peaks | None) -> Peaks | None:
    """What a look said of what was found, if another order has as much by the model; None else."""
    judge = several.turns.judge
    if seen is None or not seen.seen or here.ratios != found.ratios:
        return None
    before, now = judge.feared(found.memory, found.ratios), judge.feared(here.memory, here.ratios)
    return seen if abs(now - before) <= _LESS * before else None


def _handing_on(several: InTurn, found: Candidate, peaks: Peaks) -> tuple[Candidate, Peaks]:
    """The same, handing on less from one compiled segment to the next; or what was found, if that is smaller.

    First in another order, which costs nothing, then computing cheap results anew; the latter is tried with
    fewer gathers again where it fits by as much.
    """
    turns, judge = several.turns, several.turns.judge
    for rearranged in _Rearranged(turns).ways:
        program = rearranged(found.program)
        most = judge.feared(found.memory, found.ratios) * (1 - _LESS)
        looked = several.looked_at(program, found.ratios, most)
        if looked is None:
            continue
        here, theirs = looked
        if here.fits:
            other = several.looked_at(rearranged(several.sparing.again(0)), here.ratios)
            return other if other and other[0].fits and other[0].cost_s < here.cost_s else looked
        if here.over < found.over:
            found, peaks = here, theirs
        if turns.stop():
            break
    return found, peaks


def _instead(several: InTurn, found: Candidate, peaks: Peaks) -> tuple[Candidate, Peaks]:
    """The program as it was at first, handing on less, where that fits and is cheaper than what fits.

    It is not tried where it needs far too much. Of what would hand on less, that is looked at which should
    fit if the model is as far off about it as about what was found.
    """
    judge, ratios = several.turns.judge, several.ratios
    most = judge.feared(found.memory, found.ratios) / judge.excess(peaks)
    first = several.weighed(0)
    if judge.feared(first.memory, ratios) > HANDED_ON * most:
        return found, peaks
    for rearranged in _Rearranged(several.turns).ways:
        if several.turns.stop():
            break
        looked = several.looked_at(rearranged(first.program), ratios, _LITTLE_OFF * most)
        if looked is not None and looked[0].fits:
            return looked if looked[0].cost_s < found.cost_s else (found, peaks)
    return found, peaks


class _Rearranged:
    """Ways to hand on less; what was joined last is known."""

    def __init__(self, turns: Turns) -> None:
        self._graph, self._part = turns.judge.graph, 1 / len(turns.model.class_of)
        self._last: tuple[Program, Program] | None = None

    @property
    def ways(self) -> tuple[Callable[[Program], Program], ...]:
        """What costs nothing first."""
        return self._joined, self._joined_anew, self._anew

    def _joined(self, program: Program) -> Program:
        if self._last is None or self._last[0] is not program:
            self._last = program, joined(program, self._graph, self._part)
        return self._last[1]

    def _joined_anew(self, program: Program) -> Program:
        return self._anew(self._joined(program))

    def _anew(self, program: Program) -> Program:
        return anew(program, self._graph, self._part)
