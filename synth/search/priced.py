"""The best program of a space at one set of prices; see `solve.py` for how it is found."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from shardwright.cost.share_cost import Floats
from shardwright.synth.prices.tables import Prices, Several
from shardwright.synth.search.astar import MOST_NODES
from shardwright.synth.search.solution import Rival, Solution, existing
from shardwright.synth.search.solve import FIRST_CELLS, MOST_CELLS, STAGES, Solver
from shardwright.synth.search.stages import Core
from shardwright.synth.space.factors import Factor, Use
from shardwright.synth.space.space import Space

#: Largest table where several prices are worked out together: of more parts of a fleet than are worth a
#: closer look.
_SEVERAL_CELLS = 1 << 14


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
        #: Of prices that were bounded together: these, and the core of all.
        self._together: list[tuple[tuple[Prices, ...], Core]] = []

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
        rival: Rival | None = None,
    ) -> Solution:
        """The cheapest program at `prices`, with `rents` in place of the tables of some factors.

        For `rival` see `Solver.solve`.

        Raises:
            PlanError: no assignment is possible at all.
        """
        core = None if rents else self._core(prices)
        return existing(self.solver.solve(self._tables(prices, rents), most_nodes, stop, core, rival))

    def solve_each(
        self,
        prices: Prices,
        rents: Mapping[Factor, Floats],
        count: int,
        most_nodes: int = MOST_NODES,
        stop: Callable[[], bool] = lambda: False,
    ) -> list[Solution]:
        """The cheapest program with each of several rents, which are along the first axis of their tables.

        Raises:
            PlanError: no assignment is possible at all.
        """
        found = self.solver.solve_each(self._tables(prices, rents), count, most_nodes, stop)
        return [existing(each) for each in found]

    def _tables(self, prices: Prices, rents: Mapping[Factor, Floats] | None) -> Sequence[Floats]:
        """Of all factors, with `rents` in place of those of some."""
        tables = prices.tables(self.factors)
        if not rents:
            return tables
        return [rents.get(factor, table) for factor, table in zip(self.factors, tables, strict=True)]

    def bounds(self, prices: Prices) -> Floats:
        """A lower bound on the cost of every program at each of several prices (`Prices.of_all`)."""
        found, core = self.solver.bounds(prices.tables(self.factors), _SEVERAL_CELLS)
        assert isinstance(prices.list, Several), "these prices are not several"
        self._together.append((prices.list.prices, core))
        # What costs nothing costs that at all prices.
        return np.broadcast_to(found, len(prices.list.prices))

    def closer(self, prices: Sequence[Prices]) -> list[float]:
        """Better bounds at some of the prices that were bounded together, one after another.

        Larger tables are filled for fewer prices, over those values only that matter at any of them.
        """
        found: dict[int, float] = {}
        for several, core in reversed(self._together):
            numbers = [k for k, each in enumerate(several) if id(each) not in found and each in prices]
            if numbers:
                bounds = np.broadcast_to(core.bounds(numbers, FIRST_CELLS), len(numbers)).tolist()
                found.update(zip([id(several[k]) for k in numbers], bounds, strict=True))
        return [found[id(each)] for each in prices]

    def _core(self, prices: Prices) -> Core | None:
        """The core at prices that were bounded together with others; None at any other prices."""
        for several, core in reversed(self._together):
            for number, each in enumerate(several):
                if each is prices:
                    return core.one(number)
        return None

    def bound(
        self, prices: Prices, stop: Callable[[], bool] = lambda: False, enough: float = math.inf
    ) -> float:
        """A lower bound on the cost of every program at `prices`.

        The least cost, where A* gets there, unless something below it is `enough`.
        """
        return self.solver.least(prices.tables(self.factors), stop, enough, self._core(prices))


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
