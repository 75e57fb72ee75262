"""Reductions over dimensions, and running ones along a dimension."""

from __future__ import annotations

import math
from collections.abc import Callable

from shardwright.ir.graph import Equation
from shardwright.ir.ops.axes import blocked, names, string
from shardwright.ir.placement import ReduceOp
from shardwright.ir.registry import OpDef, register, replicated_rule
from shardwright.ir.rules import Rule, counted


def _reduced(equation: Equation, op: ReduceOp | None) -> Rule:
    letters = names("e", equation.inputs[0].type.rank)
    output = [letter for i, letter in enumerate(letters) if i not in equation.params["axes"]]
    return Rule(
        string([letters], [output]),
        reduce=op,
        linear="each" if op == "sum" else (),
        upper="each" if op == "max" else (),
        lower="each" if op == "min" else (),
    )


def _reduce(op: ReduceOp | None) -> Callable[[Equation], Rule]:
    return lambda equation: _reduced(equation, op)


def _logic(op: ReduceOp) -> Callable[[Equation], Rule]:
    """On booleans "or" is a maximum and "and" a minimum; on the bits of integers they are neither."""
    return lambda equation: _reduced(equation, op if equation.output_types[0].dtype == "bool" else None)


register(OpDef("reduce_sum", _reduce("sum"), "reduction"))
register(OpDef("reduce_max", _reduce("max"), "reduction"))
register(OpDef("reduce_min", _reduce("min"), "reduction"))
register(OpDef("reduce_or", _logic("max"), "reduction"))
register(OpDef("reduce_and", _logic("min"), "reduction"))
register(OpDef("reduce_prod", _reduce(None), "reduction", omitted="no Partial(prod): a product is not split"))
register(OpDef("reduce_xor", _reduce(None), "reduction", omitted="no Partial(xor)"))
for _name in ("argmax", "argmin"):
    register(OpDef(_name, _reduce(None), "reduction", omitted="no Partial(position of the largest)"))


def _positional(op: ReduceOp) -> Callable[[Equation], Rule]:
    """Rule of psum and its kin over positional axes, as vmap leaves them: a local reduction."""

    def rule(equation: Equation) -> Rule:
        axes = equation.params["axes"]
        local = all(isinstance(axis, int) for axis in axes) and equation.params["axis_index_groups"] is None
        if not local or len(equation.inputs) != 1:
            return replicated_rule(equation, "reduces over named axes or several operands")
        return _reduced(equation, op)

    return rule


register(OpDef("psum", _positional("sum"), "reduction"))
register(OpDef("pmax", _positional("max"), "reduction"))
register(OpDef("pmin", _positional("min"), "reduction"))


def _general_reduce(equation: Equation) -> Rule:
    """`lax.reduce` with any function: reduced dimensions stay whole."""
    operands = len(equation.inputs) // 2
    letters = names("e", equation.inputs[0].type.rank)
    reduced = equation.params["dimensions"]
    output = [letter for i, letter in enumerate(letters) if i not in reduced]
    ins = [blocked(letters, reduced)] * operands + [()] * operands
    return Rule(string(ins, [output] * operands), reduce=None)


register(
    OpDef("reduce", _general_reduce, "reduction", omitted="the function is not known to be a sum or maximum")
)


def _running(linear: bool = False, upper: bool = False, lower: bool = False) -> Callable[[Equation], Rule]:
    def rule(equation: Equation) -> Rule:
        letters = blocked(names("e", equation.inputs[0].type.rank), [equation.params["axis"]])
        return Rule(
            string([letters], [letters]),
            reduce=None,
            linear="each" if linear else (),
            upper="each" if upper else (),
            lower="each" if lower else (),
        )

    return rule


_SCAN = "a stretch needs the total of the stretches before it"
register(OpDef("cumsum", _running(linear=True), "reduction", omitted=_SCAN))
register(OpDef("cummax", _running(upper=True), "reduction", omitted=_SCAN))
register(OpDef("cummin", _running(lower=True), "reduction", omitted=_SCAN))
register(OpDef("cumprod", _running(), "reduction", omitted=_SCAN))
register(OpDef("cumlogsumexp", _running(), "reduction", omitted=_SCAN))


def _sort(equation: Equation) -> Rule:
    dim = equation.params["dimension"]
    operand = equation.inputs[0].type
    letters = blocked(names("e", operand.rank), [dim])
    rule = Rule(string([letters] * len(equation.inputs), [letters] * len(equation.outputs)), reduce=None)
    return counted(rule, equation, operand.size * math.log2(max(2, operand.shape[dim])))


register(OpDef("sort", _sort, "reduction"))


def _top_k(equation: Equation) -> Rule:
    operand, output = equation.inputs[0].type, equation.output_types[0]
    params = equation.params
    # JAX leaves the dimension of an approximation as it was given.
    dim = (params["axis"] if equation.primitive == "top_k" else params["reduction_dimension"]) % operand.rank
    letters = names("e", operand.rank)
    outs = ["k!" if i == dim else letter for i, letter in enumerate(letters)]
    rule = Rule(string([blocked(letters, [dim])], [outs, outs]), reduce=None)
    return counted(rule, equation, operand.size * math.log2(max(2, output.shape[dim])))


register(OpDef("top_k", _top_k, "reduction"))
register(OpDef("approx_top_k", _top_k, "reduction"))
