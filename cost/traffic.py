"""Which tensors of a graph go through memory, and which XLA keeps in registers.

XLA fuses elementwise and data-movement equations into the loops around them: a tensor made by such an
equation and used by such equations and reductions alone is never written. Aliases (reshape) cost
nothing, and a transpose that only contractions read is folded into them. Rows that are taken of a tensor
(`dynamic_slice`) go through memory without the others, and so do rows that are written into one
(`dynamic_update_slice`), if nobody needs it any more as it was.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from shardwright.ir.graph import Equation, Graph, Value, per_form, per_graph
from shardwright.ir.registry import registry
from shardwright.ir.table import Flags, stretches, table

#: Primitives that only rename or reinterpret memory.
ALIASES = frozenset(
    {"reshape", "squeeze", "copy", "stop_gradient", "optimization_barrier", "random_wrap", "random_unwrap"}
)


class Traffic(NamedTuple):
    """Which operands and results of an equation go through memory.

    Attributes:
        ins, outs: of every operand and result, whether it does.
        in_place: whether rows are written into the operand itself.
    """

    ins: tuple[bool, ...]
    outs: tuple[bool, ...]
    in_place: bool = False

    def nbytes(self, equation: Equation, *, rows: bool = True) -> list[int]:
        """Of every operand and result, bytes that go through memory; `rows`: of one in place, only these."""
        tensors = (*equation.input_types, *equation.output_types)
        found = [t.nbytes * counts for t, counts in zip(tensors, (*self.ins, *self.outs), strict=True)]
        if equation.primitive == _TAKES:
            found[0] = min(found[0], equation.output_types[0].nbytes)
        elif self.in_place and rows:
            found[0], found[-1] = 0, min(found[-1], equation.input_types[1].nbytes)
        return found


#: What takes rows of a tensor, and what writes some into one.
_TAKES, _PUTS = "dynamic_slice", "dynamic_update_slice"

_PRODUCERS = frozenset({"elementwise", "movement"})
_CONSUMERS = frozenset({"elementwise", "movement", "reduction"})


@per_form
def _kind(equation: Equation) -> str:
    op = registry().get(equation.primitive)
    return "region" if equation.regions else op.kind if op is not None else "unknown"


@per_graph
def traffic(graph: Graph) -> Mapping[Equation, Traffic]:
    """For every equation of `graph`, which of its operands and results go through memory."""
    return through_memory(
        graph, range(len(graph.equations)), np.flatnonzero(table(graph).handed_out).tolist()
    )


def through_memory(
    graph: Graph, compiled: Sequence[int], handed_out: Collection[int]
) -> Mapping[Equation, Traffic]:
    """The same of equations that are compiled together; what others make lies in memory at the start.

    Args:
        graph: that they are of.
        compiled: their indices, in order.
        handed_out: indices of values that are to lie in memory at the end.
    """
    found, rows = table(graph), np.array(compiled, dtype=np.intp)
    kinds, values = found.by_form(_kind), len(found.handed_out)

    def are(of_form: list[bool]) -> Flags:
        return np.array(of_form, dtype=np.bool_)[found.form[rows]]

    producers, consumers = (are([kind in some for kind in kinds]) for some in (_PRODUCERS, _CONSUMERS))
    contractions = are([kind == "contraction" for kind in kinds])
    operands, reader = stretches(found.begin, rows)
    results, maker = stretches(found.made, rows)
    read, made = found.operands[operands], found.results[results]
    reads = read >= 0

    def those(some: Flags) -> Flags:
        """Of every value, whether one of these operands is it."""
        flags = np.zeros(values, dtype=np.bool_)
        flags[read[reads & some]] = True
        return flags

    in_memory = those(~consumers[reader])  # what is read by something else than a loop
    in_memory[list(handed_out)] = True
    stored = np.ones(values, dtype=np.bool_)
    stored[made] = ~producers[maker] | in_memory[made]
    # A transpose that only contractions read.
    into_contractions = those(contractions[reader]) & ~those(~contractions[reader])
    folded = are([example.primitive == "transpose" for example in found.examples])
    folded[folded] = into_contractions[found.results[found.made[rows[folded]]]]
    stored[made[folded[maker]]] = True
    renamed = are([example.primitive in ALIASES for example in found.examples])
    for row in rows[renamed].tolist():
        equation = graph.equations[row]
        if equation.input_values:
            source = stored[equation.input_values[0].index]
            for value in equation.outputs:
                stored[value.index] = source
    reads &= ~folded[reader]
    ins, outs = reads & stored[read], stored[made] & ~folded[maker]
    # The loops of one fusion read a tensor once between them.
    takes = are([example.primitive == _TAKES for example in found.examples])
    by_loops = np.flatnonzero(reads & consumers[reader] & ~takes[reader])
    first = np.zeros(values, dtype=np.intp)
    first[read[by_loops][::-1]] = by_loops[::-1]
    ins[by_loops] &= first[read[by_loops]] == by_loops
    puts = rows[are([example.primitive == _PUTS for example in found.examples])].tolist()
    into = {row for row in puts if _in_place(graph, row, stored, handed_out)}
    #: Equal ones are one object.
    known: dict[tuple[bytes, bytes, bool], Traffic] = {}
    there: dict[Equation, Traffic] = {}
    flags = ins.tobytes(), outs.tobytes()
    begin = (np.concatenate([[0], np.bincount(of, minlength=len(rows)).cumsum()]) for of in (reader, maker))
    taken, given = (pairwise(places.tolist()) for places in begin)
    for row, (a, b), (c, d) in zip(compiled, taken, given, strict=True):
        key = flags[0][a:b], flags[1][c:d], row in into
        through = known.get(key)
        if through is None:
            through = known[key] = Traffic(tuple(map(bool, key[0])), tuple(map(bool, key[1])), row in into)
        there[graph.equations[row]] = through
    return there


def _in_place(graph: Graph, row: int, stored: Flags, handed_out: Collection[int]) -> bool:
    """Whether an equation that writes rows into a tensor may write into that: nobody reads it afterwards."""
    operand = graph.equations[row].inputs[0]
    if not isinstance(operand, Value) or not stored[operand.index] or operand.index in handed_out:
        return False
    found = table(graph)
    # What a body is given it is taken to carry; what a step is given is the caller's, but for donated state.
    state = {graph.inputs[place] for place in graph.state.values()} if graph.donated else ()
    callers = operand in graph.inputs and bool(graph.input_names) and operand not in state
    last = found.reader[found.operands == operand.index].max()
    return bool(last == row) and not callers and operand not in graph.constants


def rows_in(equation: Equation) -> frozenset[int]:
    """Dimensions of a tensor along which an equation writes rows into it."""
    if equation.primitive != _PUTS:
        return frozenset()
    whole, part = equation.input_types[:2]
    pairs = zip(whole.shape, part.shape, strict=True)
    return frozenset(dim for dim, (size, own) in enumerate(pairs) if size != own)
