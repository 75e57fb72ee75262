"""The best program on two mesh axes at one set of prices.

    simple choices eliminated --> messages --> a bound for every value --> values that may matter --> A*

Choices tied to few others are eliminated as on one axis. Of what is left, the *core*, exact tables would not
fit: messages are passed instead until the bound hardly rises (`shardwright.synth.dual`). Then all values
are left out that cost more than a little above the bound, and what is left is solved exactly. If the program
found costs no more than what was left out does at least, it is the best there is. Else more values are taken
in, up to all that could belong to a cheaper program.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence

import numpy as np

from shardwright.cost.share_cost import Floats
from shardwright.ir.errors import PlanError
from shardwright.synth.dual import Dual
from shardwright.synth.eliminate import eliminate
from shardwright.synth.factors import Factor, Use
from shardwright.synth.fold import Scope, cook, fold
from shardwright.synth.pricing import Prices
from shardwright.synth.prune import Kept, prune
from shardwright.synth.search import Layer, a_star
from shardwright.synth.solve import Core, Solution, Solver, Stage, original
from shardwright.synth.space import Space

#: Most sweeps of messages, and the part of the bound that a round of them must add to go on.
MOST_SWEEPS, ENOUGH = 160, 2e-3

#: Parts of the bound above which values are left out, tried one after another until a program is left.
_MARGINS = (3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.5, 4.0)

#: Most ties of a choice to eliminate before messages are passed, and its largest table.
_STAGES = ((3, 1 << 17), (4, 1 << 20), (4, 1 << 20))

#: Tables of the restricted problem may have so many cells, and A* may expand so many nodes.
_MOST_CELLS, _MOST_NODES = 1 << 22, 4_000


class DualSolver:
    """Solves one problem at any prices; see `shardwright.synth.solve.Solver` for the arguments."""

    def __init__(
        self,
        domains: Sequence[Hashable],
        sizes: Sequence[int],
        uses: Sequence[tuple[int, Scope]],
        stages: Sequence[tuple[int, int]] = _STAGES,
    ) -> None:
        self._solver = Solver(domains, sizes, uses, _MOST_CELLS, stages)

    def solve(self, tables: Sequence[Floats], stop: Callable[[], bool] = lambda: False) -> Solution | None:
        """The cheapest assignment, and a bound on all: equal where the search ended by itself.

        None where every assignment is impossible.
        """
        core = self._solver.core(tables)
        kept = prune(core.folded, core.sizes, core.cooked)
        dual = _dual(core, kept)
        bound = core.constant + dual.rise(MOST_SWEEPS, ENOUGH, stop)
        rest = _Rest(core, kept, dual)
        best: Solution | None = None
        proven = bound
        for margin in (*_MARGINS, math.inf):
            above = margin * abs(bound) if margin < math.inf else math.inf
            if best is not None:
                above = min(above, best.seconds * (1 + 1e-12) - bound)
            found = rest.solve(above, stop)
            if found is None:
                continue
            if best is None or found.seconds < best.seconds:
                best = found
            # A program with anything that was left out costs more than this.
            proven = max(proven, min(bound + above, found.bound_s))
            if best.seconds <= proven or found.bound_s < found.seconds or stop():
                break
        if best is None:
            return None
        proven = best.seconds if best.seconds <= proven * (1 + 1e-9) else proven
        return Solution(best.assignment, best.seconds, proven, best.expanded, best.width)


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

    def solve(self, prices: Prices, stop: Callable[[], bool] = lambda: False) -> Solution:
        """The cheapest program at `prices`.

        Raises:
            PlanError: no assignment is possible at all.
        """
        found = self._solver.solve(prices.tables(self.factors), stop)
        if found is None:
            raise PlanError(
                place="search",
                reason="no program of this space carries out the step",
                remedy="Please report the step: its rules contradict each other",
            )
        return found


class _Rest:
    """What is left of a problem, as its messages say it."""

    def __init__(self, core: Core, kept: Kept, dual: Dual) -> None:
        self.core = core
        uses, tables = dual.reparametrised()
        present = {v for _, scope in uses for v in scope}
        self.stage = Stage(fold([(shade, v in present) for v, shade in enumerate(dual.shade_of)], uses))
        self.cooked = cook(self.stage.folded, tables)
        # Equal layers keep equal values, whichever of them needs one: a program mostly treats them alike.
        excess: dict[int, Floats] = {}
        of_shade = dual.excess()
        for kind, shade in set(zip(core.folded.class_of, dual.shade_of, strict=True)):
            mine = of_shade[shade]
            excess[kind] = np.minimum(excess[kind], mine) if kind in excess else mine
        firsts = [members[0] for members in self.stage.folded.classes]
        self.excess = [excess[core.folded.class_of[v]] for v in firsts]
        self.values = [kept.values[core.folded.class_of[v]] for v in firsts]

    def solve(self, above: float, stop: Callable[[], bool]) -> Solution | None:
        """The best assignment of values that exceed the bound by no more; None where there is none."""
        folded = self.stage.folded
        some = Kept(folded, [len(values) for values in self.values], self.cooked)
        for kind, excess in enumerate(self.excess):
            mine = np.flatnonzero(excess <= above)
            if not len(mine):
                return None
            some.keep(kind, mine)
        tape = self.stage.prepare([len(values) for values in some.values], None, _MOST_CELLS)
        values = [mine[left] for mine, left in zip(self.values, some.values, strict=True)]
        last = Layer(folded.class_of, original(folded, values, self.core.done), eliminate(tape, some))
        found = a_star([*self.core.done, last], _MOST_NODES, stop)
        if found is None:
            return None
        width = max(layer.elimination.tape.width for layer in (*self.core.done, last))
        return Solution(found.assignment, found.cost, found.bound, found.expanded, width)


def _dual(core: Core, kept: Kept) -> Dual:
    folded = core.folded
    numbers: dict[tuple[int, ...], int] = {}
    tables: list[Floats] = []
    uses: list[tuple[int, Scope]] = []
    for scope, recipe in zip(folded.scopes, folded.recipe_of, strict=True):
        kinds = tuple([folded.class_of[v] for v in scope])
        key = kept.key(recipe, kinds)
        if key not in numbers:
            numbers[key] = len(numbers)
            tables.append(kept.table(recipe, kinds))
        uses.append((numbers[key], scope))
    return Dual(folded.class_of, [kept.size(kind) for kind in folded.class_of], uses, tables)
