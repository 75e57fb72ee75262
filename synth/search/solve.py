"""The best program at one set of prices: fold, prune, eliminate, and A* back through what was eliminated.

Where the tables of what is left would not fit, it is narrowed down (`shardwright.synth.search.narrow`).

Pruning sees only a choice's own terms. Choices tied to few others are therefore eliminated first; what
is left has fewer choices, tied by messages that know of everything behind them, and is folded and pruned
again. Each such round is a *stage*; the last one eliminates all that is left.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from shardwright.cost.share_cost import Floats
from shardwright.synth.search.astar import DIVES, MOST_NODES, Layer, a_star, in_order
from shardwright.synth.search.eliminate import eliminate
from shardwright.synth.search.fold import Scope, cook, fold, rounded
from shardwright.synth.search.narrow.narrowing import Narrowing
from shardwright.synth.search.prune import Kept
from shardwright.synth.search.solution import Rival, Solution, unbeaten, width_of
from shardwright.synth.search.stages import AT_ONCE, Core, Stage, distinct, original

#: The smallest of the tables that are tried before exact ones, see `_SMALLER`.
FIRST_CELLS = 1 << 16

#: Largest table of an exact bucket; beyond it mini-buckets keep the heuristic admissible, and A* searches.
MOST_CELLS = 1 << 23

#: Smaller tables are tried first: mini-buckets of so many cells often guide A* nearly as well as exact ones,
#: at a fraction of the time. So many nodes, beyond twice the shortest path, say that they do not; more where
#: exact tables are so large that filling them takes as long (a node takes about as long as `_CELLS` of them).
_SMALLER = (FIRST_CELLS, 1 << 19, 1 << 21)
_PATIENCE = 400
_CELLS = 1 << 12

#: Tables together no larger than this are filled as they are, where smaller ones might say enough.
_A_GLANCE = 1 << 22

#: Where so few nodes are allowed that a program is a guess, it may cost this part more than the bound.
_A_GUESS = 0.01

#: Where a program is wanted, and exact tables are together no larger than this, no small ones are tried:
#: those that A* is not guided well enough by take longer, one after another. Only the few largest tables are
#: split at first, which loses next to nothing.
_EXACT, _NEARLY_EXACT = 1 << 27, 1 << 22

#: Before these, where they are together larger than `AT_ONCE`, somewhat smaller ones: they guide A* as well,
#: or not at all. It is seen to get lost before it has expanded so many nodes more than the shortest path has.
_A_TRY, _STRAYED = 1 << 20, 64

#: Whether anything costs less than an assignment that there is already is asked of tables up to this size
#: first: where exact ones are together no larger than `AT_ONCE`, they hardly ever lose anything.
_A_RIVAL = 1 << 18

#: Tables for several prices that are together no larger than this are filled at once.
_TOGETHER = 1 << 20

#: See `Solver`.
STAGES = ((3, 1 << 14), (4, 1 << 15))


class Solver:
    """Solves one problem at any prices; what does not depend on prices is done once. `first` is the problem.

    Args:
        domains: of every choice, what tells it from others.
        sizes: values of every choice.
        uses: factor (by number) and the choices on its axes.
        most_cells: largest table of an exact bucket.
        stages: of every stage before the last, most ties of a choice to eliminate, and its largest table.

    Attributes:
        level: the least size of tables that was not seen to be too small, by its number.
        cells: of all exact tables, when a program was looked for last.
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
        self.level = self.cells = 0
        self._solutions: dict[bytes, Solution | None] = {}
        self._narrowing = Narrowing()
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
            cooked = cook(stage.folded, distinct(elimination))
        return Core(layers, stage, cooked)

    def layers(self, tables: Sequence[Floats], most_cells: int | None = None) -> list[Layer]:
        """All stages at the prices of `tables`, with buckets of at most `most_cells`."""
        most_cells = self._most_cells if most_cells is None else most_cells
        core = self.core(tables, most_cells)
        return core.finish(core.pruned(), most_cells)

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
        core: Core | None = None,
    ) -> float:
        """The least cost of any assignment, or a lower bound: `enough`, or as far as the search gets.

        Where exact tables are large, whether smaller ones say enough already is found out first, the smallest
        first. `core` is that of these tables, where it is known.
        """
        known = self._known(tables)
        if known in self._solutions:
            found = self._solutions[known]
            return math.inf if found is None else found.bound_s
        core = core or self.core(tables)
        kept = core.pruned()
        all_cells = core.cells(kept, self._most_cells)
        too_large = self._too_large(core, kept, all_cells)
        glances: tuple[int, ...] = ()
        if enough < math.inf and all_cells > _A_GLANCE:
            glances = self._levels[: 1 if all_cells <= AT_ONCE or too_large else -1]
        for most_cells in (*glances, *(self._levels[-1:] if all_cells <= AT_ONCE else ())):
            layers = core.finish(kept, most_cells)
            bound_s = sum(float(layer.elimination.constant) for layer in layers)
            if bound_s >= enough or not any(layer.elimination.tape.split for layer in layers):
                return bound_s
        found = self._solved(core, kept, MOST_NODES, stop, target_s=enough)
        if found is None or not found.bound_s < found.seconds:
            self._solutions[known] = found
        return math.inf if found is None else found.bound_s

    def bounds(self, tables: Sequence[Floats], most_cells: int) -> tuple[Floats, Core]:
        """What no assignment costs less than at each of several prices, without large tables.

        Args:
            tables: one per factor, with an axis of prices in front where they differ.
            most_cells: largest table.

        Returns:
            The bounds, and the core of all prices together, of which `Core.one` makes that of one.
        """
        core = self.core(tables)
        # That much the tables say of most prices. Looking for values that none wants would take longer.
        layers = core.finish(Kept(core.folded, core.sizes, core.cooked), most_cells)
        bounds = sum((layer.elimination.constant for layer in layers), np.zeros(()))
        return np.asarray(bounds), core

    def solve(
        self,
        tables: Sequence[Floats],
        most_nodes: int = MOST_NODES,
        stop: Callable[[], bool] = lambda: False,
        core: Core | None = None,
        rival: Rival | None = None,
    ) -> Solution | None:
        """The cheapest assignment; None where all of them are impossible. `core`: see `least`.

        It is the `rival`, and nothing is searched for, where none is seen to cost less.
        """
        known = self._known(tables)
        if known not in self._solutions:
            core = core or self.core(tables)
            kept = core.pruned()
            found = self._solved(core, kept, most_nodes, stop, rival)
            if found is not None and found.bound_s < found.seconds:
                return found  # more nodes, or more time, would say more
            self._solutions[known] = found
        return self._solutions[known]

    def solve_each(
        self, tables: Sequence[Floats], count: int, most_nodes: int, stop: Callable[[], bool]
    ) -> list[Solution | None]:
        """`solve` at each of several prices; small tables are filled for all of them together.

        Args:
            tables: one per factor, with an axis of prices in front where they differ.
            count: of the prices.
            most_nodes: see `solve`.
            stop: asked now and then whether to leave it at what was found.
        """
        core = self.core(tables)
        kept = Kept(core.folded, core.sizes, core.cooked)
        if core.cells(kept, self._most_cells) * count > _TOGETHER or core.tape(kept, self._most_cells).split:
            each = [core.one(number) for number in range(count)]
            return [self._solved(one, one.pruned(), most_nodes, stop) for one in each]
        layers, found = core.finish(kept, self._most_cells), list[Solution | None]()
        for number in range(count):
            mine = [replace(layer, elimination=layer.elimination.one(number)) for layer in layers]
            one, width = a_star(mine), width_of(mine)
            found.append(one and Solution(one.assignment, one.cost, one.bound, one.expanded, width))
        return found

    @staticmethod
    def _known(tables: Sequence[Floats]) -> bytes:
        """Equal for equal tables: parts of a fleet, and ranges of ratios, often have the same prices."""
        digest = hashlib.blake2b(digest_size=16)
        for table in tables:
            digest.update(table.tobytes())
        return digest.digest()

    def _too_large(self, core: Core, kept: Kept, all_cells: int) -> bool:
        """Whether exact tables of what is left, of so many cells together, would not fit."""
        return all_cells > AT_ONCE and core.tape(kept, self._most_cells).split

    def _solved(
        self,
        core: Core,
        kept: Kept,
        most_nodes: int,
        stop: Callable[[], bool],
        rival: Rival | None = None,
        target_s: float = math.inf,
    ) -> Solution | None:
        self.cells = all_cells = core.cells(kept, self._levels[-1])
        if rival is not None and _A_GLANCE < all_cells <= AT_ONCE and self._levels[-1] > _A_RIVAL:
            same = unbeaten(rival, core.finish(kept, _A_RIVAL))
            if same is not None:
                return same
        levels = self._levels[self.level :]
        if all_cells <= _EXACT:
            levels = (*([_NEARLY_EXACT] if self._levels[-1] > _NEARLY_EXACT else []), self._levels[-1])
            if all_cells > AT_ONCE and levels[0] > _A_TRY and most_nodes >= MOST_NODES:
                levels = (_A_TRY, *levels)
        # Tables that are not much too large make guesses as good, and guide A* straight on or nowhere.
        narrow = self._too_large(core, kept, all_cells) and (all_cells > _EXACT or most_nodes >= MOST_NODES)
        if narrow:
            levels = (_A_TRY,) if all_cells <= _EXACT and self._levels[-1] > _A_TRY else ()
        for most_cells in levels:
            layers = core.finish(kept, most_cells)
            same = None if rival is None else unbeaten(rival, layers)
            if same is not None:
                return same
            shortest = sum(len(layer.elimination.tape.buckets) for layer in layers)
            # The longer a node's list of choices, the longer a node takes.
            patience = all_cells // (_CELLS + len(core.folded.class_of))
            # All levels together take no more of them.
            tried = 2 if all_cells <= _EXACT else len(self._levels) - 1 or 1
            patience = _PATIENCE + patience // tried
            nodes = shortest + _STRAYED if most_cells == _A_TRY else 2 * shortest + patience
            # Who allows no more nodes than that wants a guess: nearly exact tables do.
            last = most_cells == self._levels[-1] or (most_cells == _NEARLY_EXACT and most_nodes <= nodes)
            nodes = most_nodes if last else nodes
            found = a_star(layers, nodes, stop, DIVES if last else 0)
            if found is not None and not found.assignment and stop():
                found = a_star(layers, 0)
            if found is None:
                return None
            if found.assignment or last:
                return Solution(found.assignment, found.cost, found.bound, found.expanded, width_of(layers))
            if most_cells in self._levels:
                self.level = self._levels.index(most_cells) + 1  # other prices will hardly be easier
        assert narrow, "else there is a last level"
        known = None if rival is None else rival.assignment
        enough = 0.0 if most_nodes >= MOST_NODES else _A_GUESS
        return self._narrowing.solve(core, stop, known, enough, target_s)
