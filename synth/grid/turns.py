"""Search and linear programs in turns on two mesh axes, and what was tried."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

import numpy as np

from shardwright.synth.grid.pricing import GridPriceList, grid_prices
from shardwright.synth.grid.ratios import GridBill
from shardwright.synth.grid.solve import GridSolver, Solvers
from shardwright.synth.prices.tables import Prices
from shardwright.synth.programs.ledger import Ledger
from shardwright.synth.search.narrow.search import MOST_ROUNDS
from shardwright.synth.search.solution import Solution
from shardwright.synth.space.factors import Use
from shardwright.synth.space.space import Space
from shardwright.synth.timer import Timer

_MOST_TURNS = 3

#: A program is as good as the best at its ratios if it costs no more than this part above it.
CLOSE = 5e-4

#: A turn must gain this part of the cost for another to be worth a search.
GAIN = 1e-3


@dataclass(frozen=True, slots=True)
class GridFound:
    """A pair of program and ratios, and the prices at which the program was found."""

    solution: Solution
    prices: Prices
    ratios: tuple[float, ...]
    cost_s: float


class GridTurns:
    """Search and linear programs in turns; remembers what was tried.

    Those of one space and one `extra` have one solver and one ledger: those of turns `like` them.

    Attributes:
        even: the ratios, if no others make sense.
        close: a program is as good as the best at its ratios if it costs no more than this part above it.
        bound_s: what no program costs less than at any ratios.
    """

    def __init__(
        self,
        space: Space,
        listed: GridPriceList,
        timer: Timer,
        extra: tuple[Use, ...],
        solvers: Solvers | None = None,
        like: GridTurns | None = None,
        before: GridSolver | None = None,
    ) -> None:
        self.space, self.timer = space, timer
        self.grid, self.listed = listed.grid, listed
        self.solver = GridSolver(space, extra, solvers, before) if like is None else like.solver
        self.ledger = Ledger((*space.uses, *extra)) if like is None else like.ledger
        self.expanded = self.searches = 0
        mesh = self.grid.mesh
        alike = len(self.grid.model.types) == 1 and len(set(mesh.nodes)) == 1
        self.even = mesh.ratios(*mesh.even()) if alike else None
        self.bound_s, self.close = 0.0, CLOSE
        self._seen: dict[tuple[float, ...], tuple[Solution, Prices]] = {}
        self._latest: tuple[int, ...] | None = None

    def solve(
        self,
        prices: Prices,
        known: Sequence[int] | None = None,
        enough: float = CLOSE,
        target_s: float = inf,
        rounds: int = MOST_ROUNDS,
    ) -> Solution:
        """The best program at some prices; see `DualSolver.solve`."""
        with self.timer.search():
            solution = self.solver.solve(prices, self.timer.late, known, enough, target_s, rounds=rounds)
        self.expanded, self.searches = self.expanded + solution.expanded, self.searches + 1
        self._latest = solution.assignment
        return solution

    def forget(self) -> None:
        """Search again at ratios that were tried."""
        self._seen.clear()

    def prices(self, ratios: tuple[float, ...]) -> Prices:
        """At some ratios; what was worked out at even ones serves a step's rewritings, too."""
        return self.listed.even if ratios == self.even else grid_prices(self.listed, ratios)

    def search(self, ratios: tuple[float, ...], rounds: int = MOST_ROUNDS) -> tuple[Solution, Prices]:
        """The best program at some ratios, or a good one after few rounds; see `DualSolver.solve`."""
        if ratios not in self._seen:
            prices = self.prices(ratios)
            found = self._near(prices) or self.solve(prices, self._latest, rounds=rounds)
            self._seen[ratios] = found, prices
        return self._seen[ratios]

    def _near(self, prices: Prices) -> Solution | None:
        """The latest program, where a bound at any ratios says that there is hardly a better one."""
        if self._latest is None or not self.bound_s:
            return None
        with self.timer.search():
            prices.prepare(self.solver.factors)
            lines = self.ledger.lines(self._latest, prices)
            seconds = sum(weight * float(prices.seconds[line]) for (line, _, _), weight in lines.items())
        if self.bound_s < seconds * (1 - self.close):
            return None
        return Solution(self._latest, seconds, min(self.bound_s, seconds), 0, 0)

    def best_ratios(
        self, solution: Solution, prices: Prices, start: tuple[float, ...]
    ) -> tuple[tuple[float, ...], float]:
        """The ratios at which a program costs least, and what it costs there."""
        with self.timer.ratios():
            weights: dict[int, float] = {}
            for (line, _, _), weight in self.ledger.lines(solution.assignment, prices).items():
                weights[line] = weights.get(line, 0.0) + weight
            lines = np.array(list(weights), dtype=np.intp)
            cuts = [self.listed.cuts[k] for k in lines]
            found = GridBill(self.listed.stack().take(lines), cuts, list(weights.values()), self.grid.mesh)
            ratios = found.best_ratios(start)
            return ratios, found.seconds(ratios)

    def take(self, ratios: tuple[float, ...], rounds: int = MOST_ROUNDS) -> GridFound:
        """Turns from `ratios` on, until it no longer gets better; for `rounds` see `search`."""
        reached: GridFound | None = None
        for _ in range(_MOST_TURNS):
            solution, prices = self.search(ratios, rounds)
            ratios, cost_s = self.best_ratios(solution, prices, ratios)
            if reached is not None and not cost_s < reached.cost_s * (1 - 1e-6):
                break
            reached = GridFound(solution, prices, ratios, cost_s)
            if cost_s > solution.seconds * (1 - GAIN):  # other ratios make little difference to it
                break
            if self.timer.late() or len(self.grid.model.types) == 1:
                break
        assert reached is not None
        return reached
