"""Stages: scans whose iterations lie on different devices, which hand pieces of the batch on to each other.

An equation `stages` is a scan over layers, done on one piece of the batch after another. By its rule the
layers may be cut, and nothing else: device i then has a stretch of them, with all that they hold, and is a
*stage* of a pipeline (Huang et al., GPipe, 2019). A piece passes all stages in turn; while one is at work on
it, those before are at work on the next pieces. With M pieces and S stages that takes M + S - 1 beats.

    {constants R, carry R, rows S(0)} stages {carry P(sum), rows S(0)}

The carry comes out of the last stage: it keeps it, and all others have nothing to add to it. Rows are what
scans walk over, parameters and residuals; of a `reverse` scan the last stretch of them is done first.

A device runs its layers by itself, and hands the carry of every piece on: such an instruction is neither
local nor an exchange, but a step of its own (`Relay` in `ir/segments.py`). On one device, or with all layers
on every device, the equation is what it replaces, piece by piece.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import mlir

from shardwright.ir.collectives import identity
from shardwright.ir.graph import Equation, Graph, TensorType
from shardwright.ir.placement import ReduceOp, Shard
from shardwright.ir.program import Compute, Instruction
from shardwright.ir.rows import piece_of, with_piece
from shardwright.ir.rules import Signature

#: Name of the primitive.
STAGES = "stages"

#: How a tensor goes with the pieces: cut as if they were devices, the same for all of them (None), or, of a
#: result, the sum (or largest, or smallest) over them.
Going: TypeAlias = Shard | ReduceOp | None


@dataclass(frozen=True, slots=True, eq=False)
class Layers:
    """What an equation `stages` does.

    Attributes:
        consts, carries: how many operands every layer has as they are, and how many are carried on; the
            others are walked over, one row per layer.
        length: number of layers.
        reverse: whether the last one comes first.
        pieces: of the batch.
        ins, outs: how operands and results go with the pieces; dimensions are those of the whole tensors.
        body: one layer on one piece, a closed jaxpr from constants, carry, rows and the number of the piece
            to carry and rows.
        graph: the same as a graph, for prices and memory.
        source: one layer on the whole batch, as it was.
    """

    consts: int
    carries: int
    length: int
    reverse: bool
    pieces: int
    ins: tuple[Going, ...]
    outs: tuple[Going, ...]
    body: Any
    graph: Graph
    source: Graph

    def piece(self, operands: Sequence[Any], goings: Sequence[Going], number: Any) -> list[Any]:
        """One piece of every operand."""
        pairs = zip(operands, goings, strict=True)
        return [piece_of(x, g, self.pieces, number) if isinstance(g, Shard) else x for x, g in pairs]

    def run(self, operands: Sequence[Any], number: Any) -> list[Any]:
        """Some of the layers on one piece; their number is that of the rows."""
        first = self.consts + self.carries
        layer = jaxpr_as_fun(self.body)

        def one(carry: Sequence[Any], rows: Sequence[Any]) -> tuple[list[Any], list[Any]]:
            results = layer(*operands[: self.consts], *carry, *rows, number)
            return list(results[: self.carries]), list(results[self.carries :])

        begin, rows = list(operands[self.consts : first]), list(operands[first:])
        carry, made = jax.lax.scan(one, begin, rows, reverse=self.reverse)
        return [*carry, *made]

    def put(
        self, results: Sequence[Any], ones: Sequence[Any], goings: Sequence[Going], number: Any
    ) -> list[Any]:
        """Results, with those of one more piece in them."""
        return [self._put(*each, number) for each in zip(results, ones, goings, strict=True)]

    def _put(self, result: Any, one: Any, going: Going, number: Any) -> Any:
        if isinstance(going, Shard):
            return with_piece(result, one, going, self.pieces, number)
        return one if going is None else _ADDED[going](result, one)


def piece_type(tensor: TensorType, going: Going, pieces: int) -> TensorType:
    """The type of one piece of a tensor."""
    if not isinstance(going, Shard):
        return tensor
    shape = list(tensor.shape)
    shape[going.dim] //= pieces
    return TensorType(tuple(shape), tensor.dtype)


_ADDED = {"sum": jnp.add, "max": jnp.maximum, "min": jnp.minimum}


def _everything(*operands: Any, layers: Layers) -> list[Any]:
    """All layers, on one piece after another."""

    def of_piece(number: Any, *operands: Any) -> list[Any]:
        return layers.run(layers.piece(operands, layers.ins, number), number)

    def one(so_far: Sequence[Any], number: Any) -> tuple[list[Any], None]:
        return layers.put(so_far, of_piece(number, *operands), layers.outs, number), None

    types = jax.eval_shape(of_piece, 0, *operands)
    begun = [_room(one, going, layers.pieces) for one, going in zip(types, layers.outs, strict=True)]
    return list(jax.lax.scan(one, begun, jnp.arange(layers.pieces))[0])


def _room(one: Any, going: Going, pieces: int) -> Any:
    """What there is of a result before the first piece; `one` is that of a piece."""
    shape = list(one.shape)
    if isinstance(going, Shard):
        shape[going.dim] *= pieces
    nothing = 0 if going is None or isinstance(going, Shard) else identity(going, one.dtype)
    return jnp.full(shape, nothing, one.dtype)


def _types(*operands: Any, layers: Layers) -> list[Any]:
    """Abstract results."""
    return jax.make_jaxpr(partial(_everything, layers=layers))(*operands).out_avals


stages_p = Primitive(STAGES)
stages_p.multiple_results = True
stages_p.def_impl(jax.jit(_everything, static_argnames="layers"))
stages_p.def_abstract_eval(_types)
mlir.register_lowering(stages_p, mlir.lower_fun(_everything, multiple_results=True))


def layers_of(equation: Equation) -> Layers | None:
    """What an equation does if it is one of stages."""
    return equation.params["layers"] if equation.primitive == STAGES else None


def carried_on(equation: Equation) -> int:
    """How many operands an equation of stages carries on."""
    layers = layers_of(equation)
    return 0 if layers is None else layers.carries


def in_stages(signature: Signature) -> bool:
    """Whether a signature of such an equation has its layers on different devices."""
    return any(isinstance(placement, Shard) for placement in signature.ins)


def relays(instruction: Instruction, graph: Graph) -> bool:
    """Whether an instruction runs as stages, which hand pieces on to each other."""
    if not isinstance(instruction, Compute):
        return False
    return graph.equations[instruction.equation].primitive == STAGES and in_stages(instruction.signature)
