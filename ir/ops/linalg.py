"""Batches of matrices that are decomposed or solved with, and of signals that are transformed.

Each matrix or signal is needed whole; batches are sharded. Operations are counted as in Golub and Van Loan,
"Matrix Computations" (4th edition, 2013), for real numbers; iterative methods vary.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from shardwright.ir.graph import Equation, TensorType
from shardwright.ir.ops.axes import blocked, names, string
from shardwright.ir.registry import OpDef, register
from shardwright.ir.rules import Rule, counted


def _batched(operand_rank: int, flop: Callable[[Equation], float]) -> Callable[[Equation], Rule]:
    """The rule of an operation on every element of a batch by itself.

    Args:
        operand_rank: of an element of the first operand; what is in front of it is the batch, of all operands
            and results.
        flop: operations per element of the batch.
    """

    def rule(equation: Equation) -> Rule:
        batch = names("b", equation.inputs[0].type.rank - operand_rank)
        whole = iter(names("x", sum(t.rank for t in (*equation.input_types, *equation.output_types))))

        def letters(tensor: TensorType) -> list[str]:
            return [*batch, *(f"{next(whole)}!" for _ in tensor.shape[len(batch) :])]

        sides = [[letters(t) for t in side] for side in (equation.input_types, equation.output_types)]
        elements = math.prod(equation.inputs[0].type.shape[: len(batch)])
        return counted(Rule(string(*sides), reduce=None), equation, elements * flop(equation))

    return rule


def _cubic(times: float) -> Callable[[Equation], float]:
    """So many times the cube of the smaller side of a matrix, and in proportion to the larger one."""

    def flop(equation: Equation) -> float:
        rows, columns = equation.inputs[0].type.shape[-2:]
        return times * min(rows, columns) ** 2 * max(rows, columns)

    return flop


def _linear(equation: Equation) -> float:
    return float(equation.inputs[0].type.shape[-1])


#: Operations by the cube of the side.
_DECOMPOSITIONS = {
    "cholesky": 1 / 3,
    "eig": 25.0,
    "eigh": 9.0,
    "hessenberg": 10 / 3,
    "householder_product": 4 / 3,
    "lu": 2 / 3,
    "qr": 8 / 3,
    "schur": 25.0,
    "svd": 21.0,
    "tridiagonal": 4 / 3,
}
for _name, _times in _DECOMPOSITIONS.items():
    register(OpDef(_name, _batched(2, _cubic(_times)), "reduction"))
register(OpDef("lu_pivots_to_permutation", _batched(1, _linear), "index"))


def _triangular_solve(equation: Equation) -> Rule:
    """Right-hand sides are solved for one by one, and the solution is linear in them."""
    matrix, right = (atom.type for atom in equation.inputs)
    batch = names("b", matrix.rank - 2)
    sides = ["n!", "k"] if equation.params["left_side"] else ["k", "n!"]
    rule = Rule(
        string([[*batch, "m!", "n!"], [*batch, *sides]], [[*batch, *sides]]), reduce=None, linear=((1,),)
    )
    return counted(rule, equation, float(right.size * matrix.shape[-1]))


register(OpDef("triangular_solve", _triangular_solve, "reduction"))


def _fft(equation: Equation) -> Rule:
    """A transform of the last dimensions is linear; one of real numbers keeps half of the last one."""
    operand, result = equation.inputs[0].type, equation.output_types[0]
    lengths = equation.params["fft_lengths"]
    first = operand.rank - len(lengths)
    transformed = range(first, operand.rank)
    ins, outs = (blocked([*names("b", first), *names(x, len(lengths))], transformed) for x in ("x", "y"))
    points = max(operand.size, result.size) if math.prod(lengths) else 0
    # Five operations per point and halving, half of them where one side is real.
    each = 5.0 if operand.dtype == result.dtype else 2.5
    rule = Rule(string([ins], [outs]), reduce=None, linear="each")
    return counted(rule, equation, each * points * math.log2(max(2, math.prod(lengths))))


register(OpDef("fft", _fft, "reduction"))
