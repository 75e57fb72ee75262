"""Changed graphs: equations added, exchanged and dropped, and everything numbered anew.

Whoever changes a graph writes equations over values of any number; `renumbered` drops what nobody needs and
gives the rest the numbers that a traced graph would have.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from shardwright.ir.graph import Atom, Equation, Graph, TensorType, Value
from shardwright.ir.host import is_reload

#: Numbers of values that are made before a graph is numbered anew: none of them is looked at.
UNNUMBERED = -1


def fresh(tensor: TensorType) -> Value:
    """A value of a graph that is yet to be numbered."""
    return Value(UNNUMBERED, tensor)


def with_inputs(
    equation: Equation, inputs: Iterable[Atom], outputs: Iterable[Value] | None = None
) -> Equation:
    """The same equation on other tensors of the same types."""
    outs = equation.outputs if outputs is None else tuple(outputs)
    return _made_over(equation, equation.index, tuple(inputs), outs, equation.after)


def _made_over(
    equation: Equation, index: int, inputs: tuple[Atom, ...], outputs: tuple[Value, ...], after: Value | None
) -> Equation:
    """What `dataclasses.replace` makes, in a quarter of the time: of every equation there is one."""
    same = equation.regions, equation.source, equation.part, equation.copy
    return Equation(index, equation.form, inputs, outputs, *same, after)


def renumbered(
    graph: Graph,
    equations: Sequence[Equation],
    *,
    inputs: Sequence[Value] | None = None,
    outputs: Sequence[Atom] | None = None,
    constants: Mapping[Value, object] | None = None,
) -> Graph:
    """`graph` with other equations: those that something needs, in their order, numbered densely.

    Args:
        graph: names, state and what is not given are its own.
        equations: in an order in which they can run; an `after` that is nowhere made is forgotten.
        inputs: of the new graph.
        outputs: of the new graph.
        constants: of the new graph, of which those are kept that are used.
    """
    new_inputs = graph.inputs if inputs is None else tuple(inputs)
    new_outputs = graph.outputs if outputs is None else tuple(outputs)
    new_constants = graph.constants if constants is None else constants
    used = {atom for atom in new_outputs if isinstance(atom, Value)}
    kept: list[Equation] = []
    for equation in reversed(equations):
        if not used.isdisjoint(equation.outputs):
            kept.append(equation)
            used.update(equation.input_values)
    named: dict[Value, Value] = {}

    def made(value: Value) -> Value:
        found = named[value] = Value(len(named), value.type)
        return found

    def name(atom: Atom) -> Atom:
        return named[atom] if isinstance(atom, Value) else atom

    ins = tuple([made(value) for value in new_inputs])
    held = {made(value): array for value, array in new_constants.items() if value in used}
    found: list[Equation] = []
    for equation in reversed(kept):
        operands = tuple([name(atom) for atom in equation.inputs])
        after = None if equation.after is None else named.get(equation.after)
        results = tuple([made(value) for value in equation.outputs])
        found.append(_made_over(equation, len(found), operands, results, after))
    result = replace(
        graph,
        inputs=ins,
        constants=held,
        equations=tuple(found),
        outputs=tuple([name(atom) for atom in new_outputs]),
        memo={},
    )
    return replace(result, residuals=tuple((value.type, value) for value in saved(result)), memo={})


def saved(graph: Graph) -> tuple[Value, ...]:
    """What equations before the backward part make and equations of it read, in order of definition.

    Without what waits in host memory.
    """
    behind = [e for e in graph.equations if e.part == "backward" and not is_reload(e)]
    read = {value for e in behind for value in e.input_values}
    made = (value for e in graph.equations if e.part != "backward" for value in e.outputs)
    return tuple([value for value in made if value in read])
