"""Hierarchical strategies as routines: in every node a leader collects, talks to the others, hands out.

Regions are packed in *node order*: node by node, within a node by position. On fleets that is the order of
the devices, and packing copies nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Protocol

from shardwright.backends.schedule.geometry import (
    Geometry,
    Lowering,
    Regions,
    gathered,
    in_order,
    operands,
    region_views,
    results,
    scattered,
    starts,
)
from shardwright.backends.schedule.lower import Gathering, Scattering, piece_of, piece_views
from shardwright.backends.schedule.ops import Builder, Routine, Slot, Transfer, View, whole
from shardwright.backends.schedule.rounds import Reduction


class _Size(Protocol):
    """Elements of the pieces from some participants to some."""

    def __call__(self, sources: Sequence[int], targets: Sequence[int]) -> int: ...


class Division:
    """The participants by node, as one of them sees it."""

    def __init__(self, g: Geometry) -> None:
        self.nodes = g.nodes
        self.mine = next(k for k, node in enumerate(g.nodes) if g.me in node)
        self.node = g.nodes[self.mine]
        self.here = tuple(g.participants[i] for i in self.node)
        self.leaders = tuple(g.participants[i] for i in g.leads)
        self.root = self.node.index(g.leads[self.mine])
        self.leads = g.leads[self.mine] == g.me
        self.order = [i for node in g.nodes for i in node]

    def blocks(self, found: Regions) -> Regions:
        """One region per node: those of its participants, which lie together."""
        return Regions.packed([sum(found.counts[i] for i in node) for node in self.nodes])


def _all_reduce(g: Geometry) -> Routine:
    """A reduction to each node's leader, an all-reduce among leaders, a broadcast in each node."""
    job, parts = Reduction(g), Division(g)
    if not job.size:
        return job.routine()
    all_of_it = whole(*job.part(0, job.size))
    mine = (None, all_of_it) if parts.leads else (all_of_it, None)
    job.b.transfer(Transfer("reduce", parts.here, *mine, parts.root, job.op))
    job.b.wait()
    if parts.leads:
        job.b.transfer(Transfer("all_reduce", parts.leaders, None, all_of_it, op=job.op))
        job.b.wait()
    job.b.transfer(Transfer("broadcast", parts.here, None, all_of_it, parts.root))
    return job.routine()


def _all_gather(g: Geometry) -> Routine:
    """Each node's leader gathers its stretches, the leaders gather those, and hand all on in their nodes."""
    parts = Division(g)
    found = in_order(g, gathered(g), parts.order)
    job = Gathering.begin(g, found)
    if not found.total:
        return job.end()
    together = found.slot(job.packed, parts.node) if parts.leads else None
    job.b.transfer(Transfer("gather", parts.here, job.own(), together, parts.root))
    job.b.wait()
    if parts.leads:
        blocks = parts.blocks(found).slot(job.packed)
        job.b.transfer(Transfer("all_gather", parts.leaders, None, blocks))
        job.b.wait()
    everything = whole(job.packed, 0, found.total)
    job.b.transfer(Transfer("broadcast", parts.here, None, everything, parts.root))
    return job.end()


def _reduce_scatter(g: Geometry) -> Routine:
    """A reduction to each node's leader, a reduce-scatter among leaders, a scatter in each node."""
    parts = Division(g)
    found = in_order(g, scattered(g), parts.order)
    job = Scattering.begin(g, found)
    room = job.room()
    if not found.total:
        return job.end(room)
    blocks = parts.blocks(found)
    everything = whole(job.packed, 0, found.total)
    summed = job.b.buffer("temp", job.wide, found.total if parts.leads else 0)
    target = whole(summed, 0, found.total) if parts.leads else None
    job.b.transfer(Transfer("reduce", parts.here, everything, target, parts.root, job.op))
    job.b.wait()
    block = job.b.buffer("temp", job.wide, blocks.counts[parts.mine] if parts.leads else 0)
    source = None
    if parts.leads:
        mine = whole(block, 0, blocks.counts[parts.mine])
        job.b.transfer(Transfer("reduce_scatter", parts.leaders, blocks.slot(summed), mine, op=job.op))
        job.b.wait()
        counts = tuple(found.counts[i] for i in parts.node)
        source = Slot(block, counts, tuple(starts(counts)))
    own = whole(room, 0, found.counts[g.me])
    job.b.transfer(Transfer("scatter", parts.here, source, own, parts.root))
    return job.end(room)


def _all_to_all(g: Geometry) -> Routine:
    """Each node's leader gathers all pieces of its node, the leaders swap them, and hand them out."""
    parts, b = Division(g), Builder()
    ins, outs = operands(b, g), results(b, g)
    give, take = piece_views(g, ins, outs)

    def size(sources: Sequence[int], targets: Sequence[int]) -> int:
        return sum(prod(piece_of(g, s, t)[2]) for s in sources for t in targets)

    ordered = [give[i] for i in parts.order]
    packed = b.buffer("temp", g.dtype, sum(v.size for v in give))
    for source, target in zip(ordered, region_views(packed, 0, ordered), strict=True):
        b.copy(source, target)
    own = whole(packed, 0, sum(v.size for v in give))
    due = size(range(g.count), [g.me])
    came = b.buffer("temp", g.dtype, due)
    if not prod(g.one.shape):
        return b.routine(outs)
    if not parts.leads:
        b.transfer(Transfer("gather", parts.here, own, None, parts.root))
        b.wait()
        b.transfer(Transfer("scatter", parts.here, None, whole(came, 0, due), parts.root))
    else:
        _swap(b, g, parts, size, own, whole(came, 0, due))
    arrived = [take[i] for i in parts.order]
    for source, target in zip(region_views(came, 0, arrived), arrived, strict=True):
        b.copy(source, target)
    return b.routine(outs)


def _swap(b: Builder, g: Geometry, parts: Division, size: _Size, own: Slot, came: Slot) -> None:
    """The leader's part between gathering and handing out."""
    node, nodes = parts.node, parts.nodes

    def slots(counts: Sequence[int]) -> Slot:
        return Slot(b.buffer("temp", g.dtype, sum(counts)), tuple(counts), tuple(starts(counts)))

    collected = slots([size([member], parts.order) for member in node])
    b.transfer(Transfer("gather", parts.here, own, collected, parts.root))
    b.wait()
    # From members, each with pieces for all nodes, to nodes, each with pieces of all members; and back.
    sent = slots([size(node, other) for other in nodes])
    _transpose(b, collected.buffer, sent.buffer, [[size([m], other) for other in nodes] for m in node])
    received = slots([size(other, node) for other in nodes])
    b.transfer(Transfer("all_to_all", parts.leaders, sent, received))
    b.wait()
    due = slots([size(parts.order, [member]) for member in node])
    _transpose(b, received.buffer, due.buffer, [[size([i], [m]) for m in node] for i in parts.order])
    b.transfer(Transfer("scatter", parts.here, due, came, parts.root))


def _transpose(b: Builder, source: int, target: int, sizes: Sequence[Sequence[int]]) -> None:
    """From row after row of blocks to column after column; `sizes` has the elements of each block."""
    first = starts([sum(row) for row in sizes])
    inside = [starts(row) for row in sizes]
    at = 0
    for column in range(len(sizes[0])):
        for row, counts in enumerate(sizes):
            n = counts[column]
            b.copy(View.of(source, (n,), first[row] + inside[row][column]), View.of(target, (n,), at))
            at += n


#: By (collective, strategy).
NODES: Mapping[tuple[str, str], Lowering] = {
    ("all_reduce", "hierarchical"): _all_reduce,
    ("all_gather", "hierarchical"): _all_gather,
    ("reduce_scatter", "hierarchical"): _reduce_scatter,
    ("all_to_all", "hierarchical"): _all_to_all,
}
