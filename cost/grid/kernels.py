"""What kernels cost on two mesh axes, under all signatures of an equation at once.

How signatures cut, and which of them cost the same, is worked out once per equation whatever the fleet
(`Ways`); what those cost on a fleet is then a matter of whole arrays (`shardwright.cost.grid.model`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from shardwright.cost.grid.prices import FEATURES, ONE, RQ, GridCut, Q, R
from shardwright.cost.kernels.contractions import sharded_size
from shardwright.cost.share_cost import Floats
from shardwright.ir.graph import TensorType
from shardwright.ir.placement import Placement, Shard, components
from shardwright.ir.rules import Signature, on_axes

#: What shrinks with what: by how a tensor is cut (0: not, 1: across the nodes, 2: within them, 3: both).
_SHRINKS = (ONE, R, Q, RQ)


@dataclass(frozen=True, slots=True, eq=False)
class Ways:
    """The different ways in which an equation's signatures cut it.

    Attributes:
        cuts: of every way.
        axes: of a product, a signature of every way on each of its mesh axes.
        nbytes: (ways, 4), bytes that go through memory by how they are cut.
        at: (signatures,) which way each is.
    """

    cuts: tuple[GridCut, ...]
    axes: tuple[tuple[Signature, ...], ...]
    nbytes: Floats
    at: NDArray[np.intp]

    @staticmethod
    def of(
        tensors: Sequence[TensorType], through: Sequence[bool], found: Sequence[Signature], product: bool
    ) -> Ways:
        """The ways of some signatures.

        Args:
            tensors: operands and results.
            through: which of these go through memory.
            found: the signatures.
            product: whether it matters for the speed of its parts how the equation is cut.
        """
        numbers: dict[tuple[object, ...], int] = {}
        nbytes: list[tuple[int, ...]] = []
        axes: list[tuple[Signature, ...]] = []
        cuts: list[GridCut] = []
        at = np.empty(len(found), dtype=np.intp)
        # Signatures have few placements in common: by identity, which is quicker than what is in them.
        known: list[dict[int, tuple[int, GridCut]]] = [{} for _ in tensors]
        for k, signature in enumerate(found):
            across = within = 0
            nested = False
            held = [0] * 4
            placements = (*signature.ins, *signature.outs)
            for mine, tensor, placement, counts in zip(known, tensors, placements, through, strict=True):
                cut = mine.get(id(placement))
                if cut is None:
                    cut = mine[id(placement)] = _cut_of(tensor, placement)
                category, here = cut
                if counts:
                    held[category] += tensor.nbytes
                if category:
                    across, within = across or here.across, within or here.within
                    nested = nested or here.nested
            on = on_axes(signature) if product else ()
            key = (*held, across, within, nested, *map(sharded_size, on))
            number = numbers.get(key)
            if number is None:
                number = numbers[key] = len(numbers)
                nbytes.append(tuple(held))
                axes.append(on)
                cuts.append(GridCut(across, within, nested))
            at[k] = number
        return Ways(tuple(cuts), tuple(axes), np.array(nbytes, dtype=np.float64).reshape(-1, 4), at)

    def terms(self, seconds: Floats, launch: Floats, byte_per_s: Floats) -> Floats:
        """Terms of every way's cost, (ways, features, rows, classes); the rows are arithmetic and memory.

        Args:
            seconds: (ways, classes) of the arithmetic of the whole equation.
            launch: (classes,) seconds until a kernel runs.
            byte_per_s: (classes,) through memory.
        """
        terms = np.zeros((len(self.cuts), FEATURES, 2, len(launch)))
        terms[:, ONE] = launch
        shrinks = [_SHRINKS[bool(cut.across) + 2 * bool(cut.within)] for cut in self.cuts]
        terms[np.arange(len(shrinks)), shrinks, 0] += seconds
        for feature, held in zip(_SHRINKS, self.nbytes.T, strict=True):
            terms[:, feature, 1] += held[:, None] / byte_per_s
        return terms


#: By the id of signatures (kept with them), the tensors, which of them go through memory, and whether they
#: are of a product.
KnownWays: TypeAlias = dict[
    tuple[int, tuple[TensorType, ...], tuple[bool, ...], bool], tuple[Sequence[Signature], Ways]
]


@dataclass(frozen=True, slots=True, eq=False)
class Kernels:
    """Costs of an equation under some signatures.

    Attributes:
        terms: (costs, features, rows, classes), see `GridCost`.
        cuts: of each cost.
        at: (signatures,) the number of each one's cost.
    """

    terms: Floats
    cuts: tuple[GridCut, ...]
    at: NDArray[np.intp]


def _cut_of(tensor: TensorType, placement: Placement) -> tuple[int, GridCut]:
    """How a placement cuts a tensor; before that 0: not, 1: across the nodes, 2: within them, 3: both."""
    a, w = components(placement)
    across = tensor.shape[a.dim] // a.unit if isinstance(a, Shard) else 0
    within = tensor.shape[w.dim] // w.unit if isinstance(w, Shard) else 0
    nested = isinstance(a, Shard) and isinstance(w, Shard) and a.dim == w.dim
    return isinstance(a, Shard) + 2 * isinstance(w, Shard), GridCut(across, within, nested)


def grid_cut(tensors: Sequence[TensorType], placements: Sequence[Placement]) -> GridCut:
    """How an instruction with these tensors so placed cuts them."""
    across = within = 0
    nested = False
    for tensor, placement in zip(tensors, placements, strict=True):
        _, cut = _cut_of(tensor, placement)
        across, within, nested = across or cut.across, within or cut.within, nested or cut.nested
    return GridCut(across, within, nested)
