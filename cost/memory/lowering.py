"""What XLA makes of the equations of a graph before it decides on buffers: nodes.

No compiler runs here; its decisions are taken again, on the graph: those of XLA's CPU compiler as jaxlib 0.10
has it, read off optimised programs and buffer assignments.

- Products and convolutions read operands that lie as they want them: `products.py`.
- Division by a broadcast value is multiplication by its broadcast reciprocal; constant factors move to the
  smaller operand.
- What is scattered into zeros and then added to something is scattered into that.
- A max-pooling's gradient is a scatter by indices that the forward pass finds.
- Equal equations are one; so `jax.checkpoint` outside of loops saves nothing on a CPU, where XLA drops the
  barriers around what is computed again.

`cost/memory/fusion.py` says which nodes get buffers, `cost/memory/buffers.py` where.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from typing import TypeAlias

import numpy as np

from shardwright.cost.memory.compilers import Compiler
from shardwright.cost.memory.nodes import Buffer, Node, is_square, is_zero
from shardwright.cost.memory.products import Products
from shardwright.cost.memory.ways import SUMS, Shape, shape_of, way_of
from shardwright.ir.graph import Atom, Equation, Form, Graph, Literal, TensorType, Value
from shardwright.ir.regions import Boundary, boundary
from shardwright.ir.table import table

#: Buffers of the bodies of an equation with regions.
Inner: TypeAlias = Callable[[Equation], Sequence[Buffer]]


class Lowering(Products):
    """The nodes of a graph.

    Args:
        graph: the equations.
        inner: buffers of the bodies of an equation with regions.
        compiler: whose decisions these are.
        sliced: inputs that are slices of a stacked operand (of the body of a scan).
        stored: outputs that are slices of a stacked result.

    Attributes:
        of: node of every value.
        outputs: nodes that are handed out.
        needed: by number, whether anything handed out depends on a node.
    """

    def __init__(
        self,
        graph: Graph,
        inner: Inner,
        compiler: Compiler,
        sliced: Iterable[int] = (),
        stored: Collection[int] = (),
    ) -> None:
        super().__init__(compiler)
        self.of: dict[Value, Node] = {}
        self._inner = inner
        self._literals: dict[tuple[Form, int], Node] = {}
        self._once: set[int] = set()
        found = table(graph)
        given = found.operands[found.operands >= 0]
        self._read = read = np.bincount(given, minlength=len(found.handed_out)).tolist()
        for value in (*graph.inputs, *graph.constants):
            self.of[value] = self._add(str(value), "input", (), value.type, None)
        for position in sliced:
            value = graph.inputs[position]
            self.of[value] = self._add("slice", "movement", (self.of[value],), value.type, None)
        of, shapes = self.of, found.by_form(shape_of)
        for equation, form in zip(graph.equations, found.form.tolist(), strict=True):
            shape = shapes[form]
            if shape is not None:
                of[equation.outputs[0]] = self._elementwise(equation, shape)
                if not shape.rewritten:
                    continue
            else:
                self._equation(equation)
            for value in equation.outputs:
                node = of[value]
                if node.kind == "scatter" and read[value.index] == 1:
                    self._once.add(node.number)
        self.outputs: list[Node] = []
        for position, atom in enumerate(graph.outputs):
            if isinstance(atom, Value):
                node = self.of[atom]
                store = position in stored
                self.outputs.append(self._add("store", "store", (node,), atom.type, None) if store else node)
        self._sink_constants()
        self.needed = self._find_users()

    # -- equations --------------------------------------------------------------------------------

    def _equation(self, equation: Equation) -> None:
        if equation.regions:
            self._region(equation)
            return
        if not equation.outputs:
            return
        of, way = self.of, way_of(equation)
        ins = [of[value] for value in equation.input_values]
        out = equation.outputs[0]
        match way:
            case "rename":
                of[out] = self._renamed(ins[0], out.type, equation)
            case "dot_general":
                of[out] = self._product(equation, ins)
            case "conv_general_dilated":
                of[out] = self._convolution(equation, ins)
            case "select_and_scatter_add":
                of[out] = self._unpooled(equation, ins)
            case "random_bits":
                of[out] = self._random(equation, ins)
            case "broadcast_in_dim":
                of[out] = self._spread(equation, ins)
            case _ if equation.primitive == "transpose":
                order = tuple(equation.params["permutation"])
                reads = self._read[equation.input_values[0].index]
                swapped = self._swapped(equation, ins[0], reads)
                of[out] = swapped or self._transposed(ins[0], order, equation)
            case _:
                self._results(equation, self._windowed(equation, ins), way)

    def _results(self, equation: Equation, ins: Sequence[Node], kind: str) -> None:
        key = self._key(equation, ins)
        for position, value in enumerate(equation.outputs):
            self.of[value] = self._make((*key, position), equation.primitive, kind, ins, value.type, equation)

    def _windowed(self, equation: Equation, ins: list[Node]) -> list[Node]:
        """Operands; of a scatter, what is put somewhere has the dimensions of one along which that is."""
        numbers = (
            equation.params.get("dimension_numbers") if equation.primitive.startswith("scatter") else None
        )
        if numbers is None or len(ins) != 3 or not numbers.inserted_window_dims:
            return ins
        each = ins[2].type
        inserted = (1,) * len(numbers.inserted_window_dims)
        return [*ins[:2], self._renamed(ins[2], TensorType((*each.shape, *inserted), each.dtype), equation)]

    def _key(self, equation: Equation, ins: Sequence[Node]) -> tuple[Hashable, ...]:
        return (equation.form, *ins)

    def _whole(self, equation: Equation, shape: Shape) -> tuple[Node, ...]:
        """Operands of an elementwise equation, broadcast to the shape of its result."""
        of = self.of
        found: list[Node] = []
        for place, (atom, wide) in enumerate(zip(equation.inputs, shape.wide, strict=True)):
            if type(atom) is Value:
                found.append(of[atom] if wide is None else self._broadcast(of[atom], wide, equation))
                continue
            key = equation.form, place  # equations of one form have equal literals
            node = self._literals.get(key)
            if node is None:
                assert wide is not None, "a literal has no shape"
                assert isinstance(atom, Literal)
                node = self._literals[key] = self._repeated(atom.value, wide, equation)
            found.append(node)
        return tuple(found)

    def _elementwise(self, equation: Equation, shape: Shape) -> Node:
        primitive, out, of = shape.primitive, shape.out, self.of
        # Where nothing need be broadcast there is no literal.
        ins = self._whole(equation, shape) if shape.wide else tuple([of[v] for v in equation.input_values])
        if ins[0].kind == "constant" and all(node.kind == "constant" for node in ins):
            values = (primitive, *[str(node.value) for node in ins])
            zero = primitive in ("square", "mul") and all(is_zero(node) for node in ins)
            return self._repeated(0.0 if zero else values, out, equation)
        if shape.rewritten:
            found = self._rewritten(equation, ins, out)
            if found is not None:
                return found
            if primitive == "erfc":  # a select between two expansions, of which one needs exp(-x²)
                square = self._squared(ins[0], out, equation)
                ins = (*ins, self._gauss(square, out, equation))
        # Inlined from `_make`: most nodes are made here.
        key = (equation.form, *ins)
        made = self._known.get(key)
        if made is None:
            nodes, kept = self.nodes, self.compiler.kept(primitive, out)
            made = self._known[key] = Node(len(nodes), primitive, shape.kind, ins, kept, equation)
            nodes.append(made)
        return made

    def _rewritten(self, equation: Equation, ins: Sequence[Node], out: TensorType) -> Node | None:
        """What XLA makes of an elementwise equation in its place, if it does."""
        primitive, first = equation.primitive, ins[0]
        if primitive in SUMS:
            for one, other in ((first, ins[1]), (ins[1], first)):
                if other.kind == "constant" and is_zero(other):
                    return one
                mine = one.kind == "scatter" and is_zero(one.ins[0]) and one.number in self._once
                if mine and other.kind != "scatter":
                    return self._add(one.what, "scatter", (other, *one.ins[1:]), out, equation)
        elif primitive == "max":
            for one, other in ((first, ins[1]), (ins[1], first)):
                if other.kind == "constant" and str(other.value) == "-inf":
                    return one
        elif primitive == "div":
            return self._divided(ins, out, equation)
        elif primitive == "exp":
            if first.what == "neg" and first.ins[0].what == "square":
                return self._gauss(first.ins[0], out, equation)
        elif is_square(equation, ins):
            return self._squared(first, out, equation)
        return None

    def _divided(self, ins: Sequence[Node], out: TensorType, equation: Equation) -> Node:
        by = ins[1]
        if by.what != "broadcast":
            return self._make(self._key(equation, ins), "div", "costly", ins, out, equation)
        if by.kind != "constant":
            small = by.ins[0]
            key = ("reciprocal", small.number)
            by = self._broadcast(
                self._make(key, "div", "costly", (small,), small.type, equation), out, equation
            )
        return self._make(("mul", ins[0].number, by.number), "mul", "loop", (ins[0], by), out, equation)

    def _squared(self, node: Node, out: TensorType, equation: Equation) -> Node:
        return self._make(("square", node.number), "square", "loop", (node,), out, equation)

    def _gauss(self, square: Node, out: TensorType, equation: Equation) -> Node:
        return self._make(("gauss", square.number), "exp", "costly", (square,), out, equation)

    def _region(self, equation: Equation) -> None:
        wiring = boundary(equation)
        stacked = {port.outer for port in wiring.outs if port.stacked}
        begins = _begins(wiring)
        carried = {
            result: self._copied(equation.inputs[operand], equation.outputs[result].type, equation)
            for result, operand in begins.items()
        }
        read = [atom for i, atom in enumerate(equation.inputs) if i not in begins.values()]
        ins = [self.of[atom] for atom in read if isinstance(atom, Value)]
        whole = self._add(equation.primitive, "region", (), equation.output_types[0], equation)
        whole.inner = self._inner(equation)
        places: list[Node] = []
        for position, value in enumerate(equation.outputs):
            if position in stacked:  # filled slice by slice, and there from the beginning of the program
                places.append(self._add("zeros", "kernel", (), value.type, equation))
            elif position in carried:
                places.append(carried[position])
            else:
                self.of[value] = self._add(equation.primitive, "kernel", (whole,), value.type, equation)
                continue
            self.of[value] = self._add(equation.primitive, "view", (whole, places[-1]), value.type, equation)
        whole.ins = (*ins, *places)

    def _copied(self, start: Atom, tensor: TensorType, equation: Equation) -> Node:
        """The buffer that a loop carries: what it begins with is made there, or copied there."""
        known = isinstance(start, Value)
        found = self.of[start] if known else self._repeated(start.value, tensor, equation)
        return self._add("copy", "loop", (found,), tensor, equation)

    # -- what is carried out otherwise -------------------------------------------------------------

    def _unpooled(self, equation: Equation, ins: Sequence[Node]) -> Node:
        """Each window's winner, and its index in each dimension, found beside the pooling; then a scatter."""
        source, pooled = ins
        wide, small = equation.output_types[0], source.type
        places = TensorType(wide.shape, "int32")
        numbers = [
            self._make(("iota", wide.shape, d), "iota", "kernel", (), places, equation)
            for d in range(wide.rank)
        ]
        index = TensorType(small.shape, "int32")
        found = [
            self._add("reduce_window", "kernel", (pooled, *numbers), each, equation)
            for each in (
                small,
                *[index] * wide.rank,
            )  # nobody needs the winner itself
        ]
        rows = TensorType((*small.shape, wide.rank), "int32")
        indices = self._add("concatenate", "movement", found, rows, equation)
        zeros = self._repeated(0.0, wide, equation)
        return self._add("scatter", "scatter", (zeros, indices, source), wide, equation)

    def _random(self, equation: Equation, ins: Sequence[Node]) -> Node:
        """Both words of the generator's counter; who reads them combines them."""
        key, out = self._key(equation, ins), equation.output_types[0]
        if "random_bits" in self.compiler.costly:  # then others take it in
            return self._make(key, "random_bits", "costly", ins, out, equation)
        high = self._make((*key, "high"), "random_bits", "kernel", ins, out, equation)
        low = self._make((*key, "low"), "random_bits", "kernel", (high,), out, equation)
        return self._make(key, "xor", "loop", (high, low), out, equation)

    def _spread(self, equation: Equation, ins: Sequence[Node]) -> Node:
        """A broadcast: of a constant, to as many elements (a rename), or proper."""
        operand, out = equation.inputs[0], equation.output_types[0]
        if isinstance(operand, Literal):
            return self._repeated(operand.value, out, equation)
        if operand.type.size == out.size:
            return self._renamed(ins[0], out, equation)
        return self._make(self._key(equation, ins), "broadcast", "movement", ins, out, equation)

    # -- what XLA rewrites -------------------------------------------------------------------------

    def _sink_constants(self) -> None:
        """(x · constant) · broadcast(y) is x · broadcast(constant · y), if no other reads x · constant."""
        count = [0] * len(self.nodes)
        for node in self.nodes:
            for operand in node.ins:
                count[operand.number] += 1
        found: dict[Node, list[tuple[Node, Node]]] = {}
        for node in self.nodes:
            if node.what != "mul" or len(node.ins) != 2:
                continue
            for scaled, other in (node.ins, node.ins[::-1]):
                if other.what == "broadcast" and other.kind != "constant" and scaled.what == "mul":
                    found.setdefault(scaled, []).append((node, other))
                    break
        for scaled, products in found.items():
            left = [operand for operand in scaled.ins if operand.kind != "constant"]
            if len(left) != 1 or len(products) != count[scaled.number]:
                continue
            for node, other in products:
                # A broadcast that others read is another one here: in the place of x · constant.
                if count[other.number] > 1 and other.ins[0].number < scaled.number and scaled.what == "mul":
                    scaled.what, scaled.kind, scaled.ins = "broadcast", "movement", other.ins
                    other = scaled
                node.ins = (left[0], other)

    def _find_users(self) -> list[bool]:
        """Tell every node who reads it; by number, what is needed at all."""
        needed = [False] * len(self.nodes)
        for node in self.outputs:
            needed[node.number] = True
        for node in reversed(self.nodes):  # operands come before users
            if needed[node.number]:
                for operand in node.ins if len(node.ins) == 1 else dict.fromkeys(node.ins):
                    needed[operand.number] = True
                    operand.users.append(node)
        return needed


def _begins(wiring: Boundary) -> dict[int, int]:
    """By result of a loop that it carries, the operand that it begins with."""
    operand = {(port.region, port.inner): port.outer for port in wiring.ins}
    result = {(port.region, port.inner): port.outer for port in wiring.outs}
    return {result[of, out]: operand[to, into] for of, out, to, into in wiring.carries if of == to}
