"""Programs within the devices' memory, and what none of them can be cheaper than.

Memory enters the search as rent (`synth/memory/rent.py`): seconds per byte on top of the prices. More rent
makes programs smaller and dearer. At the floors of all prices, with rent, the least program bounds the cost
of every one that fits, whatever its ratios and however many. The best rent for that is found by ascent.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from shardwright.cost.model import CostModel
from shardwright.cost.share_cost import Floats
from shardwright.ir.graph import Graph, TensorType
from shardwright.ir.placement import Shard, lengths
from shardwright.synth.memory.ascent import Ascent
from shardwright.synth.memory.rent import Part, Rents, most_shares
from shardwright.synth.prices.lists import PriceList
from shardwright.synth.prices.tables import Prices
from shardwright.synth.search.astar import MOST_NODES
from shardwright.synth.search.priced import SpaceSolver
from shardwright.synth.search.solution import Solution
from shardwright.synth.space.factors import Factor, Use
from shardwright.synth.space.space import Space

#: Rents tried, as multiples of (cost of the best program / memory of all devices), from the least on.
SCALES = tuple(4.0**k for k in range(-4, 8))

_ASCENTS = 10

#: Of `Rents.MOMENTS`, two multipliers each: the end pays where the fullest moment has no more to say.
_FIRST = (True, True, False, False)

#: Axes of fewer units per device are not cut by shares alone: four experts on three devices are two on one.
_LUMPY = 8

#: Nodes expanded at most for a program at some rent: what memory costs there is a guess in any case.
_NODES = 1000

#: Where no rents can raise a bound by more than this part of it, it is left at that.
_SETTLED = 0.002

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
        like: what solves the space without rent: it knows how large its tables have to be.

    Attributes:
        helped: the last scale (by its number among `SCALES`) at which a program fitted; 0 before one did.
        enough: whether little rent was seen to do.
        unit_s: what a scale of one is, per byte; 0 before rent was asked for.
        dealt: whether what is cut in few units pays for those that a device is dealt, not for its share.
    """

    def __init__(
        self,
        graph: Graph,
        space: Space,
        limits: Limits,
        extra: Sequence[Use] = (),
        ideal: Solution | None = None,
        like: SpaceSolver | None = None,
    ) -> None:
        self.graph, self.limits, self._ideal = graph, limits, ideal
        self.helped = 0
        self.enough = False
        self.unit_s = 0.0
        self.dealt = False
        #: The best rents so far; bounds hold for every program that fits, and are kept.
        self._ascent: Ascent | None = None
        self._unit: Floats = np.zeros(2)
        self._best_s = 0.0
        #: Whether a program lacked most in the end.
        self._full_later = False
        self.rents = rents = Rents(graph, space)
        self._space, self._extra = space, extra
        self._solver = SpaceSolver(space, (*extra, *rents.uses))
        if like is not None:
            self._solver.solver.level = like.solver.level

    def solve(
        self, prices: Prices, ratios: Sequence[float], rent_s: float, stop: Callable[[], bool]
    ) -> Solution:
        """The cheapest program at some ratios with `rent_s` per byte on all devices, and on the smallest."""
        return self._solver.solve(prices, _NODES, stop, self._tables(ratios, rent_s))

    def solve_each(
        self, prices: Prices, ratios: Sequence[float], rents_s: Sequence[float], stop: Callable[[], bool]
    ) -> list[Solution]:
        """`solve` with each of several rents."""
        each = [self._tables(ratios, rent_s) for rent_s in rents_s]
        tables = {factor: np.stack([some[factor] for some in each]) for factor in each[0]}
        return self._solver.solve_each(prices, tables, len(each), _NODES, stop)

    def nbytes(self, assignment: Sequence[int], ratios: Sequence[float]) -> float:
        """What an assignment pays rent for at some ratios, see `solve`."""
        tables = self._tables(ratios, 1.0)
        return sum(float(tables[use.factor][assignment[use.scope[0]]]) for use in self.rents.uses)

    def paid(self, assignment: Sequence[int], ratios: Sequence[float]) -> dict[int, float]:
        """What every choice of it pays rent for."""
        tables, found = self._tables(ratios, 1.0), dict[int, float]()
        for use in self.rents.uses:
            (choice,) = use.scope
            found[choice] = found.get(choice, 0.0) + float(tables[use.factor][assignment[choice]])
        return found

    def _tables(self, ratios: Sequence[float], rent_s: float) -> Mapping[Factor, Floats]:
        devices = len(self.limits.nbytes)
        return self.rents.tables(rent_s, rent_s * devices, devices, self._part(ratios))

    def _part(self, ratios: Sequence[float]) -> Part:
        """What the smallest device holds of tensors that are cut; of several, the one that is dealt most."""
        limits = self.limits.nbytes
        smallest = [device for device, limit in enumerate(limits) if limit == min(limits)]

        @cache
        def dealt(units: int) -> float:
            found = lengths(units, 1, ratios)
            return max(found[device] for device in smallest) / units

        def part(tensor: TensorType, cut: Shard) -> float:
            units = tensor.shape[cut.dim] // cut.unit
            lumpy = self.dealt and 0 < units < _LUMPY * len(ratios)
            return dealt(units) if lumpy else ratios[self.limits.smallest]

        return part

    def in_order(
        self, prices: Prices, ratios: Sequence[float], rent_s: float
    ) -> Iterator[tuple[tuple[int, ...], float]]:
        """All programs by what they cost with `rent_s` per byte on all devices, the least first."""
        solver = SpaceSolver(self._space, (*self._extra, *self.rents.uses), stages=())
        devices = len(self.limits.nbytes)
        tables = self.rents.tables(rent_s, 0.0, devices, self._part(ratios))
        return solver.in_order(prices, tables)

    def bound_within(
        self,
        listed: PriceList,
        loose_s: float,
        cost_s: float,
        stop: Callable[[], bool],
        worth_s: float = 0.0,
        patience: int = 0,
    ) -> float:
        """A lower bound on the cost of every program that fits, whatever its ratios.

        Args:
            listed: the prices.
            loose_s: a bound already.
            cost_s: of a program that fits.
            stop: asked before every step whether to leave it at that.
            worth_s: a bound below this is of no use: leave it where none can be reached.
            patience: rents at which the search may end early and say nothing, after which others are tried.
        """
        limits = self.limits
        if most_shares(self.graph, limits.nbytes).sum() < 1 - 1e-9:
            return math.inf
        # Shares of state may be other ones than those of computing: memory bounds their bytes, not each.
        floors = Prices.floors(listed)
        if self._ascent is None:
            unit = cost_s / np.array([sum(limits.nbytes), min(limits.nbytes)])
            self._ascent, self._unit = Ascent(_FIRST), np.tile(unit, self.rents.MOMENTS)
            if self._ideal is not None:
                self._best_s = self._ideal.bound_s
                self._cut(self._ideal, self._ideal.seconds)
        enough, best, wide = cost_s * (1 - 1e-3), np.zeros(len(self._unit)), False
        self._best_s = max(self._best_s, loose_s)
        for _ in range(_ASCENTS):
            if stop() or self._best_s >= enough:
                break
            if self._ascent.most <= max(self._best_s * (1 + _SETTLED), worth_s) and not self._more_moments():
                break
            at = self._ascent.at * self._unit
            found, value = self._reached(floors, at, _FEW_NODES, stop)
            self._cut(found, value + found.seconds - found.bound_s)
            loose = found.bound_s < found.seconds * (1 - _LOOSE)
            if value > self._best_s:
                self._best_s, best, wide = float(value), at, loose
            elif loose and not patience:
                break  # so few nodes say nothing about rents near these
            elif loose:
                patience -= 1
        if wide and self._best_s < enough and not stop():
            self._best_s = max(self._best_s, float(self._reached(floors, best, MOST_NODES, stop)[1]))
        return min(self._best_s, cost_s)

    def _more_moments(self) -> bool:
        """Have the end pay rent as well, if that may raise the bound; whether it may, and did not yet."""
        assert self._ascent is not None
        before = self._ascent.most
        if self._ascent.used.all() or not self._full_later:
            return False
        self._ascent.used[:] = True
        self._ascent.aim()
        return self._ascent.most > before * (1 + _SETTLED)

    def _reached(
        self, floors: Prices, at: Floats, most_nodes: int, stop: Callable[[], bool]
    ) -> tuple[Solution, float]:
        """The cheapest program at the floors with rent, and what no program that fits costs less than."""
        limits, at = self.limits.nbytes, at.reshape(self.rents.MOMENTS, 2)
        tables = self.rents.floors(at, len(limits))
        found = self._solver.solve(floors, most_nodes, stop, tables)
        return found, found.bound_s + self.rents.constant_s(at, limits)

    def _cut(self, found: Solution, value: float) -> None:
        """What a program costs with rent is above the least of all, whatever the rent."""
        assert self._ascent is not None
        excess = self.rents.excess_bytes(found.assignment, self.limits.nbytes)
        fullest, end = excess
        self._full_later |= bool((end > np.maximum(fullest, 0.0)).any())
        self._ascent.cut(value, excess.ravel() * self._unit)
