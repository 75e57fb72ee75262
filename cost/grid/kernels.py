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
from shardwright.cost.share_cost import Floats
from shardwright.ir.graph import TensorType
from shardwright.ir.placement import Placement, Shard, components
from shardwright.ir.rules import Columns, Signature, on_axes

_FIRST = np.zeros(1, dtype=np.intp)

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
        if len(found) == 1:  # of a program: what it asks for is made for it
            return Ways._single(tensors, through, found[0], product)
        columns = Columns.of(found)
        cuts = zip(tensors, columns.shards, columns.at, strict=True)
        # (tensors, signatures, what `_cuts_of` says): signatures have few placements in common.
        each = np.stack([_cuts_of(tensor, shards)[at] for tensor, shards, at in cuts])
        category, across, within = each[..., 0], each[..., 1], each[..., 2]
        counted = np.array([t.nbytes * counts for t, counts in zip(tensors, through, strict=True)])
        held = np.stack([np.where(category == c, counted[:, None], 0).sum(axis=0) for c in range(4)])
        key = [*held, _first_of(across), _first_of(within), each[..., 3].max(axis=0)]
        if product:
            key += _product_cuts(each)
        ways: dict[tuple[int, ...], int] = {}
        way = [ways.setdefault(one, len(ways)) for one in zip(*map(np.ndarray.tolist, key), strict=True)]
        at = np.array(way, dtype=np.intp)
        first = np.unique(at, return_index=True)[1]
        return Ways(
            tuple([GridCut(one[4], one[5], bool(one[6])) for one in ways]),
            tuple([on_axes(found[k]) if product else () for k in first.tolist()]),
            np.array([one[:4] for one in ways], dtype=np.float64).reshape(-1, 4),
            at,
        )

    @staticmethod
    def _single(
        tensors: Sequence[TensorType], through: Sequence[bool], one: Signature, product: bool
    ) -> Ways:
        """The way of one signature."""
        held = [0] * 4
        placements = (*one.ins, *one.outs)
        for tensor, placement, counts in zip(tensors, placements, through, strict=True):
            if counts:
                across, within = components(placement)
                held[isinstance(across, Shard) + 2 * isinstance(within, Shard)] += tensor.nbytes
        on = (on_axes(one) if product else (),)
        return Ways((grid_cut(tensors, placements),), on, np.array([held], dtype=np.float64), _FIRST)

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


def _first_of(units: NDArray[np.int64]) -> NDArray[np.int64]:
    """Of (tensors, signatures) units, those of the first tensor that has any."""
    return np.take_along_axis(units, (units > 0).argmax(axis=0)[None], axis=0)[0]


def _product_cuts(each: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    """Equal for signatures that cut a product alike, across the nodes and within (see `sharded_size`)."""
    category = each[..., 0]
    found = [each[..., 4].max(axis=0)]
    for axis in (1, 2):
        left, right, result = (category[:3] & axis) > 0
        found.append(np.where(left | right, np.where(result, 2 + left + 2 * right, 1), 0))
    return found


def _cuts_of(tensor: TensorType, shards: NDArray[np.int64]) -> NDArray[np.int64]:
    """How placements cut a tensor, a row each; `shards` as `Columns` has them.

    A row is 0 (not), 1 (across the nodes), 2 (within them) or 3 (both); what `GridCut` says of that; and
    whether the placements across the nodes and within them are different.
    """
    shape = np.array((*tensor.shape, 0), dtype=np.int64)  # what is not cut has no units
    dim, unit = shards[:, 0:4:2], shards[:, 1:4:2]
    units, cut = shape[dim] // unit, dim >= 0
    nested = cut[:, 0] & (dim[:, 0] == dim[:, 1])
    return np.column_stack([cut[:, 0] + 2 * cut[:, 1], units, nested, shards[:, 4]])


def grid_cut(tensors: Sequence[TensorType], placements: Sequence[Placement]) -> GridCut:
    """How an instruction with these tensors so placed cuts them."""
    across = within = 0
    nested = False
    for tensor, placement in zip(tensors, placements, strict=True):
        a, w = components(placement)
        if isinstance(a, Shard):
            across = across or tensor.shape[a.dim] // a.unit
            nested = nested or (isinstance(w, Shard) and a.dim == w.dim)
        if isinstance(w, Shard):
            within = within or tensor.shape[w.dim] // w.unit
    return GridCut(across, within, nested)
