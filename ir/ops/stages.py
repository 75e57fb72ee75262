"""Scans over layers that may lie on different devices: see `ir/stages.py`."""

from __future__ import annotations

from shardwright.ir.graph import Equation, TensorType
from shardwright.ir.ops.axes import string
from shardwright.ir.placement import Shard
from shardwright.ir.registry import OpDef, register
from shardwright.ir.rules import Rule
from shardwright.ir.stages import Going, layers_of

#: The letters of the layers, and of the pieces of the batch.
_LAYERS, _PIECES = "l", "p"


def _stages(equation: Equation) -> Rule:
    """Layers are cut, and in a node pieces of the batch; what is carried on is left with the last layers."""
    layers = layers_of(equation)
    assert layers is not None, "it is one of stages"
    walked = layers.consts + layers.carries
    number = 0

    def letters(tensor: TensorType, going: Going, rows: bool) -> list[str]:
        nonlocal number
        found: list[str] = []
        for dim in range(tensor.rank):
            if rows and dim == 0:
                found.append(_LAYERS)
            elif isinstance(going, Shard) and dim == going.dim:
                found.append(f"({_PIECES} {going.unit})")
            else:
                found.append(f"x{number}!")
                number += 1
        return found

    ins = zip(equation.input_types, layers.ins, strict=True)
    outs = zip(equation.output_types, layers.outs, strict=True)
    axes = string(
        [letters(*pair, k >= walked) for k, pair in enumerate(ins)],
        [letters(*pair, k >= layers.carries) for k, pair in enumerate(outs)],
    )
    # Maxima over pieces are no sums, and what is carried on beside pieces is with those that have any.
    carried = all(isinstance(going, Shard) for going in layers.outs[: layers.carries])
    shared = carried and not any(going in ("max", "min") for going in layers.outs)
    return Rule(
        axes if shared else axes.replace(f"({_PIECES} ", f"({_PIECES}! "),
        whole=tuple([k for k, going in enumerate(layers.outs) if going is None]),
        flop_per_point=0.0,
        across=_LAYERS,
        within=_PIECES,
    )


register(OpDef("stages", _stages, "stages"))
