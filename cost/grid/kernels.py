"""What kernels cost on two mesh axes, under all signatures of an equation at once.

How signatures cut, and which of them cost the same, is worked out once per equation whatever the fleet
(`Ways`); what those cost on a fleet is then a matter of whole arrays (`shardwright.cost.grid.model`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from shardwright.cost.grid.prices import FEATURES, ONE, RQ, GridCut, Q, R
from shardwright.cost.share_cost import Floats
from shardwright.cost.traffic import Moved
from shardwright.ir.graph import TensorType
from shardwright.ir.pairs import Paired
from shardwright.ir.placement import Grid, Placement, Shard, components
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
    def of(tensors: Sequence[TensorType], moved: Moved, found: Sequence[Signature], product: bool) -> Ways:
        """The ways of some signatures.

        Args:
            tensors: operands and results.
            moved: bytes of these that go through memory.
            found: the signatures.
            product: whether it matters for the speed of its parts how the equation is cut.
        """
        if isinstance(found, Paired):
            rows = _rows(tensors, moved, found, product)
        else:
            rows = [_row(tensors, moved, signature, product) for signature in found]
        numbers: dict[tuple[int, ...], int] = {}
        at = np.array([numbers.setdefault(row, len(numbers)) for row in rows], dtype=np.intp)
        first = dict(zip(reversed(at.tolist()), reversed(range(len(found))), strict=True))
        return Ways(
            tuple([GridCut(across, within, bool(nested)) for across, within, nested, *_ in numbers]),
            tuple([on_axes(found[first[k]]) if product else () for k in range(len(numbers))]),
            np.array([row[3:7] for row in numbers], dtype=np.float64).reshape(-1, 4),
            at,
        )

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
        terms[:, _SHRINKS, 1] += self.nbytes[:, :, None] / byte_per_s
        return terms


#: By the id of signatures (kept with them), the tensors, what of them goes through memory, and whether they
#: are of a product.
KnownWays: TypeAlias = dict[tuple[int, tuple[TensorType, ...], Moved, bool], tuple[Sequence[Signature], Ways]]


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


def _rows(tensors: Sequence[TensorType], moved: Moved, found: Paired, product: bool) -> list[tuple[int, ...]]:
    """`_row` of all signatures, tensor by tensor: the placements of each are few."""
    count = len(found)
    cut, held = np.zeros((3, count), dtype=np.int64), np.zeros((4, count), dtype=np.int64)
    on = np.zeros((1 + len(tensors) if product else 0, count), dtype=np.int64)
    categories: list[NDArray[np.int64]] = []
    for k, (tensor, some, at) in enumerate(zip(tensors, found.placements, found.at, strict=True)):
        across, within, nested, category, on_two = _cuts_of(tensor.shape, some)[:, at]
        cut[0] = np.where(cut[0], cut[0], across)
        cut[1] = np.where(cut[1], cut[1], within)
        cut[2] |= nested
        categories.append(category)
        if product:
            on[0] |= on_two
            on[1 + k] = category
    # By the result: few move others under some signatures.
    moves = [moved.under(result) for result in found.placements[-1]] if moved.along else [moved.nbytes]
    which = found.at[-1] if moved.along else np.zeros(count, dtype=np.intp)
    for nbytes, like in zip(zip(*moves, strict=True), moved.cut_like, strict=True):
        if any(nbytes):
            held[categories[like], np.arange(count)] += np.array(nbytes)[which]
    return list(zip(*cut.tolist(), *held.tolist(), *on.tolist(), strict=True))


def _row(tensors: Sequence[TensorType], moved: Moved, signature: Signature, product: bool) -> tuple[int, ...]:
    """How a signature cuts (see `GridCut`), and bytes that go through memory by how they are cut.

    Of a product also whether it lies on two axes, and how every tensor is cut.
    """
    across = within = nested = 0
    held, on, categories = [0] * 4, [0], list[int]()
    placements = (*signature.ins, *signature.outs)
    for tensor, placement in zip(tensors, placements, strict=True):
        category, here = _cut_of(tensor.shape, placement)
        across, within, nested = across or here.across, within or here.within, nested or int(here.nested)
        categories.append(category)
        if product:
            on[0] |= isinstance(placement, Grid)
            on.append(category)
    nbytes = moved.under(placements[-1]) if moved.along else moved.nbytes
    for each, like in zip(nbytes, moved.cut_like, strict=True):
        held[categories[like]] += each
    return (across, within, nested, *held, *(on if product else ()))


@cache
def _cuts_of(shape: tuple[int, ...], placements: tuple[Placement, ...]) -> NDArray[np.int64]:
    """Of every placement the cut, how it cuts a tensor (see `_cut_of`), and whether it is on two axes.

    Returns:
        (5, placements).
    """
    each = [(placement, *_cut_of(shape, placement)) for placement in placements]
    rows = [(*cut, category, isinstance(placement, Grid)) for placement, category, cut in each]
    return np.array(rows, dtype=np.int64).reshape(-1, 5).T


@cache
def _cut_of(shape: tuple[int, ...], placement: Placement) -> tuple[int, GridCut]:
    """How a placement cuts a tensor; before that 0: not, 1: across the nodes, 2: within them, 3: both."""
    a, w = components(placement)
    across = shape[a.dim] // a.unit if isinstance(a, Shard) else 0
    within = shape[w.dim] // w.unit if isinstance(w, Shard) else 0
    nested = isinstance(a, Shard) and isinstance(w, Shard) and a.dim == w.dim
    return isinstance(a, Shard) + 2 * isinstance(w, Shard), GridCut(across, within, nested)


def grid_cut(tensors: Sequence[TensorType], placements: Sequence[Placement]) -> GridCut:
    """How an instruction with these tensors so placed cuts them."""
    across = within = 0
    nested = False
    for tensor, placement in zip(tensors, placements, strict=True):
        _, cut = _cut_of(tensor.shape, placement)
        across, within, nested = across or cut.across, within or cut.within, nested or cut.nested
    return GridCut(across, within, nested)
