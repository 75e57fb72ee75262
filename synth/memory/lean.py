"""Programs with less in memory at a time, before anything dearer is looked for.

Of programs that cost alike rent of next to nothing picks the smaller one (`leaner`). The order of its
instructions, and gathers done again, then make it as small as need be (`synth/memory/sparing.py`): by the
model alone (`in_turn`), or as the program will run, with what the model learns from each look (`spared`).
"""

from __future__ import annotations

import math
from dataclasses import replace

from shardwright.cost.bill import Item, bill
from shardwright.cost.memory.liveness import Footprint, Peaks
from shardwright.ir.program import Program
from shardwright.synth.memory.budgets import Renting
from shardwright.synth.memory.sparing import Sparing
from shardwright.synth.prices.tables import Prices
from shardwright.synth.programs.emit import emit
from shardwright.synth.shares.turns import Candidate, Turns, candidate

#: What memory costs where programs cost nearly alike: all of it, as a part of a step's cost; one of `SCALES`.
LITTLE = 1 / 16

#: This part of them more gathers again than need be is near enough.
_NEARLY = 32

#: Looks at programs with less in memory at a time.
_LOOKS = 4


def leaner(turns: Turns, found: Candidate, renting: Renting) -> Candidate:
    """The best program at the same ratios where memory costs a little."""
    rent_s = LITTLE * found.cost_s / sum(renting.limits.nbytes)
    with turns.timer.search():
        prices = Prices.at(turns.listed, found.ratios)
        solution = renting.solve(prices, found.ratios, rent_s, turns.stop)
        turns.searches, turns.expanded = turns.searches + 1, turns.expanded + solution.expanded
    with turns.timer.ratios():
        program = emit(turns.space, solution.assignment, prices, turns.extra)
        items, memory = bill(program, renting.graph, turns.model), turns.judge.footprint(program)
        return candidate(turns, program, found.ratios, items, memory)


class _InTurn:
    """A program with so many gathers done again."""

    def __init__(self, turns: Turns, found: Candidate, sparing: Sparing) -> None:
        self.turns, self.found, self.sparing = turns, found, sparing
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
            near, cost_s = turns.best_ratios(items, self.found.ratios, memory)
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


def in_turn(turns: Turns, found: Candidate) -> Candidate | None:
    """The same with less in memory at a time, by the model; None where that is not known how."""
    sparing = Sparing(found.program, turns.judge.graph)
    if not sparing.possible:
        return None
    several = _InTurn(turns, found, sparing)
    here = several.weighed(0)
    return here if here.fits or not several.most else several.weighed(several.most)


def spared(turns: Turns, found: Candidate, *, sure: bool = True) -> tuple[Candidate, Peaks] | None:
    """The cheapest of these that fits as it will run, or else the smallest; None where there is none.

    Args:
        turns: the search so far.
        found: the program.
        sure: look at it, however far beyond the budgets the model has it.
    """
    judge = turns.judge
    sparing = Sparing(found.program, judge.graph)
    if not sparing.possible:
        return None
    several, learned = _InTurn(turns, found, sparing), judge.budgets
    count = rounds = 0
    before: tuple[float, ...] | None = None
    while True:
        count, here = several.fewest(count)
        # With nothing left to be gathered again, what the model learned may still say better ratios.
        ended = count >= several.most and before is not None and here.ratios == before
        before = here.ratios
        with turns.timer.ratios():
            peaks = judge.peaks(here.program, here.ratios, here.memory, sure=sure)
        over = judge.excess(peaks)
        here = replace(here, fits=over <= 1, over=over)
        alike = len(turns.model.types) == 1 and count >= several.most
        if here.fits or alike or ended or not peaks.seen or rounds + 1 == _LOOKS or turns.stop():
            judge.budgets = learned
            return here, peaks
        judge.learn(peaks, here.ratios, here.memory, rounds)
        rounds += 1
