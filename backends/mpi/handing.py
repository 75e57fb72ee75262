"""Stages over MPI: pieces of the batch come from the rank before and go to the rank after.

While a rank computes one piece, the next one arrives and the last one leaves: both are exchanges under way
like any other (`Lane`), which go on whenever somebody looks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from numpy.typing import NDArray

from shardwright.backends.layout import wire_type
from shardwright.backends.relay import Stage
from shardwright.backends.transport import Running
from shardwright.backends.wire import aligned, as_bytes, to_jax
from shardwright.backends.world import World

#: Of messages between stages: exchanges between the same two ranks have tag 0.
_TAG = 1


def handed_on(
    stage: Stage, args: Sequence[Any], world: World, ready: Callable[[Any], NDArray[Any]]
) -> list[Any]:
    """Results of the layers of this rank: what is carried on, of the last stage alone, and rows.

    Args:
        stage: the layers.
        args: operands of the equation, as this rank holds them.
        world: the ranks.
        ready: gives a local array as numpy's when it is there; meanwhile what is under way goes on.
    """
    carry, rows = stage.room(args)
    if not stage.takes_part:
        return [*carry, *rows]
    world.settle()
    begin, fixed = stage.split(args)
    arriving = _Arriving(stage, world)
    leaving: Running | None = None
    for which, number in stage.turns:
        piece = stage.begin(begin, number) if stage.is_first else arriving.take()
        piece, rows = stage.run(piece, fixed, rows, number)
        # To look out for the next piece meanwhile would take the core from what is computed.
        arrays = [ready(each) for each in piece]
        if stage.is_last:
            carry = stage.keep(carry, piece, number)
            continue
        if leaving is not None:  # no more than one is under way
            world.lane.land(leaving)
        leaving = world.lane.launch(_Message(world.comm.Isend, stage.after(which), len(arrays)), arrays)
    if leaving is not None:
        world.lane.land(leaving)
    return [*carry, *rows]


class _Message:
    """Arrays that go to another rank, or come from one: a `Carrier` of one stage.

    Args:
        post: of a communicator, `Isend` or `Irecv`.
        other: the rank.
        count: of arrays.
    """

    def __init__(self, post: Callable[..., Any], other: int, count: int) -> None:
        self.same: list[bool] = []
        self._post, self._other = post, other
        self.stages: list[tuple[list[Any], list[Any]]] = [
            ([], [partial(self._start, k) for k in range(count)])
        ]

    def _start(self, number: int, memory: Sequence[Any]) -> Any:
        return self._post(as_bytes(memory[number]), self._other, _TAG)

    def memory(self, operands: Sequence[Any]) -> list[Any]:
        """The arrays themselves."""
        return list(operands)

    def results(self, memory: Sequence[Any]) -> list[Any]:
        """The same."""
        return list(memory)


class _Arriving:
    """Pieces from the stage before; the next one is on its way while one is worked on."""

    def __init__(self, stage: Stage, world: World) -> None:
        self._stage, self._world = stage, world
        self._left = iter(() if stage.is_first else stage.turns)
        self._next = self._posted()

    def take(self) -> list[Any]:
        """The next piece, when it is there."""
        assert self._next is not None, "there is one for every piece"
        arrays = self._world.lane.land(self._next)
        self._next = self._posted()
        return [
            to_jax(array, tensor.dtype) for array, tensor in zip(arrays, self._stage.carried, strict=True)
        ]

    def _posted(self) -> Running | None:
        turn = next(self._left, None)
        if turn is None:
            return None
        arrays = [aligned(*wire_type(tensor)) for tensor in self._stage.carried]
        return self._world.lane.launch(
            _Message(self._world.comm.Irecv, self._stage.before(turn.piece), len(arrays)), arrays
        )
