"""Which tensors of a graph go through memory, and which XLA keeps in registers.

XLA fuses elementwise and data-movement equations into the loops around them: a tensor made by such an
equation and used by such equations and reductions alone is never written. Aliases (reshape) cost
nothing, and a transpose that only contractions read is folded into them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from shardwright.cost.lines import ALIASES, Traffic
from shardwright.ir.graph import Equation, Graph, Literal, Value, per_graph
from shardwright.ir.registry import registry

_PRODUCERS = frozenset({"elementwise", "movement"})
_CONSUMERS = frozenset({"elementwise", "movement", "reduction"})


def _kind(equation: Equation) -> str:
    op = registry().get(equation.primitive)
    return "region" if equation.regions else op.kind if op is not None else "unknown"


@per_graph
def traffic(graph: Graph) -> Mapping[Equation, Traffic]:
    """For every equation of `graph`, which of its operands and results go through memory."""
    handed_out = {atom for atom in graph.outputs if isinstance(atom, Value)}
    return through_memory(graph.equations, (*graph.inputs, *graph.constants), handed_out)


def through_memory(
    equations: Sequence[Equation], given: Iterable[Value], handed_out: Collection[Value]
) -> Mapping[Equation, Traffic]:
    """The same of equations that are compiled together.

    Args:
        equations: in order.
        given: values that lie in memory at the start.
        handed_out: values that are to lie there at the end.
    """
    users: dict[Value, list[Equation]] = {}
    for equation in equations:
        for value in set(equation.input_values):
            users.setdefault(value, []).append(equation)
    kinds = {equation: _kind(equation) for equation in equations}
    stored: dict[Value, bool] = dict.fromkeys(given, True)
    folded: set[Equation] = set()
    for equation in equations:
        using = users.get(equation.outputs[0], []) if equation.outputs else []
        if equation.primitive in ALIASES and equation.input_values:
            source = stored[equation.input_values[0]]
            stored.update(dict.fromkeys(equation.outputs, source))
        elif equation.primitive == "transpose" and using and all(kinds[u] == "contraction" for u in using):
            folded.add(equation)
            stored[equation.outputs[0]] = True
        else:
            for value in equation.outputs:
                loop = kinds[equation] in _PRODUCERS and value not in handed_out
                stored[value] = not (loop and all(kinds[user] in _CONSUMERS for user in users.get(value, [])))
    result: dict[Equation, Traffic] = {}
    read: set[Value] = set()
    for equation in equations:
        if equation in folded:
            result[equation] = Traffic((False,) * len(equation.inputs), (False,) * len(equation.outputs))
            continue
        loop = kinds[equation] in _CONSUMERS
        ins: list[bool] = []
        for atom in equation.inputs:
            # The loops of one fusion read a tensor once between them.
            ins.append(not isinstance(atom, Literal) and stored[atom] and not (loop and atom in read))
            if loop and isinstance(atom, Value):
                read.add(atom)
        result[equation] = Traffic(tuple(ins), tuple(stored[value] for value in equation.outputs))
    return result
