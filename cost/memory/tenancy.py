"""What a program establishes, and when its buffers are there: see `tenants.py`."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from typing import TypeAlias

from shardwright.ir.graph import TensorType
from shardwright.ir.placement import Placement

#: Bytes of a tensor in a placement: fixed, and times a device's share (one for each of a program's ratios).
Bytes: TypeAlias = tuple[float, ...]
Size: TypeAlias = Callable[[TensorType, Placement], Bytes]
#: A tenant that may be written over one of others, and when.
Over: TypeAlias = tuple[int, tuple[int, ...], int]


class Tenants:
    """What a program establishes, in order; a property that is established anew is another tenant.

    Attributes:
        stretch: the stretch between exchanges in which it is made; -1 for what is given.
        sources: tenants in memory that it is read from: itself, or what it is computed from.
        first, last: when its buffer is there; -1, -1 without one.
        size: of its buffer, as `Size` has it.
        leaves: tenants that another stretch reads, or that are handed out.
        later: those of them that one other stretch computes itself, from what is given: that is there anyway
            (`shardwright/ir/late.py`).
        over: tenants that may be written over operands, with these and the moment.
    """

    def __init__(self, count: int) -> None:
        self.stretch: list[int] = []
        self.sources: list[tuple[int, ...]] = [(number,) for number in range(count)]
        self.first = [-1] * count
        self.last = [-1] * count
        self.size: list[Bytes] = [(0.0, 0.0)] * count
        self.leaves: set[int] = set()
        self.later: set[int] = set()
        self.over: list[Over] = []

    def write(self, number: int, time: int, size: Bytes) -> None:
        self.first[number] = self.last[number] = time
        self.sources[number] = (number,)
        self.size[number] = size

    def read(self, numbers: tuple[int, ...], time: int) -> None:
        for number in numbers:
            if self.last[number] < time:
                self.last[number] = time

    def written_over(self, elsewhere: Container[int]) -> dict[int, int]:
        """Tenants that are written over what nobody reads any more, and when they count as their own.

        Args:
            elsewhere: those that have a place already, and that nobody's place is.
        """
        taken, after = set[int](), dict[int, int]()
        for number, sources, time in self.over:
            if number in elsewhere:
                continue
            for source in sources:
                if (
                    self.last[source] == time
                    and source not in taken
                    and source not in self.leaves
                    and source not in elsewhere
                    and self.size[source] == self.size[number]
                    and self.first[source] >= 0
                ):
                    taken.add(source)
                    after[number] = time + 1
                    break
        return after


def union(some: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """Tenants, each once, in order."""
    if len(some) == 1:
        return some[0]
    return tuple(dict.fromkeys([number for tenants in some for number in tenants]))
