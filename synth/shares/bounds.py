"""What no program of the space can be cheaper than, whatever its ratios.

Every instruction is priced at what it costs at least under shares of its own; the optimum at those prices
is a bound. It is weak where instructions ask for opposite shares: an all-to-all costs nothing if one device
has everything, and that is when all else costs most. But a plan has one vector of ratios. The range of its
largest ratio is therefore cut into pieces (branch and bound): within a piece no device has more than its
upper end and some device has no less than its lower end, on every axis up to rounding. Each piece has its
own optimum, and the least of them bounds all.

Lines that need not be cut by the plan's ratios keep their floors there. Where that leaves a wide gap, prices
with labels (`synth/shares/labelled.py`) say which of them are cut by the plan's ratios all the same.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from shardwright.synth.prices.lists import PriceList
from shardwright.synth.prices.tables import Prices
from shardwright.synth.search.priced import SpaceSolver
from shardwright.synth.shares.labelled import LabelledSolver

#: First pieces: ends in multiples of the even share.
_ENDS = (1.0, 1.2, 2.0, 4.0)

#: Gap, as a fraction of the cost, with which to be content.
ENOUGH = 0.05

#: Pieces into which ranges are cut at most where prices have labels, and ends of a piece that is not cut.
_MOST_LABELLED, _NARROW = 16, 1.02

#: Pieces in a row of which labels say nothing new, after which they are not asked for.
_IN_VAIN = 2


class Certificate:
    """A lower bound on the cost of every program of the space at every ratios, raised as far as is asked for.

    Args:
        solver: of the space.
        listed: its prices.
        loose: the optimum at the floors of all prices (`Prices.floors`), a bound already.
        stop: asked before every step whether to leave it at that.
    """

    def __init__(
        self,
        solver: SpaceSolver,
        listed: PriceList,
        loose: float,
        stop: Callable[[], bool] = lambda: False,
    ) -> None:
        self._solver, self._listed, self._stop = solver, listed, stop
        self._count = 0
        #: Pieces since labels last raised a bound.
        self._in_vain = 0
        self._pieces = [_Piece(loose, 0, None, None)]

    @property
    def bound_s(self) -> float:
        """The bound so far."""
        return self._pieces[0].bound_s

    def reach(self, wanted: float, most: int = 6, *, closely: bool = True) -> float:
        """Raise the bound to `wanted`, if cutting the ratios into `most` pieces at most does that.

        Args:
            wanted: seconds.
            most: pieces.
            closely: look closely at pieces, which takes large tables.
        """
        while self.bound_s < wanted and not self._stop():
            piece = heapq.heappop(self._pieces)
            if piece.prices is not None and not closely:
                heapq.heappush(self._pieces, piece)
                break
            if piece.prices is not None:
                self._look_closely(piece, piece.prices, wanted)
            elif piece.ends is None and len(self._listed.model.class_of) > 1:
                self._cut(piece, tuple(_pieces(len(self._listed.model.class_of))))
            elif piece.ends is not None and len(self._pieces) + 1 < most:
                low, high = piece.ends
                middle = (low * high) ** 0.5
                self._cut(piece, ((low, middle), (middle, high)))
            else:
                heapq.heappush(self._pieces, piece)
                break
        return self.bound_s

    def settle(self, cost_s: float) -> float:
        """Make the least bound of a piece exact, where that is below `cost_s`."""
        while self.bound_s < cost_s and self._pieces[0].prices is not None and not self._stop():
            piece = heapq.heappop(self._pieces)
            assert piece.prices is not None
            self._look_closely(piece, piece.prices, cost_s)
        return self.bound_s

    def sharpen(self, solver: LabelledSolver, wanted: float) -> float:
        """Raise the bound to `wanted`, if exact bounds, prices with labels and smaller pieces do that.

        Labels make tables larger: where a search among them ends early, what it says of a piece may be less
        than the exact bound without. After two pieces of which labels say nothing new they are left out.

        Args:
            solver: of the same space with the same factors that pin choices.
            wanted: seconds.
        """
        while self.bound_s < wanted and not self._stop():
            piece = heapq.heappop(self._pieces)
            if piece.ends is None and len(self._listed.model.class_of) > 1:
                self._cut(piece, tuple(_pieces(len(self._listed.model.class_of))))
                continue
            if piece.ends is None:
                heapq.heappush(self._pieces, piece)
                break
            if piece.prices is not None:
                self._look_closely(piece, piece.prices, wanted)
                continue
            low, high = piece.ends
            if not piece.labelled and self._in_vain < _IN_VAIN:
                found = solver.bound(self._listed, piece.ends, self._stop, wanted)
                self._in_vain = 0 if found > piece.bound_s else self._in_vain + 1
                piece = piece._replace(bound_s=max(piece.bound_s, found), prices=None, labelled=True)
                heapq.heappush(self._pieces, piece)
            elif len(self._pieces) + 1 < _MOST_LABELLED and high > low * _NARROW:
                middle = (low * high) ** 0.5
                self._cut(piece, ((low, middle), (middle, high)))
            else:
                heapq.heappush(self._pieces, piece)
                break
        return self.bound_s

    def _look_closely(self, piece: _Piece, prices: Prices, enough: float) -> None:
        found = max(piece.bound_s, self._solver.bound(prices, self._stop, enough))
        # A bound that was enough may be raised further when more is wanted.
        heapq.heappush(
            self._pieces, piece._replace(bound_s=found, prices=prices if found >= enough else None)
        )

    def _cut(self, piece: _Piece, ends: Sequence[tuple[float, float]]) -> None:
        """Put pieces in the place of one, each with a first bound."""
        several = Prices.of_all([Prices.floors(self._listed, each) for each in ends])
        for number, bound_s in enumerate(self._solver.bounds(several)):
            self._count += 1
            found = max(piece.bound_s, float(bound_s))
            heapq.heappush(self._pieces, _Piece(found, self._count, ends[number], several.one(number)))


def certify(
    solver: SpaceSolver, listed: PriceList, loose: float, cost_s: float, enough: float = ENOUGH, most: int = 6
) -> float:
    """A lower bound on the cost of every program of the space at every ratios, and at most `cost_s`.

    Args:
        solver: of the space.
        listed: its prices.
        loose: the optimum at the floors of all prices, a bound already.
        cost_s: cost of a program that exists.
        enough: gap, as a fraction of the cost, with which to be content.
        most: pieces into which the range of the largest ratio is cut at most.
    """
    certificate = Certificate(solver, listed, loose)
    certificate.reach(cost_s * (1 - enough), most)
    return min(certificate.settle(cost_s), cost_s)


class _Piece(NamedTuple):
    """A range of the largest ratio.

    Attributes:
        bound_s: of every plan in it.
        number: which piece it is.
        ends: of the range; None where it is all ratios.
        prices: at which it can be bounded better; None once it was.
        labelled: whether it was bounded at prices with labels.
    """

    bound_s: float
    number: int
    ends: tuple[float, float] | None
    prices: Prices | None
    labelled: bool = False


def _pieces(devices: int) -> Iterator[tuple[float, float]]:
    """The range of the largest ratio, cut; the even ratio is the least that it can be."""
    ends = [end / devices for end in _ENDS if end < devices]
    yield from zip(ends, [*ends[1:], 1.0], strict=True)
