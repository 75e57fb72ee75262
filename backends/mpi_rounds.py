"""All-reduces over MPI in several rounds: rings and recursive doubling.

All of them give every participant the same bits: each element is either added up in one place and
then sent around, or added in the same order up to exchanging the two operands.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise

import numpy as np

from shardwright.backends.mpi_link import Link, Lowering
from shardwright.backends.wire import Array, aligned, as_bytes, reducible, restored
from shardwright.ir.placement import Partial

_COMBINE = {"sum": np.add, "max": np.maximum, "min": np.minimum}


def _summed(link: Link, array: Array, rounds: Callable[[Link, Array, np.ufunc], None]) -> Array:
    """An all-reduce of which `rounds` does the work, in place on a flat copy."""
    assert isinstance(link.pre, Partial)
    sent, op = reducible(array, link.pre.op)
    total = aligned(array.shape, sent.dtype)
    total[...] = sent
    rounds(link, total.reshape(-1), _COMBINE[op])
    return restored(total, link.dtype)


def _exchange(link: Link, sent: Array, to: int, received: Array, source: int) -> None:
    link.wait([link.comm.Irecv(as_bytes(received), source), link.comm.Isend(as_bytes(sent), to)])


def _all_reduce_ring(link: Link, array: Array) -> Array:
    """Blocks travel around the ring twice: once adding up, once handing out."""

    def rounds(link: Link, flat: Array, combine: np.ufunc) -> None:
        size, me = link.comm.size, link.me
        ends = [flat.size * i // size for i in range(size + 1)]
        blocks = [flat[first:last] for first, last in pairwise(ends)]
        after, before = (me + 1) % size, (me - 1) % size
        room = np.empty(max(map(len, blocks)), flat.dtype)
        for k in range(size - 1):
            mine = blocks[(me - k - 1) % size]
            came = room[: len(mine)]
            _exchange(link, blocks[(me - k) % size], after, came, before)
            combine(mine, came, out=mine)
        for k in range(size - 1):
            _exchange(link, blocks[(me - k + 1) % size], after, blocks[(me - k) % size], before)

    return _summed(link, array, rounds)


def _folded(link: Link, flat: Array, combine: np.ufunc, doubling: Callable[[int, list[int]], None]) -> None:
    """Runs `doubling` among a power of two of the participants, with their place and everyone's ranks.

    With r beyond it, participants 1, 3, ..., 2r - 1 first hand their data to the one before, and in the
    end get the result from there.
    """
    size, me = link.comm.size, link.me
    excess = size - (1 << (size.bit_length() - 1))
    active = [*range(0, 2 * excess, 2), *range(2 * excess, size)]
    if me not in active:
        link.wait([link.comm.Isend(as_bytes(flat), me - 1)])
        link.wait([link.comm.Irecv(as_bytes(flat), me - 1)])
        return
    if me < 2 * excess:
        came = np.empty_like(flat)
        link.wait([link.comm.Irecv(as_bytes(came), me + 1)])
        combine(flat, came, out=flat)
    doubling(active.index(me), active)
    if me < 2 * excess:
        link.wait([link.comm.Isend(as_bytes(flat), me + 1)])


def _distances(count: int) -> Iterator[int]:
    return (1 << k for k in range(count.bit_length() - 1))


def _all_reduce_tree(link: Link, array: Array) -> Array:
    """Recursive doubling: partners at distance 1, 2, 4, ... exchange all they have."""

    def rounds(link: Link, flat: Array, combine: np.ufunc) -> None:
        def doubling(place: int, ranks: list[int]) -> None:
            came = np.empty_like(flat)
            for distance in _distances(len(ranks)):
                partner = ranks[place ^ distance]
                _exchange(link, flat, partner, came, partner)
                combine(flat, came, out=flat)

        _folded(link, flat, combine, doubling)

    return _summed(link, array, rounds)


def _all_reduce_rs_ag(link: Link, array: Array) -> Array:
    """Reduce-scatter by recursive halving, then all-gather by doubling; the large pieces go to neighbours."""

    def rounds(link: Link, flat: Array, combine: np.ufunc) -> None:
        def doubling(place: int, ranks: list[int]) -> None:
            first, last = 0, len(flat)
            handed: list[tuple[int, Array, Array]] = []
            for distance in _distances(len(ranks)):
                partner, middle = ranks[place ^ distance], (first + last) // 2
                low, high = flat[first:middle], flat[middle:last]
                kept, given = (high, low) if place & distance else (low, high)
                came = np.empty_like(kept)
                _exchange(link, given, partner, came, partner)
                combine(kept, came, out=kept)
                first, last = (middle, last) if place & distance else (first, middle)
                handed.append((partner, kept, given))
            for partner, kept, given in reversed(handed):
                _exchange(link, kept, partner, given, partner)

        _folded(link, flat, combine, doubling)

    return _summed(link, array, rounds)


#: By (collective, strategy).
ROUNDS: Mapping[tuple[str, str], Lowering] = {
    ("all_reduce", "ring"): _all_reduce_ring,
    ("all_reduce", "tree"): _all_reduce_tree,
    ("all_reduce", "rs_ag"): _all_reduce_rs_ag,
}
