"""Products and convolutions as nodes: how their operands lie, and as what they are multiplied.

- Operands are transposed to (batch, rows, columns), but for matrices, which are read either way; what a
  convolution makes is transposed from there.
- What is made of a product's result only to swap its rows and columns is the product of swapped operands.
- Cards without bfloat16 multiply it in float32: what they read is converted first, and what they make after.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from shardwright.cost.memory.compilers import Compiler
from shardwright.cost.memory.maker import Maker
from shardwright.cost.memory.nodes import Node, lies_well
from shardwright.ir.graph import Equation, TensorType


class Products(Maker):
    """Makes the nodes of products and convolutions, as a compiler has them."""

    def __init__(self, compiler: Compiler) -> None:
        super().__init__()
        self.compiler = compiler

    def _product(self, equation: Equation, ins: Sequence[Node]) -> Node:
        contracted, batch = equation.params["dimension_numbers"]
        operands: list[Node] = []
        for node, inner, outer in zip(ins, contracted, batch, strict=True):
            rank = node.type.rank
            free = [d for d in range(rank) if d not in inner and d not in outer]
            # The library reads matrices either way.
            if rank > 2 and not (len(inner) == len(free) == 1 and tuple(outer) == tuple(range(rank - 2))):
                orders = (*outer, *free, *inner), (*outer, *inner, *free)
                well = self.compiler.thrifty and lies_well(node, orders)
                order = tuple(range(rank)) if well else orders[len(operands)]
                moved = self._transposed(node, order, equation)
                node = self._renamed(node, node.type, equation) if moved is node and not outer else moved
            operands.append(node)
        key = (equation.form, *operands)
        return self._multiplied(key, "dot", "product", operands, equation.output_types[0], equation)

    def _swapped(self, equation: Equation, node: Node, reads: int) -> Node | None:
        """A transpose of rows and columns of a product that so many equations read: this one alone."""
        product, rank = node.equation, node.type.rank
        converted = node.what == "convert_element_type" and node.ins[0].equation is product
        made = node.ins[0] if converted else node
        if made.what != "dot" or product is None or reads != 1:
            return None
        outer = len(product.params["dimension_numbers"][1][0])
        if rank != outer + 2 or tuple(equation.params["permutation"]) != (*range(outer), rank - 1, outer):
            return None
        key = ("swapped", made.number)
        return self._multiplied(key, "dot", "product", made.ins[::-1], equation.output_types[0], product)

    def _convolution(self, equation: Equation, ins: Sequence[Node]) -> Node:
        specs, out = equation.params["dimension_numbers"], equation.output_types[0]
        batch, features, *space = specs.lhs_spec
        out_features, in_features, *window = specs.rhs_spec
        source, filters = ins
        if _swaps([source.type.shape[d] for d in space], [filters.type.shape[d] for d in window], equation):
            key = ("reversed", filters.number, *window)
            turned = self._make(key, "rev", "movement", (filters,), filters.type, equation)
            operands = (turned, source)
            return self._multiplied((equation.form, *operands), "conv", "kernel", operands, out, equation)
        operands = (
            self._transposed(source, (batch, *space, features), equation),
            self._transposed(filters, (*window, in_features, out_features), equation),
        )
        out_batch, out_feature, *out_space = specs.out_spec
        order = (out_batch, *out_space, out_feature)
        made = TensorType(tuple([out.shape[d] for d in order]), out.dtype)
        found = self._multiplied((equation.form, *operands), "conv", "kernel", operands, made, equation)
        return self._transposed(found, tuple([order.index(d) for d in range(len(order))]), equation)

    def _multiplied(
        self,
        key: tuple[object, ...],
        what: str,
        kind: str,
        ins: Sequence[Node],
        out: TensorType,
        equation: Equation,
    ) -> Node:
        """A product or convolution, its operands and result converted where the compiler does that."""
        multiplied = self.compiler.multiplied
        operands = [self._converted(node, multiplied(node.type), equation) for node in ins]
        return self._converted(
            self._make(key, what, kind, operands, multiplied(out), equation), out, equation
        )

    def _converted(self, node: Node, tensor: TensorType, equation: Equation) -> Node:
        """A node as that of another dtype, or what it was converted from: XLA allows itself more digits."""
        if node.type.dtype == tensor.dtype:
            return node
        if node.what == "convert_element_type" and node.ins[0].type.dtype == tensor.dtype:
            return node.ins[0]
        key = ("converted", node.number, tensor.dtype)
        return self._make(key, "convert_element_type", "loop", (node,), tensor, equation)


def _swaps(space: Sequence[int], window: Sequence[int], equation: Equation) -> bool:
    """Whether XLA lets the input of a convolution slide over its filters, which are then reversed."""
    groups = equation.params["feature_group_count"], equation.params["batch_group_count"]
    return groups == (1, 1) and prod(window) > prod(space)
