"""Strategies as routines: what each participant of an exchange copies, sends and receives.

One function per (collective, strategy) writes a participant's routine. Exchanges of equal kind may travel as
one message: their operands are packed one after another (`MERGED` in `schedule/geometry.py` says which kinds
can). All-reduces, which take several rounds, are in `schedule/rounds.py`, hierarchical strategies in
`schedule/nodes.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod

from shardwright.backends.schedule.geometry import (
    Geometry,
    Lowering,
    Regions,
    cut_dim,
    gathered,
    is_packed,
    on_the_wire,
    operands,
    pieces,
    region_views,
    results,
    scattered,
    starts,
)
from shardwright.backends.schedule.ops import Builder, Routine, Slot, Transfer, View, whole
from shardwright.ir.placement import Partial, ReduceOp

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
        if is_packed(g, found, cut_dim(g.members[0].pre)):
            return Gathering(b, g, found, ins, outs, outs[0].buffer)
        return Gathering(b, g, found, ins, outs, b.buffer("temp", g.dtype, found.room))

    def own(self) -> Slot:
        """The own region, packed if it is not already."""
        parts = [view.leading(cut_dim(m.pre)) for view, m in zip(self.ins, self.g.members, strict=True)]
        if len(parts) == 1 and parts[0].contiguous():
            return whole(self.ins[0].buffer, 0, parts[0].size)
        buffer = self.b.buffer("temp", self.g.dtype, sum(part.size for part in parts))
        for source, target in zip(parts, region_views(buffer, 0, parts), strict=True):
            self.b.copy(source, target)
        return whole(buffer, 0, self.regions.counts[self.g.me])

    def place(self) -> None:
        """Copy the own region to where it belongs among all."""
        parts = [view.leading(cut_dim(m.pre)) for view, m in zip(self.ins, self.g.members, strict=True)]
        first = self.regions.displs[self.g.me]
        for source, target in zip(parts, region_views(self.packed, first, parts), strict=True):
            self.b.copy(source, target)

    def end(self) -> Routine:
        """Unpack, unless the regions are the result."""
        if self.packed != self.outs[0].buffer:
            dims = [cut_dim(m.pre) for m in self.g.members]
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
        if wide != g.dtype or not is_packed(g, found, cut_dim(g.members[0].post)):
            packed = b.buffer("temp", wide, found.room)
            dims = [cut_dim(m.post) for m in g.members]
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
        direct = not more and cut_dim(self.g.members[0].post) == 0 and self.wide == self.g.dtype
        if direct and count == first.size:
            return first.buffer
        return self.b.buffer("temp", self.wide, count)

    def end(self, room: int) -> Routine:
        """Unpack the own region from `room`."""
        if room != self.outs[0].buffer:
            dims = [cut_dim(m.post) for m in self.g.members]
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
    pre, post = cut_dim(m.pre), cut_dim(m.post)
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
    pre, post = cut_dim(m.pre), cut_dim(m.post)
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
