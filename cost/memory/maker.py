"""Makes the nodes of a lowered graph: equal ones are computed once; see `lowering.py`."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from shardwright.cost.memory.nodes import Node
from shardwright.ir.graph import Equation, TensorType


class Maker:
    """Makes nodes.

    Attributes:
        nodes: all nodes.
    """

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self._known: dict[Hashable, Node] = {}

    def _add(
        self, what: str, kind: str, ins: Sequence[Node], tensor: TensorType, equation: Equation | None
    ) -> Node:
        node = Node(len(self.nodes), what, kind, tuple(ins), tensor, equation)
        self.nodes.append(node)
        return node

    def _make(
        self,
        key: Hashable,
        what: str,
        kind: str,
        ins: Sequence[Node],
        tensor: TensorType,
        equation: Equation | None,
    ) -> Node:
        """The node of this key, made if it is new: equal equations are computed once."""
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = self._add(what, kind, ins, tensor, equation)
        return found

    def _repeated(self, value: object, tensor: TensorType, equation: Equation) -> Node:
        node = self._make(("repeated", str(value), tensor), "broadcast", "constant", (), tensor, equation)
        node.value = value
        return node

    def _transposed(self, node: Node, order: tuple[int, ...], equation: Equation) -> Node:
        if order == tuple(range(len(order))):
            return node
        moved = TensorType(tuple([node.type.shape[d] for d in order]), node.type.dtype)
        key = ("transposed", node.number, order)
        found = self._make(key, "transpose", "movement", (node,), moved, equation)
        found.order = order
        return found

    def _renamed(self, node: Node, tensor: TensorType, equation: Equation) -> Node:
        return self._make(("renamed", node.number, tensor), "reshape", "rename", (node,), tensor, equation)

    def _broadcast(self, node: Node, wide: TensorType, equation: Equation) -> Node:
        if node.kind == "constant":
            return self._repeated(node.value, wide, equation)
        return self._make(("broadcast", node.number, wide), "broadcast", "movement", (node,), wide, equation)
