"""Joining and taking apart: concatenate, split, stack, unstack, pad."""

from __future__ import annotations

from typing import Any

from shardwright.ir.graph import Equation
from shardwright.ir.ops.axes import blocked, names, string
from shardwright.ir.registry import Local, OpDef, register
from shardwright.ir.rules import Rule

_WHOLE = "putting the stretches together as Partial(sum) moves more than gathering them first"


def _concatenate(equation: Equation) -> Rule:
    """Every device can make its own stretch of the joined dimension from whole operands."""
    dim = equation.params["dimension"]
    letters = names("e", equation.output_types[0].rank)
    ins = [[f"x{k}!" if i == dim else a for i, a in enumerate(letters)] for k in range(len(equation.inputs))]
    return Rule(string(ins, [letters]), linear="joint", monotone="joint", flop_per_point=0.0)


def _localize_concatenate(local: Local, *operands: Any) -> Any:
    dim = local.params["dimension"]
    wanted = local.outputs[0][dim]
    if wanted.whole:
        return local.bind(*operands, **local.params)
    pieces: list[Any] = []
    at = -wanted.offset
    for operand, extents in zip(operands, local.inputs, strict=True):
        size = extents[dim].size
        first, last = max(0, -at), min(size, wanted.length - at)
        if first < last:
            pieces.append(local.jax.lax.slice_in_dim(operand, first, last, axis=dim))
        at += size
    return local.bind(*pieces, **local.params)


register(OpDef("concatenate", _concatenate, "movement", localize=_localize_concatenate, omitted=_WHOLE))


def _split(equation: Equation) -> Rule:
    dim = equation.params["axis"]
    letters = names("e", equation.inputs[0].type.rank)
    outs = [
        [f"x{k}!" if i == dim else a for i, a in enumerate(letters)] for k in range(len(equation.outputs))
    ]
    return Rule(
        string([blocked(letters, [dim])], outs),
        reduce=None,
        linear="each",
        monotone="each",
        flop_per_point=0.0,
    )


register(OpDef("split", _split, "movement", omitted=_WHOLE))


def _stack(equation: Equation) -> Rule:
    dim = equation.params["axis"]
    letters = list(names("e", equation.inputs[0].type.rank))
    output = [*letters[:dim], "s!", *letters[dim:]]
    return Rule(
        string([letters] * len(equation.inputs), [output]),
        linear="joint",
        monotone="joint",
        flop_per_point=0.0,
    )


register(OpDef("stack", _stack, "movement"))


def _unstack(equation: Equation) -> Rule:
    dim = equation.params["axis"]
    letters = list(names("e", equation.inputs[0].type.rank))
    output = [*letters[:dim], *letters[dim + 1 :]]
    operand = blocked(letters, [dim])
    return Rule(
        string([operand], [output] * len(equation.outputs)),
        reduce=None,
        linear="each",
        monotone="each",
        flop_per_point=0.0,
    )


register(OpDef("unstack", _unstack, "movement"))


def _pad(equation: Equation) -> Rule:
    """Every device can make its own stretch of a padded dimension from a whole operand."""
    padded = [i for i, config in enumerate(equation.params["padding_config"]) if any(config)]
    letters = names("e", equation.inputs[0].type.rank)
    operand = [f"x{i}!" if i in padded else letter for i, letter in enumerate(letters)]
    return Rule(string([operand, ()], [letters]), linear="joint", monotone="joint", flop_per_point=0.0)


def _localize_pad(local: Local, operand: Any, value: Any) -> Any:
    """A stretch of a padded dimension is the whole with less (or negative) padding at its ends."""
    config = [
        (int(low), int(high), int(interior))
        if out.whole or into.length < into.size
        else (int(low) - out.offset, int(high) - (out.size - out.offset - out.length), int(interior))
        for (low, high, interior), into, out in zip(
            local.params["padding_config"], local.inputs[0], local.outputs[0], strict=True
        )
    ]
    return local.bind(operand, value, padding_config=tuple(config))


register(OpDef("pad", _pad, "movement", localize=_localize_pad, omitted=_WHOLE))
