"""Choices of a step that was changed, and those of the step as it was that they come from.

A rewriting (`shardwright.ir.rewrites`) keeps equations in their order, with their forms, and adds copies of
some: most tensors of the changed step have one in the other that they are, or are computed again for. What
was found about a choice of the one is a good guess for its twin in the other, and no more than a guess.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from shardwright.ir.graph import Atom, Equation, Graph, Value
from shardwright.ir.host import is_reload
from shardwright.ir.regions import boundary
from shardwright.synth.space.frame import Frame
from shardwright.synth.space.space import Space


def twins(space: Space, other: Space) -> list[int]:
    """Of every choice of a space, the number of its twin in that of the step as it was; -1 without one."""
    values = twin_values(space.root.graph, other.root.graph)
    there = dict(_placed(other.root))
    found = [-1] * len(space.choices)
    for (value, what), number in _placed(space.root):
        twin = values.get(value)
        if twin is not None and found[number] < 0:
            found[number] = there.get((twin, what), there.get((twin, ""), -1))
    return found


def twin_values(graph: Graph, other: Graph) -> Mapping[Value, Value]:
    """Tensors of a changed graph, and what they are in the graph as it was, or are computed again for."""
    return _Matched(graph, other).twin


def _placed(frame: Frame) -> Iterator[tuple[tuple[Value, str], int]]:
    """Choices by the value they are of, and what of it they say."""
    for what, choices in (("", frame.choice), ("exit", frame.exits)):
        for value, choice in choices.items():
            yield (value, what), choice.index
    for equation, ports in frame.ports.items():
        for result, choice in ports.items():
            yield (equation.outputs[result], "port"), choice.index
    for frames in frame.children.values():
        for child in frames:
            yield from _placed(child)


class _Matched:
    """Values of a changed graph, and those that they come from."""

    def __init__(self, graph: Graph, other: Graph) -> None:
        self.twin: dict[Value, Value] = {}
        #: Equations of the other graph by what they compute, and in their order.
        self._made: dict[tuple[object, ...], Equation] = {}
        self._like: dict[int, list[Equation]] = {}
        self._next: dict[tuple[int, int], int] = {}
        for equation in other.all_equations():
            self._made.setdefault((id(equation.form), *equation.inputs), equation)
            self._like.setdefault(id(equation.form), []).append(equation)
        self.twin.update(zip(graph.inputs, other.inputs, strict=False))
        self._walk(graph, other)

    def _walk(self, graph: Graph, other: Graph) -> None:
        self.twin.update(zip(graph.constants, other.constants, strict=False))
        rest = iter(other.equations)
        for equation in graph.equations:
            if is_reload(equation):
                twin = self._of(equation.inputs[0])
                if isinstance(twin, Value):
                    self.twin[equation.outputs[0]] = twin
                continue
            found = self._copied(equation) if equation.copy else _same(equation, rest)
            if found is None:
                continue
            if equation.regions:
                self._enter(equation, found)
            else:
                self.twin.update(zip(equation.outputs, found.outputs, strict=True))

    def _of(self, atom: Atom) -> Atom:
        return self.twin.get(atom, atom) if isinstance(atom, Value) else atom

    def _copied(self, equation: Equation) -> Equation | None:
        """What an equation computes again."""
        form = id(equation.form)
        found = self._made.get((form, *map(self._of, equation.inputs)))
        if found is None:
            place, like = (equation.copy, form), self._like.get(form, [])
            number = self._next.get(place, 0)
            self._next[place] = number + 1
            found = like[number] if number < len(like) else None
        return found

    def _enter(self, equation: Equation, other: Equation) -> None:
        mine, theirs = boundary(equation), boundary(other)
        inside = {
            (port.region, port.stacked, other.inputs[port.outer]): body.inputs[port.inner]
            for port in theirs.ins
            for body in (other.regions[port.region],)
        }
        for port in mine.ins:
            twin = inside.get((port.region, port.stacked, self._of(equation.inputs[port.outer])))
            if twin is not None:
                self.twin[equation.regions[port.region].inputs[port.inner]] = twin
        for (_, _, to, into), (_, _, other_to, other_into) in zip(mine.carries, theirs.carries, strict=False):
            self.twin[equation.regions[to].inputs[into]] = other.regions[other_to].inputs[other_into]
        for region, other_region in zip(equation.regions, other.regions, strict=True):
            self._walk(region, other_region)
        made = {
            (port.region, port.stacked, body.outputs[port.inner]): other.outputs[port.outer]
            for port in theirs.outs
            for body in (other.regions[port.region],)
        }
        for port in mine.outs:
            inner = self._of(equation.regions[port.region].outputs[port.inner])
            twin = made.get((port.region, port.stacked, inner))
            if twin is not None:
                self.twin[equation.outputs[port.outer]] = twin


def _same(equation: Equation, rest: Iterator[Equation]) -> Equation | None:
    """The next equation that this one is; those before it were dropped."""
    for other in rest:
        if other.form is equation.form:
            return other
        if equation.regions and other.primitive == equation.primitive:
            return other if len(other.regions) == len(equation.regions) else None
    return None
