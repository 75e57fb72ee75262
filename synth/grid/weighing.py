"""Programs on two mesh axes as they would run: what they cost, and what memory they take.

Before anything dearer is looked for, a program that does not fit is put in another order, and its gathers are
done again (`synth/memory/sparing.py`), until it does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from shardwright.cost.bill import charges, counted
from shardwright.cost.grid.model import GridModel
from shardwright.cost.grid.settled import Settled
from shardwright.cost.memory.ample import peaks_at_most
from shardwright.cost.memory.compilers import COMPILERS
from shardwright.cost.memory.exchange_buffers import held_bytes
from shardwright.cost.memory.liveness import Peaks, peaks_by_device, total_bytes
from shardwright.ir.graph import Graph, value_types
from shardwright.ir.program import Program
from shardwright.synth.grid.candidate import GridCandidate
from shardwright.synth.grid.parts import on_nodes
from shardwright.synth.memory.alive import crowded
from shardwright.synth.memory.budgets import Limits
from shardwright.synth.memory.sparing import Sparing
from shardwright.synth.memory.within import TOO_LARGE
from shardwright.synth.prices.tables import Prices
from shardwright.synth.programs.emit import emit
from shardwright.synth.programs.judge import MOST_LOOKS, Judge
from shardwright.synth.search.solution import Solution
from shardwright.synth.space.factors import Use
from shardwright.synth.space.space import Space
from shardwright.synth.timer import Timer

#: With all gathers done again, what takes this multiple of its budget by the model is not looked at.
_HOPELESS = 1.2

#: What takes up to this multiple of it is looked at all the same where XLA computes things again: with all
#: gathered ahead, a program for cards was seen to take three quarters of what the model has it take.
_MISTAKEN = 1.5

#: Where what is alive in the order as traced, each tensor held once, fills this part of the memory, programs
#: take most of it, or more: those of language models were seen to take 1.3 to 1.8 times as much.
_HARDLY_AMPLE = 0.5

#: Gathers done again are as few as need be, up to this part of them.
_NEARLY = 16


class Weighing:
    """Makes programs of solutions, and sees what they cost and take.

    Args:
        graph: the step.
        space: its programs.
        grid: their prices.
        judge: says what fits.
        timer: is told where time goes, and says when it is over.
        extra: factors that pin choices.
    """

    def __init__(
        self,
        graph: Graph,
        space: Space,
        grid: GridModel,
        judge: Judge,
        timer: Timer,
        extra: Sequence[Use] = (),
    ) -> None:
        self.graph, self.space, self.grid, self.judge, self.timer = graph, space, grid, judge, timer
        self.limits = Limits.of(grid.model)
        self._extra = tuple(extra)
        self._settled: dict[tuple[float, ...], Settled] = {}
        #: The latest program that was put in another order, what did, and what came of it.
        self._latest_turn: tuple[Program, Sparing, GridCandidate] | None = None

    def candidate(
        self,
        solution: Solution,
        prices: Prices,
        ratios: tuple[float, ...],
        *,
        in_turn: bool = False,
        likely: bool = False,
    ) -> GridCandidate:
        """A solution as a program at some ratios: as it is, or with every exchange where it is wanted.

        What is `likely` to fit is looked at as it will run: where it does fit, nobody asks the model.
        """
        program = emit(self.space, solution.assignment, prices, self._extra)
        if self.space.nodes != self.grid.mesh.nodes:
            program = on_nodes(program, self.graph, self.grid.mesh.nodes)
        sparing = Sparing(program, self.graph) if in_turn else None
        if sparing is None or not sparing.possible:
            return self.weighed(solution, prices, program, ratios, likely=likely)
        here = self.weighed(solution, prices, sparing.again(0), ratios, likely=likely)
        self._latest_turn = here.program, sparing, here
        return here

    def weighed(
        self,
        solution: Solution,
        prices: Prices,
        program: Program,
        ratios: tuple[float, ...],
        *,
        likely: bool = False,
    ) -> GridCandidate:
        """A program of a solution at some ratios."""
        if ratios not in self._settled:
            self._settled[ratios] = Settled(self.grid, ratios)
        items = charges(program, self.graph, self._settled[ratios])
        # Equal instructions share what they cost.
        each = counted(items)
        cost_s = sum([item.weight * times * float(item.cost.constant.max()) for item, times in each])
        memory = (self._fitting(program, ratios) if likely else None) or self._memory(program, ratios)
        over = self.judge.over(memory, ratios)
        return GridCandidate(solution, prices, program, tuple(items), ratios, cost_s, memory, over)

    def _memory(self, program: Program, ratios: tuple[float, ...]) -> Peaks:
        """By the model; of a step that fits anyway, and a program that fits by far, an upper bound."""
        if self.judge.roomy:
            return Peaks(tuple(int(b) for b in self.judge.footprint(program).peak(np.asarray(ratios))))
        # Of a step that all devices together do not hold, that bound says nothing.
        if total_bytes(self.graph) <= sum(self.limits.nbytes):
            most = peaks_at_most(program, self.graph, ratios)
            if most is not None and self.judge.ample(most, ratios):
                return most
        return peaks_by_device(program, self.graph, ratios)

    def _fitting(self, program: Program, ratios: tuple[float, ...]) -> Peaks | None:
        """As it will run, if it fits then; None also where the model mostly says that there is ample room."""
        if not crowded(self.graph, _HARDLY_AMPLE * sum(self.limits.nbytes)):
            return None
        with self.timer.ratios():
            seen = self.judge.seen(program, ratios)
        return seen if seen is not None and self.judge.excess(seen) <= 1 else None

    def in_turn(self, found: GridCandidate) -> GridCandidate:
        """The same program with every exchange where it is wanted, where that takes less memory."""
        here = self.turned(found)
        return here if here.over < found.over else found

    def turned(self, found: GridCandidate) -> GridCandidate:
        """The same program with every exchange where it is wanted, as those of changed steps are."""
        return self._turned(found)[1]

    def _turned(self, found: GridCandidate) -> tuple[Sparing, GridCandidate]:
        """What puts a program in another order, and the program with every exchange where it is wanted.

        Of that one, too: the latest is remembered.
        """
        known = self._latest_turn
        if (
            known is None
            or found.ratios != known[2].ratios
            or all(found.program is not program for program in (known[0], known[2].program))
        ):
            sparing = Sparing(found.program, self.graph)
            here = self._in_order(found, sparing, 0) if sparing.possible else found
            known = self._latest_turn = found.program, sparing, here
        _, sparing, here = known
        return sparing, replace(here, over=self.judge.over(here.memory, here.ratios))

    def spared(self, found: GridCandidate, least: int = 0) -> tuple[int, GridCandidate]:
        """The same program with as few gathers done again as fit by the model; all of them where none do.

        Args:
            found: what does not fit.
            least: gathers done again at least.

        Returns:
            How many are done again, and the program.
        """
        sparing, turned = self._turned(found)
        if not sparing.possible:
            return 0, found
        low, high = least, len(sparing.gathers)
        less = self._in_order(found, sparing, low) if low else turned
        if less.fits or low >= high:
            return low, less
        more = self._in_order(found, sparing, high)
        while more.fits and high - low > 1 + len(sparing.gathers) // _NEARLY and not self.timer.late():
            # Each frees about as much as the next.
            part = (less.over - 1) / max(less.over - more.over, 1e-12)
            middle = min(max(low + math.ceil(part * (high - low)), low + 1), high - 1)
            here = self._in_order(found, sparing, middle)
            low, less, high, more = (low, less, middle, here) if here.fits else (middle, here, high, more)
        return high, more

    def _over_at_least(self, found: GridCandidate) -> float:
        """What a device needs by the model, as a part of its budget, however many gathers are done again."""
        sparing, turned = self._turned(found)
        device = int((np.asarray(turned.memory.bytes) / self.limits.nbytes).argmax())
        types = value_types(self.graph)
        freed = sum(held_bytes(types[v], at, device, found.ratios) for v, at in sparing.gathers)
        left = [n - freed if d == device else 0 for d, n in enumerate(turned.memory.bytes)]
        return self.judge.over(Peaks(tuple(left)), found.ratios)

    def _in_order(self, found: GridCandidate, sparing: Sparing, count: int) -> GridCandidate:
        with self.timer.ratios():
            return self.weighed(found.solution, found.prices, sparing.again(count), found.ratios)

    def seen_to_fit(self, found: GridCandidate) -> GridCandidate | None:
        """A program that the model takes for somewhat too large, if it fits as it will run."""
        if found.over > TOO_LARGE:
            return None
        with self.timer.ratios():
            seen = self.judge.peaks(found.program, found.ratios, found.memory)
        over = self.judge.excess(seen)
        return replace(found, memory=seen, over=over) if over <= 1 else None

    def looked_at(self, found: GridCandidate, *, briefly: bool = False) -> GridCandidate:
        """A program as it will run, with gathers done again so that it fits, if that is enough.

        Args:
            found: by the model.
            briefly: what is far from fitting by the model even so is not looked at, unless its compiler
                may compute much of that again where it is read, of which the model knows less.
        """
        judge, budgets = self.judge, self.judge.budgets
        if briefly and found.over > _HOPELESS:
            unsure = COMPILERS[self.graph.compiler].thrifty and found.over <= _MISTAKEN
            seen = self.seen_to_fit(found) if unsure else None
            if seen is not None or self._over_at_least(found) > _HOPELESS:
                return seen or found
            _, less = self.spared(found)
            if less.over > _HOPELESS:
                return less
        count, here = 0, found
        best: GridCandidate | None = None
        for rounds in range(MOST_LOOKS):
            with self.timer.ratios():
                seen = judge.peaks(here.program, here.ratios, here.memory, sure=rounds > 0)
            told, here = here.memory, replace(here, memory=seen, over=judge.excess(seen))
            best = here if best is None or here.over < best.over else best
            if best.fits or self.timer.late():
                break
            judge.learn(seen, here.ratios, told, rounds)
            before = count
            count, here = self.spared(found, count)
            if here.over > _HOPELESS:
                best = here if here.over < best.over else best
                break
            if rounds and count == before:
                break
        judge.budgets = budgets
        assert best is not None
        return best
