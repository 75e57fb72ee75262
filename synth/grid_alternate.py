"""Program and ratios on two mesh axes: search and linear programs in turns.

As on one axis (`shardwright.synth.alternate`): the first start is the program that is best when every
instruction has the shares it likes most, whose price is the bound; a start ends when it no longer gets
better; the pair that costs least after rounding is kept. Here a device's ratio is the share of its node times
its own in it.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf

import numpy as np

from shardwright.cost.bill import bill
from shardwright.cost.fleet import Fleet
from shardwright.cost.grid_floor import FEW, Ranges
from shardwright.cost.grid_model import GridModel, Settled
from shardwright.cost.model import CostModel
from shardwright.ir.graph import Graph
from shardwright.ir.program import verify
from shardwright.synth.alternate import Synthesis
from shardwright.synth.bounds import ENOUGH
from shardwright.synth.factors import Use
from shardwright.synth.grid_memory import GridRenting
from shardwright.synth.grid_pricing import GridPriceList, grid_floors, grid_prices
from shardwright.synth.grid_ratios import GridBill
from shardwright.synth.grid_solve import MOST_ROUNDS, GridSolver
from shardwright.synth.judge import Judge, Look
from shardwright.synth.ledger import Ledger
from shardwright.synth.pricing import Prices
from shardwright.synth.solve import Solution
from shardwright.synth.space import Space
from shardwright.synth.subfleets import arithmetic_s
from shardwright.synth.timer import Timer
from shardwright.synth.turns import starts

_MOST_TURNS, _MOST_STARTS = 3, 2

#: A program is as good as the best at its ratios if it costs no more than this part above it. For a start the
#: best program at the floors need not be known that well.
CLOSE, _NEAR = 5e-4, 0.01

#: A turn must gain this part of the cost for another to be worth a search.
_GAIN = 1e-3

#: Ranges of the nodes' shares that are bounded at most.
_MOST_PIECES = 12


@dataclass(frozen=True, slots=True)
class _Found:
    solution: Solution
    prices: Prices
    ratios: tuple[float, ...]
    cost_s: float


class _Turns:
    """Search and linear programs in turns; remembers what was tried."""

    def __init__(self, space: Space, model: CostModel, timer: Timer, extra: tuple[Use, ...]) -> None:
        self.space, self.timer = space, timer
        self.grid = GridModel(model)
        self.listed = GridPriceList(self.grid)
        self.solver = GridSolver(space, extra)
        self.ledger = Ledger((*space.uses, *extra))
        self.expanded = self.searches = 0
        mesh = self.grid.mesh
        alike = len(self.grid.model.types) == 1 and len(set(mesh.nodes)) == 1
        #: The ratios, if no others make sense.
        self.even = mesh.ratios(*mesh.even()) if alike else None
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

    def prices(self, ratios: tuple[float, ...]) -> Prices:
        """At some ratios."""
        return grid_prices(self.listed, ratios)

    def search(self, ratios: tuple[float, ...]) -> tuple[Solution, Prices]:
        """The best program at some ratios."""
        if ratios not in self._seen:
            prices = self.prices(ratios)
            self._seen[ratios] = self.solve(prices, self._latest), prices
        return self._seen[ratios]

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

    def take(self, ratios: tuple[float, ...]) -> _Found:
        """Turns from `ratios` on, until it no longer gets better."""
        reached: _Found | None = None
        for _ in range(_MOST_TURNS):
            solution, prices = self.search(ratios)
            ratios, cost_s = self.best_ratios(solution, prices, ratios)
            if reached is not None and not cost_s < reached.cost_s * (1 - 1e-6):
                break
            reached = _Found(solution, prices, ratios, cost_s)
            if cost_s > solution.seconds * (1 - _GAIN):  # other ratios make little difference to it
                break
            if self.timer.late() or len(self.grid.model.types) == 1:
                break
        assert reached is not None
        return reached


def is_mesh(fleet: Fleet) -> bool:
    """Whether two mesh axes are more than one: several nodes, some of which have several devices."""
    return 1 < len(fleet.nodes) < len(fleet.devices)


class GridSearch:
    """Program and ratios on two mesh axes, for one fleet; see the module's docstring.

    Attributes:
        bound_s: what no program costs less than, as far as is known.

    Args:
        graph: the step.
        space: its programs, on the nodes of the model's fleet.
        model: prices on one axis.
        timer: is told where time goes, and says when it is over.
        extra: factors that pin choices.
        look: what says how much memory a program takes; by default the model of `cost/memory.py`.
    """

    def __init__(
        self,
        graph: Graph,
        space: Space,
        model: CostModel,
        timer: Timer,
        extra: tuple[Use, ...] = (),
        look: Look | None = None,
    ) -> None:
        self.graph = graph
        self._judge = Judge(graph, model, look)
        self._extra = extra
        with timer.search():
            self._turns = _Turns(space, model, timer, extra)
            self._floors = grid_floors(self._turns.listed)
        self._ideal: Solution | None = None
        self.bound_s = 0.0

    def arithmetic_s(self) -> float:
        """What the kernels of every program cost at least: a bound that no search is needed for."""
        with self._turns.timer.search():
            self.bound_s = max(self.bound_s, arithmetic_s(self._turns.space, self._floors))
        return self.bound_s

    def bound(self, target_s: float = inf) -> float:
        """What the best program costs when every instruction has the shares it likes most.

        Args:
            target_s: a bound that is good enough.

        Raises:
            PlanError: no program keeps to the pins.
        """
        if self._ideal is None:
            turns, known = self._turns, None
            if turns.even is not None and target_s == inf:
                found, _ = turns.search(turns.even)  # there are no other ratios to start from
                known, target_s = found.assignment, found.seconds * (1 - ENOUGH / 2)
            self._ideal = turns.solve(self._floors, known, _NEAR, target_s, rounds=1)
            self.bound_s = max(self.bound_s, self._ideal.bound_s)
        return self.bound_s

    def plan(self, most_s: float = inf) -> Synthesis:
        """The best pair of program and ratios found.

        Args:
            most_s: beyond this cost it is of no use to make a program smaller until it fits.

        Raises:
            PlanError: no program keeps to the pins.
        """
        self.bound()
        assert self._ideal is not None
        turns = self._turns
        best: _Found | None = None
        for ratios in _starts(turns, self._ideal, self._floors):
            reached = turns.take(ratios)
            if best is None or reached.cost_s < best.cost_s * (1 - 1e-9):
                best = reached
            if turns.timer.late() or self.bound_s >= best.cost_s * (1 - ENOUGH):
                break
        assert best is not None
        return self._settled(self._tightened(best, most_s), most_s)

    def _tightened(self, best: _Found, most_s: float) -> _Found:
        """A better bound, and maybe a better pair, by pieces of the range of the shares of a kind of nodes.

        Within a piece instructions cannot like just any shares. The piece with the least bound is looked at
        first: its best program is a start of its own; then it is cut in two.
        """
        turns, mesh = self._turns, self._turns.grid.mesh
        if len(mesh.kind_counts) == 1:
            return best
        assert self._ideal is not None
        units = self._few_units(best)
        whole = Ranges(units=units, dealt=(0, units))
        queue = [(self.bound_s, 0, whole, self._ideal.assignment)]
        nodes = int(mesh.kind_counts[0]), int(mesh.kind_counts.sum())
        for number in range(_MOST_PIECES // 2):
            bound_s, _, piece, assignment = queue[0]
            if turns.timer.late() or bound_s >= min(best.cost_s, most_s) * (1 - ENOUGH):
                break
            heapq.heappop(queue)
            middle, here = (piece.low + piece.high) / 2, self._together(best.ratios)
            margin = (piece.high - piece.low) / 10
            at = here if piece.low + margin < here < piece.high - margin else middle
            for k, half in enumerate(piece.halves(at, nodes)):
                best, found = self._piece(half, assignment, best, most_s)
                entry = max(bound_s, found.bound_s), 2 * number + k + 1, half, found.assignment
                heapq.heappush(queue, entry)
            self.bound_s = max(self.bound_s, queue[0][0])
        return best

    def _piece(
        self, piece: Ranges, known: Sequence[int], best: _Found, most_s: float
    ) -> tuple[_Found, Solution]:
        """The best program at the floors of a piece, and the best pair so far, which it may improve."""
        turns = self._turns
        floors = grid_floors(turns.listed, piece)
        target_s = min(best.cost_s, most_s) * (1 - ENOUGH)
        found = turns.solve(floors, known, _NEAR, target_s, rounds=1)
        if found.bound_s < target_s:
            start = self._apart((piece.low + piece.high) / 2)
            ratios, cost_s = turns.best_ratios(found, floors, start)
            if cost_s < best.cost_s * (1 - _GAIN):
                reached = turns.take(ratios)
                best = reached if reached.cost_s < best.cost_s * (1 - 1e-9) else best
        return best, found

    def _few_units(self, best: _Found) -> int:
        """Units of the dimension that nodes cut most often into few, whole ones; 0 if there is none."""
        turns = self._turns
        most = FEW * len(turns.grid.mesh.nodes)
        times: dict[int, float] = {}
        for (line, _, _), weight in turns.ledger.lines(best.solution.assignment, best.prices).items():
            units = turns.listed.cuts[line].across
            if 0 < units <= most:
                times[units] = times.get(units, 0.0) + weight * float(best.prices.seconds[line])
        return max(times, key=lambda units: (times[units], units), default=0)

    def _apart(self, first: float) -> tuple[float, ...]:
        """Even ratios of what the nodes of the first kind have, and of what the others have."""
        mesh = self._turns.grid.mesh
        _, inside = mesh.even()
        nodes = mesh.kind_counts[0]
        others = (1 - first) / (mesh.kind_counts.sum() - nodes)
        return mesh.ratios(np.where(mesh.kind_of == 0, first / nodes, others), inside)

    def _together(self, ratios: Sequence[float]) -> float:
        """What the nodes of the first kind have of everything."""
        mesh = self._turns.grid.mesh
        first = mesh.kind_of[mesh.class_of] == 0
        return float(np.asarray(ratios)[first].sum())

    def _settled(self, best: _Found, most_s: float) -> Synthesis:
        """The program of what was found, priced as it will run, within the devices' memory."""
        turns, judge = self._turns, self._judge
        solution, prices = turns.search(best.ratios)
        renting = GridRenting(self.graph, turns.space, turns.grid, judge, turns.timer, self._extra)
        free = renting.candidate(solution, prices, best.ratios)
        fitted = replace(free, over=0.0) if judge.roomy else renting.fitting(free, turns, most_s)
        bound_s = self.bound_s
        if fitted.over <= 1 and fitted.cost_s > free.cost_s * (1 + 1e-6) and fitted.cost_s < most_s:
            bound_s = renting.bound(self._floors, bound_s, fitted.cost_s)
        with turns.timer.search():
            verify(fitted.program, self.graph)
            solution, _ = turns.search(fitted.ratios)
        cost_s = fitted.cost_s
        least = min(solution.bound_s, cost_s)
        gap = max(0.0, 1 - least / cost_s) if cost_s > 0 else 0.0
        notes: list[str] = []
        if fitted.over > 1:
            notes.append("no program found fits into every device's memory")
        if solution.bound_s < solution.seconds * (1 - CLOSE) * (1 - 1e-9):
            notes.append(f"the search stopped early: at these ratios a program could be {gap:.1%} cheaper")
        if turns.timer.late():
            notes.append("the time limit ended the search before all starts were tried")
        return Synthesis(
            fitted.program,
            fitted.ratios,
            cost_s,
            min(bound_s, cost_s),
            gap,
            turns.expanded + renting.expanded,
            turns.searches + renting.searches,
            tuple(notes),
            tuple(bill(fitted.program, self.graph, Settled(turns.grid, fitted.ratios))),
            fitted.memory,
        )


def _starts(turns: _Turns, ideal: Solution, floors: Prices) -> Iterator[tuple[float, ...]]:
    if turns.even is not None:
        yield turns.even
        return
    mesh = turns.grid.mesh
    yield turns.best_ratios(ideal, floors, mesh.ratios(*mesh.even()))[0]
    if len(mesh.kind_counts) > 1:  # further starts come from the ranges of the nodes' shares
        return
    for shares in starts(turns.grid.model)[:_MOST_STARTS]:
        yield tuple(float(shares[c]) for c in turns.grid.model.class_of)
