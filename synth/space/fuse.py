"""Which equations decide together: the fusion that keeps the choice graph narrow.

Elementwise equations that hand each other tensors of one shape and width are merged into a *class* and
computed in one placement: changing the placement between them costs as much as changing it at their
border. Never merged: across a change of width; an addition that joins tensors used elsewhere (a residual
stream, whose branches may be placed differently); and an equation through which a Partial(sum) may pass
with one through which it may not (gradients stay Partial up to the optimizer), unless the former takes
one tensor and hands it to the latter alone, so that reducing before or after it is the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import NamedTuple

from shardwright.ir.graph import Equation, Graph, Value, per_form
from shardwright.ir.registry import registry, rule_of
from shardwright.ir.rules import passes_through


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
        users: who uses a value: an equation each, None for the graph's outputs, and a class once if the value
            is computed in its placement. Of a value from elsewhere, each of its equations is a user: they
            share one conversion, which is therefore to be paid once.
    """

    of_equation: Mapping[Equation, FusedClass]
    of_value: Mapping[Value, FusedClass]
    users: Mapping[Value, tuple[Equation | FusedClass | None, ...]]


@per_form
def kind(equation: Equation) -> str:
    """Kind of an equation's primitive, "unknown" where there is no rule for it."""
    op = registry().get(equation.primitive)
    return "region" if equation.regions else op.kind if op is not None else "unknown"


@per_form
def _alike(equation: Equation) -> tuple[int, ...]:
    """Positions of the operands that have the shape and width of the result."""
    out = equation.output_types[0]
    return tuple(
        k
        for k, atom in enumerate(equation.inputs)
        if isinstance(atom, Value) and atom.type.shape == out.shape and atom.type.nbytes == out.nbytes
    )


@per_form
def alike(equation: Equation) -> frozenset[int]:
    """Positions of the operands that an elementwise equation could share a class with."""
    return frozenset(_alike(equation))


def same_shape(equation: Equation) -> tuple[Value, ...]:
    """Operands that an elementwise equation could share a class with: shape and width of the result."""
    inputs = equation.inputs
    return tuple([inputs[k] for k in _alike(equation)])  # pyright: ignore[reportReturnType]  (no literals)


@per_form
def passes_sum(equation: Equation) -> bool:
    """Whether Partial(sum) passes through all same-shape operands at once, the others being replicated."""
    return passes_through(rule_of(equation), equation, _alike(equation))


def fuse(graph: Graph, may_sum: Callable[[Value], bool]) -> Fusion:
    """Merge elementwise equations into classes, and find every value's users.

    Args:
        graph: the graph.
        may_sum: whether a value may arrive as Partial(sum) at all.
    """
    readers: dict[Value, list[Equation]] = {}
    for equation in graph.equations:
        for value in equation.input_values:
            using = readers.get(value)
            if using is None:
                readers[value] = [equation]
            elif using[-1] is not equation:
                using.append(equation)
    handed_out = {atom for atom in graph.outputs if isinstance(atom, Value)}

    fusible, together = _passing(graph, may_sum, readers, handed_out)
    of_equation: dict[Equation, FusedClass] = {}
    of_value: dict[Value, FusedClass] = {}
    for equations in _groups(fusible, together):
        merged = FusedClass(tuple(equations), fusible[equations[0]])
        for equation in equations:
            of_equation[equation] = of_value[equation.outputs[0]] = merged
    users = _users(readers, handed_out, of_equation)
    for value, using in users.items():
        inside = of_value.get(value)
        if inside is None and len(using) == 1 and type(using[0]) is FusedClass:
            merged = using[0]
            if all(value in together[e] for e in readers[value]):
                of_value[value] = inside = merged
        for user in using:
            if user is not inside and type(user) is FusedClass:
                each = (inside if of_equation.get(e) is inside else e for e in readers[value])
                users[value] = (*dict.fromkeys(each), *(None,) * (value in handed_out))
                break
    return Fusion(of_equation, of_value, users)


def _groups(
    fusible: Mapping[Equation, bool], together: Mapping[Equation, Sequence[Value]]
) -> Iterable[list[Equation]]:
    """Equations that hand each other tensors and alike pass a Partial(sum) or do not.

    Args:
        fusible: the equations that may be merged, in order, and whether a Partial(sum) may pass.
        together: the operands that each could share a class with.
    """
    producer = {equation.outputs[0]: equation for equation in fusible}
    parent: dict[Equation, Equation] = dict(zip(fusible, fusible, strict=True))

    def find(equation: Equation) -> Equation:
        above = parent[equation]
        while above is not equation:
            parent[equation] = parent[above]
            equation = parent[equation]
            above = parent[equation]
        return equation

    for equation, passes in fusible.items():
        mine = equation
        for value in together[equation]:
            before = producer.get(value)
            if before is not None and fusible[before] is passes:
                root = find(before)
                parent[mine] = mine = root
    members: dict[Equation, list[Equation]] = {}
    for equation in fusible:
        members.setdefault(find(equation), []).append(equation)
    return members.values()


def _passing(
    graph: Graph,
    may_sum: Callable[[Value], bool],
    readers: Mapping[Value, Sequence[Equation]],
    handed_out: Set[Value],
) -> tuple[dict[Equation, bool], dict[Equation, tuple[Value, ...]]]:
    """The equations that may be merged, in order, and whether a Partial(sum) may usefully pass through them.

    And of each the operands that it could share a class with.
    """
    found: dict[Equation, bool] = {}
    of: dict[Equation, tuple[Value, ...]] = {}
    for equation in reversed(graph.equations):
        like = _like(equation)
        if like is None:
            continue
        inputs = equation.inputs
        together: tuple[Value, ...] = tuple([inputs[k] for k in like.together])  # pyright: ignore[reportAssignmentType]  (no literals)
        if like.joins and any(len(readers[v]) + (v in handed_out) > 1 for v in together):
            continue
        of[equation] = together
        passes = like.passes and any(map(may_sum, together))
        if passes and len(set(together)) == 1:
            result = equation.outputs[0]
            using = readers.get(result, ())
            if using and result not in handed_out:
                handed_on = all(found.get(user) is False for user in using)
                passes = not (handed_on and all(result in of[user] for user in using))
        found[equation] = passes
    return dict(reversed(found.items())), of


class _Like(NamedTuple):
    """What decides on merging an elementwise equation.

    Attributes:
        together: positions of the operands that have the shape and width of the result.
        joins: whether it adds tensors of equal shape: a residual stream, if they are used elsewhere too.
        passes: see `passes_sum`.
    """

    together: tuple[int, ...]
    joins: bool
    passes: bool


@per_form
def _like(equation: Equation) -> _Like | None:
    """None where an equation cannot be merged, whatever is around it."""
    if kind(equation) != "elementwise" or len(equation.outputs) != 1 or not _alike(equation):
        return None
    together = _alike(equation)
    joins = equation.primitive in ("add", "add_any") and len(together) > 1
    return _Like(together, joins, passes_sum(equation))


def _users(
    readers: Mapping[Value, Sequence[Equation]],
    handed_out: Set[Value],
    of_equation: Mapping[Equation, FusedClass],
) -> dict[Value, tuple[Equation | FusedClass | None, ...]]:
    users: dict[Value, tuple[Equation | FusedClass | None, ...]] = {}
    for value, using in readers.items():
        classes = [of_equation.get(equation, equation) for equation in using]
        distinct = tuple(classes) if len(classes) == 1 else tuple(dict.fromkeys(classes))
        users[value] = (*distinct, None) if value in handed_out else distinct
    for value in handed_out - readers.keys():
        users[value] = (None,)
    return users
