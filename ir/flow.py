"""What instructions read, write and wait for."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from shardwright.ir import collectives
from shardwright.ir.graph import Atom, Graph, Value, value_types
from shardwright.ir.placement import Placement, R
from shardwright.ir.program import Instruction, Loop, Move, Program, Property, covers
from shardwright.ir.repeated import repeats


def is_local(instruction: Instruction, graph: Graph | None = None) -> bool:
    """Whether every device can run the instruction alone, and in the `graph` it is over as one function."""
    if isinstance(instruction, Move):
        return collectives.registry()[instruction.kind].local
    if isinstance(instruction, Loop):
        if graph is not None and any(map(repeats, graph.equations[instruction.equation].regions)):
            return False
        return all(is_local(inner) for body in instruction.bodies for inner in body.all_instructions())
    return True


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


def _waits_for(instruction: Instruction, graph: Graph, made_first: Mapping[int, int]) -> set[int]:
    """Where what an instruction is not to run before is made, beside its operands."""
    after = None if isinstance(instruction, Move) else graph.equations[instruction.equation].after
    return {made_first[after.index]} if after is not None and after.index in made_first else set()


class Flow:
    """What each instruction reads, writes and waits for."""

    def __init__(self, program: Program, graph: Graph) -> None:
        self.program, self.graph = program, graph
        self.types = value_types(graph)
        held: dict[int, list[Property]] = {}
        made_by: dict[Property, int] = {}
        made_first: dict[int, int] = {}
        for prop in inputs(program, graph):
            held.setdefault(prop.value, []).append(prop)
        self.needs: list[tuple[Property, ...]] = []
        self.gives: list[tuple[Property, ...]] = []
        self.producers: list[set[int]] = []
        self.consumers: list[list[int]] = [[] for _ in program.instructions]
        for position, instruction in enumerate(program.instructions):
            needs = tuple(
                dict.fromkeys(find(want, held.get(want.value, ())) for want in reads(instruction, graph))
            )
            gives = writes(instruction, graph)
            producers = {made_by[prop] for prop in needs if prop in made_by}
            producers |= _waits_for(instruction, graph, made_first)
            for producer in producers:
                self.consumers[producer].append(position)
            for prop in gives:
                known = held.setdefault(prop.value, [])
                if prop not in known:
                    known.append(prop)
                made_by[prop] = position
                made_first.setdefault(prop.value, position)
            self.needs.append(needs)
            self.gives.append(gives)
            self.producers.append(producers)
        self.exchange = [isinstance(i, Move) and not is_local(i) for i in program.instructions]

    def move(self, position: int) -> Move:
        """The exchange at a position."""
        move = self.program.instructions[position]
        assert isinstance(move, Move)
        return move

    def nbytes(self, position: int) -> int:
        """Bytes of the tensor that an exchange is about."""
        return self.types[self.move(position).value].nbytes
