"""The best assignment of what is left of a problem whose exact tables would not fit.

    fewer values --> messages --> there and back through mini-buckets --> fewer values --> ...

Values that are impossible beside all that is left go (`dominated.py`), factors within others are added to
these (`absorb.py`), and messages between what is left move costs to where they arise (`dual.py`), after which
mini-buckets bound what every value of every choice costs at least (`buckets.py`). The values that cost more
than an assignment may cost are left out, which makes tables smaller and bounds better, until no bucket has to
be split: then the bound is the optimum. Where that does not come about by itself, A* finishes what is left
(`search.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from shardwright.synth.search.fold import cook
from shardwright.synth.search.narrow.absorb import absorbed
from shardwright.synth.search.narrow.search import MOST_ROUNDS, Memory, Search
from shardwright.synth.search.prune import supported
from shardwright.synth.search.solution import Solution
from shardwright.synth.search.stages import Core, Stage

#: Begins a memory of what is left, and says an assignment that is thought to be good.
Start: TypeAlias = Callable[[Core, Memory], tuple[int, ...]]


class Narrowing:
    """Solves what is left of one problem at any prices; what it finds is of use at the next ones.

    Attributes:
        memory: what one solution leaves for the next.
        latest: the best assignment at the last prices: at others it is often the best, or a good one.
    """

    def __init__(self) -> None:
        self.memory, self.latest = Memory(), tuple[int, ...]()
        #: What is left of the problem, and the same in fewer terms.
        self._left: tuple[Stage, Stage] | None = None
        self._start: Start | None = None

    @property
    def stage(self) -> Stage | None:
        """What is left of the problem, in few terms, once it was looked at."""
        return None if self._left is None else self._left[1]

    def begin_with(self, start: Start | None) -> None:
        """Begin the next solution with what is known before anything is solved."""
        self._start = start

    def solve(
        self,
        core: Core,
        stop: Callable[[], bool] = lambda: False,
        known: Sequence[int] | None = None,
        enough: float = 0.0,
        target_s: float = math.inf,
        rounds: int = MOST_ROUNDS,
    ) -> Solution | None:
        """The cheapest assignment, and a bound on all: equal where the search ended by itself.

        Args:
            core: what is left, at some prices.
            stop: whether to stop before that.
            known: an assignment that is thought to be good.
            enough: part of its cost by which the bound may miss it.
            target_s: a bound that is good enough whatever the best assignment costs.
            rounds: of messages at most; one, for a bound without much ado.

        Returns:
            None where every assignment is impossible.
        """
        if not math.isfinite(core.constant):
            return None
        core = self._absorbed(core)
        memory = self.memory.of(core.stage)
        if self._start is not None:
            self.latest, self._start = self._start(core, memory), None
        kept = memory.dominated.prune(core.folded, core.sizes, core.cooked)
        if not supported(kept):
            return None
        search = Search(core, kept, memory, stop)
        for values in (known, self.latest):
            if values:
                search.offer(values)
        search.run(enough, target_s, rounds)
        if not search.best:
            return None
        assignment = self.latest = _completed(core, search.best)
        return Solution(assignment, search.seconds, search.proven, search.expanded, search.width)

    def _absorbed(self, core: Core) -> Core:
        """A core in fewer terms (see `absorb.py`), the same ones at all prices."""
        if self._left is None or self._left[0] is not core.stage:
            self._left = core.stage, Stage(absorbed(core.folded), core.sizes)
        stage = self._left[1]
        return replace(core, stage=stage, cooked=cook(stage.folded, core.cooked))


def _completed(core: Core, values: Sequence[int]) -> tuple[int, ...]:
    """An assignment of the core with the best of all choices that were eliminated before."""
    found = list(values)
    known: dict[tuple[object, ...], int] = {}
    for layer in reversed(core.done):
        done = layer.elimination.done
        for bucket in reversed(layer.elimination.tape.buckets):
            key = (id(layer), *[(number, *[found[u] for u in rest]) for number, rest in bucket.parts])
            if key not in known:
                total: NDArray[np.float64] = np.zeros(())
                for number, rest in bucket.parts:
                    at = [slice(None), *[found[u] for u in rest]]
                    for table, axes in done[number].sources:
                        total = total + table[tuple([at[axis] for axis in axes])]
                known[key] = int(np.argmin(total)) if total.ndim else 0
            found[bucket.choice] = known[key]
    return tuple(found)
