"""Rent on two mesh axes: what lies on some nodes, or on some devices of each, pays for as many as have it.

As on one axis (`synth/memory/rent.py`). In the search, where rent need not be a bound, second placements pay,
too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeAlias

import numpy as np

from shardwright.cost.grid.prices import GridShares, Mesh
from shardwright.cost.share_cost import Floats
from shardwright.ir.graph import Graph, Value
from shardwright.ir.placement import Placement, Shard, components
from shardwright.synth.memory.alive import kept_values, must_live
from shardwright.synth.memory.rent import RentFactor, Rents
from shardwright.synth.space.conversions import Holding
from shardwright.synth.space.factors import Factor, Use
from shardwright.synth.space.space import Space

#: Of a placement: what all devices hold of a tensor together, and what the smallest one does, in tensors.
Portion: TypeAlias = Callable[[Placement], tuple[float, float]]


def portions(mesh: Mesh, ratios: Sequence[float], smallest: int) -> Portion:
    """What devices hold at some ratios."""
    shares = GridShares(ratios, mesh)

    def portion(placement: Placement) -> tuple[float, float]:
        across, within = components(placement)
        held: Floats = np.ones(len(mesh.node_of))
        if isinstance(across, Shard):
            held = held * shares.of_nodes[mesh.node_of]
        if isinstance(within, Shard):
            held = held * shares.inside
        return float(held.sum()), float(held[smallest])

    return portion


def least_portions(mesh: Mesh) -> Portion:
    """What devices hold at least, whatever the ratios."""

    def portion(placement: Placement) -> tuple[float, float]:
        across, within = (isinstance(p, Shard) for p in components(placement))
        per_node = 1 if within else min(mesh.nodes) if across else sum(mesh.nodes) / len(mesh.nodes)
        together = per_node * (1 if across else len(mesh.nodes))
        return float(together), 0.0 if across or within else 1.0

    return portion


class GridRents(Rents):
    """The rent factors of a space on two axes.

    Args:
        graph: the step.
        space: its programs.
        crowd: further tensors that pay in the search, in whatever they are held in.
    """

    def __init__(self, graph: Graph, space: Space, crowd: Iterable[Value] = ()) -> None:
        super().__init__(graph, space)
        known = {*graph.inputs, *kept_values(graph), *must_live(graph)}
        held: dict[int, int] = {}
        for value in crowd:
            if value not in known:
                index = space.root.held(value).index
                held[index] = held.get(index, 0) + value.type.nbytes
        made: dict[tuple[object, int], RentFactor] = {}
        uses: list[Use] = []
        for index, nbytes in held.items():
            domain = space.choices[index].domain
            factor = made.setdefault((domain, nbytes), RentFactor(domain, 0, nbytes))
            uses.append(Use(factor, (index,)))
        self.uses = (*self.uses, *uses)
        self._factors = (*self._factors, *made.values())

    def seconds(
        self, portion: Portion, all_s: float, smallest_s: float, *, kept: bool
    ) -> Mapping[Factor, Floats]:
        """Rent by holding.

        Args:
            portion: what devices hold of a tensor.
            all_s: seconds per byte on any device.
            smallest_s: per byte on the smallest device, in addition.
            kept: whether what the backward part reads pays, too.
        """
        return {
            factor: all_s * together + smallest_s * own
            for factor, (together, own) in self._bytes(portion, kept).items()
        }

    def excess(self, assignment: Sequence[int], portion: Portion, limits: Sequence[float]) -> Floats:
        """By how many bytes an assignment's inputs exceed all memory, and the smallest device's."""
        held = self._bytes(portion, kept=False)
        together, own = self._constant_bytes * len(limits) + self._sure_bytes, float(self._constant_bytes)
        for use in self.uses:
            on_all, on_smallest = held[use.factor]
            together += float(on_all[assignment[use.scope[0]]])
            own += float(on_smallest[assignment[use.scope[0]]])
        return np.array([together - sum(limits), own - min(limits)])

    def _bytes(self, portion: Portion, kept: bool) -> dict[Factor, tuple[Floats, Floats]]:
        """By holding: bytes on all devices together, and on the smallest."""
        known: dict[Placement, tuple[float, float]] = {}

        def of(placement: Placement) -> tuple[float, float]:
            if placement not in known:
                known[placement] = portion(placement)
            return known[placement]

        found: dict[Factor, tuple[Floats, Floats]] = {}
        for factor in self._factors:
            holdings = factor.domain.holdings
            held = factor.input_bytes * np.array([of(holding.base) for holding in holdings])
            if kept:
                # What is made of a tensor and read by both parts stays, too; inside a loop, one iteration's.
                base = np.array([of(holding.base) for holding in holdings])
                copies = np.array([self._copy(factor, holding, of) for holding in holdings])
                held = held + factor.input_bytes * copies + factor.kept_bytes * (base + copies)
            found[factor] = held[:, 0], held[:, 1]
        return found

    @staticmethod
    def _copy(factor: RentFactor, holding: Holding, of: Portion) -> tuple[float, float]:
        """What devices hold of a second placement."""
        return (0.0, 0.0) if factor.port or holding.extra is None else of(holding.extra)
