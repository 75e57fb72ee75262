"""Nodes: what XLA makes of the equations of a graph, one result each; `lowering.py` makes them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from shardwright.ir.graph import Equation, TensorType

#: Dtypes half as wide as float32.
HALVES = frozenset({"bfloat16", "float16"})
#: Equations that XLA does not compute twice to save a buffer.
COSTLY = frozenset(
    {
        "acos",
        "acosh",
        "asin",
        "asinh",
        "atan",
        "atan2",
        "atanh",
        "cbrt",
        "cos",
        "cosh",
        "digamma",
        "div",
        "erf",
    }
    | {"erf_inv", "erfc", "exp", "exp2", "expm1", "lgamma", "log", "log1p", "log2", "logistic", "pow", "rem"}
    | {"rsqrt", "sin", "sinh", "sqrt", "tan", "tanh"}
)


@dataclass(slots=True, eq=False)
class Buffer:
    """Scratch memory between two kernels.

    Attributes:
        nbytes: its size.
        first: the kernel that writes it (position in `Layout.kernels`).
        last: the last kernel that reads it.
        what: primitive that made it last, "copy" (of an input), or that of a loop whose scratch it is.
        equation: that it belongs to; None for copies of inputs.
        role: "saved" (made by the forward part, read by the backward part), "gradient" (made by the backward
            part, read by the rest of the step) or "temporary".
        offset: in the arena.
        within: of one inside of a loop, which is one kernel, from and until what part of that it is there.
        over: those that it may be written over: operands that nobody reads afterwards.
        early: of a copy of an input, how long before the first kernel it is there, in kernels.
    """

    nbytes: int
    first: int
    last: int
    what: str
    equation: Equation | None
    role: str = "temporary"
    offset: int = 0
    within: tuple[float, float] | None = None
    over: Sequence[Buffer] = field(default=(), repr=False)
    early: float = 0.0

    @property
    def start(self) -> float:
        """When it begins to be there, in kernels: what a loop reads is there all along."""
        return self.first - self.early if self.within is None else self.first - 1 + self.within[0]

    @property
    def end(self) -> float:
        """Until when it is there."""
        return self.last if self.within is None else self.last - 1 + self.within[1]


@dataclass(slots=True, eq=False)
class Node:
    """One result, as XLA sees it.

    Attributes:
        number: position in `Lowering.nodes`; operands come before users.
        what: primitive, or what XLA does in its place.
        kind: "input", "constant" (one value, repeated), "loop" (elementwise, cheap), "costly" (elementwise,
            not computed twice), "movement" (of elements to other places), "rename", "view" (in its last
            operand's buffer), "store" (into a buffer that belongs to a loop), "reduction", "product",
            "scatter" (over its first operand), "region", or "kernel" (anything else).
        ins: operands.
        type: shape and dtype of the result.
        equation: that it comes from, None for inputs.
        value: the value of a constant.
        inner: buffers of a region's bodies; their times are parts of that of the kernel.
        users: who reads it, among what is needed at all.
        group: number of the library fusion's result, where it is in one.
        order: of a transpose, the dimensions of its operand.
    """

    number: int
    what: str
    kind: str
    ins: tuple[Node, ...]
    type: TensorType
    equation: Equation | None
    value: object = None
    inner: Sequence[Buffer] = ()
    users: list[Node] = field(default_factory=list)
    group: int | None = None
    order: tuple[int, ...] = ()


def is_zero(node: Node) -> bool:
    """Whether a node is zero throughout."""
    return node.kind == "constant" and str(node.value) in ("0", "0.0")


def is_square(equation: Equation, ins: Sequence[Node]) -> bool:
    """Whether an equation squares its operand."""
    if equation.primitive == "mul":
        return ins[0] is ins[1]
    power = equation.primitive == "integer_pow" and equation.params.get("y") == 2
    return power or equation.primitive == "square"


def main_operand(node: Node) -> Node | None:
    """The largest operand with an element for each of a node's."""
    size = node.type.size
    whole = [o for o in node.ins if o.type.size == size and o.kind != "constant" and o.what != "broadcast"]
    return max(whole, key=lambda operand: operand.type.nbytes, default=None)


def is_turned(node: Node) -> bool:
    """Whether a node is made, element by element, of a transposed one."""
    found: Node | None = node
    while found is not None and found.kind in ("loop", "costly"):
        found = main_operand(found)
    return found is not None and found.what == "transpose"


def lies_well(node: Node, orders: Collection[Sequence[int]]) -> bool:
    """Whether an operand of a product is a matrix, or several, as it lies, on cards.

    A transpose before it moves through what is made of it, and comes to lie with that of the product.

    Args:
        node: the operand.
        orders: of its dimensions, with rows or columns first.
    """
    return tuple(range(node.type.rank)) in orders and not is_turned(node)
