"""Collectives over MPI: one function per (collective, strategy), on numpy arrays.

To add a strategy, write a function of a `Link` and the local array and register it; the conformance test
runs whatever is registered against the collective's `reference`. Every transfer is started non-blocking
and finished by `Link.wait`, which decides between spinning and sleeping.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, TypeAlias

import numpy as np

from shardwright.backends.wire import Array, aligned, as_bytes, leading, reducible, restored, returned
from shardwright.ir.errors import InputError
from shardwright.ir.placement import Partial, Placement, ReduceOp, Shard


@dataclass(frozen=True, slots=True)
class Link:
    """A move as one participant sees it.

    Attributes:
        comm: communicator of the participants.
        shape: global shape on the wire (of a key tensor, that of its data).
        dtype: numpy dtype on the wire.
        pre: placement before.
        post: placement after.
        before: elements of the dimension sharded before, per participant; () if there is none.
        after: the same after.
        root: participant that has the tensor at first, for rooted collectives.
        wait: finishes requests.
    """

    comm: Any
    shape: tuple[int, ...]
    dtype: Any
    pre: Placement
    post: Placement
    before: tuple[int, ...]
    after: tuple[int, ...]
    root: int | None
    wait: Callable[[Sequence[Any]], None]

    @property
    def me(self) -> int:
        return self.comm.rank


Lowering: TypeAlias = Callable[[Link, Array], Array]

_LOWERINGS: dict[tuple[str, str], Lowering] = {}


def lowerings() -> dict[tuple[str, str], Lowering]:
    """All lowerings by (collective, strategy)."""
    return _LOWERINGS


def _lowers(kind: str, strategy: str) -> Callable[[Lowering], Lowering]:
    def register(function: Lowering) -> Lowering:
        assert (kind, strategy) not in _LOWERINGS, f"{kind}.{strategy} is lowered twice"
        _LOWERINGS[kind, strategy] = function
        return function

    return register


def mpi() -> Any:
    """The MPI module of mpi4py, whose first import initialises MPI.

    Raises:
        InputError: there is no mpi4py, or no MPI library that it could load.
    """
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError, OSError) as error:
        raise InputError(
            place="backend mpi",
            reason=f"MPI cannot be loaded ({error})",
            remedy="pip install 'shardwright[mpi]'",
        ) from error
    return MPI


def _operation(op: ReduceOp) -> Any:
    return {"sum": mpi().SUM, "max": mpi().MAX, "min": mpi().MIN}[op]


def starts(lengths: Sequence[int]) -> list[int]:
    """Where each stretch begins."""
    return list(accumulate(lengths, initial=0))[:-1]


# ---------------------------------------------------------------------------------------------------
# S(d) -> R


def _gather_geometry(link: Link, array: Array) -> tuple[int, Array, tuple[int, ...], int]:
    """The sharded dimension, the local stretch with that dimension first, shape and bytes of one row."""
    assert isinstance(link.pre, Shard)
    rows = leading(array, link.pre.dim)
    row = rows.shape[1:]
    return link.pre.dim, rows, row, int(np.prod(row, dtype=np.int64)) * array.dtype.itemsize


@_lowers("all_gather", "padded")
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


@_lowers("all_gather", "grouped")
def _all_gather_grouped(link: Link, array: Array) -> Array:
    """One broadcast per owner of a stretch that is not empty."""
    dim, rows, row, _ = _gather_geometry(link, array)
    whole = aligned((sum(link.before), *row), array.dtype)
    ends = [whole[start : start + n] for start, n in zip(starts(link.before), link.before, strict=True)]
    ends[link.me][...] = rows
    link.wait([link.comm.Ibcast(as_bytes(end), root=i) for i, end in enumerate(ends) if end.size])
    return returned(whole, dim)


@_lowers("all_gather", "exact")
def _all_gather_exact(link: Link, array: Array) -> Array:
    """One all-gather of stretches of their own lengths."""
    dim, rows, row, row_bytes = _gather_geometry(link, array)
    whole = aligned((sum(link.before), *row), array.dtype)
    counts = [n * row_bytes for n in link.before]
    target = [as_bytes(whole), counts, starts(counts), mpi().BYTE]
    link.wait([link.comm.Iallgatherv(as_bytes(rows), target)])
    return returned(whole, dim)


# ---------------------------------------------------------------------------------------------------
# P(op) -> R, P(op) -> S(d)


@_lowers("all_reduce", "ring")
def _all_reduce(link: Link, array: Array) -> Array:
    """MPI's own all-reduce."""
    assert isinstance(link.pre, Partial)
    sent, op = reducible(array, link.pre.op)
    total = aligned(array.shape, sent.dtype)
    link.wait(
        [link.comm.Iallreduce(np.ascontiguousarray(sent).reshape(-1), total.reshape(-1), _operation(op))]
    )
    return restored(total, link.dtype)


@_lowers("all_reduce", "tree")
def _all_reduce_tree(link: Link, array: Array) -> Array:
    """A reduction to the first participant, then a broadcast."""
    assert isinstance(link.pre, Partial)
    sent, op = reducible(array, link.pre.op)
    total = aligned(array.shape, sent.dtype)
    flat = total.reshape(-1)
    link.wait([link.comm.Ireduce(np.ascontiguousarray(sent).reshape(-1), flat, _operation(op), root=0)])
    link.wait([link.comm.Ibcast(flat, root=0)])
    return restored(total, link.dtype)


@_lowers("reduce_scatter", "padded")
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
    link.wait([link.comm.Ireduce_scatter_block(sent.reshape(-1), received.reshape(-1), _operation(op))])
    return returned(restored(received[:mine], link.dtype), link.post.dim)


@_lowers("reduce_scatter", "exact")
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
    link.wait([link.comm.Ireduce_scatter(rows.reshape(-1), received.reshape(-1), counts, _operation(op))])
    return returned(restored(received, link.dtype), link.post.dim)


# ---------------------------------------------------------------------------------------------------
# S(d) -> S(e), and from a root


def _piece(link: Link, source: int, target: int) -> tuple[slice, tuple[int, ...]]:
    """What `source` sends `target`: the part of its dimension `post.dim`, and the shape of the piece."""
    assert isinstance(link.pre, Shard)
    assert isinstance(link.post, Shard)
    shape = list(link.shape)
    shape[link.pre.dim] = link.before[source]
    first = starts(link.after)[target]
    last = first + link.after[target]
    if link.pre.dim == link.post.dim:
        held = starts(link.before)[source]
        first, last = (min(max(x - held, 0), link.before[source]) for x in (first, last))
    shape[link.post.dim] = last - first
    return slice(first, last), tuple(shape)


@_lowers("all_to_all", "exact")
def _all_to_all(link: Link, array: Array) -> Array:
    """One all-to-all of pieces of their own sizes."""
    assert isinstance(link.pre, Shard)
    assert isinstance(link.post, Shard)
    everyone = range(len(link.before))
    axis = (slice(None),) * link.post.dim
    pieces = [array[(*axis, _piece(link, link.me, target)[0])].reshape(-1) for target in everyone]
    shapes = [_piece(link, source, link.me)[1] for source in everyone]
    item = array.dtype.itemsize
    out_counts = [piece.size * item for piece in pieces]
    in_counts = [int(np.prod(shape, dtype=np.int64)) * item for shape in shapes]
    sent = as_bytes(np.concatenate(pieces))
    received = aligned((sum(in_counts) // item,), array.dtype)
    request = link.comm.Ialltoallv(
        [sent, out_counts, starts(out_counts), mpi().BYTE],
        [as_bytes(received), in_counts, starts(in_counts), mpi().BYTE],
    )
    link.wait([request])
    ends = zip(starts(in_counts), in_counts, shapes, strict=True)
    parts = [received[start // item : (start + n) // item].reshape(shape) for start, n, shape in ends]
    local = list(link.shape)
    local[link.post.dim] = link.after[link.me]
    whole = aligned(tuple(local), array.dtype)
    np.concatenate(parts, axis=link.pre.dim, out=whole)
    return whole


def _root_buffer(link: Link, array: Array) -> Array:
    return (
        np.ascontiguousarray(array).reshape(link.shape)
        if link.me == link.root
        else aligned(link.shape, link.dtype)
    )


@_lowers("broadcast", "tree")
def _broadcast(link: Link, array: Array) -> Array:
    """MPI's own broadcast."""
    whole = _root_buffer(link, array)
    link.wait([link.comm.Ibcast(as_bytes(whole), root=link.root)])
    return whole


@_lowers("send", "direct")
def _send(link: Link, array: Array) -> Array:
    """A send on the root's side, a receive on the other."""
    whole = _root_buffer(link, array)
    other = 1 - link.me
    post = link.comm.Isend if link.me == link.root else link.comm.Irecv
    link.wait([post(as_bytes(whole), other)])
    return whole
