"""An exchange as one participant sees it: who takes part, with which tensors, and where packed data lie.

Packed data consist of one region per participant: that participant's stretch of every member, one after
another, with the sharded dimension first. For one member that is sharded along its first dimension, regions
in order *are* the tensor, and nothing is copied.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from typing import TypeAlias

from shardwright.backends.schedule.ops import ALIGNMENT, Builder, Routine, Slot, View, whole
from shardwright.ir.placement import Placement, ReduceOp, Shard


@dataclass(frozen=True, slots=True)
class Member:
    """One tensor of an exchange.

    Attributes:
        shape: of what the participants hold together (for all devices on one axis, the global shape).
        pre: placement before.
        post: placement after.
        before: elements of the dimension sharded before, per participant; () if there is none.
        after: the same after.
    """

    shape: tuple[int, ...]
    pre: Placement
    post: Placement
    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()

    def local(self, placement: Placement, lengths: Sequence[int], position: int) -> tuple[int, ...]:
        """Shape of a participant's part."""
        if not isinstance(placement, Shard):
            return self.shape
        return (*self.shape[: placement.dim], lengths[position], *self.shape[placement.dim + 1 :])

    def came(self, position: int) -> tuple[int, ...]:
        """Local shape before."""
        return self.local(self.pre, self.before, position)

    def goes(self, position: int) -> tuple[int, ...]:
        """Local shape after."""
        return self.local(self.post, self.after, position)


@dataclass(frozen=True, slots=True)
class Geometry:
    """An exchange as one participant sees it.

    Attributes:
        participants: devices, ascending.
        me: position of this one.
        dtype: of all members, on the wire.
        itemsize: its bytes.
        members: the tensors.
        root: position of the participant that has the tensor at first, for rooted collectives.
        nodes: positions of the participants by node, in order of appearance.
        leads: position of each node's leader.
    """

    participants: tuple[int, ...]
    me: int
    dtype: str
    itemsize: int
    members: tuple[Member, ...]
    root: int | None = None
    nodes: tuple[tuple[int, ...], ...] = ()
    leads: tuple[int, ...] = ()

    @property
    def count(self) -> int:
        return len(self.participants)

    @property
    def one(self) -> Member:
        """The only member."""
        (member,) = self.members
        return member


Lowering: TypeAlias = Callable[[Geometry], Routine]

#: Kinds of which several exchanges may travel as one message.
MERGED = frozenset({"all_gather", "reduce_scatter", "all_reduce"})


def starts(lengths: Sequence[int]) -> list[int]:
    """Where each stretch begins."""
    return list(accumulate(lengths, initial=0))[:-1]


def operands(b: Builder, g: Geometry) -> list[View]:
    """Buffers of the operands, and their views."""
    shapes = [member.came(g.me) for member in g.members]
    return [View.of(b.buffer("in", g.dtype, prod(shape)), shape) for shape in shapes]


def results(b: Builder, g: Geometry) -> list[View]:
    """Fresh buffers for the results."""
    shapes = [member.goes(g.me) for member in g.members]
    return [View.of(b.buffer("out", g.dtype, prod(shape)), shape) for shape in shapes]


def on_the_wire(dtype: str, op: ReduceOp) -> tuple[str, ReduceOp]:
    """The dtype in which a value is reduced, and the operation that `op` is there.

    MPI reduces no 16-bit floats: they widen to float32 and are rounded once; int4 to int8. Booleans travel as
    0 and 1: their sum is "or", their maximum.
    """
    if dtype == "bool":
        return "uint8", "max" if op == "sum" else op
    if dtype in ("float16", "bfloat16") or dtype.startswith(("float8_", "float4_", "float6_")):
        return "float32", op
    return {"int4": "int8", "uint4": "uint8", "int2": "int8", "uint2": "uint8"}.get(dtype, dtype), op


# ---------------------------------------------------------------------------------------------------
# Packed regions


@dataclass(frozen=True, slots=True)
class Regions:
    """Where the participants' regions lie in a packed buffer.

    Attributes:
        counts: elements of each.
        displs: where each begins.
        room: elements of the buffer; more than those of all regions where these are padded.
    """

    counts: tuple[int, ...]
    displs: tuple[int, ...]
    room: int

    @staticmethod
    def packed(counts: Sequence[int]) -> Regions:
        """One after another."""
        return Regions(tuple(counts), tuple(starts(counts)), sum(counts))

    @staticmethod
    def padded(counts: Sequence[int]) -> Regions:
        """Each in a block as long as the longest."""
        block = max(counts)
        return Regions(tuple(counts), tuple(i * block for i in range(len(counts))), len(counts) * block)

    @property
    def total(self) -> int:
        return sum(self.counts)

    def slot(self, buffer: int, positions: Sequence[int] | None = None) -> Slot:
        """The regions of all, or of some, as a transfer sees them."""
        which = range(len(self.counts)) if positions is None else positions
        return Slot(buffer, tuple(self.counts[i] for i in which), tuple(self.displs[i] for i in which))

    def alone(self, buffer: int, position: int) -> Slot:
        """One region."""
        return whole(buffer, self.displs[position], self.counts[position])


def regions(
    g: Geometry, dim_of: Callable[[Member], int], lengths: Callable[[Member], Sequence[int]]
) -> Regions:
    """One region per participant, in order and without gaps."""
    widths = [prod(m.shape) // m.shape[dim_of(m)] if m.shape[dim_of(m)] else 0 for m in g.members]
    counts = tuple(
        sum(lengths(m)[p] * w for m, w in zip(g.members, widths, strict=True)) for p in range(g.count)
    )
    return Regions.packed(counts)


def gathered(g: Geometry) -> Regions:
    """Regions of what is gathered."""
    return regions(g, lambda m: cut_dim(m.pre), lambda m: m.before)


def scattered(g: Geometry) -> Regions:
    """Regions of what is scattered."""
    return regions(g, lambda m: cut_dim(m.post), lambda m: m.after)


def in_order(g: Geometry, found: Regions, order: Sequence[int]) -> Regions:
    """The same regions, lying in this order of participants."""
    displs = [0] * g.count
    at = 0
    for position in order:
        displs[position] = at
        at += found.counts[position]
    return Regions(found.counts, tuple(displs), found.total)


def cut_dim(placement: Placement) -> int:
    """The dimension that a shard is cut along."""
    assert isinstance(placement, Shard)
    return placement.dim


def pieces(
    views: Sequence[View], dims: Sequence[int], lengths: Sequence[Sequence[int]], position: int
) -> list[View]:
    """A participant's stretch of every tensor, the sharded dimension first."""
    found: list[View] = []
    for view, dim, cut in zip(views, dims, lengths, strict=True):
        found.append(view.stretch(dim, sum(cut[:position]), cut[position]).leading(dim))
    return found


def region_views(buffer: int, first: int, parts: Sequence[View]) -> list[View]:
    """Contiguous windows for `parts`, one after another from `first`."""
    found: list[View] = []
    for part in parts:
        found.append(View.of(buffer, part.shape, first))
        first += part.size
    return found


def is_packed(g: Geometry, found: Regions, dim: int) -> bool:
    """Whether a tensor that is cut along `dim` *is* these regions."""
    together = found.displs == tuple(starts(found.counts)) and found.room == found.total
    return len(g.members) == 1 and dim == 0 and together


def padding(elements: int, itemsize: int) -> int:
    """The next number of elements after which memory is aligned."""
    unit = max(1, ALIGNMENT // itemsize)
    return -(-elements // unit) * unit
