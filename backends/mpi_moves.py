"""Collectives over MPI: one function per (collective, strategy), on numpy arrays.

To add a strategy, write a function of a `Link` and the local array and register it; the conformance test
runs whatever is registered against the collective's `reference`. Every transfer is started non-blocking
and finished by `Link.wait`, which decides between spinning and sleeping. Strategies in several rounds are
in `mpi_rounds.py`, hierarchical ones in `mpi_leaders.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import numpy as np

from shardwright.backends.mpi_leaders import LEADERS
from shardwright.backends.mpi_link import Link, Lowering, assembled, mpi, operation, piece, starts
from shardwright.backends.mpi_rounds import ROUNDS
from shardwright.backends.wire import Array, aligned, as_bytes, leading, reducible, restored, returned
from shardwright.ir.placement import Partial, Shard

_LOWERINGS: dict[tuple[str, str], Lowering] = {**ROUNDS, **LEADERS}


def lowerings() -> dict[tuple[str, str], Lowering]:
    """All lowerings by (collective, strategy)."""
    return _LOWERINGS


def lowers(kind: str, strategy: str) -> Callable[[Lowering], Lowering]:
    """Registers the decorated function as the lowering of a strategy."""

    def register(function: Lowering) -> Lowering:
        assert (kind, strategy) not in _LOWERINGS, f"{kind}.{strategy} is lowered twice"
        _LOWERINGS[kind, strategy] = function
        return function

    return register


# ---------------------------------------------------------------------------------------------------
# S(d) -> R


def _gather_geometry(link: Link, array: Array) -> tuple[int, Array, tuple[int, ...], int]:
    """The sharded dimension, the local stretch with that dimension first, shape and bytes of one row."""
    assert isinstance(link.pre, Shard)
    rows = leading(array, link.pre.dim)
    row = rows.shape[1:]
    return link.pre.dim, rows, row, int(np.prod(row, dtype=np.int64)) * array.dtype.itemsize


@lowers("all_gather", "padded")
def _all_gather_padded(link: Link, array: Array) -> Array:
    """One all-gather of equal blocks, each as long as the longest stretch."""
    dim, rows, row, _ = _gather_geometry(link, array)
    block = max(link.before)
    sent = rows
    if len(rows) < block:
        sent = np.zeros((block, *row), array.dtype)
        sent[: len(rows)] = rows
    padded = aligned((len(link.before), block, *row), array.dtype)
    link.wait([link.comm.Iallgather(as_bytes(sent), as_bytes(padded))])
    if min(link.before) == block:
        return returned(padded.reshape(len(link.before) * block, *row), dim)
    whole = aligned((sum(link.before), *row), array.dtype)
    np.concatenate([padded[i, :n] for i, n in enumerate(link.before)], out=whole)
    return returned(whole, dim)


@lowers("all_gather", "grouped")
def _all_gather_grouped(link: Link, array: Array) -> Array:
    """One broadcast per owner of a stretch that is not empty."""
    dim, rows, row, _ = _gather_geometry(link, array)
    whole = aligned((sum(link.before), *row), array.dtype)
    ends = [whole[start : start + n] for start, n in zip(starts(link.before), link.before, strict=True)]
    ends[link.me][...] = rows
    link.wait([link.comm.Ibcast(as_bytes(end), root=i) for i, end in enumerate(ends) if end.size])
    return returned(whole, dim)


@lowers("all_gather", "exact")
def _all_gather_exact(link: Link, array: Array) -> Array:
    """One all-gather of stretches of their own lengths."""
    dim, rows, row, row_bytes = _gather_geometry(link, array)
    whole = aligned((sum(link.before), *row), array.dtype)
    counts = [n * row_bytes for n in link.before]
    target = [as_bytes(whole), counts, starts(counts), mpi().BYTE]
    link.wait([link.comm.Iallgatherv(as_bytes(rows), target)])
    return returned(whole, dim)


# ---------------------------------------------------------------------------------------------------
# P(op) -> S(d)


@lowers("reduce_scatter", "padded")
def _reduce_scatter_padded(link: Link, array: Array) -> Array:
    """One reduce-scatter of equal blocks, each as long as the longest stretch."""
    assert isinstance(link.pre, Partial)
    assert isinstance(link.post, Shard)
    wide, op = reducible(array, link.pre.op)
    rows = leading(wide, link.post.dim)
    row, block, mine = rows.shape[1:], max(link.after), link.after[link.me]
    sent = rows
    if min(link.after) < block:
        sent = np.zeros((len(link.after), block, *row), wide.dtype)
        for i, (start, n) in enumerate(zip(starts(link.after), link.after, strict=True)):
            sent[i, :n] = rows[start : start + n]
    received = aligned((block, *row), wide.dtype)
    link.wait([link.comm.Ireduce_scatter_block(sent.reshape(-1), received.reshape(-1), operation(op))])
    return returned(restored(received[:mine], link.dtype), link.post.dim)


@lowers("reduce_scatter", "exact")
def _reduce_scatter_exact(link: Link, array: Array) -> Array:
    """One reduce-scatter of stretches of their own lengths."""
    assert isinstance(link.pre, Partial)
    assert isinstance(link.post, Shard)
    wide, op = reducible(array, link.pre.op)
    rows = leading(wide, link.post.dim)
    row = rows.shape[1:]
    size = int(np.prod(row, dtype=np.int64))
    received = aligned((link.after[link.me], *row), wide.dtype)
    counts = [n * size for n in link.after]
    link.wait([link.comm.Ireduce_scatter(rows.reshape(-1), received.reshape(-1), counts, operation(op))])
    return returned(restored(received, link.dtype), link.post.dim)


@lowers("reduce_scatter", "grouped")
def _reduce_scatter_grouped(link: Link, array: Array) -> Array:
    """One reduction per owner of a stretch that is not empty."""
    assert isinstance(link.pre, Partial)
    assert isinstance(link.post, Shard)
    wide, op = reducible(array, link.pre.op)
    rows = leading(wide, link.post.dim)
    received = aligned((link.after[link.me], *rows.shape[1:]), wide.dtype)
    requests = [
        link.comm.Ireduce(
            rows[start : start + n].reshape(-1), received.reshape(-1) if i == link.me else None,
            operation(op), root=i,
        )
        for i, (start, n) in enumerate(zip(starts(link.after), link.after, strict=True))
        if n and rows[:1].size
    ]  # fmt: skip
    link.wait(requests)
    return returned(restored(received, link.dtype), link.post.dim)


# ---------------------------------------------------------------------------------------------------
# S(d) -> S(e), and from a root


@lowers("all_to_all", "exact")
def _all_to_all(link: Link, array: Array) -> Array:
    """One all-to-all of pieces of their own sizes."""
    assert isinstance(link.pre, Shard)
    assert isinstance(link.post, Shard)
    everyone = range(len(link.before))
    axis = (slice(None),) * link.post.dim
    pieces = [array[(*axis, piece(link, link.me, target)[0])].reshape(-1) for target in everyone]
    shapes = [piece(link, source, link.me)[1] for source in everyone]
    item = array.dtype.itemsize
    out_counts = [part.size * item for part in pieces]
    in_counts = [int(np.prod(shape, dtype=np.int64)) * item for shape in shapes]
    sent = as_bytes(np.concatenate(pieces))
    received = aligned((sum(in_counts) // item,), array.dtype)
    request = link.comm.Ialltoallv(
        [sent, out_counts, starts(out_counts), mpi().BYTE],
        [as_bytes(received), in_counts, starts(in_counts), mpi().BYTE],
    )
    link.wait([request])
    return assembled(link, received, everyone)


def _root_buffer(link: Link, array: Array) -> Array:
    return (
        np.ascontiguousarray(array).reshape(link.shape)
        if link.me == link.root
        else aligned(link.shape, link.dtype)
    )


@lowers("broadcast", "tree")
def _broadcast(link: Link, array: Array) -> Array:
    """MPI's own broadcast."""
    whole = _root_buffer(link, array)
    link.wait([link.comm.Ibcast(as_bytes(whole), root=link.root)])
    return whole


@lowers("broadcast", "scatter_ag")
def _broadcast_scatter_ag(link: Link, array: Array) -> Array:
    """The root scatters pieces of equal size; all gather them."""
    whole = aligned(link.shape, link.dtype)
    if link.me == link.root:
        whole[...] = array.reshape(link.shape)
    raw = as_bytes(whole)
    ends = [raw.size * i // link.comm.size for i in range(link.comm.size + 1)]
    counts = [last - first for first, last in pairwise(ends)]
    target = [raw, counts, ends[:-1], mpi().BYTE]
    # The root's own piece lies where it belongs; elsewhere the piece is received there.
    piece = mpi().IN_PLACE if link.me == link.root else raw[ends[link.me] : ends[link.me + 1]]
    link.wait([link.comm.Iscatterv(target if link.me == link.root else None, piece, root=link.root)])
    link.wait([link.comm.Iallgatherv(mpi().IN_PLACE, target)])
    return whole


@lowers("send", "direct")
def _send(link: Link, array: Array) -> Array:
    """A send on the root's side, a receive on the other."""
    whole = _root_buffer(link, array)
    other = 1 - link.me
    post = link.comm.Isend if link.me == link.root else link.comm.Irecv
    link.wait([post(as_bytes(whole), other)])
    return whole
