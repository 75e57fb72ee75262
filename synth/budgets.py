"""Programs within the devices' memory, and what none of them can be cheaper than.

Memory enters the search as rent (`synth/rent.py`): seconds per byte on top of the prices. More rent makes
programs smaller and dearer. At the floors of all prices, with rent, the least program bounds the cost of
every one that fits, whatever its ratios and however many. The best rent for that is found by ascent.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from shardwright.cost.model import CostModel
from shardwright.ir.graph import Graph
from shardwright.synth.factors import Use
from shardwright.synth.price_list import PriceList
from shardwright.synth.pricing import Prices
from shardwright.synth.rent import Rents, most_shares
from shardwright.synth.search import MOST_NODES
from shardwright.synth.solve import Solution, SpaceSolver
from shardwright.synth.space import Space

#: Rents tried, as multiples of (cost of the best program / memory of all devices), from the least on.
SCALES = tuple(4.0**k for k in range(-4, 8))

#: Times that the range of rents around the least one that helps is cut in two.
HALVINGS = 4

_ASCENTS = 10

#: Nodes that a step of the ascent expands at most; where that leaves its bound wider than this part of it,
#: the best step is taken again with all there are.
_FEW_NODES, _LOOSE = 1000, 0.002


@dataclass(frozen=True, slots=True)
class Limits:
    """Memory of a fleet.

    Attributes:
        nbytes: per device.
        smallest: a device with the least memory.
    """

    nbytes: tuple[float, ...]
    smallest: int

    @staticmethod
    def of(model: CostModel) -> Limits:
        """Of the devices of a model."""
        found = tuple(float(device.type.memory_bytes) for device in model.fleet.devices)
        return Limits(found, int(np.argmin(found)))


class Renting:
    """Solves a space under prices and rent.

    Args:
        space: the programs.
        graph: the step.
        limits: memory of the devices.
        extra: factors that pin choices.
        ideal: the cheapest program at the floors of all prices, if it is known.

    Attributes:
        helped: the last scale (by its number among `SCALES`) at which a program fitted; 0 before one did.
        unit_s: what a scale of one is, per byte; 0 before rent was asked for.
    """

    def __init__(
        self,
        graph: Graph,
        space: Space,
        limits: Limits,
        extra: Sequence[Use] = (),
        ideal: Solution | None = None,
    ) -> None:
        self.graph, self.limits, self._ideal = graph, limits, ideal
        self.helped = 0
        self.unit_s = 0.0
        self.rents = rents = Rents(graph, space)
        self._space, self._extra = space, extra
        self._solver = SpaceSolver(space, (*extra, *rents.uses))

    def solve(
        self, prices: Prices, ratios: Sequence[float], rent_s: float, stop: Callable[[], bool]
    ) -> Solution:
        """The cheapest program at some ratios with `rent_s` per byte on all devices, and on the smallest."""
        share = ratios[self.limits.smallest]
        devices = len(self.limits.nbytes)
        tables = self.rents.tables(rent_s, rent_s * devices, devices, share)
        return self._solver.solve(prices, stop=stop, rents=tables)

    def in_order(
        self, prices: Prices, ratios: Sequence[float], rent_s: float
    ) -> Iterator[tuple[tuple[int, ...], float]]:
        """All programs by what they cost with `rent_s` per byte on all devices, the least first."""
        solver = SpaceSolver(self._space, (*self._extra, *self.rents.uses), stages=())
        devices = len(self.limits.nbytes)
        tables = self.rents.tables(rent_s, 0.0, devices, ratios[self.limits.smallest])
        return solver.in_order(prices, tables)

    def bound_within(
        self, listed: PriceList, loose_s: float, cost_s: float, stop: Callable[[], bool]
    ) -> float:
        """A lower bound on the cost of every program that fits, whatever its ratios.

        Args:
            listed: the prices.
            loose_s: a bound already.
            cost_s: of a program that fits.
            stop: asked before every step whether to leave it at that.
        """
        limits, rents = self.limits, self.rents
        devices = len(limits.nbytes)
        if most_shares(self.graph, limits.nbytes).sum() < 1 - 1e-9:
            return math.inf
        # Shares of state may be other ones than those of computing: memory bounds their bytes, not each.
        floors = Prices.floors(listed)
        best = loose_s
        scale = np.array([cost_s / sum(limits.nbytes), cost_s / min(limits.nbytes)])
        at, step = np.zeros(2), 1.0
        loose: tuple[float, float] | None = None  # the best step that was not searched to the end

        def reached(most_nodes: int) -> tuple[Solution, float]:
            tables = rents.floors(at[0], at[1], devices)
            found = self._solver.solve(floors, most_nodes, stop, tables)
            return found, found.bound_s + rents.constant_s(at[0], at[1], limits.nbytes)

        for ascent in range(_ASCENTS):
            if stop() or best >= cost_s * (1 - 1e-3):
                break
            if not ascent and self._ideal is not None:
                found, value = self._ideal, self._ideal.bound_s
            else:
                found, value = reached(_FEW_NODES)
            if value > best:
                wide = found.bound_s < found.seconds * (1 - _LOOSE)
                best, loose = value, (at[0], at[1]) if wide else None
            # Polyak's step: as if the optimum were the cost of the program at hand.
            excess = np.array(rents.excess_bytes(found.assignment, limits.nbytes)) * scale
            direction = np.where((at <= 0) & (excess < 0), 0.0, excess)
            norm = float(direction @ direction)
            if not norm:
                break
            at = np.maximum(at + scale * step * max(cost_s - value, 0.0) * direction / norm, 0.0)
            step *= 0.9
        if loose is not None and best < cost_s * (1 - 1e-3) and not stop():
            at = np.array(loose)
            best = max(best, reached(MOST_NODES)[1])
        return min(best, cost_s)
