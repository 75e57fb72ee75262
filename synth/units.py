"""How finely each dimension may be cut.

A letter of a rule ties dimensions of different tensors together: they are cut at the same points. Where
one of them is merged (`(h d)`: heads times head size), a cut must not go through a head. Dimensions
tied to each other therefore share one number of units, the greatest common divisor of their sizes: 768
tied to 12 heads of 64 is cut in 12 units of 64, and 768 tied to nothing smaller in 768 units of one.
"""

from __future__ import annotations

from math import gcd
from typing import TypeAlias

from shardwright.ir.graph import Equation, Graph, Literal, Value, per_form
from shardwright.ir.regions import boundary
from shardwright.ir.rules import cuts, rule_of

#: A dimension of an operand or result of an equation (operands are counted first).
Place: TypeAlias = tuple[int, int]

#: Name of dimensions that are tied together.
Dim: TypeAlias = int


@per_form
def ties(equation: Equation) -> tuple[tuple[Place, ...], ...]:
    """The dimensions that an equation ties together: one group per letter of its rule."""
    rule = rule_of(equation)
    literal = [isinstance(atom, Literal) for atom in (*equation.inputs, *equation.outputs)]
    groups: list[tuple[Place, ...]] = []
    for letter in rule.letters:
        cut_ins, cut_outs = cuts(rule, equation, letter)
        found = [
            (k, cut.dim) for k, cut in enumerate((*cut_ins, *cut_outs)) if cut is not None and not literal[k]
        ]
        if len(found) > 1:
            groups.append(tuple(found))
    return tuple(groups)


class Units:
    """Number of units of every dimension of every value of a graph and its regions."""

    def __init__(self) -> None:
        # Union-find over dimensions; those of one value are numbered consecutively from `_first[value]`.
        self._first: dict[Value, int] = {}
        self._parent: list[int] = []
        self._units: list[int] = []
        self._found: dict[Value, tuple[int, ...]] = {}
        self._interned: dict[tuple[int, ...], tuple[int, ...]] = {}

    def add(self, graph: Graph) -> None:
        """Take in a graph; call once for the outermost graph."""
        for value in graph.values():
            self._first[value] = len(self._parent)
            self._parent.extend(range(len(self._parent), len(self._parent) + value.type.rank))
            self._units.extend(value.type.shape)
        for out, inp in graph.state.items():
            value = graph.outputs[out]
            if isinstance(value, Value):
                self._tie_all(value, graph.inputs[inp])
        first = self._first
        for equation in graph.equations:
            if equation.regions:
                self._add_regions(equation)
                continue
            groups = ties(equation)
            if not groups:
                continue
            atoms = (*equation.inputs, *equation.outputs)
            for group in groups:
                position, dim = group[0]
                root = first[atoms[position]] + dim  # pyright: ignore[reportArgumentType]  (no literal)
                for position, dim in group[1:]:
                    self._union(root, first[atoms[position]] + dim)  # pyright: ignore[reportArgumentType]

    def _add_regions(self, equation: Equation) -> None:
        for region in equation.regions:
            self.add(region)
        wiring = boundary(equation)
        for port in wiring.ins:
            outer, inner = equation.inputs[port.outer], equation.regions[port.region].inputs[port.inner]
            if isinstance(outer, Value):
                self._tie_all(inner, outer, int(port.stacked))
        for port in wiring.outs:
            inner = equation.regions[port.region].outputs[port.inner]
            if isinstance(inner, Value):
                self._tie_all(inner, equation.outputs[port.outer], int(port.stacked))
        for from_region, out, to_region, into in wiring.carries:
            before = equation.regions[from_region].outputs[out]
            if isinstance(before, Value):
                self._tie_all(before, equation.regions[to_region].inputs[into])

    def _tie_all(self, a: Value, b: Value, shift: int = 0) -> None:
        for dim in range(a.type.rank):
            self._union(self._first[a] + dim, self._first[b] + dim + shift)

    def _find(self, dim: int) -> int:
        parent = self._parent
        while parent[dim] != dim:
            parent[dim] = dim = parent[parent[dim]]
        return dim

    def _union(self, a: int, b: int) -> None:
        a, b = self._find(a), self._find(b)
        if a != b:
            self._parent[b] = a
            if self._units[a] != self._units[b]:
                self._units[a] = gcd(self._units[a], self._units[b])

    def of(self, value: Value) -> tuple[int, ...]:
        """Per dimension, the elements that must stay together; 0 where it cannot be cut at all."""
        found = self._found.get(value)
        if found is None:
            first, counts = self._first[value], self._units
            units = [counts[self._find(first + dim)] for dim in range(value.type.rank)]
            found = tuple(
                [size // n if n > 1 else 0 for size, n in zip(value.type.shape, units, strict=True)]
            )
            found = self._found[value] = self._interned.setdefault(found, found)
        return found

    def group(self, value: Value, dim: int) -> Dim:
        """One name for all dimensions tied to this one."""
        return self._find(self._first[value] + dim)

    def unit(self, value: Value, dim: int) -> int:
        """`of` one dimension."""
        return self.of(value)[dim]
