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
from collections.abc import Iterator

from shardwright.cost.model import CostModel
from shardwright.synth.factors import Prices
from shardwright.synth.solve import bound
from shardwright.synth.space import Space

#: First pieces: ends in multiples of the even share.
_ENDS = (1.0, 1.2, 2.0, 4.0)


def certify(space: Space, model: CostModel, cost_s: float, enough: float = 0.05, most: int = 6) -> float:
    """A lower bound on the cost of every program of `space` at every ratios, and at most `cost_s`.

    Args:
        space: the programs.
        model: the prices.
        cost_s: cost of a program that exists.
        enough: gap, as a fraction of `cost_s`, with which to be content.
        most: pieces into which the range of the largest ratio is cut at most.
    """
    loose = bound(space, Prices.floors(model))
    if loose >= cost_s * (1 - enough) or len(model.class_of) == 1:
        return min(loose, cost_s)
    pieces = [(max(loose, bound(space, Prices.floors(model, ends))), ends) for ends in _pieces(model)]
    heapq.heapify(pieces)
    while len(pieces) < most and pieces[0][0] < cost_s * (1 - enough):
        below, (low, high) = heapq.heappop(pieces)
        middle = (low * high) ** 0.5
        for ends in ((low, middle), (middle, high)):
            heapq.heappush(pieces, (max(below, bound(space, Prices.floors(model, ends))), ends))
    return min(pieces[0][0], cost_s)


def _pieces(model: CostModel) -> Iterator[tuple[float, float]]:
    """The range of the largest ratio, cut; the even ratio is the least that it can be."""
    devices = len(model.class_of)
    ends = [end / devices for end in _ENDS if end < devices]
    yield from zip(ends, [*ends[1:], 1.0], strict=True)
