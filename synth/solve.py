"""The best program at one set of prices: fold, prune, eliminate, and A* back through what was eliminated.

Pruning sees only a choice's own terms. Choices tied to few others are therefore eliminated first; what
is left has fewer choices, tied by messages that know of everything behind them, and is folded and pruned
again. Each such round is a *stage*; the last one eliminates all that is left.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
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
from shardwright.synth.search import MOST_NODES, Layer, a_star
from shardwright.synth.space import Space

#: Largest table of an exact bucket; beyond it mini-buckets keep the heuristic admissible, and A* searches.
MOST_CELLS = 1 << 23

#: Smaller tables are tried first: mini-buckets of so many cells often guide A* nearly as well as exact ones,
#: at a fraction of the time. Nodes beyond the shortest path say that they do not.
_SMALLER = (1 << 16, 1 << 19)
_PATIENCE = 400

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

    A tape serves all prices under which no class is open that it holds settled, and no table outgrows what
    a bucket may have.
    """

    folded: Folded
    room: list[int] = field(default_factory=list[int])
    order: list[int] = field(default_factory=list[int])
    tapes: dict[int, Tape] = field(default_factory=dict[int, Tape])
    following: Stage | None = None

    def prepare(self, sizes: Sequence[int], simple: tuple[int, int] | None, most_cells: int) -> Tape:
        """The tape for these sizes; `simple` says which choices to eliminate, None for all."""
        tape = self.tapes.get(most_cells)
        if tape is not None and self._serves(tape, sizes, most_cells):
            return tape
        room = [max(pair) for pair in zip(sizes, self.room or sizes, strict=True)]
        if room != self.room:
            scopes = live(self.folded, room)
            sized = [room[kind] for kind in self.folded.class_of]
            self.order = full_order(sized, scopes) if simple is None else simple_order(sized, scopes, *simple)
            self.room, self.following = room, None
            self.tapes.clear()
        tape = self.tapes[most_cells] = record(self.folded, room, self.order, most_cells)
        return tape

    @staticmethod
    def _serves(tape: Tape, sizes: Sequence[int], most_cells: int) -> bool:
        if any(size > 1 and kind not in tape.open for kind, size in enumerate(sizes)):
            return False
        return all(math.prod([sizes[k] for k in step.kinds]) <= most_cells for step in tape.operations)

    def next(self, tape: Tape) -> Stage:
        """What is left, folded again; its factors are the sources of `tape.left`, in order of appearance."""
        if self.following is None:
            numbers: dict[object, int] = {}
            uses = [(numbers.setdefault(source, len(numbers)), scope) for source, scope in tape.left]
            present = {v for _, scope in uses for v in scope}
            # Choices that are done with stay, for the numbers' sake, in classes apart.
            kinds = [(kind, v in present) for v, kind in enumerate(self.folded.class_of)]
            self.following = Stage(fold(kinds, uses))
        return self.following


@dataclass(frozen=True, slots=True)
class Core:
    """A problem whose simple choices have been eliminated.

    Attributes:
        done: the stages so far.
        stage: what is left.
        sizes: values of every class that is left.
        cooked: table of every recipe.
    """

    done: Sequence[Layer]
    stage: Stage
    sizes: Sequence[int]
    cooked: Sequence[Floats]

    @property
    def folded(self) -> Folded:
        """Choices and terms that are left."""
        return self.stage.folded

    @property
    def constant(self) -> float:
        """What the choices eliminated so far cost at least, apart from what the tables say."""
        return sum(layer.elimination.constant for layer in self.done)

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
        pruned: whether to prune before each of them. Where not, what is left does not depend on prices.
    """

    def __init__(
        self,
        domains: Sequence[Hashable],
        sizes: Sequence[int],
        uses: Sequence[tuple[int, Scope]],
        most_cells: int = MOST_CELLS,
        stages: Sequence[tuple[int, int]] = STAGES,
        *,
        pruned: bool = True,
    ) -> None:
        self._pruned = pruned
        self.first = fold(domains, uses)
        self._start = Stage(self.first)
        self._sizes = [sizes[members[0]] for members in self.first.classes]
        self._most_cells = most_cells
        self._levels = (*(cells for cells in _SMALLER if cells < most_cells), most_cells)
        self._level = 0
        # Only the last stage may split buckets: what is pruned after a split is pruned by a relaxation.
        self._stages = tuple((degree, min(cells, most_cells)) for degree, cells in stages)

    def core(self, tables: Sequence[Floats], most_cells: int | None = None) -> Core:
        """All stages but the last at the prices of `tables`, one per factor: what is left to be decided."""
        most_cells = self._most_cells if most_cells is None else most_cells
        stage, layers = self._start, list[Layer]()
        cooked, sizes = rounded(stage.folded, cook(stage.folded, tables)), self._sizes
        for simple in self._stages:
            folded = stage.folded
            kept = prune(folded, sizes, cooked) if self._pruned else Kept(folded, sizes, cooked)
            tape = stage.prepare([len(values) for values in kept.values], simple, most_cells)
            elimination = eliminate(tape, kept)
            layers.append(Layer(folded.class_of, original(folded, kept.values, layers), elimination))
            stage = stage.next(tape)
            cooked = cook(stage.folded, _distinct(elimination))
            before = [folded.class_of[members[0]] for members in stage.folded.classes]
            sizes = [kept.size(kind) for kind in before]
        return Core(layers, stage, sizes, cooked)

    def layers(self, tables: Sequence[Floats], most_cells: int | None = None) -> list[Layer]:
        """All stages at the prices of `tables`, with buckets of at most `most_cells`."""
        most_cells = self._most_cells if most_cells is None else most_cells
        core = self.core(tables, most_cells)
        return core.finish(prune(core.folded, core.sizes, core.cooked), most_cells)

    def bound(self, tables: Sequence[Floats]) -> float:
        """What no assignment costs less than (the least cost itself unless a bucket was split)."""
        return sum(layer.elimination.constant for layer in self.layers(tables))

    def solve(
        self,
        tables: Sequence[Floats],
        most_nodes: int = MOST_NODES,
        stop: Callable[[], bool] = lambda: False,
    ) -> Solution | None:
        """The cheapest assignment; None where all of them are impossible."""
        for most_cells in self._levels[self._level :]:
            layers = self.layers(tables, most_cells)
            shortest = sum(len(layer.elimination.tape.buckets) for layer in layers)
            last = most_cells == self._levels[-1]
            nodes = most_nodes if last else min(most_nodes, shortest + _PATIENCE)
            found = a_star(layers, nodes, stop)
            if found is None:
                return None
            width = max(layer.elimination.tape.width for layer in layers)
            solution = Solution(found.assignment, found.cost, found.bound, found.expanded, width)
            if found.bound == found.cost or last or stop():
                return solution
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

    def __init__(self, space: Space, extra: Sequence[Use] = (), most_cells: int = MOST_CELLS) -> None:
        numbers: dict[Factor, int] = {}
        uses = [(numbers.setdefault(u.factor, len(numbers)), u.scope) for u in (*space.uses, *extra)]
        domains = [choice.domain for choice in space.choices]
        self.factors = tuple(numbers)
        self.solver = Solver(domains, [len(domain) for domain in domains], uses, most_cells)

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
        tables = prices.tables(self.factors)
        if rents:
            tables = [rents.get(factor, table) for factor, table in zip(self.factors, tables, strict=True)]
        found = self.solver.solve(tables, most_nodes, stop)
        if found is None:
            raise PlanError(
                place="search",
                reason="no program of this space carries out the step",
                remedy="Please report the step: its rules contradict each other",
            )
        return found

    def bound(self, prices: Prices, stop: Callable[[], bool] = lambda: False) -> float:
        """A lower bound on the cost of every program at `prices` (the least cost, where A* gets there)."""
        found = self.solver.solve(prices.tables(self.factors), stop=stop)
        return math.inf if found is None else found.bound_s


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
