"""Stages as devices run them: each its own layers, on one piece of the batch after another.

What a device does with a piece is one compiled function; who has the piece before and after it, and how it
gets there, is the backend's matter. See `shardwright.ir.stages`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from shardwright.backends.compile import Compiler
from shardwright.backends.layout import abstract
from shardwright.backends.local import local_shape
from shardwright.ir.graph import Equation
from shardwright.ir.placement import Shard, lengths
from shardwright.ir.rules import Signature
from shardwright.ir.stages import Layers, layers_of, piece_type


def chain(equation: Equation, signature: Signature, ratios: Sequence[float]) -> tuple[int, ...]:
    """The devices that have layers, in the order in which they have a piece."""
    layers = layers_of(equation)
    assert layers is not None, "it is one of stages"
    cut = next(p for p in signature.ins if isinstance(p, Shard))
    counts = lengths(layers.length, cut.unit, cut.ratios(ratios))
    found = [device for device, count in enumerate(counts) if count]
    return tuple(reversed(found) if layers.reverse else found)


class Stage:
    """The layers of one device.

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
        layers = layers_of(equation)
        assert layers is not None, "it is one of stages"
        self.layers: Layers = layers
        self._chain = chain(equation, signature, ratios)
        self._place = self._chain.index(device) if device in self._chain else -1
        first, count = layers.consts + layers.carries, layers.carries
        pairs = zip(equation.input_types, signature.ins, strict=True)
        whole = [abstract(t, local_shape(t, p, device, ratios)) for t, p in pairs]
        pairs = zip(equation.output_types, signature.outs, strict=True)
        made = [abstract(t, local_shape(t, p, device, ratios)) for t, p in pairs]
        self._rows = whole[first].shape[0]
        goings = layers.ins[layers.consts : first]
        carried = zip(equation.input_types[layers.consts : first], goings, strict=True)
        #: Types of what is carried on, of one piece.
        self.carried = tuple(piece_type(tensor, going, layers.pieces) for tensor, going in carried)
        if not self.takes_part:
            return
        piece, number = [abstract(t, t.shape) for t in self.carried], jax.ShapeDtypeStruct((), "int32")
        fixed = [*whole[: layers.consts], *whole[first:]]

        def begin(carry: list[Any], number: Any) -> list[Any]:
            return layers.piece(carry, goings, number)

        self.run = compiler.share(layers.run, (piece, fixed, made[count:], number), (2,), now=now)
        if self.is_first:
            self.begin = compiler.share(begin, (whole[layers.consts : first], number), now=now)
        if self.is_last:
            self.keep = compiler.share(layers.put, (made[:count], piece, number), (0,), now=now)

    @property
    def takes_part(self) -> bool:
        """Whether the device has any layers."""
        return self._place >= 0

    @property
    def is_first(self) -> bool:
        """Whether pieces begin here."""
        return self._place == 0

    @property
    def is_last(self) -> bool:
        """Whether pieces end here."""
        return self._place == len(self._chain) - 1

    @property
    def before(self) -> int:
        """The device that has a piece before this one."""
        return self._chain[self._place - 1]

    @property
    def after(self) -> int:
        """The device that has a piece after this one."""
        return self._chain[self._place + 1]

    def room(self) -> tuple[list[Any], list[Any]]:
        """Results before the first piece: what is carried on, and rows."""
        made, count = self.layers.room(self._rows), self.layers.carries
        return made[:count], made[count:]

    def split(self, operands: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """Of operands, what is carried on, and all others."""
        first, last = self.layers.consts, self.layers.consts + self.layers.carries
        return list(operands[first:last]), [*operands[:first], *operands[last:]]


def numbers(layers: Layers) -> list[Any]:
    """Of every piece, its number as an operand."""
    return [jnp.asarray(number, "int32") for number in range(layers.pieces)]
