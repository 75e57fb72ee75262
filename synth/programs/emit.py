"""From an assignment of choices to a program.

The graph is walked once. Before an equation its operands are brought into the placements its signature
needs, after it its results into the placements they are to be held in; each move takes the cheapest
path from what is established. The instructions are then put in order of rounds (`rounds.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain, pairwise
from typing import Any, NamedTuple

import numpy as np

from shardwright.ir.graph import Atom, Equation, Value
from shardwright.ir.placement import Placement, R, reduction
from shardwright.ir.program import Compute, Instruction, Loop, Move, Program
from shardwright.ir.regions import boundary, outer_placement
from shardwright.ir.rules import Signature
from shardwright.ir.table import table
from shardwright.ir.wires import Number, Recorder
from shardwright.synth.prices.tables import Prices
from shardwright.synth.programs.as_read import handed_in_as_read, made_as_read
from shardwright.synth.programs.rounds import ordered
from shardwright.synth.space.conversions import Holding, Routes
from shardwright.synth.space.factors import Choice, EquationFactor, Use
from shardwright.synth.space.frame import Frame
from shardwright.synth.space.pins import pinned
from shardwright.synth.space.space import Space


def emit(space: Space, assignment: Sequence[int], prices: Prices, extra: Sequence[Use] = ()) -> Program:
    """The program that an assignment stands for, at the prices under which it was found.

    Args:
        space: all programs.
        assignment: a holding for each of its choices.
        prices: under which it was found.
        extra: factors under which it was found; arguments that they pin are held as assigned.
    """
    frame = space.root
    wanted: list[Placement | None] = [None] * len(frame.graph.outputs)
    for out, atom in enumerate(frame.graph.outputs):
        if out in frame.graph.state:
            source = frame.choice[frame.graph.inputs[frame.graph.state[out]]]
            wanted[out] = source.domain.holdings[assignment[source.index]].base
        elif atom.type.rank == 0 or not isinstance(atom, Value):
            wanted[out] = R
    program = _Emitter(space, assignment, prices, frame).program(wanted)
    return handed_in_as_read(program, frame, pinned(extra))


class _Coded(NamedTuple):
    """The cheapest signature of a factor at an assignment.

    Attributes:
        signature: it.
        ins, outs: its placements as parts of the numbers of operands and results (`Recorder.codes`).
        settled: whether results are held in no other placement than they are made in; exits apart.
    """

    signature: Signature
    ins: list[Number]
    outs: list[Number]
    settled: bool


class _Numbered(NamedTuple):
    """The equations of a graph under their signatures; of those with regions nothing is said.

    Attributes:
        reads, makes: by equation, see `shardwright.ir.wires`.
        plain: whether all operands are read as they were made, and all results held so and no other way.
    """

    reads: list[list[Number]]
    makes: list[list[Number]]
    plain: list[bool]


@dataclass(slots=True)
class _Emitter:
    """Writes the program of one frame.

    Attributes:
        instructions: so far.
        recorder: who reads and makes what in them.
        coded: of every equation; None of those with regions.
        established: the placements in which a value is there, the one that it was made in first; read by
            `held`.
        there: the same as numbers, and beforehand those of the results of equations without regions.
    """

    space: Space
    assignment: Sequence[int]
    prices: Prices
    frame: Frame
    instructions: list[Instruction] = field(default_factory=list[Instruction])
    recorder: Recorder = field(default_factory=Recorder)
    coded: list[_Coded | None] = field(default_factory=list[_Coded | None])
    established: dict[Value, list[Placement]] = field(default_factory=dict[Value, list[Placement]])
    there: set[Number] = field(default_factory=set[Number])

    def holding(self, choice: Choice) -> Holding:
        return choice.domain.holdings[self.assignment[choice.index]]

    def program(self, wanted: Sequence[Placement | None]) -> Program:
        """The frame's program; `wanted` are the placements of its outputs, None for anything but Partial."""
        graph = self.frame.graph
        inputs = tuple(self.holding(self.frame.choice[value]).base for value in graph.inputs)
        given = (*zip(graph.inputs, inputs, strict=True), *((value, R) for value in graph.constants))
        for value, placement in given:
            self.establish(value, placement)
        for value in graph.inputs:
            self.hold(value)
        self.coded = self._coded()
        lines = self._numbered([self.recorder.wires.number(v.index, p) for v, p in given])
        for equation, coded, reads, makes, plain in zip(graph.equations, self.coded, *lines, strict=True):
            if coded is None:
                self.region(equation)
            elif plain:
                self.instructions.append(Compute(equation.index, coded.signature))
                self.recorder.note(reads, makes)
            else:
                self.write(Compute(equation.index, coded.signature), equation, coded.settled, reads, makes)
        outputs = tuple(
            self.output(atom, placement) for atom, placement in zip(graph.outputs, wanted, strict=True)
        )
        program = Program(inputs, tuple(self.instructions), outputs)
        return made_as_read(ordered(program, graph, self.recorder.wires), self.frame)

    def _coded(self) -> list[_Coded | None]:
        """Of every equation without regions; what a factor comes to at an assignment is found out once."""
        assignment, uses = self.assignment, self.frame.uses
        known: dict[tuple[Any, ...], _Coded] = {}
        found: list[_Coded | None] = []
        for equation in self.frame.graph.equations:
            use = uses.get(equation)
            if use is None:
                found.append(None)
                continue
            key = (use.factor, *[assignment[choice] for choice in use.scope])
            coded = known.get(key)
            if coded is None:
                assert isinstance(use.factor, EquationFactor)
                signature = use.factor.signatures[self.prices.best(use.factor, key[1:])]
                _, ins, outs = self.recorder.codes(signature)
                held = [self.holding(self.frame.choice[value]) for value in equation.outputs]
                settled = held == [Holding(placement) for placement in signature.outs]
                coded = known[key] = _Coded(signature, ins, outs, settled)
            found.append(coded)
        return found

    def _numbered(self, given: list[Number]) -> _Numbered:
        """Of all equations at once; `given` are the numbers of inputs and constants."""
        found, graph = table(self.frame.graph), self.frame.graph
        pairs = list(zip(graph.equations, self.coded, strict=True))
        ins = chain.from_iterable([(0,) * len(e.inputs) if c is None else c.ins for e, c in pairs])
        outs = chain.from_iterable([(0,) * len(e.outputs) if c is None else c.outs for e, c in pairs])
        written = np.array([c is not None for c in self.coded], dtype=np.bool_)
        reads = found.operands + np.fromiter(ins, np.int64, len(found.operands))
        makes = found.results + np.fromiter(outs, np.int64, len(found.results))
        made = np.concatenate([np.array(given, dtype=np.int64), np.where(written[found.maker], makes, -1)])
        values = found.operands >= 0
        plain = written & ~found.any_of(values & (made[found.operands] != reads))
        plain &= np.array([c is not None and c.settled for c in self.coded], dtype=np.bool_)
        left = np.zeros(len(made), dtype=np.bool_)
        left[[value.index for value in self.frame.exits]] = True
        plain[found.maker[left[found.results]]] = False
        self.there.update(makes[written[found.maker]].tolist())
        begin = np.concatenate([[0], values.cumsum()])[found.begin].tolist()
        read, made_by = reads[values].tolist(), makes.tolist()
        return _Numbered(
            [read[first:last] for first, last in pairwise(begin)],
            [made_by[first:last] for first, last in pairwise(found.made.tolist())],
            plain.tolist(),
        )

    def write(
        self,
        instruction: Compute | Loop,
        equation: Equation,
        settled: bool,
        reads: list[Number],
        makes: list[Number],
    ) -> None:
        """Write an instruction between the moves that bring what it needs, and those into what is held."""
        there, exits = self.there, self.frame.exits
        if not there.issuperset(reads):
            for atom, placement in zip(equation.inputs, instruction.signature.ins, strict=True):
                if type(atom) is Value:
                    self.need(atom, placement)
        self.instructions.append(instruction)
        self.recorder.note(reads, makes)
        there.update(makes)
        for value, placement in zip(equation.outputs, instruction.signature.outs, strict=True):
            self.established[value] = [placement]
            if not settled or value in exits:
                self.hold(value)

    def establish(self, value: Value, placement: Placement) -> None:
        """A value is there, first in this placement."""
        self.established[value] = [placement]
        self.there.add(self.recorder.wires.number(value.index, placement))

    def held(self, value: Value) -> list[Placement]:
        """The placements in which a value is there, the one that it was made in first."""
        found = self.established.get(value)
        if found is None:
            graph = self.frame.graph
            result = value.index - len(graph.inputs) - len(graph.constants)
            maker = int(table(graph).maker[result])
            coded = self.coded[maker]
            assert coded is not None, "what has regions establishes its results"
            placement = coded.signature.outs[result - int(table(graph).made[maker])]
            found = self.established[value] = [placement]
        return found

    def hold(self, value: Value) -> None:
        """Bring a value into all placements it is to be held in, the nearer one first."""
        frame, established = self.frame, self.held(value)
        left = frame.exits.get(value)
        for choice in (frame.choice[value],) if left is None else (frame.choice[value], left):
            holding = self.holding(choice)
            if holding.extra is None and holding.base in established:
                continue
            missing = [p for p in holding.all if p not in established]
            while missing:
                if len(missing) > 1:
                    missing.sort(key=lambda p: self.distance(value, p))
                self.need(value, missing.pop(0))

    def distance(self, value: Value, placement: Placement) -> float:
        routes = self.routes(value)
        return min(self.prices.distance(routes, p, placement) for p in self.held(value))

    def routes(self, value: Value) -> Routes:
        return self.space.routes(value)

    def need(self, value: Value, placement: Placement) -> None:
        """Establish `value` in `placement` by the cheapest moves."""
        held = self.held(value)
        if placement in held:
            return
        routes = self.routes(value)
        source = held[0]
        if len(held) > 1:
            source = min(held, key=lambda p: self.prices.distance(routes, p, placement))
        for pre, post in self.prices.path(routes, source, placement):
            if post not in held:
                kind, strategy, _ = self.prices.strategy(routes, pre, post)
                move = Move(kind, value.index, pre, post, strategy)
                self.instructions.append(move)
                self.there.add(self.recorder.move(move))
                held.append(post)

    def output(self, atom: Atom, wanted: Placement | None) -> Placement:
        if not isinstance(atom, Value):
            return R
        if wanted is None:
            whole = [p for p in self.held(atom) if reduction(p) is None]
            domain = self.frame.held(atom).domain
            options = whole or [
                h.base for h in domain.holdings if h.extra is None and reduction(h.base) is None
            ]
            wanted = min(options, key=lambda p: self.distance(atom, p))
        self.need(atom, wanted)
        return wanted

    # -- regions -----------------------------------------------------------------------------------

    def region(self, equation: Equation) -> None:
        wiring = boundary(equation)
        frames = self.frame.children[equation]
        ports = self.frame.ports[equation]
        wanted: list[list[Placement | None]] = [[None] * len(child.graph.outputs) for child in frames]
        for from_region, out, to_region, into in wiring.carries:
            target = frames[to_region]
            wanted[from_region][out] = self.holding(target.choice[target.graph.inputs[into]]).base
        outs: list[Placement] = [R] * len(equation.outputs)
        for port in wiring.outs:
            inside = self.holding(ports[port.outer]).base
            wanted[port.region][port.inner] = inside
            outs[port.outer] = outer_placement(inside, port.stacked)
        for region, out in wiring.replicated_outputs:
            wanted[region][out] = R
        ins: list[Placement] = [R] * len(equation.inputs)
        for port in wiring.ins:
            child = frames[port.region]
            inside = self.holding(child.choice[child.graph.inputs[port.inner]]).base
            ins[port.outer] = outer_placement(inside, port.stacked)
        bodies = tuple(
            _Emitter(self.space, self.assignment, self.prices, child).program(outputs)
            for child, outputs in zip(frames, wanted, strict=True)
        )
        signature = Signature(tuple(ins), tuple(outs))
        _, reads, makes = self.recorder.codes(signature)
        self.write(
            Loop(equation.index, signature, bodies),
            equation,
            settled=False,
            reads=[a.index + c for a, c in zip(equation.inputs, reads, strict=True) if type(a) is Value],
            makes=[value.index + c for value, c in zip(equation.outputs, makes, strict=True)],
        )
