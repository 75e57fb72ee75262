"""Stages: scans whose iterations lie on different devices, which hand pieces of the batch on to each other.

An equation `stages` is a scan over layers, done on one piece of the batch after another. By its rule the
layers may be cut: device i then has a stretch of them, with all that they hold, and is a *stage* of a
pipeline (Huang et al., GPipe, 2019). A piece passes all stages in turn; while one is at work on it, those
before are at work on the next pieces. With M pieces and S stages that takes M + S - 1 beats.

    {constants R, carry R, rows S(0)} stages {carry P(sum), rows S(0)}

The carry comes out of the last stage: it keeps it, and all others have nothing to add to it. Rows are what
scans walk over, parameters and residuals; of a `reverse` scan the last stretch of them is done first.

On two mesh axes every node is a stage, and its devices share out the pieces, each with its stretch of the
batch. What they add up over it is the sum over the node then:

    {constants R, carry R/S(batch), parameters S(0)/R} stages {carry P(sum)/S(batch), gradients S(0)/P(sum)}

A device runs its layers by itself, and hands the carry of every piece on: such an instruction is neither
local nor an exchange, but a step of its own (`Relay` in `ir/segments.py`). On one device, or with all layers
on every device, the equation is what it replaces, piece by piece.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import mlir

from shardwright.ir.collectives import identity
from shardwright.ir.dtypes import dtype_of, is_key, key_implementation
from shardwright.ir.graph import Equation, Graph, TensorType
from shardwright.ir.placement import ReduceOp, Shard
from shardwright.ir.program import Compute, Instruction
from shardwright.ir.rows import piece_of, with_piece
from shardwright.ir.rules import Signature, on_axes

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
        pieces: of the batch, or of the stretch of it that a device has.
        ins, outs: how operands and results go with the pieces; dimensions are those of the whole tensors, and
            a piece is one unit.
        body: one layer on one piece, a closed jaxpr from constants, carry, rows and the number of the piece
            to carry and rows.
        graph: the same as a graph, for prices and memory.
        source: one layer on the whole batch, as it was.
        first: number of the first of these pieces.
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
    first: int = 0

    def some(self, first: int, pieces: int) -> Layers:
        """The same on a stretch of the batch: operands and results are of so many pieces."""
        return replace(self, first=self.first + first, pieces=pieces)

    def run(
        self, carry: Sequence[Any], fixed: Sequence[Any], made: Sequence[Any], number: Any
    ) -> tuple[list[Any], list[Any]]:
        """Some of the layers on one piece; their number is that of the rows.

        Args:
            carry: of that piece.
            fixed: constants, then rows, of all pieces.
            made: rows that are made of the pieces before, and room for those of this one.
            number: of the piece, counted from the first one here.

        Returns:
            What is carried on, and rows with those of this piece in them: in the same memory, if XLA may.
        """
        layer, first = jaxpr_as_fun(self.body), self.consts + self.carries
        consts = self.piece(fixed[: self.consts], self.ins[: self.consts], number)
        rows = list(fixed[self.consts :])
        cuts: list[Going] = [_in_row(going) for going in self.ins[first:]]
        goings: list[Going] = [_in_row(going) for going in self.outs[self.carries :]]

        def one(state: tuple[list[Any], list[Any]], given: tuple[Any, list[Any]]) -> tuple[Any, None]:
            (carry, made), (at, rows) = state, given
            results = layer(*consts, *carry, *self.piece(rows, cuts, number), number + self.first)
            pairs = zip(made, results[self.carries :], goings, strict=True)
            made = [self._with_row(whole, new, going, at, number) for whole, new, going in pairs]
            return (list(results[: self.carries]), made), None

        begin, at = (list(carry), list(made)), jnp.arange(rows[0].shape[0], dtype="int32")
        return jax.lax.scan(one, begin, (at, rows), reverse=self.reverse)[0]

    def without_pieces(self, fixed: Sequence[Any]) -> list[Any]:
        """Rows of a device that has layers, and no piece: what is the same for all pieces is there, too."""
        layer, first, sizes = jaxpr_as_fun(self.body), self.consts + self.carries, self.graph.inputs
        consts, rows = fixed[: self.consts], fixed[self.consts :]

        def any_piece(operands: Sequence[Any], begin: int) -> list[Any]:
            pairs = enumerate(operands, begin)
            return [x if self.ins[k] is None else _nothing(sizes[k].type) for k, x in pairs]

        def one(carry: None, rows: list[Any]) -> tuple[None, list[Any]]:
            carried = [_nothing(value.type) for value in sizes[self.consts : first]]
            results = layer(*any_piece(consts, 0), *carried, *any_piece(rows, first), jnp.int32(0))
            return carry, [x for x, going in zip(results, self.outs, strict=True) if going is None]

        same = iter(jax.lax.scan(one, None, list(rows))[1])
        made = self.room(rows[0].shape[0])[self.carries :]
        return [
            next(same) if going is None else x
            for x, going in zip(made, self.outs[self.carries :], strict=True)
        ]

    def piece(self, operands: Sequence[Any], goings: Sequence[Going], number: Any) -> list[Any]:
        """One piece of every operand."""
        pairs = zip(operands, goings, strict=True)
        return [piece_of(x, g, self.pieces, number) if isinstance(g, Shard) else x for x, g in pairs]

    def put(self, results: Sequence[Any], ones: Sequence[Any], number: Any) -> list[Any]:
        """Of what is carried on, that of all pieces so far with that of one more."""
        return [
            with_piece(result, one, going, self.pieces, number) if isinstance(going, Shard) else one
            for result, one, going in zip(results, ones, self.outs[: self.carries], strict=True)
        ]

    def _with_row(self, whole: Any, new: Any, going: Going, at: Any, number: Any) -> Any:
        """Rows, with what a layer makes of one more piece in them."""
        if isinstance(going, Shard):
            return with_piece(whole, new, going, self.pieces, number, at)
        if going is not None:
            new = _ADDED[going](jax.lax.dynamic_index_in_dim(whole, at, keepdims=False), new)
        return jax.lax.dynamic_update_index_in_dim(whole, new, at, 0)

    def room(self, rows: int) -> list[Any]:
        """Results before the first piece, of so many layers."""
        found: list[Any] = []
        for number, (atom, going) in enumerate(zip(self.graph.outputs, self.outs, strict=True)):
            shape, dtype = list(atom.type.shape), dtype_of(atom.type.dtype)
            if number >= self.carries:
                shape.insert(0, rows)
            if isinstance(going, Shard):
                shape[going.dim] *= self.pieces
            nothing = 0 if going is None or isinstance(going, Shard) else identity(going, dtype)
            found.append(jnp.full(shape, nothing, dtype))
        return found


def piece_type(tensor: TensorType, going: Going) -> TensorType:
    """The type of one piece of a tensor."""
    if not isinstance(going, Shard):
        return tensor
    shape = list(tensor.shape)
    shape[going.dim] = going.unit
    return TensorType(tuple(shape), tensor.dtype)


def _nothing(tensor: TensorType) -> Any:
    """A tensor that nobody looks at."""
    if is_key(tensor.dtype):
        return jnp.broadcast_to(jax.random.key(0, impl=key_implementation(tensor.dtype)), tensor.shape)
    return jnp.zeros(tensor.shape, dtype_of(tensor.dtype))


_ADDED = {"sum": jnp.add, "max": jnp.maximum, "min": jnp.minimum}


def _in_row(going: Going) -> Going:
    """How one row of a tensor goes with the pieces."""
    return replace(going, dim=going.dim - 1) if isinstance(going, Shard) else going


def _everything(*operands: Any, layers: Layers) -> list[Any]:
    """All layers, on one piece after another."""
    first, count = layers.consts + layers.carries, layers.carries
    fixed = [*operands[: layers.consts], *operands[first:]]

    def one(so_far: list[Any], number: Any) -> tuple[list[Any], None]:
        begin = layers.piece(operands[layers.consts : first], layers.ins[layers.consts : first], number)
        carry, rows = layers.run(begin, fixed, so_far[count:], number)
        return [*layers.put(so_far[:count], carry, number), *rows], None

    begun = layers.room(layers.length)
    return list(jax.lax.scan(one, begun, jnp.arange(layers.pieces, dtype="int32"))[0])


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
    """Whether a signature of such an equation has its layers on different devices, or nodes."""
    return any(isinstance(placement, Shard) for placement in on_axes(signature)[0].ins)


def relays(instruction: Instruction, graph: Graph) -> bool:
    """Whether an instruction runs as stages, which hand pieces on to each other."""
    if not isinstance(instruction, Compute):
        return False
    return graph.equations[instruction.equation].primitive == STAGES and in_stages(instruction.signature)
