"""Price lists of programs on two mesh axes; see `synth/prices/tables.py` and `cost/grid/prices.py`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from shardwright.cost.grid.floor import Ranges, floors
from shardwright.cost.grid.model import GridModel, grid_cut
from shardwright.cost.grid.prices import WHOLE, GridCost, GridCut, GridShares, GridStack
from shardwright.cost.model import CostModel, kernel_key
from shardwright.cost.share_cost import Floats
from shardwright.ir.collectives import between, step
from shardwright.ir.graph import TensorType
from shardwright.ir.placement import Placement, Shard, components
from shardwright.ir.rules import flop_count
from shardwright.synth.prices.lists import Moves, Step
from shardwright.synth.prices.tables import Prices
from shardwright.synth.space.conversions import Routes
from shardwright.synth.space.factors import EquationFactor

#: A single move: its kind, placements before and after, and numbers of what its price and its cuts depend on.
_Move: TypeAlias = tuple[str, Placement, Placement, int, int]


class GridPriceList:
    """The lines of all instructions asked for so far; equal costs of equally cut tensors are one line."""

    def __init__(self, grid: GridModel) -> None:
        self.grid = grid
        self.costs: list[GridCost] = []
        self.cuts: list[GridCut] = []
        self.moves: dict[tuple[Routes, ...], Moves] = {}
        self._lines: dict[tuple[int, GridCut], int] = {}
        self._varies: dict[int, bool] = {}
        self._steps: dict[Routes, tuple[Step, ...]] = {}
        self._pairs: dict[tuple[Placement, ...], list[_Move]] = {}
        self._kernels: dict[tuple[object, ...], NDArray[np.intp]] = {}
        self._stack: GridStack | None = None

    @property
    def model(self) -> CostModel:
        """Prices on one axis."""
        return self.grid.model

    @cached_property
    def floors(self) -> Prices:
        """What every instruction costs at least, under shares of its own."""
        return grid_floors(self)

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
        varies = self._varies.get(id(cost))
        if varies is None:
            varies = self._varies[id(cost)] = cost.varies
        key = (id(cost), cut if varies else WHOLE)
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
            # Moves that are alike in what they cost, or in how they cut, are worked out once.
            tensor = routes.type
            costs: dict[int, tuple[tuple[str, ...], list[GridCost]]] = {}
            cuts: dict[int, GridCut] = {}
            lines: dict[tuple[int, int], tuple[int, ...]] = {}
            steps: list[Step] = []
            for kind, pre, post, cost, cut in self._moves(routes.placements):
                key = cost, cut
                if key not in lines:
                    if cost not in costs:
                        names = self.grid.strategies(kind, pre, post)
                        costs[cost] = names, [self.grid.move(kind, n, tensor, pre, post) for n in names]
                    if cut not in cuts:
                        cuts[cut] = grid_cut((tensor, tensor), (pre, post))
                    lines[key] = tuple([self.line(each, cuts[cut]) for each in costs[cost][1]])
                steps.append(Step(kind, pre, post, costs[cost][0], lines[key]))
            found = self._steps[routes] = tuple(steps)
        return found

    def _moves(self, placements: tuple[Placement, ...]) -> list[_Move]:
        """All single moves between some placements."""
        found = self._pairs.get(placements)
        if found is None:
            numbers: dict[object, int] = {}
            found = self._pairs[placements] = []
            for a in placements:
                for b in placements:
                    collective = between(a, b) if a != b else None
                    if collective is not None:
                        cost, cut = _what(collective.kind, a, b)
                        number = numbers.setdefault(cost, len(numbers))
                        found.append((collective.kind, a, b, number, numbers.setdefault(cut, len(numbers))))
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


def _what(kind: str, pre: Placement, post: Placement) -> tuple[object, object]:
    """What a move's price depends on besides the tensor, and what its cuts do."""
    found = step(pre, post)
    assert found is not None, "it is a single move"
    (across, within), (to_across, to_within) = components(pre), components(post)
    what: tuple[object, ...] = "all", found
    if found.axis == "within":
        what = found.axis, isinstance(across, Shard)
    elif found.axis == "across":
        what = found.axis, isinstance(within, Shard)
    nested = any(
        isinstance(a, Shard) and isinstance(w, Shard) and a.dim == w.dim
        for a, w in ((across, within), (to_across, to_within))
    )
    cut = (
        across if isinstance(across, Shard) else to_across,
        within if isinstance(within, Shard) else to_within,
    )
    return (kind, *what), (*[p if isinstance(p, Shard) else None for p in cut], nested)


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
