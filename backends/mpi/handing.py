"""Stages over MPI: pieces of the batch come from the rank before and go to the rank after.

While a rank computes one piece, the next one is received and the last one is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from numpy.typing import NDArray

from shardwright.backends.layout import wire_type
from shardwright.backends.relay import Stage, numbers
from shardwright.backends.wire import aligned, as_bytes, to_jax
from shardwright.backends.world import World

#: Of messages between stages: exchanges under way between the same two ranks have tag 0.
_TAG = 1


def handed_on(
    stage: Stage, args: Sequence[Any], world: World, ready: Callable[[Any], NDArray[Any]]
) -> list[Any]:
    """Results of the layers of this rank: what is carried on, of the last stage alone, and rows.

    Args:
        stage: the layers.
        args: operands of the equation, as this rank holds them.
        world: the ranks.
        ready: gives a local array as numpy's when it is there.
    """
    carry, rows = stage.room()
    if not stage.takes_part:
        return [*carry, *rows]
    world.settle()
    begin, fixed = stage.split(args)
    arriving = _Arriving(stage, world)
    leaving: list[tuple[list[Any], list[Any]]] = []
    for number in numbers(stage.layers):
        piece = stage.begin(begin, number) if stage.is_first else arriving.take()
        piece, rows = stage.run(piece, fixed, rows, number)
        if stage.is_last:
            carry = stage.keep(carry, piece, number)
            continue
        arrays = [ready(each) for each in piece]
        if leaving:  # no more than one is under way, whose memory is kept until it has left
            world.wait(leaving.pop()[1])
        requests = [world.comm.Isend(as_bytes(array), stage.after, _TAG) for array in arrays]
        leaving.append((arrays, requests))
    for _, requests in leaving:
        world.wait(requests)
    return [*carry, *rows]


class _Arriving:
    """Pieces from the stage before; the next one is on its way while one is worked on."""

    def __init__(self, stage: Stage, world: World) -> None:
        self._stage, self._world = stage, world
        self._left = 0 if stage.is_first else stage.layers.pieces
        self._next = self._post()

    def take(self) -> list[Any]:
        """The next piece, when it is there."""
        arrays, requests = self._next
        self._world.wait(requests)
        self._next = self._post()
        pairs = zip(arrays, self._stage.carried, strict=True)
        return [to_jax(array, tensor.dtype) for array, tensor in pairs]

    def _post(self) -> tuple[list[Any], list[Any]]:
        if not self._left:
            return [], []
        self._left -= 1
        arrays = [aligned(*wire_type(tensor)) for tensor in self._stage.carried]
        comm, before = self._world.comm, self._stage.before
        return arrays, [comm.Irecv(as_bytes(array), before, _TAG) for array in arrays]
