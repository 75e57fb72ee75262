"""Who lies in whose place: buffers in what results and donated inputs leave vacant, and over their operands.

As XLA assigns buffers, the largest first and of equal ones in the order in which the results need them:

- A result has a place from the beginning of the program, and donated state has its input's. While neither the
  input nor the result is there, any buffer that is no larger can be, in its operand's place or else in the
  smallest.
- What finds no such place goes to the arena. There it lies over an operand that nobody reads afterwards.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from shardwright.cost.memory.nodes import Buffer


class Place:
    """Where a result will be, and the input was that it continues."""

    __slots__ = ("nbytes", "tenants")

    def __init__(self, result: Buffer, given: Buffer | None = None) -> None:
        self.nbytes = result.nbytes
        self.tenants = [(result.start, result.end, result)]
        if given is not None:
            # Of an input that is copied, `given` is the copy: it cannot lie there, nor what is there before.
            until = given.start if given.early else given.end
            self.tenants.append((-1.0, until, given))

    @property
    def vacant(self) -> bool:
        """Whether anything else may be there at all."""
        return self.tenants[0][0] > (self.tenants[1][1] if len(self.tenants) > 1 else 0)

    def takes(self, buffer: Buffer, start: float, end: float) -> bool:
        """Whether there is room for a buffer from `start` to `end`, and put it there."""
        for begin, until, other in self.tenants:
            if (
                start <= until
                and begin <= end
                # One that begins where the other ends may be written over it.
                and not (start == until and other in buffer.over)
                and not (begin == end and buffer in other.over)
            ):
                return False
        self.tenants.append((start, end, buffer))
        return True


def settle(buffers: Sequence[Buffer], places: Sequence[Place]) -> list[Buffer]:
    """Move buffers into places; those that are left.

    Args:
        buffers: in the order in which the results need them.
        places: likewise.
    """
    vacant = sorted(places, key=lambda place: -place.nbytes)[::-1]
    vacant = [place for place in vacant if place.vacant]
    if not vacant:
        return list(buffers)
    sizes = [place.nbytes for place in vacant]
    home = {tenant: place for place in vacant for _, _, tenant in place.tenants}
    left: list[Buffer] = []
    for buffer in sorted(buffers, key=lambda buffer: -buffer.nbytes):
        first = bisect_left(sizes, buffer.nbytes)
        if first < len(sizes):
            start, end = buffer.start, buffer.end
            mine = [home[other] for other in buffer.over if other in home]
            for place in (*mine, *vacant[first:]):
                if place.nbytes >= buffer.nbytes and place.takes(buffer, start, end):
                    home[buffer] = place
                    break
            else:
                left.append(buffer)
        else:
            left.append(buffer)
    return left


def share(buffers: Sequence[Buffer]) -> list[Buffer]:
    """Buffers of the arena, of which each that may be written over an operand is one with that."""
    of: dict[Buffer, Buffer] = {}
    for buffer in sorted(buffers, key=lambda buffer: buffer.start):
        under = next((of[other] for other in buffer.over if other in of), buffer)
        of[buffer] = under
        if under is not buffer:
            under.last, under.what, under.equation = buffer.last, buffer.what, buffer.equation
            under.role = buffer.role
    return [buffer for buffer in buffers if of[buffer] is buffer]
