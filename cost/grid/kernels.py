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
        for k, signature in enumerate(found):
            cut, categories = _cut_of(tensors, (*signature.ins, *signature.outs))
            held = [0] * 4
            for tensor, category, counts in zip(tensors, categories, through, strict=True):
                held[category] += tensor.nbytes if counts else 0
            here = on_axes(signature) if product else ()
            key = (*held, cut, *map(sharded_size, here))
            if key not in numbers:
                numbers[key] = len(numbers)
                nbytes.append(tuple(held))
                axes.append(here)
                cuts.append(cut)
            at[k] = numbers[key]
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


def _cut_of(
    tensors: Sequence[TensorType], placements: Sequence[Placement]
) -> tuple[GridCut, tuple[int, ...]]:
    """How an instruction cuts; and per tensor 0: not, 1: across the nodes, 2: within them, 3: both."""
    across = within = 0
    nested = False
    categories: list[int] = []
    for tensor, placement in zip(tensors, placements, strict=True):
        a, w = components(placement)
        categories.append(isinstance(a, Shard) + 2 * isinstance(w, Shard))
        if isinstance(a, Shard):
            across = across or tensor.shape[a.dim] // a.unit
        if isinstance(w, Shard):
            within = within or tensor.shape[w.dim] // w.unit
            nested = nested or (isinstance(a, Shard) and a.dim == w.dim)
    return GridCut(across, within, nested), tuple(categories)


def grid_cut(tensors: Sequence[TensorType], placements: Sequence[Placement]) -> GridCut:
    """How an instruction with these tensors so placed cuts them."""
    return _cut_of(tensors, placements)[0]
