"""The best program on two mesh axes at one set of prices.

    simple choices eliminated --> messages --> there and back through mini-buckets --> fewer values --> ...

Choices tied to few others are eliminated as on one axis. Of what is left, the *core*, exact tables would not
fit. Messages between factors move costs to where they arise (`shardwright.synth.dual`), after which
mini-buckets bound what every value of every choice costs at least (`shardwright.synth.grid_buckets`). The
values that cost least make a first program; those that cost more than the best one known are left out, which
makes tables smaller and bounds better, until no bucket has to be split: then the bound is the optimum. Where
that does not come about by itself, A* finishes what is left.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence

import numpy as np
from numpy.typing import NDArray

from shardwright.cost.share_cost import Floats
from shardwright.ir.errors import PlanError
from shardwright.synth.dual import Dual
from shardwright.synth.eliminate import eliminate, live, record
from shardwright.synth.factors import Factor, Use
from shardwright.synth.fold import Folded, Scope, cook, fold
from shardwright.synth.grid_buckets import Bounds, Buckets
from shardwright.synth.order import full_order
from shardwright.synth.pricing import Prices
from shardwright.synth.prune import Kept, prune
from shardwright.synth.search import Found, Layer, a_star
from shardwright.synth.solve import Core, Solution, Solver, Stage
from shardwright.synth.space import Space

#: Most sweeps of messages, from nothing and from messages that were right at other prices; and the part of
#: the bound that a round of them must add to go on.
MOST_SWEEPS, FEW_SWEEPS, ENOUGH = 56, 16, 1e-3

#: Most ties of a choice to eliminate before messages are passed, and its largest table.
_STAGES = ((3, 1 << 17), (4, 1 << 20), (4, 1 << 20))

#: Largest tables of the ways there and back between two rounds of messages, and rounds at most.
_CELLS, _MOST_ROUNDS = (1 << 14, *(1 << 16,) * 6), 5

#: Parts of the bound by which values may exceed it that are tried for a first program.
_MARGINS = (3e-5, 3e-4, 3e-3, 3e-2, 0.3, math.inf)

#: A way there and back is worth repeating while it leaves out such a part of the values.
_PROGRESS = 0.08

#: What stands for "impossible", in units of the largest cost at hand; a power of two.
_NEVER = 2.0**14

#: A* has tables of so many cells to guide it, and expands so many nodes at most.
_MOST_CELLS, _MOST_NODES = 1 << 20, 4_000

#: The same for a first program.
_FEW_CELLS, _FEW_NODES = 1 << 17, 1_500

#: Bounds that are so close to a cost are equal to it.
_CLOSE = 1e-9


class DualSolver:
    """Solves one problem at any prices; see `shardwright.synth.solve.Solver` for the arguments."""

    def __init__(
        self,
        domains: Sequence[Hashable],
        sizes: Sequence[int],
        uses: Sequence[tuple[int, Scope]],
        stages: Sequence[tuple[int, int]] = _STAGES,
    ) -> None:
        self._solver = Solver(domains, sizes, uses, _MOST_CELLS, stages, pruned=False)
        self._memory = _Memory()

    def solve(
        self,
        tables: Sequence[Floats],
        stop: Callable[[], bool] = lambda: False,
        known: Sequence[int] | None = None,
        enough: float = 0.0,
        target_s: float = math.inf,
    ) -> Solution | None:
        """The cheapest assignment, and a bound on all: equal where the search ended by itself.

        Args:
            tables: of every factor.
            stop: whether to stop before that.
            known: an assignment that is thought to be good.
            enough: part of its cost by which the bound may miss it.
            target_s: a bound that is good enough whatever the best assignment costs.

        Returns:
            None where every assignment is impossible.
        """
        core = self._solver.core(tables)
        if not math.isfinite(core.constant):
            return None
        search = _Search(core, prune(core.folded, core.sizes, core.cooked), self._memory, stop)
        if known is not None:
            search.offer(known)
        search.run(enough, target_s)
        if not search.best:
            return None
        assignment = _completed(core, search.best)
        return Solution(assignment, search.seconds, search.proven, search.expanded, search.width)


class GridSolver:
    """`DualSolver` for the choices and factors of a space on two axes.

    Attributes:
        factors: all factors, by number.
    """

    def __init__(self, space: Space, extra: Sequence[Use] = ()) -> None:
        numbers: dict[Factor, int] = {}
        uses = [(numbers.setdefault(u.factor, len(numbers)), u.scope) for u in (*space.uses, *extra)]
        domains = [choice.domain for choice in space.choices]
        self.factors = tuple(numbers)
        self._solver = DualSolver(domains, [len(domain) for domain in domains], uses)

    def solve(
        self,
        prices: Prices,
        stop: Callable[[], bool] = lambda: False,
        known: Sequence[int] | None = None,
        enough: float = 0.0,
        target_s: float = math.inf,
    ) -> Solution:
        """The cheapest program at `prices`; see `DualSolver.solve` for the other arguments.

        Raises:
            PlanError: no assignment is possible at all.
        """
        found = self._solver.solve(prices.tables(self.factors), stop, known, enough, target_s)
        if found is None:
            raise PlanError(
                place="search",
                reason="no program of this space carries out the step",
                remedy="Please report the step: its rules contradict each other",
            )
        return found


class _Memory:
    """What one solution leaves for the next, at other prices: messages and an order of elimination."""

    def __init__(self) -> None:
        self.stage: Stage | None = None
        self.messages: dict[tuple[object, ...], list[Floats]] = {}
        self.order: list[int] = []

    def of(self, stage: Stage) -> _Memory:
        """The memory, empty if it was of something else."""
        if self.stage is not stage:
            self.stage, self.messages, self.order = stage, {}, []
        return self


class _Search:
    """Search in the core of a problem.

    Attributes:
        seconds: what the best assignment costs, infinite while there is none.
        best: its value of every choice of the core.
        proven: no assignment costs less.
        expanded, width: see `Solution`.
    """

    def __init__(self, core: Core, kept: Kept, memory: _Memory, stop: Callable[[], bool]) -> None:
        self.core, self.kept, self.stop = core, kept, stop
        self.memory = memory.of(core.stage)
        self.seconds, self.proven = math.inf, -math.inf
        self.best: list[int] = []
        self.expanded = self.width = 0

    def offer(self, values: Sequence[int]) -> None:
        """Keep an assignment of the core if it is better than the best."""
        folded = self.core.folded
        seconds = self.core.constant + sum(
            float(self.core.cooked[recipe][tuple([values[v] for v in scope])])
            for scope, recipe in zip(folded.scopes, folded.recipe_of, strict=True)
        )
        if seconds < self.seconds:
            self.seconds, self.best = seconds, list(values)

    def run(self, enough: float, target_s: float) -> None:
        """Narrow down what is left until the bound meets the best assignment, or nothing helps any more."""
        sweeps = FEW_SWEEPS if self.memory.messages else MOST_SWEEPS
        for _ in range(_MOST_ROUNDS):
            rest = _Rest(self.core, self.kept, self._swept(sweeps), self.memory)
            for cells in _CELLS:
                before = rest.left()
                self._narrow(rest, cells, enough)
                if self._done(enough) or self.proven >= target_s or self.stop():
                    return
                if cells > _CELLS[0] and rest.left() > before * (1 - _PROGRESS):
                    break
            rest.leave_out(self.kept)
            sweeps = FEW_SWEEPS
        self._finish(_Rest(self.core, self.kept, self._swept(0), self.memory))

    def _done(self, enough: float) -> bool:
        if self.seconds <= self.proven * (1 + _CLOSE):
            self.proven = self.seconds
        return self.proven >= self.seconds * (1 - enough)

    def _swept(self, sweeps: int) -> Dual:
        """Messages of what is left, as those of the last time after some sweeps."""
        dual, names = _dual(self.core.folded, self.kept)
        for number, (name, kinds) in enumerate(names):
            if name in self.memory.messages:
                full = self.memory.messages[name]
                values = [self.kept.values[kind] for kind in kinds]
                dual.start_from(number, [m[v] for m, v in zip(full, values, strict=True)])
        dual.rise(sweeps, ENOUGH, self.stop)
        for number, (name, kinds) in enumerate(names):
            full = self.memory.messages.setdefault(name, [np.zeros(self.core.sizes[k]) for k in kinds])
            for whole, kind, message in zip(full, kinds, dual.kinds[number].messages, strict=True):
                whole[self.kept.values[kind]] = message
        return dual

    def _narrow(self, rest: _Rest, cells: int, enough: float) -> None:
        """There and back: a better bound, perhaps a better program, and fewer values."""
        scale = self.seconds if math.isfinite(self.seconds) else rest.scale
        buckets = Buckets(rest.some, rest.order, cells, scale * _NEVER)
        found = buckets.bounds()
        bound = self.core.constant + found.bound
        self.proven = max(self.proven, min(bound, self.seconds))
        if found.exact:
            self.offer(rest.original(buckets.greedy(), rest.some))
            self.proven = max(self.proven, min(bound, self.seconds))
        elif self.seconds > bound * (1 + max(enough, ENOUGH)):
            self._look(rest, found)
        rest.keep(found, self.seconds * (1 + _CLOSE) - bound)

    def _look(self, rest: _Rest, found: Bounds) -> None:
        """Look for a program among the values that cost least."""
        for margin in _MARGINS:
            few = rest.few(found, margin * abs(self.core.constant + found.bound))
            got = self._searched(rest, few, _FEW_CELLS, _FEW_NODES)
            if got is not None and math.isfinite(got.cost):
                return

    def _searched(self, rest: _Rest, some: Kept, cells: int, nodes: int) -> Found | None:
        """A* among some values; what it finds is offered."""
        folded = rest.stage.folded
        sizes = [len(values) for values in some.values]
        order = [v for v in rest.order if sizes[folded.class_of[v]] > 1]
        layer = Layer(folded.class_of, some.values, eliminate(record(folded, sizes, order, cells), some))
        found = a_star([layer], nodes, self.stop)
        if found is not None:
            self.expanded, self.width = self.expanded + found.expanded, layer.elimination.tape.width
            self.offer(
                [int(rest.values[k][v]) for v, k in zip(found.assignment, folded.class_of, strict=True)]
            )
        return found

    def _finish(self, rest: _Rest) -> None:
        """A* on what is left."""
        found = self._searched(rest, rest.some, _MOST_CELLS, _MOST_NODES)
        bound = math.inf if found is None else self.core.constant + found.bound
        self.proven = max(self.proven, min(bound, self.seconds))
        self._done(0.0)


class _Rest:
    """What is left of a problem, as its messages say it.

    Attributes:
        stage: choices and terms that are left.
        values: per class, values of the core that its tables are over.
        some: of these, the values that still matter, and tables over them.
        order: in which choices are eliminated.
        scale: seconds that no useful program costs more than.
    """

    def __init__(self, core: Core, kept: Kept, dual: Dual, memory: _Memory) -> None:
        self.core = core
        uses, tables = dual.reparametrised()
        present = {v for _, scope in uses for v in scope}
        self.stage = Stage(fold([(shade, v in present) for v, shade in enumerate(dual.shade_of)], uses))
        folded = self.stage.folded
        cooked = cook(folded, tables)
        self._kind_of = [core.folded.class_of[members[0]] for members in folded.classes]
        self.values = [kept.values[kind] for kind in self._kind_of]
        self.some = Kept(folded, [len(values) for values in self.values], cooked)
        self._cooked = cooked
        finite = [float(np.where(np.isfinite(table), np.abs(table), 0.0).max()) for table in core.cooked]
        self.scale = max(finite, default=0.0) + abs(core.constant) + abs(dual.bound()) or 1.0
        sizes = [self.some.size(kind) for kind in range(len(self.values))]
        scopes = live(folded, sizes)
        placed = set(memory.order)
        if any(v not in placed for scope in scopes for v in scope):
            memory.order = full_order([sizes[kind] for kind in folded.class_of], scopes)
        self.order = memory.order

    def left(self) -> int:
        """How many values are left, by classes."""
        return sum(map(len, self.some.values))

    def keep(self, found: Bounds, above: float) -> None:
        """Leave out the values that exceed the bound by more, all but the least one of a class."""
        for kind, excess in enumerate(found.of_value):
            if excess is not None:
                mine = np.flatnonzero(excess <= max(above, float(excess.min())))
                if len(mine) < len(excess):
                    self.some.keep(kind, self.some.values[kind][mine])

    def few(self, found: Bounds, above: float) -> Kept:
        """The values that exceed the bound by no more, whichever of equal layers they are of."""
        least: dict[int, Floats] = {}
        for kind, excess in enumerate(found.of_value):
            if excess is not None:
                full = np.full(self.core.sizes[self._kind_of[kind]], np.inf)
                full[self.values[kind][self.some.values[kind]]] = excess - excess.min()
                before = least.get(self._kind_of[kind])
                least[self._kind_of[kind]] = full if before is None else np.minimum(before, full)
        few = Kept(self.stage.folded, [len(values) for values in self.values], self._cooked)
        for kind, mine in enumerate(self._kind_of):
            values = self.some.values[kind]
            if mine in least:
                values = values[least[mine][self.values[kind][values]] <= above]
            few.keep(kind, values)
        return few

    def leave_out(self, kept: Kept) -> None:
        """Leave out of the core's values those that none of a class's choices has left."""
        of_kind: dict[int, set[int]] = {}
        for kind, values, some in zip(self._kind_of, self.values, self.some.values, strict=True):
            of_kind.setdefault(kind, set()).update(values[some].tolist())
        for kind, values in of_kind.items():
            if len(values) < kept.size(kind):
                kept.keep(kind, np.array(sorted(values), dtype=np.intp))

    def original(self, at: dict[int, int], some: Kept) -> list[int]:
        """The core's value of every choice, from positions among the values of `some`."""
        kinds = enumerate(self.stage.folded.class_of)
        return [int(self.values[kind][some.values[kind][at.get(v, 0)]]) for v, kind in kinds]


def _dual(folded: Folded, kept: Kept) -> tuple[Dual, list[tuple[tuple[object, ...], list[int]]]]:
    """Messages of a problem, all nothing; and of every kind of factor its name and the classes it ties."""
    numbers: dict[tuple[int, ...], int] = {}
    tables: list[Floats] = []
    uses: list[tuple[int, Scope]] = []
    called: list[tuple[tuple[object, ...], list[int]]] = []
    for scope, recipe in zip(folded.scopes, folded.recipe_of, strict=True):
        kinds = tuple([folded.class_of[v] for v in scope])
        key = kept.key(recipe, kinds)
        if key not in numbers:
            numbers[key] = len(numbers)
            tables.append(kept.table(recipe, kinds))
        uses.append((numbers[key], scope))
        called.append(((recipe, *kinds), list(kinds)))
    dual = Dual(folded.class_of, [kept.size(kind) for kind in folded.class_of], uses, tables)
    by_kind = dict(zip(dual.kind_of_use(), called, strict=True))
    return dual, [by_kind[number] for number in range(len(dual.kinds))]


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
