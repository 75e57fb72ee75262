"""What no program of the space can be cheaper than, whatever its ratios.

Every instruction is priced at what it costs at least under shares of its own; the optimum at those prices
is a bound. It is weak where instructions ask for opposite shares: an all-to-all costs nothing if one device
has everything, and that is when all else costs most. But a plan has one vector of ratios. The range of its
largest ratio is therefore cut into pieces (branch and bound): within a piece no device has more than its
upper end and some device has no less than its lower end, on every axis up to rounding. Each piece has its
own optimum, and the least of them bounds all.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator

from shardwright.synth.pricing import PriceList, Prices
from shardwright.synth.solve import SpaceSolver

#: First pieces: ends in multiples of the even share.
_ENDS = (1.0, 1.2, 2.0, 4.0)

#: Gap, as a fraction of the cost, with which to be content.
ENOUGH = 0.05


def certify(
    solver: SpaceSolver,
    listed: PriceList,
    loose: float,
    cost_s: float,
    enough: float = ENOUGH,
    most: int = 6,
    stop: Callable[[], bool] = lambda: False,
) -> float:
    """A lower bound on the cost of every program of the space at every ratios, and at most `cost_s`.

    Args:
        solver: of the space.
        listed: its prices.
        loose: the optimum at the floors of all prices (`Prices.floors`), a bound already.
        cost_s: cost of a program that exists.
        enough: gap with which to be content.
        most: pieces into which the range of the largest ratio is cut at most.
        stop: asked before every piece whether to leave it at that.
    """
    devices = len(listed.model.class_of)
    if loose >= cost_s * (1 - enough) or devices == 1:
        return min(loose, cost_s)

    def bound(ends: tuple[float, float], below: float) -> tuple[float, tuple[float, float]]:
        return (below if stop() else max(below, solver.bound(Prices.floors(listed, ends), stop))), ends

    pieces = [bound(ends, loose) for ends in _pieces(devices)]
    heapq.heapify(pieces)
    while len(pieces) < most and pieces[0][0] < cost_s * (1 - enough) and not stop():
        below, (low, high) = heapq.heappop(pieces)
        middle = (low * high) ** 0.5
        for ends in ((low, middle), (middle, high)):
            heapq.heappush(pieces, bound(ends, below))
    return min(pieces[0][0], cost_s)


def _pieces(devices: int) -> Iterator[tuple[float, float]]:
    """The range of the largest ratio, cut; the even ratio is the least that it can be."""
    ends = [end / devices for end in _ENDS if end < devices]
    yield from zip(ends, [*ends[1:], 1.0], strict=True)
