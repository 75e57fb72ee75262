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
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

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
    count = 0

    def bounded(below: float, some: Sequence[tuple[float, float]]) -> Iterator[_Piece]:
        """Pieces with a first bound; each is looked at closely when it is the least of all."""
        nonlocal count
        several = Prices.of_all([Prices.floors(listed, ends) for ends in some])
        for number, bound_s in enumerate(solver.bounds(several)):
            count += 1
            yield _Piece(max(below, float(bound_s)), count, some[number], several.one(number))

    pieces = list(bounded(loose, tuple(_pieces(devices))))
    heapq.heapify(pieces)
    while pieces[0].bound_s < cost_s and not stop():
        piece = heapq.heappop(pieces)
        if piece.prices is not None:
            found = max(piece.bound_s, solver.bound(piece.prices, stop))
            heapq.heappush(pieces, piece._replace(bound_s=found, prices=None))
            continue
        if len(pieces) + 1 == most or piece.bound_s >= cost_s * (1 - enough):
            return min(piece.bound_s, cost_s)
        low, high = piece.ends
        middle = (low * high) ** 0.5
        for half in bounded(piece.bound_s, ((low, middle), (middle, high))):
            heapq.heappush(pieces, half)
    return min(pieces[0].bound_s, cost_s)


class _Piece(NamedTuple):
    """A range of the largest ratio.

    Attributes:
        bound_s: of every plan in it.
        number: which piece it is.
        ends: of the range.
        prices: at which it can be bounded better; None once it was.
    """

    bound_s: float
    number: int
    ends: tuple[float, float]
    prices: Prices | None


def _pieces(devices: int) -> Iterator[tuple[float, float]]:
    """The range of the largest ratio, cut; the even ratio is the least that it can be."""
    ends = [end / devices for end in _ENDS if end < devices]
    yield from zip(ends, [*ends[1:], 1.0], strict=True)
