"""What instructions read, write and wait for."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from shardwright.ir import collectives
from shardwright.ir.graph import Atom, Graph, Value, value_types
from shardwright.ir.placement import Placement, R
from shardwright.ir.program import Instruction, Loop, Move, Program, Property, covers
from shardwright.ir.repeated import repeats
from shardwright.ir.stages import relays
from shardwright.ir.wires import Wires, apart, wires


def is_local(instruction: Instruction, graph: Graph | None = None) -> bool:
    """Whether every device can run the instruction alone, and in the `graph` it is over as one function.

    Without a graph, stages (`ir/stages.py`) count as local: loop bodies, of which it is asked so, have none.
    """
    if isinstance(instruction, Move):
        return collectives.registry()[instruction.kind].local
    if isinstance(instruction, Loop):
        if graph is not None and any(map(repeats, graph.equations[instruction.equation].regions)):
            return False
        return all(is_local(inner) for body in instruction.bodies for inner in body.all_instructions())
    return graph is None or not relays(instruction, graph)


def reads(instruction: Instruction, graph: Graph) -> tuple[Property, ...]:
    """Properties an instruction names as preconditions."""
    if isinstance(instruction, Move):
        group = instruction.group if instruction.root is None else (instruction.root,)
        return (Property(instruction.value, instruction.pre, group),)
    return _of(graph.equations[instruction.equation].inputs, instruction.signature.ins)


def writes(instruction: Instruction, graph: Graph) -> tuple[Property, ...]:
    """Properties an instruction establishes."""
    if isinstance(instruction, Move):
        return (Property(instruction.value, instruction.post, instruction.group),)
    return _of(graph.equations[instruction.equation].outputs, instruction.signature.outs)


def outputs(program: Program, graph: Graph) -> tuple[Property, ...]:
    """Properties the program ends with (literal outputs need none)."""
    return _of(graph.outputs, program.outputs)


def inputs(program: Program, graph: Graph) -> tuple[Property, ...]:
    """Properties the program starts with, the constants last."""
    return (*_of(graph.inputs, program.inputs), *(Property(value.index, R) for value in graph.constants))


def _of(atoms: Iterable[Atom], placements: Iterable[Placement]) -> tuple[Property, ...]:
    pairs = zip(atoms, placements, strict=True)
    return tuple(Property(atom.index, p) for atom, p in pairs if isinstance(atom, Value))


def find(wanted: Property, held: Collection[Property]) -> Property:
    """The property among `held` that covers `wanted` (itself, before any other)."""
    if wanted in held:
        return wanted
    covering = [prop for prop in held if covers(prop, wanted)]
    assert covering, f"{wanted} is nowhere established: the program was not verified"
    return covering[0]


class Flow:
    """What each instruction reads, writes and waits for.

    Attributes:
        needs, gives: properties that every instruction reads, each once, and writes.
        reads, makes: the same as numbers.
    """

    def __init__(self, program: Program, graph: Graph) -> None:
        self.program, self.graph = program, graph
        self.types = value_types(graph)
        if any(isinstance(i, Move) and i.group is not None for i in program.instructions):
            self._number = dict[Property, int]()
            self._in_groups()
        else:
            self._number = wires(program, graph)
            self._among_all(self._number)
        waits = {e.index: e.after.index for e in graph.equations if e.after is not None}
        made_by: dict[int, int] = {}
        made_first: dict[int, int] = {}
        self.producers: list[set[int]] = []
        self.consumers: list[list[int]] = [[] for _ in program.instructions]
        for position, instruction in enumerate(program.instructions):
            producers = {made_by[number] for number in self.reads[position] if number in made_by}
            if waits and not isinstance(instruction, Move):
                # What it is not to run before is made there, beside its operands.
                first = made_first.get(waits.get(instruction.equation, -1))
                if first is not None:
                    producers.add(first)
            for producer in producers:
                self.consumers[producer].append(position)
            for number in self.makes[position]:
                made_by[number] = position
            if waits:
                for prop in self.gives[position]:
                    made_first.setdefault(prop.value, position)
            self.producers.append(producers)
        self.exchange = [isinstance(i, Move) and not is_local(i) for i in program.instructions]

    def _among_all(self, found: Wires) -> None:
        """Properties of all devices each, which are found again by their numbers."""
        placements = list(found.numbers)
        known: dict[int, Property] = {}
        for number in {number for numbers in (*found.reads, *found.makes) for number in numbers}:
            value, placement = apart(number)
            known[number] = Property(value, placements[placement])
        self.reads: list[Sequence[int]] = [
            each if len(each) < 2 else tuple(dict.fromkeys(each)) for each in found.reads
        ]
        self.makes: Sequence[Sequence[int]] = found.makes
        self.needs = [tuple([known[number] for number in each]) for each in self.reads]
        self.gives = [tuple([known[number] for number in each]) for each in self.makes]

    def _in_groups(self) -> None:
        """Of some devices each: what is held by more of them will do."""
        held: dict[int, list[Property]] = {}
        for prop in inputs(self.program, self.graph):
            held.setdefault(prop.value, []).append(prop)
        self.needs: list[tuple[Property, ...]] = []
        self.gives: list[tuple[Property, ...]] = []
        for instruction in self.program.instructions:
            wanted = reads(instruction, self.graph)
            self.needs.append(tuple(dict.fromkeys(find(want, held.get(want.value, ())) for want in wanted)))
            self.gives.append(writes(instruction, self.graph))
            for prop in self.gives[-1]:
                known = held.setdefault(prop.value, [])
                if prop not in known:
                    known.append(prop)
        self.reads = [tuple(map(self.number, props)) for props in self.needs]
        self.makes = [tuple(map(self.number, props)) for props in self.gives]

    def number(self, prop: Property) -> int:
        """Of a property, as in `reads` and `makes`."""
        if isinstance(self._number, Wires):
            return self._number.number(prop.value, prop.placement)
        return self._number.setdefault(prop, len(self._number))

    def move(self, position: int) -> Move:
        """The exchange at a position."""
        move = self.program.instructions[position]
        assert isinstance(move, Move)
        return move

    def nbytes(self, position: int) -> int:
        """Bytes of the tensor that an exchange is about."""
        return self.types[self.move(position).value].nbytes
