"""Which equations decide together: the fusion that keeps the choice graph narrow.

Elementwise equations that hand each other tensors of one shape and width are merged into a *class* and
computed in one placement: changing the placement between them costs as much as changing it at their
border. Never merged: across a change of width; an addition that joins tensors used elsewhere (a residual
stream, whose branches may be placed differently); and an equation through which a Partial(sum) may pass
with one through which it may not (gradients stay Partial up to the optimizer), unless the former takes
one tensor and hands it to the latter alone, so that reducing before or after it is the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from shardwright.ir.graph import Equation, Graph, Value
from shardwright.ir.placement import Partial, R
from shardwright.ir.rules import Rule, Signature, registry, signatures

_SUM = Partial("sum")


@dataclass(frozen=True, slots=True, eq=False)
class FusedClass:
    """Elementwise equations computed in one placement. `passes` says whether that may be Partial(sum)."""

    equations: tuple[Equation, ...]
    passes: bool


@dataclass(frozen=True, slots=True)
class Fusion:
    """The classes of one graph.

    Attributes:
        of_equation: the class of an elementwise equation that was merged.
        of_value: the class in whose placement a value is computed, or in which its only users are.
        users: who uses a value: an equation each, a class once however many of its equations do, and
            None for the graph's outputs.
    """

    of_equation: Mapping[Equation, FusedClass]
    of_value: Mapping[Value, FusedClass]
    users: Mapping[Value, tuple[Equation | FusedClass | None, ...]]


def kind(equation: Equation) -> str:
    """Kind of an equation's primitive, "unknown" where there is no rule for it."""
    op = registry().get(equation.primitive)
    return "region" if equation.regions else op.kind if op is not None else "unknown"


def same_shape(equation: Equation) -> tuple[Value, ...]:
    """Operands that an elementwise equation could share a class with: shape and width of the result."""
    out = equation.output_types[0]
    return tuple(
        v for v in equation.input_values if v.type.shape == out.shape and v.type.nbytes == out.nbytes
    )


def passes_sum(equation: Equation, rule: Rule) -> bool:
    """Whether Partial(sum) passes through all same-shape operands at once, the others being replicated."""
    together = set(same_shape(equation))
    ins = tuple(_SUM if isinstance(a, Value) and a in together else R for a in equation.inputs)
    return Signature(ins, (_SUM,)) in list(signatures(rule, equation))


def fuse(graph: Graph, rules: Mapping[Equation, Rule], may_sum: Callable[[Value], bool]) -> Fusion:
    """Merge elementwise equations into classes, and find every value's users.

    Args:
        graph: the graph.
        rules: rules of its equations.
        may_sum: whether a value may arrive as Partial(sum) at all.
    """
    count: dict[Value, int] = {}
    producer: dict[Value, Equation] = {}
    for equation in graph.equations:
        for value in set(equation.input_values):
            count[value] = count.get(value, 0) + 1
        for value in equation.outputs:
            producer[value] = equation
    for atom in graph.outputs:
        if isinstance(atom, Value):
            count[atom] = count.get(atom, 0) + 1

    fusible = _passing(graph, rules, may_sum, count)
    parent: dict[Equation, Equation] = {e: e for e in fusible}

    def find(equation: Equation) -> Equation:
        while parent[equation] is not equation:
            parent[equation] = parent[parent[equation]]
            equation = parent[equation]
        return equation

    for equation in fusible:
        for value in same_shape(equation):
            before = producer.get(value)
            if before in fusible and fusible[before] == fusible[equation]:
                parent[find(equation)] = find(before)

    members: dict[Equation, list[Equation]] = {}
    for equation in fusible:
        members.setdefault(find(equation), []).append(equation)
    of_equation: dict[Equation, FusedClass] = {}
    for root, equations in members.items():
        merged = FusedClass(tuple(equations), fusible[root])
        of_equation.update(dict.fromkeys(equations, merged))
    users = _users(graph, of_equation)
    of_value = {v: of_equation[e] for v, e in producer.items() if e in of_equation}
    for value, using in users.items():
        if value not in of_value and len(using) == 1 and isinstance(using[0], FusedClass):
            merged = using[0]
            if all(value in same_shape(e) for e in merged.equations if value in e.input_values):
                of_value[value] = merged
    return Fusion(of_equation, of_value, users)


def _passing(
    graph: Graph, rules: Mapping[Equation, Rule], may_sum: Callable[[Value], bool], count: Mapping[Value, int]
) -> dict[Equation, bool]:
    """The equations that may be merged, and whether a Partial(sum) may usefully pass through them."""
    readers: dict[Value, list[Equation]] = {}
    for equation in graph.equations:
        for value in set(equation.input_values):
            readers.setdefault(value, []).append(equation)
    found: dict[Equation, bool] = {}
    for equation in reversed(graph.equations):
        if not _may_fuse(equation, count):
            continue
        together = same_shape(equation)
        passes = any(map(may_sum, together)) and passes_sum(equation, rules[equation])
        result = equation.outputs[0]
        using = readers.get(result, [])
        handed_on = len(using) == count.get(result, 0) and all(found.get(user) is False for user in using)
        if passes and len(set(together)) == 1 and using and handed_on:
            passes = not all(result in same_shape(user) for user in using)
        found[equation] = passes
    return {e: found[e] for e in graph.equations if e in found}


def _may_fuse(equation: Equation, count: Mapping[Value, int]) -> bool:
    if kind(equation) != "elementwise" or len(equation.outputs) != 1:
        return False
    together = same_shape(equation)
    joins = equation.primitive in ("add", "add_any") and len(together) > 1
    return bool(together) and not (joins and any(count[value] > 1 for value in together))


def _users(
    graph: Graph, of_equation: Mapping[Equation, FusedClass]
) -> dict[Value, tuple[Equation | FusedClass | None, ...]]:
    users: dict[Value, dict[Equation | FusedClass | None, None]] = {}
    for equation in graph.equations:
        for value in equation.input_values:
            users.setdefault(value, {})[of_equation.get(equation, equation)] = None
    for atom in graph.outputs:
        if isinstance(atom, Value):
            users.setdefault(atom, {})[None] = None
    return {value: tuple(using) for value, using in users.items()}
