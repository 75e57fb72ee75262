"""Contractions: dot_general and conv_general_dilated in full generality, and products of groups of rows."""

from __future__ import annotations

import math
from typing import Any

from shardwright.ir.graph import Equation
from shardwright.ir.ops.axes import as_ints, carries_sum, names, string
from shardwright.ir.registry import Local, OpDef, register, replicated_rule
from shardwright.ir.rules import Passing, Rule, counted


def _dot_general(equation: Equation) -> Rule:
    (left_contract, right_contract), (left_batch, right_batch) = equation.params["dimension_numbers"]
    left = list(names("m", equation.inputs[0].type.rank))
    right = list(names("n", equation.inputs[1].type.rank))
    for i, (a, b) in enumerate(zip(left_batch, right_batch, strict=True)):
        left[a] = right[b] = f"b{i}"
    for i, (a, b) in enumerate(zip(left_contract, right_contract, strict=True)):
        left[a] = right[b] = f"k{i}"
    output = [left[a] for a in left_batch]
    output += [x for i, x in enumerate(left) if i not in left_batch and i not in left_contract]
    output += [x for i, x in enumerate(right) if i not in right_batch and i not in right_contract]
    reduce, linear = _sums(equation)
    return Rule(string([left, right], [output]), reduce, linear, flop_per_point=2.0)


def _sums(equation: Equation) -> tuple[Any, Passing]:
    """How a product contracts and through which operands Partial(sum) passes.

    A result narrower than an operand (`preferred_element_type`) would round every device's part.
    """
    output = equation.output_types[0].dtype
    carried = tuple((i,) for i, t in enumerate(equation.input_types[:2]) if carries_sum(t.dtype, output))
    rounds = "float" in output and len(carried) < 2
    return None if rounds else "sum", carried


register(OpDef("dot_general", _dot_general, "contraction"))


def _ragged_dot(equation: Equation) -> Rule:
    """A product in which every group of rows has a matrix of its own, and the gradients of one.

    Groups follow each other along one dimension of the first operand, in the sizes that the third one says.
    """
    left_type, right_type, group_sizes = equation.input_types
    params = equation.params["ragged_dot_dimension_numbers"]
    (left_contract, right_contract), (left_batch, right_batch) = params.dot_dimension_numbers
    (ragged,), groups = params.lhs_ragged_dimensions, params.rhs_group_dimensions
    if group_sizes.rank != 1:
        return replicated_rule(equation, "the sizes of groups differ within a batch")
    left, right = list(names("m", left_type.rank)), list(names("n", right_type.rank))
    for letter, lefts, rights in (("b", left_batch, right_batch), ("k", left_contract, right_contract)):
        for i, (a, b) in enumerate(zip(lefts, rights, strict=True)):
            left[a] = right[b] = f"{letter}{i}"
    for d in groups:
        right[d] = "g!"
    output = ["g!"] if ragged in left_contract else []
    output += [left[a] for a in left_batch]
    output += [x for i, x in enumerate(left) if i not in left_batch and i not in left_contract]
    output += [x for i, x in enumerate(right) if i not in (*right_batch, *right_contract, *groups)]
    reduce, linear = _sums(equation)
    rule = Rule(string([left, right, ["g!"]], [output]), reduce, linear)
    # Each row meets the matrix of its group alone.
    free = (right_type.shape[d] for d in range(right_type.rank) if right[d].startswith("n"))
    return counted(rule, equation, 2.0 * left_type.size * math.prod(free))


def _localize_ragged_dot(local: Local, lhs: Any, rhs: Any, group_sizes: Any) -> Any:
    """As much of each group as lies in this device's stretch."""
    (ragged,) = local.params["ragged_dot_dimension_numbers"].lhs_ragged_dimensions
    held = local.inputs[0][ragged]
    if not held.whole:
        jnp = local.jax.numpy
        wide = group_sizes.astype("int64" if str(group_sizes.dtype) == "int64" else "int32")
        ends = jnp.cumsum(wide, dtype=wide.dtype)
        begin, end = held.offset, held.offset + held.length
        here = jnp.clip(ends, begin, end) - jnp.clip(ends - wide, begin, end)
        group_sizes = here.astype(group_sizes.dtype)
    return local.bind(lhs, rhs, group_sizes, **local.params)


register(OpDef("ragged_dot_general", _ragged_dot, "contraction", localize=_localize_ragged_dot))


def _conv(equation: Equation) -> Rule:
    """Batch, features and groups shard; so does a spatial axis whose windows do not overlap."""
    lhs, rhs = equation.input_types
    params = equation.params
    numbers = params["dimension_numbers"]
    left, right, output = [""] * lhs.rank, [""] * rhs.rank, [""] * lhs.rank
    (lb, lf, *lx), (ro, ri, *rx), (ob, of, *ox) = numbers.lhs_spec, numbers.rhs_spec, numbers.out_spec
    left[lb] = output[ob] = "n"
    left[lf] = right[ri] = "i"
    right[ro] = output[of] = "o"
    if params["feature_group_count"] > 1:
        left[lf], right[ri] = "(g i)", "i!"
        right[ro] = output[of] = f"(g {rhs.shape[ro] // params['feature_group_count']})"
    elif params["batch_group_count"] > 1:
        left[lb], output[ob] = "(g n)", "n!"
        right[ro] = output[of] = f"(g {rhs.shape[ro] // params['batch_group_count']})"
    points = 1.0
    for k, (a, b, c) in enumerate(zip(lx, rx, ox, strict=True)):
        left[a], right[b], output[c] = _spatial(equation, k, a, b, c)
        # Multiplications by the zeros that dilation puts in are not counted.
        points *= equation.output_types[0].shape[c] * rhs.shape[b] / params["lhs_dilation"][k]
    reduce, linear = _sums(equation)
    rule = Rule(string([left, right], [output]), reduce, linear)
    groups = params["batch_group_count"]
    pairs = lhs.shape[lb] // groups * rhs.shape[ri] * rhs.shape[ro]
    return counted(rule, equation, 2.0 * pairs * points)


def _spatial(equation: Equation, k: int, a: int, b: int, c: int) -> tuple[str, str, str]:
    """Letters of the k-th spatial axis in both operands and the result."""
    params = equation.params
    size, kernel = equation.input_types[0].shape[a], equation.input_types[1].shape[b]
    out = equation.output_types[0].shape[c]
    stride, low_high = params["window_strides"][k], as_ints(params["padding"][k])
    spread, dilation = params["lhs_dilation"][k], params["rhs_dilation"][k]
    window = (kernel - 1) * dilation + 1
    x, r = f"s{k}", f"r{k}!"
    if spread == 1 and low_high == (0, 0):
        if window <= stride and size == out * stride:
            return _patch(x, stride), r, x  # patches side by side, as in a vision transformer's first layer
        if dilation * kernel == size:
            return _patch(x, dilation), x, f"y{k}!"  # their weights' gradient: a contraction
    # The gradient of patches: every element of the operand makes `spread` of the result.
    low, high = low_high
    if stride == 1 and window - 1 <= low < spread and low + high == window + spread - 2:
        return x, r, _patch(x, spread)
    return f"x{k}!", r, f"y{k}!"


def _patch(letter: str, size: int) -> str:
    return letter if size == 1 else f"({letter} {size})"


def _localize_conv(local: Local, lhs: Any, rhs: Any) -> Any:
    """As many groups as this device holds."""
    numbers, params = local.params["dimension_numbers"], dict(local.params)
    for name, dim in (("feature_group_count", 1), ("batch_group_count", 0)):
        if params[name] > 1:
            held = local.inputs[0][numbers.lhs_spec[dim]]
            params[name] = max(1, params[name] * held.length // held.size)
    return local.bind(lhs, rhs, **params)


register(OpDef("conv_general_dilated", _conv, "contraction", localize=_localize_conv))
