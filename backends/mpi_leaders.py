"""Hierarchical collectives over MPI: in every node a leader collects, talks to the other leaders, hands out.

Data of several participants is packed in *node order*: node by node, within a node by position. On fleets
that is the order of the devices, and packing copies nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from shardwright.backends.mpi_link import Link, Lowering, assembled, mpi, operation, piece, starts
from shardwright.backends.wire import Array, aligned, as_bytes, leading, reducible, restored, returned
from shardwright.ir.placement import Partial, Shard


def _all_reduce_hierarchical(link: Link, array: Array) -> Array:
    """A reduction to each node's leader, an all-reduce among leaders, a broadcast in each node."""
    assert isinstance(link.pre, Partial)
    sent, op = reducible(array, link.pre.op)
    total = aligned(array.shape, sent.dtype)
    flat, parts = total.reshape(-1), link.divide()
    link.wait(
        [parts.here.Ireduce(np.ascontiguousarray(sent).reshape(-1), flat, operation(op), root=parts.lead)]
    )
    if parts.leaders is not None:
        link.wait([parts.leaders.Iallreduce(mpi().IN_PLACE, flat, operation(op))])
    link.wait([parts.here.Ibcast(as_bytes(total), root=parts.lead)])
    return restored(total, link.dtype)


def _by_node(rows: Array, lengths: tuple[int, ...], order: list[int]) -> Array:
    """The stretches of `rows`, of these lengths, in another order; no copy if it is the same."""
    if order == sorted(order):
        return rows
    first = starts(lengths)
    return np.concatenate([rows[first[i] : first[i] + lengths[i]] for i in order])


def _all_gather_hierarchical(link: Link, array: Array) -> Array:
    """Each node's leader gathers its stretches, the leaders gather those, and hand all on in their nodes."""
    assert isinstance(link.pre, Shard)
    parts, rows = link.divide(), leading(array, link.pre.dim)
    order = [i for node in parts.nodes for i in node]
    packed = aligned((sum(link.before), *rows.shape[1:]), array.dtype)
    raw = as_bytes(packed)
    row_bytes = rows[:1].nbytes if len(rows) else packed[:1].nbytes
    nodes = [[link.before[i] * row_bytes for i in node] for node in parts.nodes]
    totals, own = [sum(node) for node in nodes], nodes[parts.mine]
    start = starts(totals)[parts.mine]
    block = [raw[start : start + totals[parts.mine]], own, starts(own), mpi().BYTE]
    leads = parts.leaders is not None
    link.wait([parts.here.Igatherv(as_bytes(rows), block if leads else None, root=parts.lead)])
    if leads:
        link.wait([parts.leaders.Iallgatherv(mpi().IN_PLACE, [raw, totals, starts(totals), mpi().BYTE])])
    link.wait([parts.here.Ibcast(raw, root=parts.lead)])
    back = sorted(range(len(order)), key=order.__getitem__)
    return returned(_by_node(packed, tuple(link.before[i] for i in order), back), link.pre.dim)


def _reduce_scatter_hierarchical(link: Link, array: Array) -> Array:
    """A reduction to each node's leader, a reduce-scatter among leaders, a scatter in each node."""
    assert isinstance(link.pre, Partial)
    assert isinstance(link.post, Shard)
    parts = link.divide()
    wide, op = reducible(array, link.pre.op)
    order = [i for node in parts.nodes for i in node]
    rows = _by_node(leading(wide, link.post.dim), link.after, order)
    row = rows.shape[1:]
    width = int(np.prod(row, dtype=np.int64))
    nodes = [[link.after[i] * width for i in node] for node in parts.nodes]
    totals, own = [sum(node) for node in nodes], nodes[parts.mine]
    summed = np.empty(rows.size, wide.dtype)
    link.wait([parts.here.Ireduce(rows.reshape(-1), summed, operation(op), root=parts.lead)])
    block = np.empty(totals[parts.mine], wide.dtype)
    if parts.leaders is not None:
        link.wait([parts.leaders.Ireduce_scatter(summed, block, totals, operation(op))])
    received = aligned((link.after[link.me], *row), wide.dtype)
    item = wide.dtype.itemsize
    counts = [n * item for n in own]
    source = [as_bytes(block), counts, starts(counts), mpi().BYTE] if parts.leaders is not None else None
    link.wait([parts.here.Iscatterv(source, as_bytes(received), root=parts.lead)])
    return returned(restored(received, link.dtype), link.post.dim)


def _all_to_all_hierarchical(link: Link, array: Array) -> Array:
    """Each node's leader gathers all pieces of its node, the leaders swap them, and hand them out."""
    assert isinstance(link.post, Shard)
    parts, item = link.divide(), array.dtype.itemsize
    order = [i for node in parts.nodes for i in node]
    mine = parts.nodes[parts.mine]

    def nbytes(sources: Sequence[int], targets: Sequence[int]) -> int:
        shapes = (piece(link, source, target)[1] for source in sources for target in targets)
        return item * sum(int(np.prod(shape, dtype=np.int64)) for shape in shapes)

    axis = (slice(None),) * link.post.dim
    pieces = [array[(*axis, piece(link, link.me, target)[0])].reshape(-1) for target in order]
    counts = [nbytes([member], order) for member in mine]
    gathered = np.empty(sum(counts), np.uint8)
    link.wait(
        [
            parts.here.Igatherv(
                as_bytes(np.concatenate(pieces)),
                [gathered, counts, starts(counts), mpi().BYTE] if parts.leaders is not None else None,
                root=parts.lead,
            )
        ]
    )
    source = None
    if parts.leaders is not None:
        # From members, each with pieces for all nodes, to nodes, each with pieces of all members; and back.
        out = [nbytes(mine, node) for node in parts.nodes]
        sent = _transposed(gathered, [[nbytes([member], node) for node in parts.nodes] for member in mine])
        back = [nbytes(node, mine) for node in parts.nodes]
        came = np.empty(sum(back), np.uint8)
        swap = parts.leaders.Ialltoallv(
            [sent, out, starts(out), mpi().BYTE], [came, back, starts(back), mpi().BYTE]
        )
        link.wait([swap])
        due = [nbytes(order, [member]) for member in mine]
        packed = _transposed(came, [[nbytes([i], [member]) for member in mine] for i in order])
        source = [packed, due, starts(due), mpi().BYTE]
    received = aligned((nbytes(order, [link.me]) // item,), array.dtype)
    link.wait([parts.here.Iscatterv(source, as_bytes(received), root=parts.lead)])
    return assembled(link, received, order)


def _transposed(packed: Array, sizes: Sequence[Sequence[int]]) -> Array:
    """From row after row of blocks to column after column; `sizes` has the bytes of each block."""
    first = starts([sum(row) for row in sizes])
    inside = [starts(row) for row in sizes]
    return np.concatenate(
        [
            packed[first[r] + inside[r][c] : first[r] + inside[r][c] + sizes[r][c]]
            for c in range(len(sizes[0]))
            for r in range(len(sizes))
        ]
    )


#: By (collective, strategy).
LEADERS: Mapping[tuple[str, str], Lowering] = {
    ("all_reduce", "hierarchical"): _all_reduce_hierarchical,
    ("all_gather", "hierarchical"): _all_gather_hierarchical,
    ("reduce_scatter", "hierarchical"): _reduce_scatter_hierarchical,
    ("all_to_all", "hierarchical"): _all_to_all_hierarchical,
}
