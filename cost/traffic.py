"""Which tensors of a graph go through memory, and which XLA keeps in registers.

XLA fuses elementwise and data-movement equations into the loops around them: a tensor made by such an
equation and used by such equations and reductions alone is never written. Aliases (reshape) cost
nothing, and a transpose that only contractions read is folded into them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from shardwright.cost.lines import ALIASES, Traffic
from shardwright.ir.graph import Equation, Graph, Value, per_form, per_graph
from shardwright.ir.registry import registry

_PRODUCERS = frozenset({"elementwise", "movement"})
_CONSUMERS = frozenset({"elementwise", "movement", "reduction"})


@per_form
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
    kinds = [_kind(equation) for equation in equations]
    # What is read by something else than a contraction, and than a loop.
    contracted: set[Value] = set()
    uncontracted: set[Value] = set()
    unlooped: set[Value] = set()
    for equation, kind in zip(equations, kinds, strict=True):
        if kind in _CONSUMERS:
            uncontracted.update(equation.input_values)
        else:
            (contracted if kind == "contraction" else uncontracted).update(equation.input_values)
            unlooped.update(equation.input_values)
    in_memory = unlooped.union(handed_out)
    stored: dict[Value, bool] = dict.fromkeys(given, True)
    found: dict[Equation, Traffic] = {}
    read: set[Value] = set()
    for equation, kind in zip(equations, kinds, strict=True):
        inputs, outputs = equation.inputs, equation.outputs
        primitive = equation.primitive
        if primitive in ALIASES and equation.input_values:
            source = stored[equation.input_values[0]]
            stored.update(dict.fromkeys(outputs, source))
        elif primitive == "transpose" and outputs[0] in contracted and outputs[0] not in uncontracted:
            stored[outputs[0]] = True
            found[equation] = Traffic((False,) * len(inputs), (False,) * len(outputs))
            continue
        else:
            loop = kind in _PRODUCERS
            for value in outputs:
                stored[value] = not loop or value in in_memory
        if kind in _CONSUMERS:
            # The loops of one fusion read a tensor once between them.
            ins: list[bool] = []
            for atom in inputs:
                if type(atom) is Value and atom not in read:
                    read.add(atom)
                    ins.append(stored[atom])
                else:
                    ins.append(False)
        else:
            ins = [type(atom) is Value and stored[atom] for atom in inputs]
        found[equation] = Traffic(tuple(ins), tuple([stored[value] for value in outputs]))
    return found
