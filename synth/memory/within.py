"""Programs that fit into memory where the best of all does not."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from shardwright.cost.bill import charges
from shardwright.cost.memory.liveness import Footprint, Peaks
from shardwright.ir.graph import Graph
from shardwright.ir.host import uses_host
from shardwright.ir.repeated import repeats
from shardwright.synth.combinations import SMALL
from shardwright.synth.memory.budgets import SCALES, Renting
from shardwright.synth.memory.lean import AS_CHEAP, HANDED_ON, InTurn, in_least, leaner, ordered, spared
from shardwright.synth.memory.least import LeastRent
from shardwright.synth.memory.rent import too_small
from shardwright.synth.prices.tables import Prices
from shardwright.synth.programs.emit import emit
from shardwright.synth.programs.judge import MOST_LOOKS
from shardwright.synth.shares.bounds import ENOUGH
from shardwright.synth.shares.turns import Candidate, Found, Turns, candidate

#: See `next_to_nothing`.
_NOTHING = 1e-3

#: Looks at programs that cost less than the best that fits by the model; at each, and at other ratios of it;
#: unless the model has it need more than so many times the memory.
_LOOKS, _ADJUSTED = 2, 3
_FEARED = 1.5

#: What was found under rent by budgets that a look corrected is not looked at beyond so many times them.
_NEARLY = 1.1

#: What the model has need more than so many times the memory is not looked at: it was seen to take programs
#: for half as large again as they are.
TOO_LARGE = 2.0

#: What fits and leaves so much of the memory is looked at again, if memory makes it dearer.
_ROOMY = 0.9

#: Part of its cost that a program should save to be looked at: that takes a while.
WORTH_A_LOOK = 0.01

#: What costs more than this multiple of a plan that fits is not made to fit by other means: ratios of its own
#: save less.
FAR_DEARER = 1.2

#: Beyond this multiple of the cost without a limit of memory, no bound is tried against a rival.
_FAR_ABOVE = 1.5


def judged(
    turns: Turns,
    best: Candidate,
    free: Found,
    renting: Callable[[], Renting],
    rival_s: float = math.inf,
    *,
    briefly: bool = False,
    handed_on: float = HANDED_ON,
    apart: Callable[[], bool] = lambda: False,
) -> tuple[Candidate, Footprint | Peaks] | None:
    """The best candidate that fits as it will run; searched for with rent where the best of all does not.

    None where it fits with several ratios: then nothing else is looked for.

    Args:
        turns: the search so far.
        best: what it found, with memory in the linear program where it would not fit otherwise.
        free: what it found if memory were no limit.
        renting: makes programs smaller.
        rival_s: what a plan that fits costs already: nobody looks for a dearer one.
        briefly: look at the candidate, and for no other one, but where that is dearer and leaves room.
        handed_on: see `most` of `lean.spared`.
        apart: whether it fits with several ratios, and is no dearer.
    """
    if best.cost_s <= free.cost_s * (1 + ENOUGH) and turns.judge.ample(best.memory, best.ratios):
        return best, best.memory
    made = _Judging(turns, free.cost_s, renting, rival_s, apart, briefly=briefly, handed_on=handed_on)
    return made.search(best)


class _Judging:
    """The search of `judged`, and the best that it looked at: what fits, and what lacks least."""

    def __init__(
        self,
        turns: Turns,
        free_s: float,
        renting: Callable[[], Renting],
        rival_s: float,
        apart: Callable[[], bool],
        *,
        briefly: bool,
        handed_on: float,
    ) -> None:
        self._turns, self._judge, self._renting, self._apart = turns, turns.judge, renting, apart
        self._free_s, self._rival_s, self._briefly = free_s, rival_s, briefly
        self._handed_on = handed_on
        limits = [device.type.memory_bytes for device in turns.model.fleet.devices]
        self._possible = not too_small(turns.judge.graph, limits)
        graph = turns.judge.graph
        #: One device runs a step as one compiled program, whatever its order, if nothing is done again.
        self._alone = len(limits) == 1 and not (repeats(graph) or uses_host(graph))
        #: Briefly, what by the model needs more than so many times the memory is not looked at.
        self._feared = (_FEARED if self._possible else 1.0) if briefly else math.inf
        #: Whether it fits with several ratios.
        self._cut = False
        self._fitting: tuple[Candidate, Peaks] | None = None
        self._fallen: tuple[Candidate, Peaks] | None = None

    def search(self, best: Candidate) -> tuple[Candidate, Footprint | Peaks] | None:
        """See `judged`."""
        start = self._start(best)
        if self._cut:
            return None
        if start is not None:
            self._go_on(*start)
        return self._fitting or self._least_lacking()

    def _start(self, best: Candidate) -> tuple[Candidate, Peaks] | None:
        """Where the search for what fits begins; None where there is no need of it, or no use."""
        if self._briefly and not self._alone and self._in_turn(best):
            return None
        best, peaks = self._roomier(*self._look(best))
        if not (best.fits or self._briefly) and self._beaten(best):
            return None
        self._cut = self._possible and not self._for_nothing(best) and self._apart()
        if self._cut:
            return None
        if not (best.fits or self._alone) and (self._possible or not self._briefly):
            best, peaks = self._spared(best, peaks)
        dearer = not best.fits or best.cost_s > self._rival_s
        if self._fitting is not None:
            if self._for_nothing(self._fitting[0]):
                return None
            self._rival_s = min(self._rival_s, self._fitting[0].cost_s)
        if self._briefly or not (best.fits or self._possible) or (dearer and self._hopeless()):
            return None
        return best, peaks

    def _go_on(self, best: Candidate, peaks: Peaks) -> None:
        """Search for what fits by the model of memory, which learns from one look after the other."""
        judge, turns = self._judge, self._turns
        for rounds in range(MOST_LOOKS):
            # The model takes some programs too large: one that fits then makes room for others.
            judge.learn(peaks, best.ratios, best.memory, rounds)
            over = judge.over(best.memory, best.ratios)
            best = replace(best, over=over, fits=over <= 1)
            best = LeastRent(turns, best, self._renting(), self._rival_s).search()
            if not best.fits and best.over > (_NEARLY if rounds else _FEARED):
                break
            if best.cost_s > self._rival_s * FAR_DEARER:
                break  # whatever a look says of it
            best, peaks = self._look(best)
            if best.fits or not self._possible or turns.stop():
                break

    def _look(self, best: Candidate) -> tuple[Candidate, Peaks]:
        """How much memory a program takes as it will run."""
        with self._turns.timer.ratios():
            peaks = self._judge.peaks(best.program, best.ratios, best.memory, feared=self._feared)
        over = self._judge.excess(peaks)
        best = replace(best, fits=over <= 1, over=over)
        if best.fits and (self._fitting is None or best.cost_s < self._fitting[0].cost_s):
            self._fitting = best, peaks
        if not best.fits and (self._fallen is None or over < self._fallen[0].over):
            self._fallen = best, peaks
        return best, peaks

    def _in_turn(self, best: Candidate) -> bool:
        """Whether what costs what it does without a limit fits in another order, which costs nothing.

        Where the model has it, and not what was found, that is what is looked at first.
        """
        judge = self._judge
        dearer = best.cost_s > self._free_s * (1 + next_to_nothing(judge.graph))
        if dearer or judge.feared(best.memory, best.ratios) <= _NEARLY:
            return False
        several = self._ordered(best)
        here = None if several is None else several.weighed(0)
        if here is None or not here.fits or here.cost_s > best.cost_s * (1 + 1e-9):
            return False
        return self._look(here)[0].fits

    def _for_nothing(self, found: Candidate) -> bool:
        """Whether it fits, and memory makes it no dearer."""
        return found.fits and found.cost_s <= self._free_s * (1 + next_to_nothing(self._judge.graph))

    def _hopeless(self) -> bool:
        return hopeless(self._turns, self._renting, self._free_s, self._rival_s)

    def _beaten(self, best: Candidate) -> bool:
        """Whether what does not fit need not be made to, beside a plan that there is."""
        if self._hopeless():
            return True
        # Nobody wants to know by how much the smallest program does not fit.
        if self._rival_s == math.inf or best.over <= _FEARED:
            return False
        return _smallest(self._turns, best, self._renting()).over > _FEARED

    def _spared(self, best: Candidate, peaks: Peaks) -> tuple[Candidate, Peaks]:
        """What needs less of the program, or nearly the same, in another order.

        Where that fits it is kept as what does: what the model learns is about the smaller one that does not.
        """
        smaller = best if self._briefly else self._leaner(best, peaks)
        if not self._briefly and smaller.fits:
            self._renting().enough = True
        if smaller.cost_s > self._rival_s * FAR_DEARER:  # in another order it is no cheaper
            return best, peaks
        several, seen = self._ordered(smaller), peaks if smaller is best else None
        if several is None:
            return best, peaks
        small = spared(several, smaller, seen, feared=self._feared, most=self._handed_on)
        if small[0].fits:
            self._fitting = small
        elif small[0].over < best.over:
            self._fallen = small
            return small
        return best, peaks

    def _roomier(self, best: Candidate, peaks: Peaks) -> tuple[Candidate, Peaks]:
        """What takes more of the memory and costs less, where what fits is dearer and leaves room."""
        dearer = best.cost_s > self._free_s * (1 + AS_CHEAP)
        if not (best.fits and dearer and peaks.seen) or best.over > _ROOMY:
            return best, peaks
        other = self._leaner(best, peaks)
        if not (other.fits and other.beats(best)):
            return best, peaks
        other, theirs = self._look(other)
        return (other, theirs) if other.fits else (best, peaks)

    def _leaner(self, best: Candidate, peaks: Peaks) -> Candidate:
        """See `leaner`; with what a look says of the model, which takes most programs for too large."""
        judge, learned = self._judge, self._judge.budgets
        judge.learn(peaks, best.ratios, best.memory, 0)
        found = leaner(self._turns, best, self._renting(), self._free_s)
        judge.budgets = learned
        return found

    def _ordered(self, found: Candidate) -> InTurn | None:
        """See `ordered`; that of the last program is remembered."""
        turns = self._turns
        if turns.in_order is None or turns.in_order[0] is not found.program:
            turns.in_order = found.program, ordered(turns, found.program, found.ratios)
        return turns.in_order[1]

    def _least_lacking(self) -> tuple[Candidate, Peaks]:
        """Of what does not fit, what lacks least; looked at if somebody may see it."""
        assert self._fallen is not None, "what was looked at fits, or does not"
        judge, (best, peaks) = self._judge, self._fallen
        # Beside a plan that fits, or briefly, nobody will see it: a look is for what may fit after all.
        seen = self._rival_s == math.inf and not self._briefly
        wanted = seen or judge.feared(best.memory, best.ratios) <= _FEARED
        if not peaks.seen and wanted and not (self._briefly and not self._possible):
            peaks = judge.peaks(best.program, best.ratios, best.memory, sure=True)
            over = judge.excess(peaks)
            best = replace(best, fits=over <= 1, over=over)
        return best, peaks


def overlooked(
    turns: Turns,
    best: Candidate,
    memory: Footprint | Peaks,
    free_s: float,
    rival_s: float = math.inf,
    *,
    briefly: bool = False,
) -> tuple[Candidate, Footprint | Peaks]:
    """The cheapest program weighed that fits as it will run, even where the model feared that it does not.

    One that does not fit as it stands may at other ratios: the model learns how far it is off about this one.

    Args:
        turns: the search so far.
        best: what it found.
        memory: of that.
        free_s: what was found if memory were no limit.
        rival_s: what a plan that fits costs already.
        briefly: look at one program.
    """
    judge, learned = turns.judge, turns.judge.budgets
    if best.fits and best.cost_s <= free_s * (1 + ENOUGH):
        return best, memory
    few, most, worth = *((1, _FEARED) if briefly else (_LOOKS, TOO_LARGE)), 1 - WORTH_A_LOOK
    off = 0.0  # how much larger than the model has it a program was that needs far too much
    cheaper = [each for each in turns.weighed if not best.fits or each.cost_s < best.cost_s * worth]
    distinct = {
        (each.program, each.ratios): each
        for each in cheaper
        if judge.feared(each.memory, each.ratios) <= most
    }
    for each in sorted(distinct.values(), key=lambda each: each.cost_s):
        if each.cost_s >= min(rival_s, best.cost_s if best.fits else math.inf) * (1 - 1e-9):
            break
        if judge.feared(each.memory, each.ratios) * off > _FEARED:
            continue
        for rounds in range(_ADJUSTED):
            if not few or turns.stop():
                break
            few -= 1
            with turns.timer.ratios():
                peaks = judge.peaks(each.program, each.ratios, each.memory)
                over = judge.excess(peaks)
                if over <= 1:
                    best, memory = replace(each, fits=True, over=over), peaks
                if over > _FEARED:
                    off = over / judge.feared(each.memory, each.ratios)
                if over <= 1 or over > _FEARED:
                    break
                judge.learn(peaks, each.ratios, each.memory, rounds)
                near, cost_s = turns.best_ratios(list(each.items), each.ratios, each.memory)
            if near == each.ratios or (best.fits and cost_s >= best.cost_s * (1 - 1e-9)):
                break
            each = replace(each, ratios=near, cost_s=cost_s)
    judge.budgets = learned
    return best, memory


def next_to_nothing(graph: Graph) -> float:
    """By what part memory may make a step dearer without a further search; small ones take a moment."""
    return _NOTHING if len(graph.equations) <= SMALL else ENOUGH


def hopeless(turns: Turns, renting: Callable[[], Renting], free_s: float, rival_s: float) -> bool:
    """Whether a bound proves that no program that fits costs less than a rival."""
    if rival_s == math.inf or rival_s > free_s * _FAR_ABOVE:
        return False
    with turns.timer.search():
        wanted_s = rival_s * (1 - 1e-3)
        return renting().bound_within(turns.listed, 0.0, rival_s, turns.stop, wanted_s) >= wanted_s


def _smallest(turns: Turns, found: Candidate, renting: Renting) -> Candidate:
    """The program found under the highest rent, in the least order: at the same ratios, or by memory."""
    limits = renting.limits.nbytes
    here = _smallest_at(turns, found, renting, found.ratios)
    by_memory = tuple(limit / sum(limits) for limit in limits)
    if here.over <= _FEARED or by_memory == found.ratios:
        return here
    there = _smallest_at(turns, found, renting, by_memory)
    return there if there.over < here.over else here


def _smallest_at(turns: Turns, found: Candidate, renting: Renting, ratios: tuple[float, ...]) -> Candidate:
    """The same at some ratios."""
    with turns.timer.search():
        prices = Prices.at(turns.listed, ratios)
        rent_s = SCALES[-1] * found.cost_s / sum(renting.limits.nbytes)
        solution = renting.solve(prices, ratios, rent_s, turns.stop)
        turns.searches, turns.expanded = turns.searches + 1, turns.expanded + solution.expanded
    with turns.timer.ratios():
        program = emit(turns.space, solution.assignment, prices, turns.extra)
    least = in_least(turns, program, ratios)
    if least is not None and (least.fits or least.ratios == ratios):
        return least
    with turns.timer.ratios():
        # Nothing in the linear program keeps the ratios small where its program cannot fit.
        program = program if least is None else least.program
        items, memory = charges(program, renting.graph, turns.model), turns.judge.footprint(program)
        here = candidate(turns, program, ratios, items, memory)
    return here if least is None or here.over < least.over else least
