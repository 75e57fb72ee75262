"""The best program on two mesh axes at one set of prices.

Choices tied to few others are eliminated as on one axis. Of what is left, the *core*, exact tables would not
fit: it is narrowed down (`shardwright.synth.search.narrow`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TypeAlias

from shardwright.cost.share_cost import Floats
from shardwright.synth.grid.inherited import Inherited
from shardwright.synth.prices.tables import Prices
from shardwright.synth.search.fold import Scope
from shardwright.synth.search.narrow.narrowing import Narrowing
from shardwright.synth.search.narrow.search import MOST_CELLS, MOST_ROUNDS
from shardwright.synth.search.solution import Solution, existing
from shardwright.synth.search.solve import Solver
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
        self._narrowing = Narrowing()

    def inherit(self, space: Space, other: Space, solver: DualSolver) -> None:
        """Begin with what is known of another space, if that was searched: see `Inherited`."""
        known = solver._narrowing
        if known.stage is not None and known.latest:
            found = Inherited.of(space, other, known.stage, known.memory, known.latest)
            self._narrowing.begin_with(None if found is None else found.hand_on)

    def solve(
        self,
        tables: Sequence[Floats],
        stop: Callable[[], bool] = lambda: False,
        known: Sequence[int] | None = None,
        enough: float = 0.0,
        target_s: float = math.inf,
        rounds: int = MOST_ROUNDS,
    ) -> Solution | None:
        """The cheapest assignment at the tables of every factor; see `Narrowing.solve`."""
        return self._narrowing.solve(self._solver.core(tables), stop, known, enough, target_s, rounds)


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
        return existing(self._solver.solve(tables, stop, known, enough, target_s, rounds))
