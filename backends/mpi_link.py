"""What a lowering over MPI works with: the move as one participant sees it, and small helpers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, TypeAlias

import numpy as np

from shardwright.backends.wire import Array, aligned
from shardwright.ir.errors import InputError
from shardwright.ir.placement import Placement, ReduceOp, Shard


@dataclass(frozen=True, slots=True)
class Division:
    """The participants of a move by node, as one of them sees it.

    Attributes:
        nodes: positions of the participants, by node; this participant's own node is number `mine`.
        mine: see above.
        here: communicator of this participant's node, in the order of positions.
        lead: rank in `here` of the leader.
        leaders: communicator of the leaders, in the order of nodes; None on all others.
    """

    nodes: tuple[tuple[int, ...], ...]
    mine: int
    here: Any
    lead: int
    leaders: Any


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
        divide: the participants by node; the first call is a collective one.
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
    divide: Callable[[], Division]

    @property
    def me(self) -> int:
        return self.comm.rank


Lowering: TypeAlias = Callable[[Link, Array], Array]


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


def operation(op: ReduceOp) -> Any:
    """MPI's operation for a reduction."""
    return {"sum": mpi().SUM, "max": mpi().MAX, "min": mpi().MIN}[op]


def starts(lengths: Sequence[int]) -> list[int]:
    """Where each stretch begins."""
    return list(accumulate(lengths, initial=0))[:-1]


def piece(link: Link, source: int, target: int) -> tuple[slice, tuple[int, ...]]:
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


def assembled(link: Link, received: Array, order: Sequence[int]) -> Array:
    """This participant's array after an all-to-all, from the sources' pieces one after another in `order`."""
    assert isinstance(link.pre, Shard)
    assert isinstance(link.post, Shard)
    parts: dict[int, Array] = {}
    start = 0
    for source in order:
        shape = piece(link, source, link.me)[1]
        size = int(np.prod(shape, dtype=np.int64))
        parts[source] = received[start : start + size].reshape(shape)
        start += size
    local = list(link.shape)
    local[link.post.dim] = link.after[link.me]
    whole = aligned(tuple(local), received.dtype)
    np.concatenate([parts[source] for source in sorted(parts)], axis=link.pre.dim, out=whole)
    return whole
