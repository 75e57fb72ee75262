"""A graph as arrays, made once per graph: what passes over all of its equations read.

A pass that asks every equation for its operands, their types and its form spends most of its time on asking.
What is decided by form alone is asked once per form here (`Table.by_form`) and gathered; what neighbours
decide is decided for all equations at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from shardwright.ir.graph import Equation, Graph, Value, per_graph

Numbers: TypeAlias = NDArray[np.intp]
Flags: TypeAlias = NDArray[np.bool_]

_T = TypeVar("_T")

#: Codes of rows are kept below this, so that one more column does not overflow them.
_LARGE = 1 << 40


@dataclass(frozen=True, slots=True, eq=False)
class Table:
    """The equations of a graph, without those of its regions; equations and values are their indices.

    Attributes:
        examples: an equation of every form.
        form: of every equation, the number of its form.
        operands: of all equations one after another: the value, -1 for a literal.
        reader: of every operand, the equation that it is of.
        begin: where the operands of every equation begin, and in the end how many there are.
        results: of all equations one after another: the value.
        maker: of every result, the equation that it is of.
        made: where the results of every equation begin, and in the end how many there are.
        handed_out: of every value, whether it is an output of the graph.
    """

    examples: tuple[Equation, ...]
    form: Numbers
    operands: Numbers
    reader: Numbers
    begin: Numbers
    results: Numbers
    maker: Numbers
    made: Numbers
    handed_out: Flags

    def by_form(self, function: Callable[[Equation], _T]) -> list[_T]:
        """What a function of an equation that depends on its form alone says of every form."""
        return [function(equation) for equation in self.examples]

    def by_operand(self, of_form: Sequence[Sequence[bool]]) -> Flags:
        """Of every operand, what is said of those of every form."""
        return np.array(list(chain.from_iterable([of_form[f] for f in self.form.tolist()])), dtype=np.bool_)

    def any_of(self, operands: Flags) -> Flags:
        """Of every equation, whether one of its operands is among these."""
        found = np.zeros(len(self.form), dtype=np.bool_)
        found[self.reader[operands]] = True
        return found

    def readers(self, operands: Flags) -> tuple[Numbers, Numbers]:
        """Values among these operands and the equations that read them; each pair once, in their order."""
        equations = len(self.form)
        pairs = np.unique(self.operands[operands] * equations + self.reader[operands])
        values, readers = np.divmod(pairs, max(equations, 1))
        return values, readers


@per_graph
def table(graph: Graph) -> Table:
    """The table of a graph."""
    equations, known = graph.equations, dict[int, int]()
    form = np.array([known.setdefault(id(e.form), len(known)) for e in equations], dtype=np.intp)
    first = np.unique(form, return_index=True)[1]
    examples = tuple([equations[position] for position in first.tolist()])
    takes = np.array([len(e.inputs) for e in examples], dtype=np.intp)[form]
    gives = np.array([len(e.outputs) for e in examples], dtype=np.intp)[form]
    operands = [a.index if type(a) is Value else -1 for e in equations for a in e.inputs]
    results = [v.index for e in equations for v in e.outputs]
    handed_out = np.zeros(len(graph.inputs) + len(graph.constants) + len(results), dtype=np.bool_)
    handed_out[[atom.index for atom in graph.outputs if isinstance(atom, Value)]] = True
    numbers = np.arange(len(equations))
    return Table(
        examples=examples,
        form=form,
        operands=np.array(operands, dtype=np.intp),
        reader=numbers.repeat(takes),
        begin=np.concatenate([[0], takes.cumsum()]),
        results=np.array(results, dtype=np.intp),
        maker=numbers.repeat(gives),
        made=np.concatenate([[0], gives.cumsum()]),
        handed_out=handed_out,
    )


def stretches(begin: Numbers, equations: Numbers) -> tuple[Numbers, Numbers]:
    """Places of the operands, or results, of some equations, and which of these equations each is of.

    Args:
        begin: `Table.begin` or `Table.made`.
        equations: in any order.
    """
    lengths = begin[equations + 1] - begin[equations]
    before = lengths.cumsum() - lengths
    places = np.arange(lengths.sum()) + (begin[equations] - before).repeat(lengths)
    return places, np.arange(len(equations)).repeat(lengths)


def codes(rows: Numbers) -> Numbers:
    """A number for every row, equal for equal rows."""
    found = rows[:, 0]
    for column in rows.T[1:]:
        found = found * (int(column.max()) + 1) + column
        if found.max() > _LARGE:  # few rows, by far: numbered anew before they overflow
            found = np.unique(found, return_inverse=True)[1]
    return found
