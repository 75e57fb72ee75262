"""Bounds by ranges of the nodes' shares, where nodes are unlike; see `shardwright.cost.grid.floor`."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np

from shardwright.cost.grid.floor import FEW, Ranges
from shardwright.synth.grid.pricing import grid_floors
from shardwright.synth.grid.turns import GAIN, GridFound, GridTurns
from shardwright.synth.search.solve import Solution
from shardwright.synth.shares.bounds import ENOUGH

#: Ranges of the nodes' shares that are bounded at most.
_MOST_PIECES = 12

#: For a bound, or a start, the best program at the floors need not be known better than this.
NEAR = 0.01


class Tightening:
    """Ranges of the shares of a kind of nodes, cut in two again and again; can be taken up again.

    Within a range instructions cannot like just any shares. The one with the least bound is looked at first:
    its best program is a start of its own; then it is cut in two.

    Args:
        turns: the search so far.
        ideal: the best program at the floors of all ranges.
        best: the best pair so far.
    """

    def __init__(self, turns: GridTurns, ideal: Solution, best: GridFound) -> None:
        self._turns = turns
        mesh = turns.grid.mesh
        units = self._few_units(best)
        self._queue = [(ideal.bound_s, 0, Ranges(units=units, dealt=(0, units)), ideal.assignment)]
        self._nodes = int(mesh.kind_counts[0]), int(mesh.kind_counts.sum())
        self._made = 0

    def run(self, best: GridFound, most_s: float) -> GridFound:
        """The best pair so far, or a better one; the bound of all ranges is that of the turns.

        Args:
            best: the best pair so far.
            most_s: beyond this cost a plan is of no use.
        """
        turns = self._turns
        while self._made < _MOST_PIECES and not turns.timer.late():
            bound_s, _, piece, assignment = self._queue[0]
            if bound_s >= min(best.cost_s, most_s) * (1 - ENOUGH):
                break
            heapq.heappop(self._queue)
            middle, here = (piece.low + piece.high) / 2, self._together(best.ratios)
            margin = (piece.high - piece.low) / 10
            at = here if piece.low + margin < here < piece.high - margin else middle
            for half in piece.halves(at, self._nodes):
                best, found = self._piece(half, assignment, best, most_s)
                self._made += 1
                entry = max(bound_s, found.bound_s), self._made, half, found.assignment
                heapq.heappush(self._queue, entry)
            turns.bound_s = max(turns.bound_s, self._queue[0][0])
        return best

    def _piece(
        self, piece: Ranges, known: Sequence[int], best: GridFound, most_s: float
    ) -> tuple[GridFound, Solution]:
        """The best program at the floors of a piece, and the best pair so far, which it may improve."""
        turns = self._turns
        floors = grid_floors(turns.listed, piece)
        target_s = min(best.cost_s, most_s) * (1 - ENOUGH)
        found = turns.solve(floors, known, NEAR, target_s, rounds=1)
        if found.bound_s < target_s:
            start = self._apart((piece.low + piece.high) / 2)
            ratios, cost_s = turns.best_ratios(found, floors, start)
            if cost_s < best.cost_s * (1 - GAIN):
                reached = turns.take(ratios)
                best = reached if reached.cost_s < best.cost_s * (1 - 1e-9) else best
        return best, found

    def _few_units(self, best: GridFound) -> int:
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
