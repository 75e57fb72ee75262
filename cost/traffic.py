"""Which tensors of a graph go through memory, and which XLA keeps in registers.

XLA fuses elementwise and data-movement equations into the loops around them: a tensor made by such an
equation and used by such equations and reductions alone is never written. Aliases (reshape) cost
nothing, and a transpose that only contractions read is folded into them. Rows that are taken of a tensor
(`dynamic_slice`, `gather`) go through memory without the others, and so do rows that are written into one
(`dynamic_update_slice`, `scatter`), if nobody needs it any more as it was. What is scattered into zeros and
then added to something, as gradients of what was looked up are, is scattered into that.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from shardwright.cost.in_place import PUTS, overwrites, scattered_into
from shardwright.ir.graph import Equation, Graph, per_form, per_graph
from shardwright.ir.placement import Grid, Placement, Shard
from shardwright.ir.registry import registry
from shardwright.ir.table import Flags, stretches, table

#: Primitives that only rename or reinterpret memory.
ALIASES = frozenset(
    {"reshape", "squeeze", "copy", "stop_gradient", "optimization_barrier", "random_wrap", "random_unwrap"}
)


#: What takes rows of its first operand.
_TAKES = frozenset({"dynamic_slice", "gather"})


class Moved(NamedTuple):
    """Bytes of an equation's operands and results that go through memory.

    Attributes:
        nbytes: of each.
        cut_like: of each, the operand or result whose placement says how many of them are a device's own:
            itself, but rows that are looked up are cut as the result is, and rows that are written at
            places which were looked up as what is written there.
        along: dimensions of the result along which rows are written into it. Where devices share these, each
            goes through all of its own.
        everywhere: bytes of each then.
    """

    nbytes: tuple[int, ...]
    cut_like: tuple[int, ...]
    along: frozenset[int] = frozenset()
    everywhere: tuple[int, ...] = ()

    def under(self, result: Placement) -> tuple[int, ...]:
        """Bytes of each where the result is held so."""
        parts = (result.across, result.within) if isinstance(result, Grid) else (result,)
        shared = any(isinstance(part, Shard) and part.dim in self.along for part in parts)
        return self.everywhere if shared else self.nbytes


class Traffic(NamedTuple):
    """Which operands and results of an equation go through memory.

    Attributes:
        ins, outs: of every operand and result, whether it does.
        in_place: whether rows are written into the operand itself.
    """

    ins: tuple[bool, ...]
    outs: tuple[bool, ...]
    in_place: bool = False

    def moved(self, equation: Equation) -> Moved:
        """Bytes that go through memory; of rows alone, where those are."""
        primitive, places = equation.primitive, tuple(range(len(self.ins) + len(self.outs)))
        tensors = (*equation.input_types, *equation.output_types)
        whole = tuple([t.nbytes * counts for t, counts in zip(tensors, (*self.ins, *self.outs), strict=True)])
        if primitive in _TAKES:
            rows, result = tensors[-1].nbytes, places[-1]
            like = result if primitive == "gather" else 0
            return Moved((min(whole[0], rows), *whole[1:]), (like, *places[1:]))
        if not self.in_place:
            return Moved(whole, places)
        at, reads = PUTS[primitive]
        rows = tensors[at].nbytes
        alone = (min(whole[0], rows) if reads else 0, *whole[1:-1], min(whole[-1], rows))
        if primitive == "dynamic_update_slice":
            sizes = zip(tensors[0].shape, tensors[at].shape, strict=True)
            along = frozenset(dim for dim, (size, own) in enumerate(sizes) if size != own)
            return Moved(alone, places, along, whole)
        return Moved(alone, (at, *places[1:-1], at))


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
    scatters = np.flatnonzero(are([example.primitive == "scatter-add" for example in found.examples]))
    joined = scattered_into(graph, rows, scatters) if len(scatters) else []
    for scatter, addition, _ in joined:  # nobody writes zeros, and what is added to lies in memory
        reads[np.searchsorted(reader, scatter)] = False
        producers[addition] = consumers[addition] = False

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
    takes = are([example.primitive in _TAKES for example in found.examples])
    by_loops = np.flatnonzero(reads & consumers[reader] & ~takes[reader])
    first = np.zeros(values, dtype=np.intp)
    first[read[by_loops][::-1]] = by_loops[::-1]
    ins[by_loops] &= first[read[by_loops]] == by_loops
    puts = rows[are([example.primitive in PUTS for example in found.examples])].tolist()
    into = {row for row in puts if overwrites(graph, row, 0, stored, handed_out)}
    for scatter, addition, to in joined:
        at = int(np.searchsorted(reader, addition))
        copied = not overwrites(graph, int(rows[addition]), to, stored, handed_out)
        ins[np.searchsorted(reader, scatter)] = True
        ins[at : at + 2] = [copied and k == to for k in range(2)]
        outs[np.searchsorted(maker, addition)] = copied
        into.add(int(rows[scatter]))
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
