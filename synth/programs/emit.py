"""From an assignment of choices to a program.

The graph is walked once. Before an equation its operands are brought into the placements its signature
needs, after it its results into the placements they are to be held in; each move takes the cheapest
path from what is established. The instructions are then put in order of *rounds*: everything local that
can run before the next exchange runs before it, so that local segments are as long as possible and
exchanges that wait for the same segment stand side by side.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from shardwright.ir.collectives import registry as collectives
from shardwright.ir.graph import Atom, Equation, Graph, Value
from shardwright.ir.placement import Placement, R, reduction
from shardwright.ir.program import Compute, Instruction, Loop, Move, Program
from shardwright.ir.regions import boundary, outer_placement
from shardwright.ir.rules import Signature
from shardwright.ir.wires import Number, Recorder, Wires, wires, with_wires
from shardwright.synth.prices.tables import Prices
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
    return _handed_in_as_read(program, frame, pinned(extra))


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


@dataclass(slots=True)
class _Emitter:
    """Writes the program of one frame.

    Attributes:
        instructions: so far.
        recorder: who reads and makes what in them.
        established: the placements in which every value is there, the one that it was made in first.
        there: the same as numbers.
        known: what every factor comes to at every assignment met so far.
    """

    space: Space
    assignment: Sequence[int]
    prices: Prices
    frame: Frame
    instructions: list[Instruction] = field(default_factory=list[Instruction])
    recorder: Recorder = field(default_factory=Recorder)
    established: dict[Value, list[Placement]] = field(default_factory=dict[Value, list[Placement]])
    there: set[Number] = field(default_factory=set[Number])
    known: dict[tuple[Any, ...], _Coded] = field(default_factory=dict[tuple[Any, ...], "_Coded"])

    def holding(self, choice: Choice) -> Holding:
        return choice.domain.holdings[self.assignment[choice.index]]

    def program(self, wanted: Sequence[Placement | None]) -> Program:
        """The frame's program; `wanted` are the placements of its outputs, None for anything but Partial."""
        graph = self.frame.graph
        inputs = tuple(self.holding(self.frame.choice[value]).base for value in graph.inputs)
        for value, placement in zip(graph.inputs, inputs, strict=True):
            self.establish(value, placement)
            self.hold(value)
        for value in graph.constants:
            self.establish(value, R)
        for equation in graph.equations:
            if equation.regions:
                self.region(equation)
            else:
                self.equation(equation)
        outputs = tuple(
            self.output(atom, placement) for atom, placement in zip(graph.outputs, wanted, strict=True)
        )
        return _ordered(Program(inputs, tuple(self.instructions), outputs), graph, self.recorder.wires)

    def equation(self, equation: Equation) -> None:
        use, assignment = self.frame.uses[equation], self.assignment
        key = (use.factor, *[assignment[choice] for choice in use.scope])
        coded = self.known.get(key)
        if coded is None:
            assert isinstance(use.factor, EquationFactor)
            signature = use.factor.signatures[self.prices.best(use.factor, key[1:])]
            _, ins, outs = self.recorder.codes(signature)
            held = [self.holding(self.frame.choice[value]) for value in equation.outputs]
            settled = held == [Holding(placement) for placement in signature.outs]
            coded = self.known[key] = _Coded(signature, ins, outs, settled)
        self.write(Compute(equation.index, coded.signature), equation, coded)

    def write(self, instruction: Compute | Loop, equation: Equation, coded: _Coded) -> None:
        """Write an instruction between the moves that bring what it needs, and those into what is held."""
        signature, ins, outs, settled = coded
        there, established, exits = self.there, self.established, self.frame.exits
        reads = [a.index + c for a, c in zip(equation.inputs, ins, strict=True) if type(a) is Value]
        if not there.issuperset(reads):
            for atom, placement in zip(equation.inputs, signature.ins, strict=True):
                if type(atom) is Value:
                    self.need(atom, placement)
        makes = [value.index + code for value, code in zip(equation.outputs, outs, strict=True)]
        self.instructions.append(instruction)
        self.recorder.note(reads, makes)
        there.update(makes)
        for value, placement in zip(equation.outputs, signature.outs, strict=True):
            established[value] = [placement]
            if not settled or value in exits:
                self.hold(value)

    def establish(self, value: Value, placement: Placement) -> None:
        """A value is there, first in this placement."""
        self.established[value] = [placement]
        self.there.add(self.recorder.wires.number(value.index, placement))

    def hold(self, value: Value) -> None:
        """Bring a value into all placements it is to be held in, the nearer one first."""
        frame, established = self.frame, self.established[value]
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
        return min(self.prices.distance(routes, p, placement) for p in self.established[value])

    def routes(self, value: Value) -> Routes:
        return self.space.routes(value)

    def need(self, value: Value, placement: Placement) -> None:
        """Establish `value` in `placement` by the cheapest moves."""
        held = self.established[value]
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
            whole = [p for p in self.established[atom] if reduction(p) is None]
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
        coded = _Coded(*self.recorder.codes(signature), settled=False)
        self.write(Loop(equation.index, signature, bodies), equation, coded)


def _handed_in_as_read(program: Program, frame: Frame, pinned: Collection[int]) -> Program:
    """The program with arguments handed in as the part that is read of them, where only one is.

    To cut a part out of a whole tensor costs nothing by the model, so that an assignment may do either; but
    the whole would be held, and the part be copied in every step. State comes back as it went in and stays.
    """
    graph = frame.graph
    found = wires(program, graph)
    inputs, dropped = list(program.inputs), set[int]()
    state = set(graph.state.values())
    places = {value.index: place for place, value in enumerate(graph.inputs) if place not in state}
    #: By what it reads, the last slice of an argument, and where it is.
    cuts: dict[Number, tuple[int, Move]] = {}
    for position, move in enumerate(program.instructions):
        if isinstance(move, Move) and move.kind == "slice" and move.value in places:
            cuts[found.number(move.value, move.pre)] = position, move
    several = _ends(program, graph, found)
    if cuts:
        for position, reads in enumerate(found.reads):
            for number in reads:
                if number in cuts and cuts[number][0] != position:
                    several.add(number)
    for number, (position, move) in cuts.items():
        place = places[move.value]
        choice = frame.choice[graph.inputs[place]]
        if (
            inputs[place] == move.pre
            and number not in several
            and choice.index not in pinned
            and any(holding.base == move.post for holding in choice.domain.holdings)
        ):
            inputs[place] = move.post
            dropped.add(position)
    if not dropped:
        return program
    left = [position for position in range(len(program.instructions)) if position not in dropped]
    instructions = tuple([program.instructions[position] for position in left])
    return with_wires(Program(tuple(inputs), instructions, program.outputs), graph, found.taken(left))


# ---------------------------------------------------------------------------------------------------
# Order


def exchanges(instruction: Instruction) -> bool:
    """Whether devices talk to each other in an instruction."""
    if isinstance(instruction, Loop):
        return any(exchanges(inner) for body in instruction.bodies for inner in body.instructions)
    return isinstance(instruction, Move) and not collectives()[instruction.kind].local


def _ordered(program: Program, graph: Graph, found: Wires) -> Program:
    """The program without what nobody needs, in stable order by round.

    A round is local instructions first, then its exchanges. `found`: what they read and make.
    """
    kept = _live(found, _ends(program, graph, found))
    order = _in_rounds(program.instructions, kept, found, graph)
    instructions = tuple([program.instructions[position] for position in order])
    return with_wires(Program(program.inputs, instructions, program.outputs), graph, found.taken(order))


def _ends(program: Program, graph: Graph, found: Wires) -> set[Number]:
    """The outputs in the placements that they are given back in."""
    ends = zip(graph.outputs, program.outputs, strict=True)
    return {found.number(atom.index, p) for atom, p in ends if isinstance(atom, Value)}


def _live(found: Wires, needed: set[Number]) -> list[int]:
    """Positions of instructions that make something anybody needs."""
    kept: list[int] = []
    for position in range(len(found.reads) - 1, -1, -1):
        if not needed.isdisjoint(found.makes[position]):
            kept.append(position)
            needed.update(found.reads[position])
    return kept[::-1]


def _in_rounds(
    instructions: Sequence[Instruction], positions: Sequence[int], found: Wires, graph: Graph
) -> list[int]:
    """The positions by round."""
    equations = graph.equations
    waits = {e.index: e.after.index for e in equations if e.after is not None}
    ready: dict[Number, int] = {}
    #: The round in which a value is there first, in whatever placement.
    made_in: dict[int, int] = {}
    #: Of every position twice its round, and one more for an exchange.
    turn: dict[int, int] = {}
    for position in positions:
        instruction = instructions[position]
        start, talks = 0, False
        for need in found.reads[position]:
            since = ready.get(need, 0)
            if since > start:
                start = since
        if type(instruction) is Compute:
            # What is computed again waits for the backward part to come by.
            if waits and instruction.equation in waits:
                start = max(start, made_in.get(waits[instruction.equation], 0))
        else:
            talks = exchanges(instruction)
        turn[position] = 2 * start + talks
        for made in found.makes[position]:
            ready.setdefault(made, start + talks)
        if waits:
            for value, _ in found.keys(found.makes[position]):
                made_in.setdefault(value, start + talks)
    return sorted(turn, key=turn.__getitem__)
