"""Moving elements without computing: broadcast, transpose, squeeze, reshape, rev, tile, iota."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from shardwright.ir.graph import Equation
from shardwright.ir.ops.axes import blocked, names, string
from shardwright.ir.registry import Local, OpDef, register
from shardwright.ir.rules import Rule


def _broadcast_in_dim(equation: Equation) -> Rule:
    source, target = equation.inputs[0].type, equation.output_types[0]
    letters = names("e", target.rank)
    dims = equation.params["broadcast_dimensions"]
    operand = [letters[d] if source.shape[i] == target.shape[d] else "1" for i, d in enumerate(dims)]
    return Rule(string([operand], [letters]), linear="each", monotone="each", flop_per_point=0.0)


register(OpDef("broadcast_in_dim", _broadcast_in_dim, "movement", shape_params=("shape",)))


def _transpose(equation: Equation) -> Rule:
    letters = names("e", equation.inputs[0].type.rank)
    output = [letters[d] for d in equation.params["permutation"]]
    return Rule(string([letters], [output]), linear="each", monotone="each", flop_per_point=0.0)


register(OpDef("transpose", _transpose, "movement"))


def _squeeze(equation: Equation) -> Rule:
    letters = names("e", equation.inputs[0].type.rank)
    dropped = equation.params["dimensions"]
    operand = ["1" if i in dropped else letter for i, letter in enumerate(letters)]
    output = [letter for i, letter in enumerate(letters) if i not in dropped]
    return Rule(string([operand], [output]), linear="each", monotone="each", flop_per_point=0.0)


register(OpDef("squeeze", _squeeze, "movement"))


def _reshape(equation: Equation) -> Rule:
    """Match runs of dimensions with equal products: a run of several against one is a split or merge.

    With `dimensions` those of the operand are put in that order first.
    """
    order = equation.params.get("dimensions") or range(equation.inputs[0].type.rank)
    shape, target = equation.inputs[0].type.shape, equation.output_types[0].shape
    source = tuple([shape[d] for d in order])
    ins, outs = ["1"] * len(source), ["1"] * len(target)
    i = j = run = 0
    while i < len(source) and j < len(target):
        a, b = i, j
        left, right = source[i], target[j]
        while left != right:
            if left < right and i + 1 < len(source):
                i += 1
                left *= source[i]
            elif right < left and j + 1 < len(target):
                j += 1
                right *= target[j]
            else:
                return Rule(
                    string([["1"] * len(source)], [["1"] * len(target)]), linear="each", monotone="each"
                )
        _name_run(source, range(a, i + 1), ins, target, range(b, j + 1), outs, run)
        i, j, run = i + 1, j + 1, run + 1
    operand = [name for _, name in sorted(zip(order, ins, strict=True))]
    return Rule(string([operand], [outs]), linear="each", monotone="each", flop_per_point=0.0)


def _name_run(
    source: tuple[int, ...],
    a: range,
    ins: list[str],
    target: tuple[int, ...],
    b: range,
    outs: list[str],
    run: int,
) -> None:
    """Letters for `source[a]` and `target[b]`, which hold equally many elements."""
    a_dims = [d for d in a if source[d] != 1]
    b_dims = [d for d in b if target[d] != 1]
    if not a_dims or not b_dims:
        return
    # The majors are cut together where one divides the other: n = (h d) against h, d.
    major_a, major_b = source[a_dims[0]], target[b_dims[0]]
    h = f"h{run}"
    if major_a == major_b:
        ins[a_dims[0]] = outs[b_dims[0]] = h
    elif major_b and major_a % major_b == 0:
        ins[a_dims[0]], outs[b_dims[0]] = f"({h} {major_a // major_b})", h
    elif major_a and major_b % major_a == 0:
        ins[a_dims[0]], outs[b_dims[0]] = h, f"({h} {major_b // major_a})"
    else:
        common = math.gcd(major_a, major_b)
        ins[a_dims[0]], outs[b_dims[0]] = f"({h} {major_a // common})", f"({h} {major_b // common})"
    for side, dims in ((ins, a_dims), (outs, b_dims)):
        for d in dims[1:]:
            side[d] = f"{'i' if side is ins else 'o'}{d}!"


def _localize_reshape(local: Local, operand: Any) -> Any:
    return local.jax.lax.reshape(operand, local.local_type(0), local.params.get("dimensions"))


register(OpDef("reshape", _reshape, "movement", localize=_localize_reshape))


def _rev(equation: Equation) -> Rule:
    letters = names("e", equation.inputs[0].type.rank)
    letters = blocked(letters, equation.params["dimensions"])
    return Rule(string([letters], [letters]), linear="each", monotone="each", flop_per_point=0.0)


register(OpDef("rev", _rev, "movement", omitted="a reversed stretch belongs to another device"))


def _tile(equation: Equation) -> Rule:
    """Repetitions are the major axis of a repeated dimension: each device may make some of them."""
    reps = equation.params["reps"]
    letters = names("e", len(reps))
    operand = blocked(letters, [i for i, count in enumerate(reps) if count != 1])
    output = [
        letter if count == 1 else f"(r{i} {letter})"
        for i, (letter, count) in enumerate(zip(letters, reps, strict=True))
    ]
    return Rule(string([operand], [output]), linear="each", monotone="each", flop_per_point=0.0)


def _localize_tile(local: Local, operand: Any) -> Any:
    pairs = zip(local.params["reps"], local.inputs[0], local.outputs[0], strict=True)
    reps = tuple(
        rep if rep == 1 or not into.length else out.length // into.length for rep, into, out in pairs
    )
    return local.bind(operand, **{**local.params, "reps": reps})


register(OpDef("tile", _tile, "movement", localize=_localize_tile))


def _iota(equation: Equation) -> Rule:
    letters = names("e", equation.output_types[0].rank)
    return Rule(string([], [letters]), flop_per_point=0.0)


def _localize_iota(local: Local) -> Any:
    extent = local.outputs[0][local.params["dimension"]]
    if extent.whole:
        return local.bind(**local.params)
    # Counted in integers: a narrow float would round where the stretch begins, and once more the sum.
    place = local.bind(**{**local.params, "dtype": np.dtype("uint32")})
    return (place + local.jax.numpy.asarray(extent.offset).astype("uint32")).astype(local.params["dtype"])


register(OpDef("iota", _iota, "movement", localize=_localize_iota, shape_params=("shape",)))
# A zero that nobody reads: what branches that have nothing to keep for the backward pass keep.
register(OpDef("empty2", _iota, "movement"))


def _reload(equation: Equation) -> Rule:
    """What was in host memory: see `ir/host.py`. Nothing fuses with it."""
    letters = names("e", equation.inputs[0].type.rank)
    return Rule(string([letters], [letters]), linear="each", monotone="each", flop_per_point=0.0)


register(OpDef("reload", _reload, "host"))
