"""Recomputation: what the forward part made is made again in the backward part, rather than kept.

    recomputing(graph, stretches)     the graph in which these stretches of the forward part run twice

A *stretch* is a run of forward equations. Of what they make and backward equations read, only this is kept:
what other equations before the backward part read as well (the output of a layer is the input of the next),
and, with `keep="products"`, results of contractions. The rest the backward part gets from copies of the
equations, which read what is kept. Copies are ordinary equations with the same forms: rules, prices, search
need not know of them. Only their place is special. They stand before their first reader, and wait for a
gradient that a reader waits for (`Equation.after`): otherwise they would run as soon as their operands are
there, right after the originals. Backends run them in another executable than the originals: a compiler would
make one of two equal computations.

What a stretch keeps may wait in host memory (`host`): the backward part then reads results of `reload`
equations (`ir/host.py`), which wait for a gradient in the same way. What others are handed comes back before
the first of them reads it, the rest together, before the stretch's own backward part.

A stretch that is a scan is computed again inside the loop that walks back over it, iteration by iteration:
what an iteration was handed over by the one before it is kept, and what it makes is made again.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from shardwright.ir.errors import PlanError
from shardwright.ir.graph import Atom, Equation, Form, Graph, Value, per_graph
from shardwright.ir.host import RELOAD
from shardwright.ir.regions import scan_counts
from shardwright.ir.registry import is_contraction
from shardwright.ir.rewrites.graphs import UNNUMBERED, fresh, renumbered, saved, with_inputs
from shardwright.ir.rewrites.scans import Body

#: What of a stretch is kept beside its inputs and outputs.
Keep: TypeAlias = Literal["nothing", "products", "all"]

#: Tensors of fewer bytes are not worth a trip to host memory.
LEAST_SPILLED = 1024


@dataclass(frozen=True, slots=True)
class Stretch:
    """Forward equations that are run again in the backward part, or whose results wait in host memory.

    Attributes:
        name: for people, such as a layer's.
        first: index of its first equation.
        last: index of its last one, plus one. Equations between them that are part of the backward part are
            none of it. If it is a single scan, its iterations are run again one by one.
        keep: what is kept nevertheless.
        host: whether what is kept of it waits in host memory; not that of a scan.
    """

    name: str
    first: int
    last: int
    keep: Keep = "nothing"
    host: bool = False

    def keeps(self, equation: Equation) -> bool:
        """Whether what one of its equations makes is kept."""
        return self.keep == "all" or (self.keep == "products" and is_contraction(equation.primitive))


def recomputing(graph: Graph, stretches: Sequence[Stretch]) -> Graph:
    """The graph in which these stretches are computed again; what else it computes is the same, to the bit.

    Raises:
        PlanError: a stretch is no run of its equations, or two overlap.
    """
    if not stretches:
        return graph
    _check(graph, stretches)
    edit = _Edit(graph)
    for number, stretch in enumerate(stretches, 1):
        equations = graph.equations[stretch.first : stretch.last]
        if len(equations) == 1 and equations[0].primitive == "scan":
            edit.scan(equations[0], stretch, number)
        else:
            inside = [e for e in equations if e.part != "backward"]
            edit.straight(inside, stretch, number)
            if stretch.host:
                edit.host(inside, number)
    return renumbered(graph, edit.equations())


@dataclass(frozen=True, slots=True)
class Gain:
    """What computing a stretch again saves and takes.

    Attributes:
        freed_bytes: by how much less is kept for the backward part, each tensor whole.
        again: the equations that run once more, and how often.
        spilled_bytes: what waits in host memory, each tensor whole.
        spilled: how many tensors do.
    """

    freed_bytes: int
    again: tuple[tuple[Equation, int], ...]
    spilled_bytes: int = 0
    spilled: int = 0


def gains(graph: Graph, stretches: Sequence[Stretch]) -> list[Gain]:
    """What computing each of these stretches again, and no other, would save and take."""
    edit = _unchanged(graph)
    return [edit.gain(stretch) for stretch in stretches]


@per_graph
def _unchanged(graph: Graph) -> _Edit:
    """A graph of which it is only asked what changes to it would bring."""
    return _Edit(graph)


def _check(graph: Graph, stretches: Sequence[Stretch]) -> None:
    end = 0
    for stretch in sorted(stretches, key=lambda each: each.first):
        if not end <= stretch.first < stretch.last <= len(graph.equations):
            raise PlanError(
                place=f"stretch {stretch.name}",
                reason=f"is equations {stretch.first} to {stretch.last} of {len(graph.equations)}, or "
                "overlaps another stretch",
                remedy="Plan again: this is another step",
            )
        end = stretch.last


class _Edit:
    """Changes to a graph, by the equations they are made at."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.readers: dict[Value, list[Equation]] = {}
        self.makers: dict[Value, Equation] = {}
        #: What the backward part reads.
        self.read_behind: set[Value] = set()
        for equation in graph.equations:
            for value in dict.fromkeys(equation.input_values):
                self.readers.setdefault(value, []).append(equation)
            if equation.part == "backward":
                self.read_behind.update(equation.input_values)
            for value in equation.outputs:
                self.makers[value] = equation
        self.handed_out = {atom for atom in graph.outputs if isinstance(atom, Value)}
        self.before: dict[int, list[Equation]] = {}
        self.instead: dict[int, Equation] = {}
        self.copies: dict[Value, Value] = {}
        #: What waits in host memory: number of its stretch, whether others of the forward part read it.
        self.spilled: dict[Value, tuple[int, bool]] = {}

    def gain(self, stretch: Stretch) -> Gain:
        """What computing a stretch again would save and take."""
        equations = self.graph.equations[stretch.first : stretch.last]
        if len(equations) == 1 and equations[0].primitive == "scan":
            again = recomputing(self.graph, [stretch])
            freed = sum(_nbytes(saved(g)) * sign for g, sign in ((self.graph, 1), (again, -1)))
            loops = (
                (r, e.params["length"]) for e in again.equations if e.primitive == "scan" for r in e.regions
            )
            return Gain(freed, tuple((e, length) for r, length in loops for e in r.equations if e.copy))
        inside = [e for e in equations if e.part != "backward"]
        kept = self._kept(inside, stretch)
        values = self._again(inside, kept)
        needed = _closure(inside, values, kept)
        own = {value for equation in needed for value in equation.outputs}
        read = dict.fromkeys(v for e in needed for v in e.input_values if v not in own and v in self.makers)
        again = tuple((equation, 1) for equation in needed)
        newly = [v for v in read if v not in self.read_behind]
        if not stretch.host:
            return Gain(_nbytes(values) - _nbytes(newly), again)
        gone = set(values)
        mine = [v for v in self._spillable(inside) if v not in gone and (v in read or v in self.read_behind)]
        spilled = set(mine)
        kept = [v for v in mine if v in self.read_behind]
        newly = [v for v in newly if v not in spilled]
        return Gain(_nbytes(values) + _nbytes(kept) - _nbytes(newly), again, _nbytes(mine), len(mine))

    def equations(self) -> list[Equation]:
        """The equations of the changed graph."""
        found: list[Equation] = []
        for equation in self.graph.equations:
            found += self.before.get(equation.index, ())
            equation = self.instead.get(equation.index, equation)
            if equation.part == "backward" and not self.copies.keys().isdisjoint(equation.input_values):
                equation = with_inputs(equation, [self._reads(atom) for atom in equation.inputs])
            found.append(equation)
        return self._from_host(found) if self.spilled else found

    # -- host memory ---------------------------------------------------------------------------------

    def _spillable(self, inside: Iterable[Equation]) -> list[Value]:
        """What equations make that may wait in host memory."""
        return [
            value
            for equation in inside
            for value in equation.outputs
            if value not in self.handed_out
            and value.type.nbytes >= LEAST_SPILLED
            and not value.type.dtype.startswith("key<")
        ]

    def host(self, inside: Sequence[Equation], number: int) -> None:
        """What a stretch keeps is to wait in host memory."""
        own = {equation.index for equation in inside}
        for value in self._spillable(inside):
            self.spilled[value] = (number, self._read_elsewhere(value, own))

    def _from_host(self, equations: list[Equation]) -> list[Equation]:
        """With reloads of what is spilled before their first readers in the backward part."""
        first: dict[tuple[int, Value | None], int] = {}
        wanted: dict[tuple[int, Value | None], dict[Value, None]] = {}
        for position, equation in enumerate(equations):
            if equation.part != "backward":
                continue
            for value in equation.input_values:
                if value in self.spilled:
                    number, outside = self.spilled[value]
                    group = (number, value if outside else None)
                    first.setdefault(group, position)
                    wanted.setdefault(group, {})[value] = None
        back: dict[Value, Value] = {}
        before: dict[int, list[Equation]] = {}
        for group, position in first.items():
            reader = equations[position]
            behind = self._readers_behind(wanted[group])
            mark = reader.after if reader.copy else self._gradient(reader, behind)
            if mark is None:
                continue  # the backward part begins with it: there is nothing to wait for
            for value in wanted[group]:
                back[value] = result = fresh(value.type)
                form = Form(RELOAD, {}, (value.type,), (value.type,))
                reload = Equation(UNNUMBERED, form, (value,), (result,), part="backward")
                before.setdefault(self._before(equations, position), []).append(
                    replace(reload, source=reader.source, copy=group[0], after=mark)
                )
        found: list[Equation] = []
        for position, equation in enumerate(equations):
            found += before.get(position, ())
            if equation.part == "backward":
                inputs = (back.get(a, a) if isinstance(a, Value) else a for a in equation.inputs)
                equation = with_inputs(equation, inputs)
            found.append(equation)
        return found

    def _readers_behind(self, values: Iterable[Value]) -> list[Equation]:
        return [r for value in values for r in self.readers[value] if r.part == "backward"]

    @staticmethod
    def _before(equations: Sequence[Equation], position: int) -> int:
        """Where the copies that an equation is among begin."""
        number = equations[position].copy
        while number and position and equations[position - 1].copy == number:
            position -= 1
        return position

    def _reads(self, atom: Atom) -> Atom:
        return self.copies.get(atom, atom) if isinstance(atom, Value) else atom

    # -- straight lines ------------------------------------------------------------------------------

    def straight(self, inside: Sequence[Equation], stretch: Stretch, number: int) -> None:
        """Compute a run of equations again."""
        kept = self._kept(inside, stretch)
        again = self._again(inside, kept)
        readers = self._readers_behind(again)
        if not readers:
            return
        at = min(readers, key=lambda equation: equation.index)
        copied: dict[Value, Value] = {}
        mark = self._gradient(at, readers)
        for equation in _closure(inside, again, kept):
            outs = tuple(fresh(value.type) for value in equation.outputs)
            ins = [copied.get(a, a) if isinstance(a, Value) else a for a in equation.inputs]
            copied.update(zip(equation.outputs, outs, strict=True))
            copy = replace(
                equation, inputs=tuple(ins), outputs=outs, part="backward", copy=number, after=mark
            )
            self.before.setdefault(at.index, []).append(copy)
        self.copies.update((value, copied[value]) for value in again)

    def _kept(self, inside: Sequence[Equation], stretch: Stretch) -> set[Value]:
        """What a stretch makes that is there in the backward part anyway, or is to be."""
        own = {equation.index for equation in inside}
        kept: set[Value] = set()
        for equation in inside:
            keeps = stretch.keeps(equation)
            for value in equation.outputs:
                if keeps or value in self.handed_out or self._read_elsewhere(value, own):
                    kept.add(value)
        return kept

    def _read_elsewhere(self, value: Value, own: Container[int]) -> bool:
        """Whether other equations before the backward part than those with these numbers read a value."""
        readers = self.readers.get(value, ())
        return any(r.part != "backward" and r.index not in own for r in readers)

    def _again(self, inside: Sequence[Equation], kept: Container[Value]) -> list[Value]:
        """What the backward part is to get from copies, where it is not `kept`."""
        made = (value for equation in inside for value in equation.outputs)
        return [value for value in made if value in self.read_behind and value not in kept]

    def _gradient(self, at: Equation, readers: Iterable[Equation]) -> Value | None:
        """What one of the readers has from the backward part before `at`: the copies wait for it."""
        for reader in sorted(readers, key=lambda equation: equation.index):
            made: dict[Value, int] = {}
            for value in reader.input_values:
                maker = self.makers.get(value)
                if maker is not None and maker.part == "backward" and maker.index < at.index:
                    made[value] = maker.index
            if made:
                return max(made, key=made.__getitem__)
        return None

    # -- loops ---------------------------------------------------------------------------------------

    def scan(self, loop: Equation, stretch: Stretch, number: int) -> None:
        """Compute the iterations of a scan again in the scan that walks back over them."""
        back = self._walks_back(loop)
        if back is None:
            return
        ahead = Body(self.instead.get(loop.index, loop))
        behind = Body(self.instead.get(back.index, back))
        makers = {value: e for e in ahead.region.equations for value in e.outputs}
        again: dict[Value, Value] = {}
        for outer, inner in zip(loop.outputs[ahead.carries :], ahead.outputs[ahead.carries :], strict=True):
            if not isinstance(inner, Value) or inner not in makers:
                continue
            kept = stretch.keeps(makers[inner])
            if self.readers.get(outer) == [back] and outer not in self.handed_out and not kept:
                again[outer] = inner
        needed = _closure(
            ahead.region.equations,
            again.values(),
            {v for v, e in makers.items() if stretch.keep == "products" and is_contraction(e.primitive)},
        )
        copied: dict[Atom, Atom] = {}
        made = {value for equation in needed for value in equation.outputs}
        for value in dict.fromkeys(v for e in needed for v in e.input_values if v not in made):
            copied[value] = self._hand_over(value, ahead, behind)
        copies: list[Equation] = []
        for equation in needed:
            outs = tuple(fresh(value.type) for value in equation.outputs)
            ins = tuple(copied.get(atom, atom) for atom in equation.inputs)
            copied.update(zip(equation.outputs, outs, strict=True))
            copies.append(replace(equation, inputs=ins, outputs=outs, part="backward", copy=number))
        behind.begin_with(copies, {outer: copied[inner] for outer, inner in again.items()})
        ahead.forget(again)
        self.instead[loop.index] = ahead.equation()
        self.instead[back.index] = behind.equation()

    def _walks_back(self, loop: Equation) -> Equation | None:
        """The scan of the backward part that reads what a scan stacks up."""
        carries = scan_counts(loop.params)[1]
        found = {e.index: e for v in loop.outputs[carries:] for e in self.readers.get(v, ())}
        for equation in found.values():
            if (
                equation.part == "backward"
                and equation.primitive == "scan"
                and equation.params["length"] == loop.params["length"]
            ):
                return equation
        return None

    def _hand_over(self, value: Value, ahead: Body, behind: Body) -> Value:
        """A value of an iteration as the iteration that walks back over it has it."""
        if value in ahead.region.constants:
            return behind.constant(value, ahead.region.constants[value])
        if value in ahead.region.inputs:
            position = ahead.region.inputs.index(value)
            if position < ahead.consts:
                return behind.shared(ahead.loop.inputs[position])
            if position >= ahead.consts + ahead.carries:
                return behind.sliced(ahead.loop.inputs[position], value.type)
        return behind.sliced(ahead.stacked(value), value.type)


def _closure(equations: Sequence[Equation], wanted: Iterable[Atom], given: Iterable[Value]) -> list[Equation]:
    """The equations, in order, that make `wanted` from what is `given` and what others make."""
    missing = {atom for atom in wanted if isinstance(atom, Value)}
    there = set(given)
    found: list[Equation] = []
    for equation in reversed(equations):
        if any(value in missing for value in equation.outputs):
            found.append(equation)
            missing.update(value for value in equation.input_values if value not in there)
    return found[::-1]


def _nbytes(values: Iterable[Value]) -> int:
    return sum(value.type.nbytes for value in values)
