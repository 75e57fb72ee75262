"""Stages as devices run them: each its own layers, on one piece of the batch after another.

What a device does with a piece is one compiled function; who has the piece before and after it, and how it
gets there, is the backend's matter. See `shardwright.ir.stages`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from shardwright.backends.compile import Compiler
from shardwright.backends.layout import abstract
from shardwright.backends.local import local_shape
from shardwright.ir.graph import Equation
from shardwright.ir.placement import Shard, region
from shardwright.ir.rules import Signature
from shardwright.ir.stages import Layers, layers_of


@dataclass(frozen=True, slots=True)
class Course:
    """Which device has which piece, and when.

    A stage is those devices that have the same layers: one, or those of a node, each with a stretch of the
    pieces. All of them take theirs in one order, so that none waits for a piece which is behind one that is
    not taken. In that order each first few are spread out over all pieces: however many devices share them
    out in the next stage, all of these soon have one.

    Attributes:
        owners: of every stage, in the order in which a piece passes them, the device of each piece.
        turns: of every device that has any, its pieces in the order in which it is at work on them.
    """

    owners: tuple[tuple[int, ...], ...]
    turns: Mapping[int, tuple[int, ...]]

    @staticmethod
    def of(equation: Equation, signature: Signature, ratios: Sequence[float]) -> Course:
        """That of stages."""
        layers = layers_of(equation)
        assert layers is not None, "it is one of stages"
        found: dict[int, list[int]] = {}
        for device in range(len(ratios)):
            here, (begin, count) = _part(equation, signature, device, ratios)
            if count:
                owners = found.setdefault(begin, [-1] * layers.pieces)
                owners[here.first : here.first + here.pieces] = [device] * here.pieces
        owners = [tuple(found[begin]) for begin in sorted(found, reverse=layers.reverse)]
        order = spread_out(layers.pieces)
        turns = {
            d: tuple([p for p in order if stage[p] == d]) for stage in owners for d in dict.fromkeys(stage)
        }
        return Course(tuple(owners), turns)

    def place(self, device: int) -> int:
        """The number of a device's stage; -1 where it has nothing to do."""
        return next((number for number, stage in enumerate(self.owners) if device in stage), -1)


def spread_out(count: int) -> list[int]:
    """Numbers below `count`, by their bits from the last one on (van der Corput, 1935)."""
    bits = max(count - 1, 0).bit_length()
    return sorted(range(count), key=lambda number: f"{number:0{bits}b}"[::-1])


def _part(
    equation: Equation, signature: Signature, device: int, ratios: Sequence[float]
) -> tuple[Layers, tuple[int, int]]:
    """The pieces of a device, and where its layers begin, and how many they are."""
    layers = layers_of(equation)
    assert layers is not None, "it is one of stages"

    def held(number: int) -> Sequence[tuple[int, int]]:
        return region(equation.input_types[number].shape, signature.ins[number], device, ratios)

    # What is carried on comes in pieces, some of it at least.
    number, going = next((k, going) for k, going in enumerate(layers.ins) if isinstance(going, Shard))
    begin, length = held(number)[going.dim]
    here = layers.some(begin // going.unit, length // going.unit)
    return here, held(layers.consts + layers.carries)[0]


class Turn(NamedTuple):
    """A piece of the batch: its number, and as an operand that among those of its device."""

    piece: int
    number: Any


class Stage:
    """The layers of one device, on its pieces.

    Args:
        equation: the stages.
        signature: which lies where.
        device, ratios: of the program.
        compiler: of its functions.
        now: whether to compile them now; else each is when it is first called.
    """

    def __init__(
        self,
        equation: Equation,
        signature: Signature,
        device: int,
        ratios: Sequence[float],
        compiler: Compiler,
        *,
        now: bool = False,
    ) -> None:
        layers, _ = _part(equation, signature, device, ratios)
        self.layers, self.course = layers, Course.of(equation, signature, ratios)
        self._place = self.course.place(device)
        #: The pieces in the order in which they come.
        self.turns = tuple(
            [Turn(p, jnp.asarray(p - layers.first, "int32")) for p in self.course.turns.get(device, ())]
        )
        first, count = layers.consts + layers.carries, layers.carries
        pairs = zip(equation.input_types, signature.ins, strict=True)
        whole = [abstract(t, local_shape(t, p, device, ratios)) for t, p in pairs]
        pairs = zip(equation.output_types, signature.outs, strict=True)
        made = [abstract(t, local_shape(t, p, device, ratios)) for t, p in pairs]
        self._rows = whole[first].shape[0]
        goings = layers.ins[layers.consts : first]
        carried = layers.graph.inputs[layers.consts : first]
        #: Types of what is carried on, of one piece.
        self.carried = tuple([value.type for value in carried])
        fixed = [*whole[: layers.consts], *whole[first:]]
        self._idle = None
        if not self.takes_part:
            if self._rows and None in layers.outs[count:]:
                self._idle = compiler.share(layers.without_pieces, (fixed,), now=now)
            return
        piece, number = [abstract(t, t.shape) for t in self.carried], jax.ShapeDtypeStruct((), "int32")

        def begin(carry: list[Any], number: Any) -> list[Any]:
            return layers.piece(carry, goings, number)

        self.run = compiler.share(layers.run, (piece, fixed, made[count:], number), (2,), now=now)
        if self.is_first:
            self.begin = compiler.share(begin, (whole[layers.consts : first], number), now=now)
        if self.is_last:
            self.keep = compiler.share(layers.put, (made[:count], piece, number), (0,), now=now)

    @property
    def takes_part(self) -> bool:
        """Whether the device has any layers, and pieces."""
        return self._place >= 0

    @property
    def is_first(self) -> bool:
        """Whether pieces begin here."""
        return self._place == 0

    @property
    def is_last(self) -> bool:
        """Whether pieces end here."""
        return self._place == len(self.course.owners) - 1

    def before(self, piece: int) -> int:
        """The device that has a piece before this one."""
        return self.course.owners[self._place - 1][piece]

    def after(self, piece: int) -> int:
        """The device that has a piece after this one."""
        return self.course.owners[self._place + 1][piece]

    def room(self, operands: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """Results before the first piece: what is carried on, and rows."""
        made, count = self.layers.room(self._rows), self.layers.carries
        rows = made[count:] if self._idle is None else self._idle(self.split(operands)[1])
        return made[:count], rows

    def split(self, operands: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """Of operands, what is carried on, and all others."""
        first, last = self.layers.consts, self.layers.consts + self.layers.carries
        return list(operands[first:last]), [*operands[:first], *operands[last:]]
