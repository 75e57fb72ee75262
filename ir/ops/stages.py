"""Scans over layers that may lie on different devices: see `ir/stages.py`."""

from __future__ import annotations

from shardwright.ir.graph import Equation, TensorType
from shardwright.ir.ops.axes import string
from shardwright.ir.registry import OpDef, register
from shardwright.ir.rules import Rule
from shardwright.ir.stages import layers_of

#: The letter of the layers.
_LAYERS = "l"


def _stages(equation: Equation) -> Rule:
    """Layers are cut, and nothing else; what is carried on is left with the last of them."""
    layers = layers_of(equation)
    assert layers is not None, "it is one of stages"
    walked = layers.consts + layers.carries
    number = 0

    def blocked(tensor: TensorType, rows: bool) -> list[str]:
        nonlocal number
        rest = range(number, number + tensor.rank - rows)
        number += len(rest)
        return [*([_LAYERS] if rows else []), *[f"x{i}!" for i in rest]]

    ins = [blocked(t, k >= walked) for k, t in enumerate(equation.input_types)]
    outs = [blocked(t, k >= layers.carries) for k, t in enumerate(equation.output_types)]
    return Rule(string(ins, outs), flop_per_point=0.0)


register(OpDef("stages", _stages, "stages"))
