"""How XLA carries out an equation, as far as its form says; `lowering.py` makes nodes of it."""

from __future__ import annotations

from typing import NamedTuple

from shardwright.cost.memory.nodes import COSTLY
from shardwright.cost.traffic import ALIASES
from shardwright.ir.graph import Equation, TensorType, Value, per_form
from shardwright.ir.registry import registry

_RENAMES = ALIASES | {"expand_dims", "name", "sharding_constraint"}
#: What joins two tensors.
SUMS = frozenset({"add", "add_any"})
#: Elementwise, and something else under certain operands; sums and divisions are, too.
_REWRITTEN = frozenset({"exp", "erfc", "mul", "integer_pow", "square", "max"})
#: Carried out in a way of their own; some of them where both operands are tensors.
_OWN_WAY = frozenset({"random_bits", "broadcast_in_dim"})
_OF_TWO = frozenset({"dot_general", "conv_general_dilated", "select_and_scatter_add"})


@per_form
def way_of(equation: Equation) -> str:
    """How XLA carries out an equation: in a way of its own, else the kind of node that it becomes."""
    primitive, rules, operands = equation.primitive, registry(), len(equation.input_values)
    kind = rules[primitive].kind if primitive in rules else "unknown"
    if primitive in _OWN_WAY or (primitive in _OF_TWO and operands == 2):
        return primitive
    if primitive in _RENAMES and operands:
        return "rename"
    if primitive.startswith("scatter"):
        return "scatter" if isinstance(equation.inputs[0], Value) else "kernel"
    if kind == "elementwise":
        return kind
    if kind in ("movement", "index"):
        return "movement"
    if kind != "reduction" or not primitive.startswith(("reduce_", "arg")) or "window" in primitive:
        return "kernel"
    same = len(equation.outputs) == 1 and equation.inputs[0].type.size == equation.output_types[0].size
    return "rename" if same and primitive.startswith("reduce_") and operands == 1 else "reduction"


class Shape(NamedTuple):
    """What the form of an elementwise equation says of its node.

    Attributes:
        primitive, out: of the equation; type of its result.
        kind: of the node, where nothing else is made of it.
        wide: what operands are broadcast to, None where they need not be; empty if none need.
        rewritten: whether XLA may make something else of it (`Lowering._rewritten`).
    """

    primitive: str
    out: TensorType
    kind: str
    wide: tuple[TensorType | None, ...]
    rewritten: bool


@per_form
def shape_of(equation: Equation) -> Shape | None:
    """None for what is not elementwise."""
    if equation.regions or not equation.outputs or way_of(equation) != "elementwise":
        return None
    primitive, out = equation.primitive, equation.output_types[0]
    wide = tuple(
        None
        if atom.type.shape == out.shape and isinstance(atom, Value)
        else TensorType(out.shape, atom.type.dtype)
        for atom in equation.inputs
    )
    kind = "costly" if primitive in COSTLY and out.is_float else "loop"
    rewritten = primitive in _REWRITTEN or primitive in SUMS or (primitive == "div" and out.is_float)
    return Shape(primitive, out, kind, wide if any(wide) else (), rewritten)
