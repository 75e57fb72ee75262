"""Windowed reductions (pooling) and their derivatives: windows side by side shard with their elements."""

from __future__ import annotations

from collections.abc import Callable

from shardwright.ir.graph import Equation
from shardwright.ir.ops.axes import as_ints, string
from shardwright.ir.placement import ReduceOp
from shardwright.ir.registry import OpDef, register
from shardwright.ir.rules import Rule, counted

_HALO = "overlapping windows would need the neighbours' edges"


def _letters(
    equation: Equation, whole: tuple[int, ...], pooled: tuple[int, ...]
) -> tuple[list[str], list[str]]:
    """Letters of the pooled tensor's source and of the pooled tensor."""
    params, rank = equation.params, len(whole)
    ones = (1,) * rank
    before, after = [f"x{d}!" for d in range(rank)], [f"y{d}!" for d in range(rank)]
    for d in range(rank):
        window = (params["window_dimensions"][d] - 1) * params.get("window_dilation", ones)[d] + 1
        stride = params["window_strides"][d]
        plain = as_ints(params["padding"][d]) == (0, 0) and params.get("base_dilation", ones)[d] == 1
        if plain and window <= stride and whole[d] == pooled[d] * stride:
            before[d], after[d] = (f"e{d}" if stride == 1 else f"(e{d} {stride})"), f"e{d}"
    return before, after


def _window_flop(equation: Equation, pooled: int) -> float:
    count = float(pooled)
    for size in equation.params["window_dimensions"]:
        count *= size
    return count


def _reduce_window(op: ReduceOp | None) -> Callable[[Equation], Rule]:
    def rule(equation: Equation) -> Rule:
        output = equation.output_types[0]
        before, after = _letters(equation, equation.input_types[0].shape, output.shape)
        # The general form has initial values, scalars, after its operands.
        ins = [
            before if tensor.rank == output.rank and output.rank else () for tensor in equation.input_types
        ]
        rule = Rule(
            string(ins, [after] * len(equation.outputs)),
            reduce=None,
            linear="each" if op == "sum" else (),
            upper="each" if op == "max" else (),
            lower="each" if op == "min" else (),
        )
        return counted(rule, equation, _window_flop(equation, output.size))

    return rule


register(OpDef("reduce_window_sum", _reduce_window("sum"), "reduction", omitted=_HALO))
register(OpDef("reduce_window_max", _reduce_window("max"), "reduction", omitted=_HALO))
register(OpDef("reduce_window_min", _reduce_window("min"), "reduction", omitted=_HALO))
register(OpDef("reduce_window", _reduce_window(None), "reduction", omitted=_HALO))


def _select_and_scatter_add(equation: Equation) -> Rule:
    """Gradient of a maximum over windows: operands are the pooled cotangent and what was pooled."""
    source, operand = equation.input_types
    before, after = _letters(equation, operand.shape, source.shape)
    rule = Rule(string([after, before], [before]), reduce=None, linear=((0,),))
    return counted(rule, equation, _window_flop(equation, source.size))


register(OpDef("select_and_scatter_add", _select_and_scatter_add, "reduction", omitted=_HALO))


def _select_and_gather_add(equation: Equation) -> Rule:
    """Tangent of a maximum over windows: picks from its first operand where the second is largest."""
    output = equation.output_types[0]
    before, after = _letters(equation, equation.input_types[1].shape, output.shape)
    rule = Rule(string([before, before], [after]), reduce=None, linear=((0,),), monotone=((0,),))
    return counted(rule, equation, _window_flop(equation, output.size))


register(OpDef("select_and_gather_add", _select_and_gather_add, "reduction", omitted=_HALO))
