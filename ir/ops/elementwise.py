"""Elementwise primitives: every dimension shards through; linearity and order decide about Partial."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shardwright.ir.graph import Equation
from shardwright.ir.ops.axes import aligned, carries_order, carries_sum, names, string
from shardwright.ir.registry import Local, OpDef, register
from shardwright.ir.rules import Operands, Passing, Rule


def _shape_rule(equation: Equation) -> Rule:
    """The axes alone: nothing is known of Partial."""
    output = equation.output_types[0]
    letters = names("e", output.rank)
    ins = [aligned(tensor, output, letters) for tensor in equation.input_types]
    return Rule(string(ins, [letters] * len(equation.outputs)), reduce=None)


def _elementwise(
    linear: Passing = (), monotone: Passing = (), upper: Passing = (), lower: Passing = ()
) -> Callable[[Equation], Rule]:
    def rule(equation: Equation) -> Rule:
        exact = all(
            carries_sum(tensor.dtype, equation.output_types[0].dtype) for tensor in equation.input_types
        )
        axes = _shape_rule(equation).axes
        return Rule(axes, None, linear if exact else (), monotone, upper, lower)

    return rule


def _if_inexact(rule: Callable[[Equation], Rule]) -> Callable[[Equation], Rule]:
    """A rule for floats and complex numbers only: integers truncate or wrap around."""

    def chosen(equation: Equation) -> Rule:
        dtype = equation.output_types[0].dtype
        return rule(equation) if "float" in dtype or "complex" in dtype else _shape_rule(equation)

    return chosen


def _if_bool(rule: Callable[[Equation], Rule]) -> Callable[[Equation], Rule]:
    """A rule for logic only: on the bits of integers it keeps neither sums nor order."""
    return lambda equation: (rule if equation.output_types[0].dtype == "bool" else _shape_rule)(equation)


def _if_unsigned(rule: Callable[[Equation], Rule]) -> Callable[[Equation], Rule]:
    """A rule for unsigned integers: the sign bit, or a negative factor, would turn the order around."""
    return lambda equation: (rule if equation.output_types[0].dtype.startswith("uint") else _shape_rule)(
        equation
    )


def _each(*names_: str, rule: Callable[[Equation], Rule]) -> None:
    for name in names_:
        register(OpDef(name, rule, "elementwise"))


_each(
    *("abs", "acos", "asin", "atanh", "bessel_i0e", "bessel_i1e", "clz", "cos", "cosh", "digamma", "erf_inv"),
    *("erfc", "is_finite", "lgamma", "not", "population_count", "rsqrt", "sin", "square", "tan"),
    "one_minus_square",
    *("atan2", "eq", "eq_to", "ge", "gt", "igamma_grad_a", "igammac", "le", "le_to", "lt", "lt_to", "ne"),
    *("polygamma", "pow", "rem", "xor", "zeta"),
    rule=_elementwise(),
)
# Monotone wherever it is defined, and defined everywhere.
_each(
    *("asinh", "atan", "cbrt", "ceil", "erf", "exp", "exp2", "expm1", "floor", "logistic", "nextafter"),
    *("reduce_precision", "round", "sign", "sinh", "tanh"),
    rule=_elementwise(monotone="each"),
)


# Monotone from some number on and undefined below: the least of several is undefined when any of them is.
def _polynomial(equation: Equation) -> Rule:
    """A polynomial is linear in its coefficients, the operands after the first."""
    return _elementwise(linear=(tuple(range(1, len(equation.inputs))),))(equation)


_each("polynomial", rule=_polynomial)
_each("acosh", "log", "log1p", "log2", "sqrt", rule=_elementwise(lower="each"))
_each("igamma", "regularized_incomplete_beta", rule=_elementwise(lower=((1,),)))
_each("add", "sub", "add_any", "complex", rule=_elementwise(linear="joint"))
_each("neg", "mul", "real", "imag", "conj", rule=_elementwise(linear="each"))
_each("div", rule=_if_inexact(_elementwise(linear=((0,),))))
_each("shift_left", rule=_elementwise(linear=((0,),)))
_each("shift_right_arithmetic", rule=_elementwise(monotone=((0,),)))
_each("shift_right_logical", rule=_if_unsigned(_elementwise(monotone=((0,),))))
_each("mulhi", rule=_if_unsigned(_elementwise(monotone="each")))
_each("copy", "stop_gradient", "name", rule=_elementwise(linear="each", monotone="each"))
_each("and", rule=_if_bool(_elementwise(monotone="each", lower="joint")))
_each("or", rule=_if_bool(_elementwise(monotone="each", upper="joint")))
_each("max", rule=_elementwise(monotone="each", upper="joint"))
_each("min", rule=_elementwise(monotone="each", lower="joint"))
# min(max(x, lower bound), upper bound)
_each("clamp", rule=_elementwise(monotone="each", upper=((0, 1),), lower=((0, 2), (1, 2))))


def _integer_pow(equation: Equation) -> Rule:
    power = equation.params["y"]
    odd = power > 0 and power % 2 == 1
    return _if_inexact(_elementwise(monotone="each" if odd else ()))(equation)


_each("integer_pow", rule=_integer_pow)


def _select(equation: Equation) -> Rule:
    branches: Operands = (tuple(range(1, len(equation.inputs))),)
    return Rule(_shape_rule(equation).axes, None, linear=branches, monotone=branches)


_each("select_n", rule=_select)


def _convert(equation: Equation) -> Rule:
    """Rounding does not commute with a sum: Partial(sum) passes only to an equal or wider float."""
    before, after = equation.input_types[0].dtype, equation.output_types[0].dtype
    order = carries_order(before, after)
    return _elementwise(linear="each", monotone="each" if order else ())(equation)


_each("convert_element_type", rule=_convert)


def _identity(local: Local, *operands: Any) -> list[Any]:
    return list(operands)


# What they ask of one device (a sharding, a layout, a memory) is the plan's to decide.
for _name in ("sharding_constraint", "layout_constraint", "reshard"):
    register(OpDef(_name, _elementwise(linear="each", monotone="each"), "movement", localize=_identity))


def _bitcast(equation: Equation) -> Rule:
    """The same bits read as another dtype; where widths differ a trailing dimension comes or goes."""
    before, after = equation.input_types[0], equation.output_types[0]
    letters = names("e", min(before.rank, after.rank))
    operand = [*letters, "w!"] if before.rank > after.rank else letters
    output = [*letters, "w!"] if after.rank > before.rank else letters
    # Two's complement: signed and unsigned integers of one width add alike.
    integers = before.rank == after.rank and "int" in before.dtype and "int" in after.dtype
    same = before.dtype == after.dtype
    return Rule(
        string([operand], [output]),
        None,
        linear="each" if integers or same else (),
        monotone="each" if same else (),
        flop_per_point=0.0,
    )


register(OpDef("bitcast_convert_type", _bitcast, "elementwise"))


def _barrier(equation: Equation) -> Rule:
    """Operands that have nothing to do with each other: one of them is sharded, the others stay whole.

    Tracing makes one equation per operand of it, which lets each be placed freely.
    """
    ins = [names(f"o{i}_", tensor.rank) for i, tensor in enumerate(equation.input_types)]
    through: Passing = "each" if len(ins) == 1 else "joint"
    return Rule(string(ins, ins), None, linear=through, monotone=through, flop_per_point=0.0)


register(OpDef("optimization_barrier", _barrier, "movement"))
register(OpDef("device_put", _barrier, "movement", localize=_identity))
