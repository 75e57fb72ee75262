"""Strategies as routines: what each participant of an exchange copies, sends and receives.

One function per (collective, strategy) writes a participant's routine. Exchanges of equal kind may travel as
one message: their operands are packed one after another (`MERGED` says which kinds can). All-reduces, which
take several rounds, are in `schedule_rounds.py`, hierarchical strategies in `schedule_nodes.py`.

Packed data consist of one region per participant: that participant's stretch of every member, one after
another, with the sharded dimension first. For one member that is sharded along its first dimension, regions
in order *are* the tensor, and nothing is copied.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import prod
from typing import TypeAlias

from shardwright.backends.schedule_ops import ALIGNMENT, Builder, Routine, Slot, Transfer, View, whole
from shardwright.ir.placement import Partial, Placement, ReduceOp, Shard


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
    if dtype in ("float16", "bfloat16") or dtype.startswith(("float8", "float4", "float6")):
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
    return regions(g, lambda m: _dim(m.pre), lambda m: m.before)


def scattered(g: Geometry) -> Regions:
    """Regions of what is scattered."""
    return regions(g, lambda m: _dim(m.post), lambda m: m.after)


def in_order(g: Geometry, found: Regions, order: Sequence[int]) -> Regions:
    """The same regions, lying in this order of participants."""
    displs = [0] * g.count
    at = 0
    for position in order:
        displs[position] = at
        at += found.counts[position]
    return Regions(found.counts, tuple(displs), found.total)


def _dim(placement: Placement) -> int:
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


# ---------------------------------------------------------------------------------------------------
# S(d) -> R


@dataclass(frozen=True, slots=True)
class Gathering:
    """Buffers of an all-gather: where the own region is sent from, and where all come together."""

    b: Builder
    g: Geometry
    regions: Regions
    ins: list[View]
    outs: list[View]
    packed: int

    @staticmethod
    def begin(g: Geometry, found: Regions) -> Gathering:
        """Fresh buffers; results are received in place where that is possible."""
        b = Builder()
        ins, outs = operands(b, g), results(b, g)
        if is_packed(g, found, _dim(g.members[0].pre)):
            return Gathering(b, g, found, ins, outs, outs[0].buffer)
        return Gathering(b, g, found, ins, outs, b.buffer("temp", g.dtype, found.room))

    def own(self) -> Slot:
        """The own region, packed if it is not already."""
        parts = [view.leading(_dim(m.pre)) for view, m in zip(self.ins, self.g.members, strict=True)]
        if len(parts) == 1 and parts[0].contiguous():
            return whole(self.ins[0].buffer, 0, parts[0].size)
        buffer = self.b.buffer("temp", self.g.dtype, sum(part.size for part in parts))
        for source, target in zip(parts, region_views(buffer, 0, parts), strict=True):
            self.b.copy(source, target)
        return whole(buffer, 0, self.regions.counts[self.g.me])

    def place(self) -> None:
        """Copy the own region to where it belongs among all."""
        parts = [view.leading(_dim(m.pre)) for view, m in zip(self.ins, self.g.members, strict=True)]
        first = self.regions.displs[self.g.me]
        for source, target in zip(parts, region_views(self.packed, first, parts), strict=True):
            self.b.copy(source, target)

    def end(self) -> Routine:
        """Unpack, unless the regions are the result."""
        if self.packed != self.outs[0].buffer:
            dims = [_dim(m.pre) for m in self.g.members]
            for position in range(self.g.count):
                targets = pieces(self.outs, dims, [m.before for m in self.g.members], position)
                sources = region_views(self.packed, self.regions.displs[position], targets)
                for source, target in zip(sources, targets, strict=True):
                    self.b.copy(source, target)
        return self.b.routine(self.outs)


def _all_gather_exact(g: Geometry) -> Routine:
    """One all-gather of stretches of their own lengths."""
    job = Gathering.begin(g, gathered(g))
    if job.regions.total:
        job.b.transfer(Transfer("all_gather", g.participants, job.own(), job.regions.slot(job.packed)))
    return job.end()


def _all_gather_padded(g: Geometry) -> Routine:
    """One all-gather of equal blocks, each as long as the longest stretch."""
    found = Regions.padded(gathered(g).counts)
    block = max(found.counts)
    job = Gathering.begin(g, found)
    if block:
        sent = job.own()
        if sent.counts[0] < block:
            padded = job.b.buffer("temp", g.dtype, block)
            job.b.copy(View.of(sent.buffer, sent.counts), View.of(padded, sent.counts))
            sent = whole(padded, 0, block)
        job.b.transfer(Transfer("all_gather_block", g.participants, sent, Slot(job.packed, (block,), (0,))))
    return job.end()


def _all_gather_grouped(g: Geometry) -> Routine:
    """One broadcast per owner of a stretch that is not empty."""
    job = Gathering.begin(g, gathered(g))
    job.place()
    for position, count in enumerate(job.regions.counts):
        if count:
            job.b.transfer(
                Transfer("broadcast", g.participants, None, job.regions.alone(job.packed, position), position)
            )
    return job.end()


# ---------------------------------------------------------------------------------------------------
# P(op) -> S(d)


@dataclass(frozen=True, slots=True)
class Scattering:
    """Buffers of a reduce-scatter: all regions packed, and the own one after the reduction."""

    b: Builder
    g: Geometry
    regions: Regions
    outs: list[View]
    packed: int
    wide: str
    op: ReduceOp

    @staticmethod
    def begin(g: Geometry, found: Regions) -> Scattering:
        """Operands packed in the dtype in which they are reduced."""
        pre = g.members[0].pre
        assert isinstance(pre, Partial)
        wide, op = on_the_wire(g.dtype, pre.op)
        b = Builder()
        ins, outs = operands(b, g), results(b, g)
        packed = ins[0].buffer
        if wide != g.dtype or not is_packed(g, found, _dim(g.members[0].post)):
            packed = b.buffer("temp", wide, found.room)
            dims = [_dim(m.post) for m in g.members]
            for position in range(g.count):
                sources = pieces(ins, dims, [m.after for m in g.members], position)
                for source, target in zip(
                    sources, region_views(packed, found.displs[position], sources), strict=True
                ):
                    b.copy(source, target)
        return Scattering(b, g, found, outs, packed, wide, op)

    def room(self, count: int | None = None) -> int:
        """A buffer for the own region; the result's own where that is possible."""
        count = self.regions.counts[self.g.me] if count is None else count
        (first, *more) = self.outs
        direct = not more and _dim(self.g.members[0].post) == 0 and self.wide == self.g.dtype
        if direct and count == first.size:
            return first.buffer
        return self.b.buffer("temp", self.wide, count)

    def end(self, room: int) -> Routine:
        """Unpack the own region from `room`."""
        if room != self.outs[0].buffer:
            dims = [_dim(m.post) for m in self.g.members]
            targets = [view.leading(dim) for view, dim in zip(self.outs, dims, strict=True)]
            for source, target in zip(region_views(room, 0, targets), targets, strict=True):
                self.b.copy(source, target)
        return self.b.routine(self.outs)


def _reduce_scatter_exact(g: Geometry) -> Routine:
    """One reduce-scatter of stretches of their own lengths."""
    job = Scattering.begin(g, scattered(g))
    room = job.room()
    if job.regions.total:
        sent = Slot(job.packed, job.regions.counts, job.regions.displs)
        mine = whole(room, 0, job.regions.counts[g.me])
        job.b.transfer(Transfer("reduce_scatter", g.participants, sent, mine, op=job.op))
    return job.end(room)


def _reduce_scatter_padded(g: Geometry) -> Routine:
    """One reduce-scatter of equal blocks, each as long as the longest stretch."""
    found = Regions.padded(scattered(g).counts)
    block = max(found.counts)
    job = Scattering.begin(g, found)
    room = job.room(block)
    if block:
        sent, mine = Slot(job.packed, (block,), (0,)), whole(room, 0, block)
        job.b.transfer(Transfer("reduce_scatter_block", g.participants, sent, mine, op=job.op))
    return job.end(room)


def _reduce_scatter_grouped(g: Geometry) -> Routine:
    """One reduction per owner of a stretch that is not empty."""
    job = Scattering.begin(g, scattered(g))
    room = job.room()
    for position, count in enumerate(job.regions.counts):
        if count:
            mine = whole(room, 0, count) if position == g.me else None
            sent = job.regions.alone(job.packed, position)
            job.b.transfer(Transfer("reduce", g.participants, sent, mine, position, job.op))
    return job.end(room)


# ---------------------------------------------------------------------------------------------------
# S(d) -> S(e), and from a root


def piece_of(g: Geometry, source: int, target: int) -> tuple[int, int, tuple[int, ...]]:
    """What `source` sends `target` in an all-to-all: the part of its dimension `post.dim`, and the shape.

    Returns:
        First element of that dimension in the source's array, first in the target's array along the
        dimension sharded before, and the shape of the piece.
    """
    m = g.one
    pre, post = _dim(m.pre), _dim(m.post)
    shape = list(m.came(source))
    first = sum(m.after[:target])
    last = first + m.after[target]
    held = sum(m.before[:source])
    lies = held
    if pre == post:
        lies = max(held, first) - first if last > first else 0
        first, last = (min(max(x - held, 0), m.before[source]) for x in (first, last))
    shape[post] = last - first
    return first, lies, tuple(shape)


def piece_views(g: Geometry, ins: Sequence[View], outs: Sequence[View]) -> tuple[list[View], list[View]]:
    """This participant's pieces for every target in its operand, and of every source in its result."""
    m = g.one
    pre, post = _dim(m.pre), _dim(m.post)
    give: list[View] = []
    take: list[View] = []
    for other in range(g.count):
        first, _, shape = piece_of(g, g.me, other)
        give.append(ins[0].stretch(post, first, shape[post]))
        _, lies, shape = piece_of(g, other, g.me)
        take.append(outs[0].stretch(pre, lies if shape[pre] else 0, shape[pre]))
    return give, take


def _all_to_all(g: Geometry) -> Routine:
    """One all-to-all of pieces of their own sizes."""
    b = Builder()
    ins, outs = operands(b, g), results(b, g)
    give, take = piece_views(g, ins, outs)
    sizes_out, sizes_in = tuple(v.size for v in give), tuple(v.size for v in take)
    out = b.buffer("temp", g.dtype, sum(sizes_out))
    into = b.buffer("temp", g.dtype, sum(sizes_in))
    for source, target in zip(give, region_views(out, 0, give), strict=True):
        b.copy(source, target)
    if prod(g.one.shape):
        sent = Slot(out, sizes_out, tuple(starts(sizes_out)))
        b.transfer(
            Transfer("all_to_all", g.participants, sent, Slot(into, sizes_in, tuple(starts(sizes_in))))
        )
    for source, target in zip(region_views(into, 0, take), take, strict=True):
        b.copy(source, target)
    return b.routine(outs)


def _rooted(g: Geometry) -> tuple[Builder, View]:
    """The tensor's view: on the root its operand, elsewhere fresh memory. Others' operands are empty."""
    b = Builder()
    shape = g.one.shape
    if g.me == g.root:
        return b, View.of(b.buffer("in", g.dtype, prod(shape)), shape)
    b.buffer("in", g.dtype, 0)
    return b, View.of(b.buffer("out", g.dtype, prod(shape)), shape)


def _broadcast_tree(g: Geometry) -> Routine:
    """The transport's own broadcast."""
    b, view = _rooted(g)
    if view.size:
        b.transfer(Transfer("broadcast", g.participants, None, whole(view.buffer, 0, view.size), g.root))
    return b.routine([view])


def _broadcast_scatter_ag(g: Geometry) -> Routine:
    """The root scatters pieces of equal size; all gather them."""
    b, view = _rooted(g)
    if not view.size:
        return b.routine([view])
    ends = [view.size * i // g.count for i in range(g.count + 1)]
    counts = tuple(last - first for first, last in pairwise(ends))
    target = view
    if g.me == g.root:  # the gathering writes where the operand must stay as it is
        target = View.of(b.buffer("out", g.dtype, view.size), view.shape)
        b.copy(view, target)
    parts = Regions.packed(counts)
    assert g.root is not None
    mine = parts.alone(target.buffer, g.me)
    if g.me == g.root:
        b.transfer(Transfer("scatter", g.participants, parts.slot(target.buffer), None, g.root))
    else:
        b.transfer(Transfer("scatter", g.participants, None, mine, g.root))
    b.wait()
    b.transfer(Transfer("all_gather", g.participants, None, parts.slot(target.buffer)))
    return b.routine([target])


def _send(g: Geometry) -> Routine:
    """A send on the root's side, a receive on the other."""
    b, view = _rooted(g)
    if view.size:
        assert g.root is not None
        slot = whole(view.buffer, 0, view.size)
        pair = (g.participants[g.root], g.participants[1 - g.root])
        if g.me == g.root:
            b.transfer(Transfer("send", pair, slot))
        else:
            b.transfer(Transfer("recv", pair, None, slot))
    return b.routine([view])


def padding(elements: int, itemsize: int) -> int:
    """The next number of elements after which memory is aligned."""
    unit = max(1, ALIGNMENT // itemsize)
    return -(-elements // unit) * unit


#: By (collective, strategy).
ONE_STAGE: Mapping[tuple[str, str], Lowering] = {
    ("all_gather", "exact"): _all_gather_exact,
    ("all_gather", "padded"): _all_gather_padded,
    ("all_gather", "grouped"): _all_gather_grouped,
    ("reduce_scatter", "exact"): _reduce_scatter_exact,
    ("reduce_scatter", "padded"): _reduce_scatter_padded,
    ("reduce_scatter", "grouped"): _reduce_scatter_grouped,
    ("all_to_all", "exact"): _all_to_all,
    ("broadcast", "tree"): _broadcast_tree,
    ("broadcast", "scatter_ag"): _broadcast_scatter_ag,
    ("send", "direct"): _send,
}
