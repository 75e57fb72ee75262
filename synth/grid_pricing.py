"""Price lists of programs on two mesh axes; see `shardwright.synth.pricing` and `shardwright.cost.grid`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from shardwright.cost.grid import WHOLE, GridCost, GridCut, GridShares, GridStack
from shardwright.cost.grid_floor import Ranges, floors
from shardwright.cost.grid_model import GridModel, grid_cut
from shardwright.cost.model import CostModel, kernel_key
from shardwright.cost.share_cost import Floats
from shardwright.ir.collectives import between
from shardwright.ir.graph import TensorType
from shardwright.ir.placement import Placement
from shardwright.ir.rules import flop_count
from shardwright.synth.conversions import Routes
from shardwright.synth.factors import EquationFactor
from shardwright.synth.price_list import Moves, Step
from shardwright.synth.pricing import Prices


class GridPriceList:
    """The lines of all instructions asked for so far; equal costs of equally cut tensors are one line."""

    def __init__(self, grid: GridModel) -> None:
        self.grid = grid
        self.costs: list[GridCost] = []
        self.cuts: list[GridCut] = []
        self.moves: dict[tuple[Routes, ...], Moves] = {}
        self._lines: dict[tuple[int, GridCut], int] = {}
        self._steps: dict[Routes, tuple[Step, ...]] = {}
        self._pairs: dict[tuple[Placement, ...], list[tuple[str, Placement, Placement]]] = {}
        self._kernels: dict[tuple[object, ...], NDArray[np.intp]] = {}
        self._stack: GridStack | None = None

    @property
    def model(self) -> CostModel:
        """Prices on one axis."""
        return self.grid.model

    def __len__(self) -> int:
        return len(self.costs)

    def fresh(self, known: int) -> tuple[GridStack, Sequence[GridCut]]:
        """The lines from number `known` on: their costs, and how each is cut."""
        return self.stack().take(np.arange(known, len(self.costs))), self.cuts[known:]

    def stack(self) -> GridStack:
        """The costs of all lines so far."""
        if self._stack is None or len(self._stack.terms) < len(self.costs):
            self._stack = GridStack.of(self.costs)
        return self._stack

    def line(self, cost: GridCost, cut: GridCut) -> int:
        """The line of an instruction that costs `cost` and cuts its tensors so."""
        key = (id(cost), cut if cost.varies else WHOLE)
        found = self._lines.get(key)
        if found is None:
            found = self._lines[key] = len(self.costs)
            self.costs.append(cost)
            self.cuts.append(key[1])
        return found

    def kernels(self, factor: EquationFactor) -> NDArray[np.intp]:
        """The lines of an equation's kernels, one per signature."""
        equation = factor.equation
        flop = flop_count(factor.rule, equation)
        key = (*kernel_key(equation, flop), id(factor.signatures), factor.traffic)
        found = self._kernels.get(key)
        if found is None:
            costs = self.grid.kernels(equation, factor.rule, factor.signatures, factor.traffic)
            found = self._kernels[key] = np.array(
                [self.line(cost, cut) for cost, cut in costs], dtype=np.intp
            )
        return found

    def steps(self, routes: Routes) -> tuple[Step, ...]:
        """All single moves between placements of a tensor."""
        found = self._steps.get(routes)
        if found is None:
            steps = (self._step(kind, routes.type, a, b) for kind, a, b in self._moves(routes.placements))
            found = self._steps[routes] = tuple(steps)
        return found

    def _moves(self, placements: tuple[Placement, ...]) -> list[tuple[str, Placement, Placement]]:
        """Kind, before and after of all single moves between some placements."""
        found = self._pairs.get(placements)
        if found is None:
            found = self._pairs[placements] = [
                (collective.kind, a, b)
                for a in placements
                for b in placements
                if a != b and (collective := between(a, b)) is not None
            ]
        return found

    def step(self, tensor: TensorType, pre: Placement, post: Placement) -> Step | None:
        """The move from `pre` to `post`, None where there is none."""
        collective = between(pre, post)
        return None if collective is None else self._step(collective.kind, tensor, pre, post)

    def _step(self, kind: str, tensor: TensorType, pre: Placement, post: Placement) -> Step:
        cut = grid_cut((tensor, tensor), (pre, post))
        names = self.grid.strategies(kind, pre, post)
        lines = tuple([self.line(self.grid.move(kind, name, tensor, pre, post), cut) for name in names])
        return Step(kind, pre, post, names, lines)


def grid_prices(listed: GridPriceList, ratios: Sequence[float]) -> Prices:
    """Prices at the shares per device that `ratios` round to, axis by axis."""
    return Prices(listed, GridShares(ratios, listed.grid.mesh).stack)


def grid_floors(listed: GridPriceList, ranges: Ranges | None = None) -> Prices:
    """What every instruction costs at least, under shares of its own.

    Args:
        listed: the price list.
        ranges: in which the nodes' shares lie; None for any.
    """
    mesh = listed.grid.mesh

    def evaluate(stack: GridStack, cuts: Sequence[GridCut]) -> Floats:
        return floors(stack, cuts, mesh, ranges)

    return Prices(listed, evaluate)
