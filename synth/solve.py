"""The best program at one set of prices: fold, prune, eliminate, and A* back through what was eliminated.

Pruning sees only a choice's own terms. Choices tied to few others are therefore eliminated first; what
is left has fewer choices, tied by messages that know of everything behind them, and is folded and pruned
again. Each such round is a *stage*; the last one eliminates all that is left.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from shardwright.cost.share_cost import Floats
from shardwright.ir.errors import PlanError
from shardwright.synth.eliminate import Elimination, Tape, eliminate, live, record
from shardwright.synth.factors import Factor, Use
from shardwright.synth.fold import Folded, Scope, cook, fold, rounded
from shardwright.synth.order import full_order, simple_order
from shardwright.synth.pricing import Prices
from shardwright.synth.prune import Kept, prune
from shardwright.synth.search import DIVES, MOST_NODES, Layer, a_star, in_order
from shardwright.synth.space import Space

#: Largest table of an exact bucket; beyond it mini-buckets keep the heuristic admissible, and A* searches.
MOST_CELLS = 1 << 23

#: Smaller tables are tried first: mini-buckets of so many cells often guide A* nearly as well as exact ones,
#: at a fraction of the time. So many nodes, beyond twice the shortest path, say that they do not; more where
#: exact tables are so large that filling them takes as long (a node takes about as long as `_CELLS` of them).
_SMALLER = (1 << 16, 1 << 19, 1 << 21)
_PATIENCE = 400
_CELLS = 1 << 12

#: Unless all tables together are no larger than this.
_AT_ONCE = 1 << 24

#: Tables together no larger than this are filled as they are, where smaller ones might say enough.
_A_GLANCE = 1 << 22

#: The same where several prices are worked out together: more parts of a fleet than are worth a closer look.
_SEVERAL_CELLS = 1 << 14

#: See `Solver`.
STAGES = ((3, 1 << 14), (4, 1 << 15))


@dataclass(frozen=True, slots=True)
class Solution:
    """An assignment at one set of prices.

    Attributes:
        assignment: position in its domain of every choice.
        seconds: what it costs.
        bound_s: what no assignment can be cheaper than at these prices; equal to `seconds` where the search
            ended by itself.
        expanded: nodes that A* expanded.
        width: most choices in one table of the elimination.
    """

    assignment: tuple[int, ...]
    seconds: float
    bound_s: float
    expanded: int
    width: int


@dataclass(slots=True)
class Stage:
    """A folded problem, and the tape that eliminates the choices of one stage.

    A tape serves all prices under which no table outgrows what a bucket may have: classes that are settled at
    some of them are carried along.

    Attributes:
        folded: the problem.
        sizes: values of every class; those of one are settled.
        order: in which choices are eliminated.
        made_for: values left that it was made for, until there were others.
    """

    folded: Folded
    sizes: Sequence[int]
    order: list[int] = field(default_factory=list[int])
    made_for: tuple[int, ...] = ()
    tapes: dict[int, Tape] = field(default_factory=dict[int, Tape])
    following: Stage | None = None

    def prepare(self, left: Sequence[int], simple: tuple[int, int] | None, most_cells: int) -> Tape:
        """The tape for so many values left; `simple` says which choices to eliminate, None for all."""
        for made_for, tape in self.tapes.items():
            # A tape that splits no bucket is the same whatever a bucket may have.
            if (made_for == most_cells or not tape.split) and self._serves(tape, left, most_cells):
                return tape
        if not self.order:
            self.order, self.made_for = self._ordered(left, simple), tuple(left)
        tape = record(self.folded, self.sizes, left, self.order, most_cells)
        if simple is None and self.made_for not in ((), tuple(left)):
            # Finding an order takes about as long as filling so many cells, and one is found already.
            if self.cells(tape, left) > _AT_ONCE:
                self.order = self._ordered(left, simple)
                tape = record(self.folded, self.sizes, left, self.order, most_cells)
            self.made_for = ()
        self.tapes[most_cells] = tape
        return tape

    def _ordered(self, left: Sequence[int], simple: tuple[int, int] | None) -> list[int]:
        scopes = live(self.folded, self.sizes)
        sized = [left[kind] for kind in self.folded.class_of]
        return full_order(sized, scopes) if simple is None else simple_order(sized, scopes, *simple)

    @staticmethod
    def cells(tape: Tape, left: Sequence[int]) -> int:
        """Cells of all tables of a tape."""
        return sum(math.prod([left[kind] for kind in step.kinds]) for step in tape.operations)

    @staticmethod
    def _serves(tape: Tape, left: Sequence[int], most_cells: int) -> bool:
        return all(math.prod([left[k] for k in step.kinds]) <= most_cells for step in tape.operations)

    def next(self, tape: Tape) -> Stage:
        """What is left, folded again; its factors are the sources of `tape.left`, in order of appearance."""
        if self.following is None:
            numbers: dict[object, int] = {}
            uses = [(numbers.setdefault(source, len(numbers)), scope) for source, scope in tape.left]
            present = {v for _, scope in uses for v in scope}
            # Choices that are done with stay, for the numbers' sake, in classes apart.
            kinds = [(kind, v in present) for v, kind in enumerate(self.folded.class_of)]
            folded = fold(kinds, uses)
            before = [self.folded.class_of[members[0]] for members in folded.classes]
            self.following = Stage(folded, [self.sizes[kind] for kind in before])
        return self.following


@dataclass(frozen=True, slots=True)
class Core:
    """A problem whose simple choices have been eliminated.

    Attributes:
        done: the stages so far.
        stage: what is left.
        cooked: table of every recipe.
    """

    done: Sequence[Layer]
    stage: Stage
    cooked: Sequence[Floats]

    @property
    def folded(self) -> Folded:
        """Choices and terms that are left."""
        return self.stage.folded

    @property
    def sizes(self) -> Sequence[int]:
        """Values of every class that is left."""
        return self.stage.sizes

    @property
    def constant(self) -> float:
        """What the choices eliminated so far cost at least, apart from what the tables say."""
        return sum(float(layer.elimination.constant) for layer in self.done)

    def cells(self, kept: Kept, most_cells: int) -> int:
        """Cells of all tables of `finish`."""
        sizes = [len(values) for values in kept.values]
        tape = self.stage.prepare(sizes, None, most_cells)
        return self.stage.cells(tape, sizes)

    def finish(self, kept: Kept, most_cells: int) -> list[Layer]:
        """All stages, the last one over the values of `kept`, with buckets of at most `most_cells`."""
        tape = self.stage.prepare([len(values) for values in kept.values], None, most_cells)
        values = original(self.folded, kept.values, self.done)
        return [*self.done, Layer(self.folded.class_of, values, eliminate(tape, kept))]


class Solver:
    """Solves one problem at any prices; what does not depend on prices is done once. `first` is the problem.

    Args:
        domains: of every choice, what tells it from others.
        sizes: values of every choice.
        uses: factor (by number) and the choices on its axes.
        most_cells: largest table of an exact bucket.
        stages: of every stage before the last, most ties of a choice to eliminate, and its largest table.
    """

    def __init__(
        self,
        domains: Sequence[Hashable],
        sizes: Sequence[int],
        uses: Sequence[tuple[int, Scope]],
        most_cells: int = MOST_CELLS,
        stages: Sequence[tuple[int, int]] = STAGES,
    ) -> None:
        self.first = fold(domains, uses)
        self._start = Stage(self.first, [sizes[members[0]] for members in self.first.classes])
        self._most_cells = most_cells
        self._levels = (*(cells for cells in _SMALLER if cells < most_cells), most_cells)
        self._level = 0
        self._solutions: dict[bytes, Solution | None] = {}
        self._stages = tuple((degree, min(cells, most_cells)) for degree, cells in stages)

    def core(self, tables: Sequence[Floats], most_cells: int | None = None) -> Core:
        """All stages but the last at the prices of `tables`, one per factor: what is left to be decided."""
        most_cells = self._most_cells if most_cells is None else most_cells
        stage, layers = self._start, list[Layer]()
        cooked = rounded(stage.folded, cook(stage.folded, tables))
        for simple in self._stages:
            folded = stage.folded
            # Not pruned: these tables are small, and what is left then has one shape, whatever the prices.
            kept = Kept(folded, stage.sizes, cooked)
            # Only the last stage may split buckets: what is pruned after a split is pruned by a relaxation.
            room = max(most_cells, simple[1])
            tape = stage.prepare(stage.sizes, simple, room)
            elimination = eliminate(tape, kept)
            layers.append(Layer(folded.class_of, original(folded, kept.values, layers), elimination))
            stage = stage.next(tape)
            cooked = cook(stage.folded, _distinct(elimination))
        return Core(layers, stage, cooked)

    def layers(self, tables: Sequence[Floats], most_cells: int | None = None) -> list[Layer]:
        """All stages at the prices of `tables`, with buckets of at most `most_cells`."""
        most_cells = self._most_cells if most_cells is None else most_cells
        core = self.core(tables, most_cells)
        return core.finish(prune(core.folded, core.sizes, core.cooked), most_cells)

    def in_order(self, tables: Sequence[Floats]) -> Iterator[tuple[tuple[int, ...], float]]:
        """All assignments with their costs, the cheapest first; dominated values are not dropped.

        Of a solver without stages.
        """
        core = self.core(tables)
        kept = Kept(core.folded, core.sizes, core.cooked)
        return in_order(core.finish(kept, self._most_cells))

    def bound(self, tables: Sequence[Floats]) -> float:
        """What no assignment costs less than (the least cost itself unless a bucket was split)."""
        return sum(float(layer.elimination.constant) for layer in self.layers(tables))

    def least(
        self,
        tables: Sequence[Floats],
        stop: Callable[[], bool] = lambda: False,
        enough: float = math.inf,
    ) -> float:
        """The least cost of any assignment, or a lower bound: `enough`, or as far as the search gets.

        Where exact tables are large, whether smaller ones say enough already is found out first.
        """
        known = self._known(tables)
        if known in self._solutions:
            found = self._solutions[known]
            return math.inf if found is None else found.bound_s
        core = self.core(tables)
        kept = prune(core.folded, core.sizes, core.cooked)
        all_cells = core.cells(kept, self._most_cells)
        glances = self._levels[:1] if enough < math.inf and all_cells > _A_GLANCE else ()
        for most_cells in (*glances, *(self._levels[-1:] if all_cells <= _AT_ONCE else ())):
            layers = core.finish(kept, most_cells)
            bound_s = sum(float(layer.elimination.constant) for layer in layers)
            if bound_s >= enough or not any(layer.elimination.tape.split for layer in layers):
                return bound_s
        found = self._solved(core, kept, MOST_NODES, stop)
        if found is None or not found.bound_s < found.seconds:
            self._solutions[known] = found
        return math.inf if found is None else found.bound_s

    def bounds(self, tables: Sequence[Floats], most_cells: int) -> Floats:
        """What no assignment costs less than at each of several prices, without large tables.

        Args:
            tables: one per factor, with an axis of prices in front where they differ.
            most_cells: largest table.
        """
        core = self.core(tables, most_cells)
        # Values that none of several prices wants are few; looking for them takes longer than it saves.
        layers = core.finish(Kept(core.folded, core.sizes, core.cooked), most_cells)
        return np.asarray(sum((layer.elimination.constant for layer in layers), np.zeros(())))

    def solve(
        self,
        tables: Sequence[Floats],
        most_nodes: int = MOST_NODES,
        stop: Callable[[], bool] = lambda: False,
    ) -> Solution | None:
        """The cheapest assignment; None where all of them are impossible."""
        known = self._known(tables)
        if known not in self._solutions:
            core = self.core(tables)
            kept = prune(core.folded, core.sizes, core.cooked)
            found = self._solved(core, kept, most_nodes, stop)
            if found is not None and found.bound_s < found.seconds:
                return found  # more nodes, or more time, would say more
            self._solutions[known] = found
        return self._solutions[known]

    @staticmethod
    def _known(tables: Sequence[Floats]) -> bytes:
        """Equal for equal tables: parts of a fleet, and ranges of ratios, often have the same prices."""
        digest = hashlib.blake2b(digest_size=16)
        for table in tables:
            digest.update(np.ascontiguousarray(table))
        return digest.digest()

    def _solved(self, core: Core, kept: Kept, most_nodes: int, stop: Callable[[], bool]) -> Solution | None:
        all_cells = core.cells(kept, self._levels[-1])
        for most_cells in self._levels[-1 if all_cells <= _AT_ONCE else self._level :]:
            layers = core.finish(kept, most_cells)
            shortest = sum(len(layer.elimination.tape.buckets) for layer in layers)
            last = most_cells == self._levels[-1]
            nodes = most_nodes if last else 2 * shortest + _PATIENCE + all_cells // _CELLS
            found = a_star(layers, nodes, stop, DIVES if last else 0)
            if found is not None and not found.assignment and stop():
                found = a_star(layers, 0)
            if found is None:
                return None
            if found.assignment or last:
                width = max(layer.elimination.tape.width for layer in layers)
                return Solution(found.assignment, found.cost, found.bound, found.expanded, width)
            self._level = self._levels.index(most_cells) + 1  # other prices will hardly be easier
        raise AssertionError("there is always a last level")


def original(
    folded: Folded, kept: Sequence[NDArray[np.intp]], layers: Sequence[Layer]
) -> list[NDArray[np.intp]]:
    """Per class, the values left, as values of the first stage's domains."""
    if not layers:
        return list(kept)
    before = layers[-1]
    result: list[NDArray[np.intp]] = []
    for members, values in zip(folded.classes, kept, strict=True):
        result.append(before.values[before.class_of[members[0]]][values])
    return result


def _distinct(elimination: Elimination) -> list[Floats]:
    """Tables of what is left, one per source."""
    found: dict[object, Floats] = {}
    for (source, _), table in zip(elimination.tape.left, elimination.left, strict=True):
        found.setdefault(source, table)
    return list(found.values())


class SpaceSolver:
    """`Solver` for the choices and factors of a space, and factors in addition that pin some of them.

    Attributes:
        factors: all factors, by number.
        solver: what solves for their tables.
    """

    def __init__(
        self,
        space: Space,
        extra: Sequence[Use] = (),
        most_cells: int = MOST_CELLS,
        stages: Sequence[tuple[int, int]] = STAGES,
    ) -> None:
        numbers: dict[Factor, int] = {}
        uses = [(numbers.setdefault(u.factor, len(numbers)), u.scope) for u in (*space.uses, *extra)]
        domains = [choice.domain for choice in space.choices]
        self.factors = tuple(numbers)
        self.solver = Solver(domains, [len(domain) for domain in domains], uses, most_cells, stages)

    def in_order(
        self, prices: Prices, rents: Mapping[Factor, Floats] | None = None
    ) -> Iterator[tuple[tuple[int, ...], float]]:
        """All programs with their costs, rents included, the cheapest first; see `Solver.in_order`."""
        return self.solver.in_order(self._tables(prices, rents))

    def solve(
        self,
        prices: Prices,
        most_nodes: int = MOST_NODES,
        stop: Callable[[], bool] = lambda: False,
        rents: Mapping[Factor, Floats] | None = None,
    ) -> Solution:
        """The cheapest program at `prices`, with `rents` in place of the tables of some factors.

        Raises:
            PlanError: no assignment is possible at all.
        """
        found = self.solver.solve(self._tables(prices, rents), most_nodes, stop)
        if found is None:
            raise PlanError(
                place="search",
                reason="no program of this space carries out the step",
                remedy="Please report the step: its rules contradict each other",
            )
        return found

    def _tables(self, prices: Prices, rents: Mapping[Factor, Floats] | None) -> Sequence[Floats]:
        """Of all factors, with `rents` in place of those of some."""
        tables = prices.tables(self.factors)
        if not rents:
            return tables
        return [rents.get(factor, table) for factor, table in zip(self.factors, tables, strict=True)]

    def bounds(self, prices: Prices) -> Floats:
        """A lower bound on the cost of every program at each of several prices (`Prices.of_all`)."""
        return self.solver.bounds(prices.tables(self.factors), _SEVERAL_CELLS)

    def bound(
        self, prices: Prices, stop: Callable[[], bool] = lambda: False, enough: float = math.inf
    ) -> float:
        """A lower bound on the cost of every program at `prices`.

        The least cost, where A* gets there, unless something below it is `enough`.
        """
        return self.solver.least(prices.tables(self.factors), stop, enough)


def solve(
    space: Space,
    prices: Prices,
    most_cells: int = MOST_CELLS,
    most_nodes: int = MOST_NODES,
    extra: Sequence[Use] = (),
) -> Solution:
    """The cheapest program of `space` at one set of prices; `extra` factors pin choices.

    Raises:
        PlanError: no assignment is possible at all.
    """
    return SpaceSolver(space, extra, most_cells).solve(prices, most_nodes)


def bound(space: Space, prices: Prices, most_cells: int = MOST_CELLS) -> float:
    """A lower bound on the cost of every program of `space` at one set of prices."""
    return SpaceSolver(space, (), most_cells).bound(prices)
