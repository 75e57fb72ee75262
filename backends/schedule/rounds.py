"""All-reduces as routines of several rounds: rings and recursive doubling.

All of them give every participant the same bits: each element is either added up in one place and then sent
around, or added in the same order up to exchanging the two operands.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from math import prod

from shardwright.backends.schedule.geometry import Geometry, Lowering, on_the_wire, operands, padding, results
from shardwright.backends.schedule.ops import Builder, Routine, Transfer, View, whole
from shardwright.ir.placement import Partial, ReduceOp


class Reduction:
    """A flat buffer that is reduced in place: the operands of all members, one after another.

    Every member begins at an aligned address, so that results are windows into the buffer wherever the dtype
    is the one in which it is reduced.
    """

    def __init__(self, g: Geometry) -> None:
        pre = g.members[0].pre
        assert isinstance(pre, Partial)
        self.g, self.b = g, Builder()
        wide, op = on_the_wire(g.dtype, pre.op)
        self.wide: str = wide
        self.op: ReduceOp = op
        ins = operands(self.b, g)
        sizes = [prod(member.shape) for member in g.members]
        starts = [0]
        for size in sizes:
            starts.append(starts[-1] + padding(size, g.itemsize if self.wide == g.dtype else 1))
        self.size = starts[-2] + sizes[-1]
        same = self.wide == g.dtype
        self.flat = self.b.buffer("out" if same else "temp", self.wide, self.size)
        places = [View.of(self.flat, m.shape, at) for m, at in zip(g.members, starts, strict=False)]
        for source, target in zip(ins, places, strict=True):
            self.b.copy(source, target)
        self.places = places
        self.outs = places if same else results(self.b, g)

    def exchange(self, sent: tuple[int, int, int], to: int, came: tuple[int, int, int], source: int) -> None:
        """Send a stretch (buffer, first, count) to one participant while receiving one from another."""
        me = self.g.me
        self.receive(came, source)
        if sent[2]:
            self.b.transfer(Transfer("send", self._pair(me, to), whole(*sent)))

    def receive(self, came: tuple[int, int, int], source: int) -> None:
        """Receive a stretch."""
        if came[2]:
            self.b.transfer(Transfer("recv", self._pair(source, self.g.me), None, whole(*came)))

    def add(self, came: tuple[int, int, int], mine: tuple[int, int, int]) -> None:
        """Reduce what came into a stretch of the flat buffer."""
        (buffer, at, count), (target, first, _) = came, mine
        self.b.combine(self.op, View.of(buffer, (count,), at), View.of(target, (count,), first))

    def room(self, count: int) -> tuple[int, int, int]:
        """Scratch to receive so much in."""
        return self.b.buffer("temp", self.wide, count), 0, count

    def part(self, first: int, last: int) -> tuple[int, int, int]:
        """A stretch of the flat buffer."""
        return self.flat, first, last - first

    def routine(self) -> Routine:
        """With the results in the value's own dtype."""
        if self.outs is not self.places:
            for source, target in zip(self.places, self.outs, strict=True):
                self.b.copy(source, target)
        return self.b.routine(self.outs)

    def _pair(self, source: int, target: int) -> tuple[int, int]:
        """The two devices of a message, its sender first."""
        return self.g.participants[source], self.g.participants[target]


def _all_reduce_ring(g: Geometry) -> Routine:
    """Blocks travel around the ring twice: once adding up, once handing out."""
    job = Reduction(g)
    size, me = g.count, g.me
    ends = [job.size * i // size for i in range(size + 1)]
    blocks = [job.part(first, last) for first, last in pairwise(ends)]
    after, before = (me + 1) % size, (me - 1) % size
    room = job.room(max(count for _, _, count in blocks))
    for k in range(size - 1):
        mine = blocks[(me - k - 1) % size]
        came = (room[0], 0, mine[2])
        job.exchange(blocks[(me - k) % size], after, came, before)
        job.add(came, mine)
        job.b.wait()
    for k in range(size - 1):
        job.exchange(blocks[(me - k + 1) % size], after, blocks[(me - k) % size], before)
        job.b.wait()
    return job.routine()


def _folded(job: Reduction, doubling: Callable[[int, list[int]], None]) -> None:
    """Runs `doubling` among a power of two of the participants, with their place and everyone's positions.

    With r beyond it, participants 1, 3, ..., 2r - 1 first hand their data to the one before, and in the
    end get the result from there.
    """
    size, me = job.g.count, job.g.me
    everything = job.part(0, job.size)
    nothing = (job.flat, 0, 0)
    excess = size - (1 << (size.bit_length() - 1))
    active = [*range(0, 2 * excess, 2), *range(2 * excess, size)]
    if me not in active:
        job.exchange(everything, me - 1, nothing, me - 1)
        job.b.wait()
        job.receive(everything, me - 1)
        return
    if me < 2 * excess:
        came = job.room(job.size)
        job.receive(came, me + 1)
        job.add(came, everything)
    doubling(active.index(me), active)
    if me < 2 * excess:
        job.b.wait()
        job.exchange(everything, me + 1, nothing, me + 1)


def _distances(count: int) -> Iterator[int]:
    return (1 << k for k in range(count.bit_length() - 1))


def _all_reduce_tree(g: Geometry) -> Routine:
    """Recursive doubling: partners at distance 1, 2, 4, ... exchange all they have."""
    job = Reduction(g)

    def doubling(place: int, positions: list[int]) -> None:
        everything, came = job.part(0, job.size), job.room(job.size)
        for distance in _distances(len(positions)):
            partner = positions[place ^ distance]
            job.b.wait()
            job.exchange(everything, partner, came, partner)
            job.add(came, everything)

    _folded(job, doubling)
    return job.routine()


def _all_reduce_rs_ag(g: Geometry) -> Routine:
    """Reduce-scatter by recursive halving, then all-gather by doubling; the large pieces go to neighbours."""
    job = Reduction(g)

    def doubling(place: int, positions: list[int]) -> None:
        first, last = 0, job.size
        room = job.room(-(-job.size // 2))[0]
        handed: list[tuple[int, tuple[int, int, int], tuple[int, int, int]]] = []
        for distance in _distances(len(positions)):
            partner, middle = positions[place ^ distance], (first + last) // 2
            low, high = job.part(first, middle), job.part(middle, last)
            kept, given = (high, low) if place & distance else (low, high)
            came = (room, 0, kept[2])
            job.b.wait()
            job.exchange(given, partner, came, partner)
            job.add(came, kept)
            first, last = (middle, last) if place & distance else (first, middle)
            handed.append((partner, kept, given))
        for partner, kept, given in reversed(handed):
            job.b.wait()
            job.exchange(kept, partner, given, partner)

    _folded(job, doubling)
    return job.routine()


#: By (collective, strategy).
ROUNDS: Mapping[tuple[str, str], Lowering] = {
    ("all_reduce", "ring"): _all_reduce_ring,
    ("all_reduce", "tree"): _all_reduce_tree,
    ("all_reduce", "rs_ag"): _all_reduce_rs_ag,
}
