"""Prices at settled ratios, on one mesh axis or on two, as bills of programs ask for them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from shardwright.cost.bill import Pricing
from shardwright.cost.grid.kernels import grid_cut
from shardwright.cost.grid.model import GridModel
from shardwright.cost.grid.prices import GridCost, GridCut, GridShares
from shardwright.cost.model import CostModel
from shardwright.cost.share_cost import ShareCost
from shardwright.cost.traffic import Traffic
from shardwright.ir.graph import Equation, Form, TensorType
from shardwright.ir.placement import Placement
from shardwright.ir.program import Program, nodes_of
from shardwright.ir.registry import rule_of
from shardwright.ir.rules import Signature


class Settled:
    """Prices at ratios that are settled, as bills of a step's programs ask for them: seconds of every class.

    Equal instructions, as repeated layers have them, are priced once.

    Args:
        grid: prices.
        ratios: share of every device.
    """

    def __init__(self, grid: GridModel, ratios: Sequence[float]) -> None:
        self._grid = grid
        self._shares = GridShares(ratios, grid.mesh)
        self._kernels: dict[tuple[int, Signature, Traffic], tuple[Form, ShareCost]] = {}
        self._moves: dict[tuple[str, str, TensorType, Placement, Placement], ShareCost] = {}

    def kernel(self, equation: Equation, signature: Signature, traffic: Traffic) -> ShareCost:
        """Seconds of one equation on every class."""
        key = id(equation.form), signature, traffic
        known = self._kernels.get(key)
        if known is None:
            found = self._grid.kernels(equation, rule_of(equation), (signature,), traffic)
            # What is remembered by identity is kept, lest something else comes to have it.
            known = equation.form, self._fixed(GridCost(found.terms[0]), found.cuts[0])
            self._kernels[key] = known
        return known[1]

    def move(
        self, kind: str, strategy: str, tensor: TensorType, pre: Placement, post: Placement
    ) -> ShareCost:
        """Seconds of one move on every class."""
        key = kind, strategy, tensor, pre, post
        found = self._moves.get(key)
        if found is None:
            cost = self._grid.move(kind, strategy, tensor, pre, post)
            found = self._moves[key] = self._fixed(cost, grid_cut((tensor, tensor), (pre, post)))
        return found

    def _fixed(self, cost: GridCost, cut: GridCut) -> ShareCost:
        slowest = np.zeros(cost.terms.shape[2])
        np.maximum.at(slowest, self._grid.mesh.class_of, self._shares.per_device(cost, cut))
        return ShareCost.fixed(slowest.tolist())


def pricing(program: Program, model: CostModel, ratios: Sequence[float]) -> Pricing:
    """What prices the instructions of a program at some ratios, on one mesh axis or on two."""
    return model if nodes_of(program) is None else Settled(GridModel(model), ratios)
