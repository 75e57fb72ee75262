"""Which placements of a program must be cut by the same ratios, and programs with ratios of their own.

An instruction on local shards needs all of them cut alike, so that its operands and results are *tied*; so
are state and what continues it, and the two sides of a loop's border. A collective ties nothing: from a
Partial or a whole tensor any cut can be made, and of any cut a whole tensor. What is tied together, directly
or through others, is a *stretch* of the program: it may have ratios of its own, at no further price.

An exchange between two sharded placements could pass from one cut to another, too (that is legal, and runs);
here it ties them, so that ratios never change what is sent there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeAlias

from shardwright.ir.graph import Atom, Graph, Value
from shardwright.ir.placement import OwnRatios, Placement, Shard
from shardwright.ir.program import Instruction, Loop, Move, Program
from shardwright.ir.regions import boundary
from shardwright.ir.rules import Signature

#: Where a program stands: number of the loop's instruction and of its body, from the outside in.
Path: TypeAlias = tuple[int, ...]


class Cut(NamedTuple):
    """A sharded placement of a value, in the program or in a loop's body."""

    path: Path
    value: int
    placement: Placement


@dataclass(frozen=True, slots=True)
class Stretches:
    """The stretches of a program; those that hold state come first, else in order of appearance.

    Attributes:
        of: the stretch of every sharded placement.
        count: how many there are.
        with_state: how many of them hold arguments that come back as outputs.
    """

    of: Mapping[Cut, int]
    count: int
    with_state: int

    def along(self, program: Program, graph: Graph) -> Iterator[int | None]:
        """The stretch of every instruction, loops replaced by their bodies' (as in a bill); None: uncut."""
        yield from self._along(program, graph, ())

    def _along(self, program: Program, graph: Graph, path: Path) -> Iterator[int | None]:
        for position, instruction in enumerate(program.instructions):
            if isinstance(instruction, Loop):
                equation = graph.equations[instruction.equation]
                for number, (body, region) in enumerate(
                    zip(instruction.bodies, equation.regions, strict=True)
                ):
                    yield from self._along(body, region, (*path, position, number))
            else:
                first = next(iter(_cuts(instruction, graph, path)), None)
                yield None if first is None else self.of[first]


def stretches(program: Program, graph: Graph) -> Stretches:
    """The stretches of a program that is cut by the plan's ratios alone."""
    ties = _Ties()
    ties.program(program, graph, ())
    state: dict[Cut, None] = {}
    for out, position in graph.state.items():
        value, placement = graph.inputs[position], program.inputs[position]
        if isinstance(placement, Shard):
            held = Cut((), value.index, placement)
            state[held] = None
            atom = graph.outputs[out]
            if isinstance(atom, Value):
                ties.join([held, Cut((), atom.index, program.outputs[out])])
    numbers: dict[Cut, int] = {}
    for cut in state:
        numbers.setdefault(ties.root(cut), len(numbers))
    with_state = len(numbers)
    of = {cut: numbers.setdefault(ties.root(cut), len(numbers)) for cut in ties.parent}
    return Stretches(of, len(numbers), with_state)


def cut_by(program: Program, graph: Graph, own: Mapping[Cut, OwnRatios]) -> Program:
    """The program with some of its placements cut by ratios of their own; a stretch must be named whole."""
    return _relabelled(program, graph, own, ())


class _Ties:
    """Sets of cuts that are tied, as trees."""

    def __init__(self) -> None:
        self.parent: dict[Cut, Cut] = {}

    def root(self, cut: Cut) -> Cut:
        parent = self.parent
        while (above := parent.setdefault(cut, cut)) != cut:
            parent[cut] = cut = parent[above]
        return cut

    def join(self, cuts: Sequence[Cut]) -> None:
        if cuts:
            first = self.root(cuts[0])
            for other in cuts[1:]:
                self.parent[self.root(other)] = first

    def program(self, program: Program, graph: Graph, path: Path) -> None:
        ends = zip((*graph.inputs, *graph.outputs), (*program.inputs, *program.outputs), strict=True)
        for end in ends:
            self.join(list(_cut_of(*end, path)))
        for position, instruction in enumerate(program.instructions):
            self.join(list(_cuts(instruction, graph, path)) if not isinstance(instruction, Loop) else [])
            if isinstance(instruction, Loop):
                self.loop(instruction, graph, path, position)

    def loop(self, loop: Loop, graph: Graph, path: Path, position: int) -> None:
        equation = graph.equations[loop.equation]
        wiring = boundary(equation)
        inside = [(*path, position, number) for number in range(len(loop.bodies))]
        for body, region, within in zip(loop.bodies, equation.regions, inside, strict=True):
            self.program(body, region, within)

        def entering(number: int, place: int) -> Iterator[Cut]:
            region, body = equation.regions[number], loop.bodies[number]
            return _cut_of(region.inputs[place], body.inputs[place], inside[number])

        def leaving(number: int, place: int) -> Iterator[Cut]:
            region, body = equation.regions[number], loop.bodies[number]
            return _cut_of(region.outputs[place], body.outputs[place], inside[number])

        for port in wiring.ins:
            outer = _cut_of(equation.inputs[port.outer], loop.signature.ins[port.outer], path)
            self.join([*outer, *entering(port.region, port.inner)])
        for port in wiring.outs:
            outer = _cut_of(equation.outputs[port.outer], loop.signature.outs[port.outer], path)
            self.join([*outer, *leaving(port.region, port.inner)])
        for source, out, target, into in wiring.carries:
            self.join([*leaving(source, out), *entering(target, into)])


def _cut_of(atom: Atom, placement: Placement, path: Path) -> Iterator[Cut]:
    if isinstance(atom, Value) and isinstance(placement, Shard):
        yield Cut(path, atom.index, placement)


def _cuts(instruction: Instruction, graph: Graph, path: Path) -> Iterator[Cut]:
    """What an instruction has cut."""
    if isinstance(instruction, Move):
        for placement in (instruction.pre, instruction.post):
            if isinstance(placement, Shard):
                yield Cut(path, instruction.value, placement)
        return
    equation, signature = graph.equations[instruction.equation], instruction.signature
    pairs = zip((*equation.inputs, *equation.outputs), (*signature.ins, *signature.outs), strict=True)
    for atom, placement in pairs:
        yield from _cut_of(atom, placement, path)


def _relabelled(program: Program, graph: Graph, own: Mapping[Cut, OwnRatios], path: Path) -> Program:
    def place(atom: Atom, placement: Placement) -> Placement:
        if not isinstance(atom, Value) or not isinstance(placement, Shard):
            return placement
        by = own.get(Cut(path, atom.index, placement))
        return placement if by is None else replace(placement, by=by)

    def side(atoms: Sequence[Atom], placements: Sequence[Placement]) -> tuple[Placement, ...]:
        return tuple([place(atom, p) for atom, p in zip(atoms, placements, strict=True)])

    def moved(value: int, placement: Placement) -> Placement:
        by = own.get(Cut(path, value, placement))
        return replace(placement, by=by) if isinstance(placement, Shard) and by is not None else placement

    found: list[Instruction] = []
    for position, instruction in enumerate(program.instructions):
        if isinstance(instruction, Move):
            pre, post = (moved(instruction.value, p) for p in (instruction.pre, instruction.post))
            found.append(replace(instruction, pre=pre, post=post))
            continue
        equation = graph.equations[instruction.equation]
        signature = Signature(
            side(equation.inputs, instruction.signature.ins),
            side(equation.outputs, instruction.signature.outs),
        )
        if isinstance(instruction, Loop):
            pairs = enumerate(zip(instruction.bodies, equation.regions, strict=True))
            bodies = tuple(_relabelled(b, region, own, (*path, position, n)) for n, (b, region) in pairs)
            found.append(replace(instruction, signature=signature, bodies=bodies))
        else:
            found.append(replace(instruction, signature=signature))
    return Program(side(graph.inputs, program.inputs), tuple(found), side(graph.outputs, program.outputs))
