"""Sums over pieces of what a scan stacks up, such as gradients of its layers' weights.

Added up where pieces follow one another, the rows of one piece, all of them, lie in memory beside the sums so
far, which are as large. So each row is added by the scan that makes it: the sums are carried through it, and
stay in one place (`ir/carried.py`). They come out the same to the last bit: every row is added once a piece.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from shardwright.ir.graph import Equation, Value
from shardwright.ir.placement import ReduceOp
from shardwright.ir.regions import scan_counts


def added_inside(equations: Sequence[Equation], sums: Mapping[Value, ReduceOp]) -> list[Value]:
    """Sums of what a scan among these equations stacks up, for nothing else among them."""
    read = {value for equation in equations for value in equation.input_values}
    return [
        value
        for equation in equations
        if equation.primitive == "scan"
        for value in equation.outputs[scan_counts(equation.params)[1] :]
        if value not in read and sums.get(value) == "sum"
    ]


def scan(
    equation: Equation, args: Sequence[Any], body: Callable[..., list[Any]], totals: Mapping[Value, Any]
) -> list[Any]:
    """Results of a scan; those that have a total so far are added to it.

    Args:
        equation: the scan.
        args: its operands.
        body: its body, from operands to results.
        totals: by result, which it stacks up.
    """
    consts, carries = scan_counts(equation.params)
    length, results = equation.params["length"], range(carries, len(equation.outputs))
    added = [k for k in results if equation.outputs[k] in totals]
    stacked = [k for k in results if k not in added]

    def iteration(carry: Sequence[Any], xs: tuple[Sequence[Any], Any]) -> tuple[list[Any], list[Any]]:
        own, (rows, number) = carry[:carries], xs
        made = body(*args[:consts], *own, *rows)
        sums = [_with_row(total, made[k], number) for total, k in zip(carry[carries:], added, strict=True)]
        return [*made[:carries], *sums], [made[k] for k in stacked]

    begin = [*args[consts : consts + carries], *(totals[equation.outputs[k]] for k in added)]
    numbers = jnp.arange(length) if added else None
    last, rows = jax.lax.scan(
        iteration, begin, (list(args[consts + carries :]), numbers), length, equation.params["reverse"]
    )
    found = dict(zip([*range(carries), *added, *stacked], [*last, *rows], strict=True))
    return [found[k] for k in range(len(equation.outputs))]


def _with_row(total: Any, row: Any, number: Any) -> Any:
    here = jax.lax.dynamic_index_in_dim(total, number, keepdims=False)
    return jax.lax.dynamic_update_index_in_dim(total, here + row, number, 0)
