"""How finely each dimension may be cut.

A letter of a rule ties dimensions of different tensors together: they are cut at the same points. Where
one of them is merged (`(h d)`: heads times head size), a cut must not go through a head. Dimensions
tied to each other therefore share one number of units, the greatest common divisor of their sizes: 768
tied to 12 heads of 64 is cut in 12 units of 64, and 768 tied to nothing smaller in 768 units of one.
"""

from __future__ import annotations

from math import gcd
from typing import TypeAlias

from shardwright.ir.graph import Equation, Graph, Value
from shardwright.ir.regions import boundary
from shardwright.ir.rules import Rule, cuts

Dim: TypeAlias = tuple[Value, int]


class Units:
    """Number of units of every dimension of every value of a graph and its regions."""

    def __init__(self) -> None:
        self._parent: dict[Dim, Dim] = {}
        self._units: dict[Dim, int] = {}

    def add(self, graph: Graph, rules: dict[Equation, Rule]) -> None:
        """Take in a graph with the rules of its equations; call once for the outermost graph."""
        for out, inp in graph.state.items():
            value = graph.outputs[out]
            if isinstance(value, Value):
                self._tie_all(value, graph.inputs[inp])
        for equation in graph.equations:
            if equation.regions:
                self._add_regions(equation, rules)
                continue
            rule = rules[equation]
            for letter in rule.letters:
                self._tie(equation, rule, letter)

    def _tie(self, equation: Equation, rule: Rule, letter: str) -> None:
        cut_ins, cut_outs = cuts(rule, equation, letter)
        places = zip((*cut_ins, *cut_outs), (*equation.inputs, *equation.outputs), strict=True)
        tied = [(atom, cut.dim) for cut, atom in places if cut is not None and isinstance(atom, Value)]
        for dim in tied[1:]:
            self._union(tied[0], dim)

    def _add_regions(self, equation: Equation, rules: dict[Equation, Rule]) -> None:
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
        for region in equation.regions:
            self.add(region, rules)

    def _tie_all(self, a: Value, b: Value, shift: int = 0) -> None:
        for dim in range(a.type.rank):
            self._union((a, dim), (b, dim + shift))

    def _find(self, dim: Dim) -> Dim:
        parent = self._parent
        if dim not in parent:
            parent[dim] = dim
            self._units[dim] = dim[0].type.shape[dim[1]]
        while parent[dim] != dim:
            parent[dim] = parent[parent[dim]]
            dim = parent[dim]
        return dim

    def _union(self, a: Dim, b: Dim) -> None:
        a, b = self._find(a), self._find(b)
        if a != b:
            self._parent[b] = a
            self._units[a] = gcd(self._units[a], self._units[b])

    def group(self, value: Value, dim: int) -> Dim:
        """One name for all dimensions tied to this one."""
        return self._find((value, dim))

    def unit(self, value: Value, dim: int) -> int:
        """Elements of `dim` that must stay together; 0 where the dimension cannot be cut at all."""
        units = self._units[self._find((value, dim))]
        return value.type.shape[dim] // units if units > 1 else 0

    def of(self, value: Value) -> tuple[int, ...]:
        """`unit` of every dimension."""
        return tuple(self.unit(value, dim) for dim in range(value.type.rank))
