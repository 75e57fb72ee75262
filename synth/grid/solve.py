"""The best program on two mesh axes at one set of prices.

    simple choices eliminated --> messages --> there and back through mini-buckets --> fewer values --> ...

Choices tied to few others are eliminated as on one axis. Of what is left, the *core*, exact tables would not
fit. There, values that are impossible beside all that is left go (`shardwright.synth.search.prune`),
factors within others are added to these (`shardwright.synth.grid.absorb`), and messages between what is left
move costs to where they arise (`shardwright.synth.search.dual`), after which mini-buckets bound what every
value of every choice costs at least (`shardwright.synth.grid.buckets`). The values that cost more than a
program may cost are left out, which makes tables smaller and bounds better, until no bucket has to be split:
then the bound is the optimum. Where that does not come about by itself, A* finishes what is left.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from shardwright.cost.share_cost import Floats
from shardwright.ir.errors import PlanError
from shardwright.synth.grid.absorb import absorbed
from shardwright.synth.grid.inherited import Inherited
from shardwright.synth.grid.narrow import MOST_CELLS, MOST_ROUNDS, Memory, Search
from shardwright.synth.prices.tables import Prices
from shardwright.synth.search.fold import Scope, cook
from shardwright.synth.search.prune import supported
from shardwright.synth.search.solution import Solution
from shardwright.synth.search.solve import Solver
from shardwright.synth.search.stages import Core, Stage
from shardwright.synth.space.conversions import Domain
from shardwright.synth.space.factors import Factor, Use
from shardwright.synth.space.space import Space

#: Most ties of a choice to eliminate before messages are passed, and its largest table.
_STAGES = ((3, 1 << 17), (4, 1 << 20))


class DualSolver:
    """Solves one problem at any prices; see `shardwright.synth.search.solve.Solver` for the arguments."""

    def __init__(
        self,
        domains: Sequence[Hashable],
        sizes: Sequence[int],
        uses: Sequence[tuple[int, Scope]],
        stages: Sequence[tuple[int, int]] = _STAGES,
    ) -> None:
        self._solver = Solver(domains, sizes, uses, MOST_CELLS, stages)
        self._memory = Memory()
        #: What is left of the problem, and the same in fewer terms.
        self._left: tuple[Stage, Stage] | None = None
        #: The best assignment at the last prices: at others it is often the best, or a good one.
        self._latest: tuple[int, ...] = ()
        #: What is known before anything is solved.
        self._inherited: Inherited | None = None

    def inherit(self, space: Space, other: Space, solver: DualSolver) -> None:
        """Begin with what is known of another space, if that was searched: see `Inherited`."""
        if solver._left is not None and solver._latest:
            left, memory = solver._left[1], solver._memory
            self._inherited = Inherited.of(space, other, left, memory, solver._latest)

    def solve(
        self,
        tables: Sequence[Floats],
        stop: Callable[[], bool] = lambda: False,
        known: Sequence[int] | None = None,
        enough: float = 0.0,
        target_s: float = math.inf,
        rounds: int = MOST_ROUNDS,
    ) -> Solution | None:
        """The cheapest assignment, and a bound on all: equal where the search ended by itself.

        Args:
            tables: of every factor.
            stop: whether to stop before that.
            known: an assignment that is thought to be good.
            enough: part of its cost by which the bound may miss it.
            target_s: a bound that is good enough whatever the best assignment costs.
            rounds: of messages at most; one, for a bound without much ado.

        Returns:
            None where every assignment is impossible.
        """
        core = self._solver.core(tables)
        if not math.isfinite(core.constant):
            return None
        core = self._absorbed(core)
        memory = self._memory.of(core.stage)
        if self._inherited is not None:
            self._latest, self._inherited = self._inherited.hand_on(core, memory), None
        kept = memory.dominated.prune(core.folded, core.sizes, core.cooked)
        if not supported(kept):
            return None
        search = Search(core, kept, memory, stop)
        for values in (known, self._latest):
            if values:
                search.offer(values)
        search.run(enough, target_s, rounds)
        if not search.best:
            return None
        assignment = self._latest = _completed(core, search.best)
        return Solution(assignment, search.seconds, search.proven, search.expanded, search.width)

    def _absorbed(self, core: Core) -> Core:
        """A core in fewer terms (see `shardwright.synth.grid.absorb`), the same ones at all prices."""
        if self._left is None or self._left[0] is not core.stage:
            self._left = core.stage, Stage(absorbed(core.folded), core.sizes)
        stage = self._left[1]
        return replace(core, stage=stage, cooked=cook(stage.folded, core.cooked))


#: Solvers by the structure of what they solve.
Solvers: TypeAlias = dict[Hashable, DualSolver]


class GridSolver:
    """`DualSolver` for the choices and factors of a space on two axes.

    Attributes:
        factors: all factors, by number.

    Args:
        space: the programs.
        extra: factors that pin choices, or have them pay rent.
        known: solvers by what they solve: parts of a fleet have spaces of one structure, and what their
            searches leave (see `Memory`) is of use to each other.
        before: that of a step of which this one is a rewriting; what it found is begun with.
    """

    def __init__(
        self,
        space: Space,
        extra: Sequence[Use] = (),
        known: Solvers | None = None,
        before: GridSolver | None = None,
    ) -> None:
        self._space = space
        numbers: dict[Factor, int] = {}
        uses = [(numbers.setdefault(u.factor, len(numbers)), u.scope) for u in (*space.uses, *extra)]
        domains = [choice.domain for choice in space.choices]
        self.factors = tuple(numbers)
        kinds: dict[Domain, int] = {}
        of_choice = tuple([kinds.setdefault(domain, len(kinds)) for domain in domains])
        key = of_choice, tuple(map(len, domains)), tuple(uses)
        known = {} if known is None else known
        if key not in known:
            known[key] = DualSolver(of_choice, key[1], uses)
            if before is not None:
                known[key].inherit(space, before._space, before._solver)
        self._solver = known[key]

    def solve(
        self,
        prices: Prices,
        stop: Callable[[], bool] = lambda: False,
        known: Sequence[int] | None = None,
        enough: float = 0.0,
        target_s: float = math.inf,
        rents: Mapping[Factor, Floats] | None = None,
        rounds: int = MOST_ROUNDS,
    ) -> Solution:
        """The cheapest program at `prices`, with `rents` in place of the tables of some factors.

        See `DualSolver.solve` for the other arguments.

        Raises:
            PlanError: no assignment is possible at all.
        """
        tables = prices.tables(self.factors)
        if rents:
            tables = [rents.get(factor, table) for factor, table in zip(self.factors, tables, strict=True)]
        found = self._solver.solve(tables, stop, known, enough, target_s, rounds)
        if found is None:
            raise PlanError(
                place="search",
                reason="no program of this space carries out the step",
                remedy="Please report the step: its rules contradict each other",
            )
        return found


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
