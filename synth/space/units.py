"""How finely each dimension may be cut.

A letter of a rule ties dimensions of different tensors together: they are cut at the same points. Where
one of them is merged (`(h d)`: heads times head size), a cut must not go through a head. Dimensions
tied to each other therefore share one number of units, the greatest common divisor of their sizes: 768
tied to 12 heads of 64 is cut in 12 units of 64, and 768 tied to nothing smaller in 768 units of one.
"""

from __future__ import annotations

from functools import cache
from itertools import chain, pairwise
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray
from scipy import sparse
from scipy.sparse import csgraph

from shardwright.ir.graph import Equation, Graph, Literal, Value, per_form
from shardwright.ir.regions import boundary
from shardwright.ir.registry import rule_of
from shardwright.ir.rules import cuts_of, minor_sizes
from shardwright.ir.table import Numbers, Table, table

#: A dimension of an operand or result of an equation (operands are counted first).
Place: TypeAlias = tuple[int, int]

#: Name of dimensions that are tied together.
Dim: TypeAlias = int


class Places(NamedTuple):
    """Where the letters of an equation's rule cut its tensors; literals are not cut.

    Attributes:
        tied: the dimensions that are tied together: one group per letter.
        letters: those that cut a tensor.
        first: of every such letter a place where it cuts: operand or result, dimension, elements per step.
        merged: all places where a step is of several elements.
    """

    tied: tuple[tuple[Place, ...], ...]
    letters: tuple[str, ...]
    first: tuple[tuple[int, int, int], ...]
    merged: tuple[tuple[int, int, int], ...]


def places(equation: Equation, *, mesh: bool) -> Places:
    """Those of an equation, on one mesh axis or on two (`mesh`); one object for many forms."""
    return _on_axes(equation)[mesh]


@per_form
def _on_axes(equation: Equation) -> tuple[Places, Places]:
    """Those on one axis, and those on two."""
    rule = rule_of(equation)
    literal = tuple([type(atom) is Literal for atom in equation.inputs])
    minors, known = minor_sizes(rule, equation), (rule.letters, rule.all_letters)
    one, two = (_places(rule.axes, letters, minors, literal) for letters in known)
    return one, two


@cache
def _places(
    axes: str, letters: tuple[str, ...], minors: tuple[tuple[str, int], ...], literal: tuple[bool, ...]
) -> Places:
    tied: list[tuple[Place, ...]] = []
    merged: list[tuple[int, int, int]] = []
    found: dict[str, tuple[int, int, int]] = {}
    where = cuts_of(axes, minors)
    for letter in letters:
        cut_ins, cut_outs = where[letter]
        mine = [
            (k, cut)
            for k, cut in enumerate((*cut_ins, *cut_outs))
            if cut is not None and not (k < len(literal) and literal[k])
        ]
        if mine:
            position, cut = mine[0]
            found[letter] = position, cut.dim, cut.minor
        if len(mine) > 1:
            tied.append(tuple([(k, cut.dim) for k, cut in mine]))
        merged += [(k, cut.dim, cut.minor) for k, cut in mine if cut.minor > 1]
    return Places(tuple(tied), tuple(found), tuple(found.values()), tuple(merged))


class Units:
    """Number of units of every dimension of every value of a graph and its regions.

    Args:
        mesh: whether programs are on two mesh axes.
    """

    def __init__(self, *, mesh: bool = False) -> None:
        self._mesh = mesh
        # Dimensions of one value are numbered consecutively from `_first[value]`.
        self._first: dict[Value, int] = {}
        self._sizes: list[int] = []
        #: `_first` of the values of every graph by their indices, and where those of the last one end.
        self._of_graph: dict[Graph, list[int]] = {}
        #: Pairs of dimensions that are tied.
        self._pairs: list[tuple[NDArray[np.intp], NDArray[np.intp]]] = []
        #: Dimensions of which so many elements are one step.
        self._merged: list[tuple[NDArray[np.intp], int]] = []
        self._settled: tuple[list[int], list[int]] | None = None
        self._found: (
            tuple[dict[Graph, list[int]], list[tuple[int, ...]], dict[Value, tuple[int, ...]]] | None
        ) = None

    def add(self, graph: Graph) -> None:
        """Take in a graph; call once for the outermost graph."""
        values = graph.values()
        shapes = [value.type.shape for value in values]
        first = len(self._sizes) + np.cumsum([0, *map(len, shapes)])
        self._of_graph[graph] = first.tolist()
        self._first.update(zip(values, first.tolist(), strict=False))
        self._sizes.extend(chain.from_iterable(shapes))
        for out, inp in graph.state.items():
            value = graph.outputs[out]
            if isinstance(value, Value):
                self._tie_all(value, graph.inputs[inp])
        found = table(graph)
        # Equations whose letters are in the same places tie the same dimensions of operands and results.
        alike: dict[int, tuple[int, Places]] = {}
        kind = np.full(len(found.examples), -1)
        for form, example in enumerate(found.examples):
            where = None if example.regions else places(example, mesh=self._mesh)
            if where is not None and (where.tied or where.merged):
                kind[form], _ = alike.setdefault(id(where), (len(alike), where))
        kinds = kind[found.form]
        for number, where in alike.values():
            self._tie(where, np.flatnonzero(kinds == number), found, first)
        for equation in graph.equations:
            if equation.regions:
                self._add_regions(equation)
        self._settled = self._found = None

    def _tie(self, where: Places, equations: Numbers, found: Table, first: Numbers) -> None:
        """Tie the same dimensions of all these equations, which have equally many operands.

        Args:
            where: their letters cut their tensors.
            equations: of one graph.
            found: the graph.
            first: of all of its values, the number of the first dimension.
        """
        operands = len(found.examples[found.form[equations[0]]].inputs)
        of: dict[int, Numbers] = {}
        groups = where.tied
        for position in {position for group in (*groups, where.merged) for position, *_ in group}:
            if position < operands:
                of[position] = first[found.operands[found.begin[equations] + position]]
            else:
                of[position] = first[found.results[found.made[equations] + position - operands]]
        for (position, dim), *others in groups:
            root = of[position] + dim
            self._pairs.extend((root, of[other] + at) for other, at in others)
        self._merged.extend((of[position] + dim, minor) for position, dim, minor in where.merged)

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
        dims = np.arange(a.type.rank)
        self._pairs.append((self._first[a] + dims, self._first[b] + shift + dims))

    def _known(self) -> tuple[list[int], list[int]]:
        """Of every dimension, the name of those tied to it, and the elements that must stay together."""
        if self._settled is None:
            count, sizes = len(self._sizes), np.array(self._sizes, dtype=np.int64)
            steps = sizes.copy()
            for dims, minor in self._merged:
                steps[dims] = np.gcd(steps[dims], sizes[dims] // minor)
            none = np.zeros(0, dtype=np.intp)
            one, other = (np.concatenate([none, *(pair[k] for pair in self._pairs)]) for k in (0, 1))
            ties = sparse.coo_matrix((np.ones(len(one)), (one, other)), shape=(count, count))
            _, names = csgraph.connected_components(ties, directed=False)
            order = np.argsort(names, kind="stable")
            starts = np.flatnonzero(np.diff(names[order], prepend=-1))
            units = np.gcd.reduceat(steps[order], starts)[names] if count else sizes
            together = np.where(units > 1, sizes // np.maximum(units, 1), 0)
            self._settled = names.tolist(), together.tolist()
        return self._settled

    def of(self, value: Value) -> tuple[int, ...]:
        """Per dimension, the elements that must stay together; 0 where it cannot be cut at all."""
        return self._each()[2][value]

    def numbers(self, graph: Graph) -> list[int]:
        """Of every value of a graph, by its index, a number that stands for its units (`numbered`)."""
        return self._each()[0][graph]

    def numbered(self, number: int) -> tuple[int, ...]:
        """The units that a number stands for."""
        return self._each()[1][number]

    def _each(self) -> tuple[dict[Graph, list[int]], list[tuple[int, ...]], dict[Value, tuple[int, ...]]]:
        """Numbers for the units of every graph's values; what these stand for, and of every value its own."""
        if self._found is None:
            steps, known = self._known()[1], dict[tuple[int, ...], int]()
            numbers = {
                graph: [known.setdefault(tuple(steps[a:b]), len(known)) for a, b in pairwise(first)]
                for graph, first in self._of_graph.items()
            }
            units, of = list(known), dict[Value, tuple[int, ...]]()
            for graph, mine in numbers.items():
                of.update(zip(graph.values(), [units[number] for number in mine], strict=True))
            self._found = numbers, units, of
        return self._found

    def group(self, value: Value, dim: int) -> Dim:
        """One name for all dimensions tied to this one."""
        return self._known()[0][self._first[value] + dim]

    def unit(self, value: Value, dim: int) -> int:
        """`of` one dimension."""
        return self.of(value)[dim]
