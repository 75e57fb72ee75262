"""Bounds by ranges of the nodes' shares, where nodes are unlike; see `shardwright.cost.grid.floor`.

For a plan, the range of what the nodes of the first kind have is cut into a few pieces. For a certificate
that is wide even so, ranges of what every kind has are: where that makes the best program of a piece dearest.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np

from shardwright.cost.grid.floor import FEW, Ranges, floors
from shardwright.cost.grid.prices import GridCut, GridStack
from shardwright.cost.share_cost import Floats
from shardwright.synth.grid.pricing import grid_floors
from shardwright.synth.grid.turns import GAIN, GridFound, GridTurns
from shardwright.synth.search.solution import Solution
from shardwright.synth.shares.bounds import ENOUGH

#: Ranges of the nodes' shares that are bounded at most for a plan, and for a certificate that is wide.
MOST_PIECES, _MOST_RAISED = 12, 72

#: Of a range that makes a program no dearer, this part of it counts where two are weighed against each other.
_LITTLE = 1e-4

#: For a bound, or a start, the best program at the floors need not be known better than this.
NEAR = 0.01


def _cut_at(low: float, high: float, share: float) -> float:
    """Where to cut a range: at a share if it is well within, or in the middle."""
    margin = (high - low) / 10
    return share if low + margin < share < high - margin else (low + high) / 2


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

    def run(self, best: GridFound, content_s: float) -> GridFound:
        """The best pair so far, or a better one; the bound of all ranges is that of the turns.

        Args:
            best: the best pair so far.
            content_s: a bound with which to be content, whatever that costs.
        """
        turns = self._turns
        while self._made < MOST_PIECES and not turns.timer.late():
            bound_s, _, piece, assignment = self._queue[0]
            if bound_s >= min(best.cost_s * (1 - ENOUGH), content_s):
                break
            here = float(self._together(best.ratios)[0])
            at = _cut_at(piece.low, piece.high, here)
            heapq.heappop(self._queue)
            for half in piece.halves(at, self._nodes):
                best, found = self._piece(half, assignment, best, content_s)
                self._add(half, bound_s, found)
            turns.bound_s = max(turns.bound_s, self._queue[0][0])
        return best

    def reach(self, best: GridFound, wanted_s: float, most: int = _MOST_RAISED) -> None:
        """Raise the bound, by ranges of the shares of every kind of nodes.

        Args:
            best: the best pair.
            wanted_s: a bound with which to be content.
            most: ranges to bound in all.
        """
        turns = self._turns
        while self._made < most and not turns.timer.late():
            bound_s, _, piece, assignment = self._queue[0]
            if bound_s >= min(wanted_s, best.cost_s * (1 - NEAR)):
                break
            heapq.heappop(self._queue)
            for half in self._halves(piece, assignment, best):
                prices = grid_floors(turns.listed, half)
                self._add(half, bound_s, turns.solve(prices, assignment, NEAR, wanted_s, rounds=1))
            turns.bound_s = max(turns.bound_s, self._queue[0][0])

    def _add(self, piece: Ranges, bound_s: float, found: Solution) -> None:
        """Put a piece, whose bound is that of a larger one at least, into the queue."""
        self._made += 1
        heapq.heappush(self._queue, (max(bound_s, found.bound_s), self._made, piece, found.assignment))

    def _halves(self, piece: Ranges, assignment: Sequence[int], best: GridFound) -> tuple[Ranges, Ranges]:
        """Two ranges that cover one: by units dealt, or else where its best program gets dearest in both."""
        mesh, shares = self._turns.grid.mesh, self._together(best.ratios)
        if len(shares) == 2 or piece.dealt[0] < piece.dealt[1]:
            return piece.halves(_cut_at(piece.low, piece.high, float(shares[0])), self._nodes)
        stack, cuts, weights = self._bill(assignment)

        def seconds(one: Ranges) -> float:
            return float(weights @ floors(stack, cuts, mesh, one))

        here = seconds(piece)
        best_of: tuple[float, tuple[Ranges, Ranges]] | None = None
        for kind, (low, high) in enumerate(piece.of_kinds(len(shares))):
            for at in (_cut_at(low, high, float(shares[kind])), (low + high) / 2):
                halves = piece.cut(kind, at, len(shares))
                more = [max(seconds(half) - here, here * _LITTLE) for half in halves]
                if best_of is None or more[0] * more[1] > best_of[0]:
                    best_of = more[0] * more[1], halves
        assert best_of is not None, "there are kinds"
        return best_of[1]

    def _bill(self, assignment: Sequence[int]) -> tuple[GridStack, Sequence[GridCut], Floats]:
        """The lines of a program, and how often each runs per step."""
        listed = self._turns.listed
        weights: dict[int, float] = {}
        for (line, _, _), weight in self._turns.ledger.lines(assignment, listed.floors).items():
            weights[line] = weights.get(line, 0.0) + weight
        lines = np.array(list(weights), dtype=np.intp)
        return listed.stack().take(lines), [listed.cuts[k] for k in lines], np.array(list(weights.values()))

    def _piece(
        self, piece: Ranges, known: Sequence[int], best: GridFound, content_s: float
    ) -> tuple[GridFound, Solution]:
        """The best program at the floors of a piece, and the best pair so far, which it may improve."""
        turns = self._turns
        prices = grid_floors(turns.listed, piece)
        target_s = min(best.cost_s * (1 - ENOUGH), content_s)
        found = turns.solve(prices, known, NEAR, target_s, rounds=1)
        if found.bound_s < target_s:
            start = self._apart((piece.low + piece.high) / 2)
            ratios, cost_s = turns.best_ratios(found, prices, start)
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

    def _together(self, ratios: Sequence[float]) -> Floats:
        """What the nodes of every kind have of everything."""
        mesh = self._turns.grid.mesh
        found: Floats = np.zeros(len(mesh.kind_counts))
        np.add.at(found, mesh.kind_of[mesh.class_of], np.asarray(ratios))
        return found
