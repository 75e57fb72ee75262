"""A program as a list of steps: local stretches that are compiled whole, and the exchanges between them.

    schedule ::= step*
    step     ::= segment     instructions that every device runs alone, as one compiled function; it ends
                             where something is computed again: a compiler would do it once
               | exchange    one collective
               | loop        a loop whose body exchanges: its schedules, run iteration by iteration

The order is the program's. Every step names the properties it reads and those it hands on; what no
later step reads is dropped, so that buffers live no longer than needed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from shardwright.ir import collectives
from shardwright.ir.graph import Atom, Graph, TensorType, Value
from shardwright.ir.placement import Placement, R
from shardwright.ir.program import Instruction, Loop, Move, Program, Property, covers
from shardwright.ir.recompute import begins_again, repeats


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """Consecutive instructions without communication.

    Attributes:
        first: position of the first instruction in its program, for messages.
        instructions: computations, local moves, and loops made of nothing else.
        needs: properties read from outside.
        gives: properties handed on, because a later step reads them or they are outputs.
        drops: properties that nobody reads any more afterwards.
    """

    first: int
    instructions: tuple[Instruction, ...]
    needs: tuple[Property, ...]
    gives: tuple[Property, ...]
    drops: tuple[Property, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Exchange:
    """One collective: `gives` from `needs`."""

    first: int
    move: Move
    needs: tuple[Property]
    gives: tuple[Property]
    drops: tuple[Property, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class LoopStep:
    """A loop run by the host; `bodies` are in the order of the equation's regions."""

    first: int
    loop: Loop
    bodies: tuple[Schedule, ...]
    needs: tuple[Property, ...]
    gives: tuple[Property, ...]
    drops: tuple[Property, ...] = ()


Step: TypeAlias = Segment | Exchange | LoopStep


@dataclass(frozen=True, slots=True, eq=False)
class Schedule:
    """The steps of `program` over `graph`, and the global types of its values by index."""

    program: Program
    graph: Graph
    steps: tuple[Step, ...]
    types: Mapping[int, TensorType]


def schedule(program: Program, graph: Graph, *, inspect: bool = False) -> Schedule:
    """Cut a verified program into steps.

    Args:
        inspect: segments hand on everything they compute and every loop is run by the host, so that
            each single value can be looked at.
    """
    holders = _Holders(program, graph)
    steps: list[Step] = []
    pending: list[Instruction] = []
    first = 0

    def flush() -> None:
        if pending:
            steps.append(Segment(first, tuple(pending), *holders.interface(pending)))
            pending.clear()

    for position, instruction in enumerate(program.instructions):
        if is_local(instruction, graph) and not (isinstance(instruction, Loop) and inspect):
            if begins_again(instruction, graph, pending):
                flush()
            if not pending:
                first = position
            pending.append(instruction)
            continue
        flush()
        needs, gives = holders.interface([instruction])
        if isinstance(instruction, Move):
            steps.append(Exchange(position, instruction, (needs[0],), (gives[0],)))
        elif isinstance(instruction, Loop):
            regions = graph.equations[instruction.equation].regions
            bodies = tuple(
                schedule(body, region, inspect=inspect)
                for body, region in zip(instruction.bodies, regions, strict=True)
            )
            steps.append(LoopStep(position, instruction, bodies, needs, gives))
    flush()
    types = {value.index: value.type for value in graph.values()}
    return Schedule(program, graph, _with_lifetimes(steps, outputs(program, graph), inspect), types)


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


class _Holders:
    """Finds, for every property read, the one that was established and covers it."""

    def __init__(self, program: Program, graph: Graph) -> None:
        self.graph = graph
        self.of_value: dict[int, list[Property]] = {}
        for prop in inputs(program, graph):
            self.add(prop)

    def add(self, prop: Property) -> None:
        held = self.of_value.setdefault(prop.value, [])
        if prop not in held:
            held.append(prop)

    def find(self, wanted: Property) -> Property:
        return find(wanted, self.of_value.get(wanted.value, ()))

    def interface(
        self, instructions: Sequence[Instruction]
    ) -> tuple[tuple[Property, ...], tuple[Property, ...]]:
        """What a run of instructions reads from outside and what it writes."""
        needs: dict[Property, None] = {}
        written: dict[Property, None] = {}
        for instruction in instructions:
            for wanted in reads(instruction, self.graph):
                held = self.find(wanted)
                if held not in written:
                    needs[held] = None
            for prop in writes(instruction, self.graph):
                written[prop] = None
                self.add(prop)
        return tuple(needs), tuple(written)


def find(wanted: Property, held: Iterable[Property]) -> Property:
    """The property among `held` that covers `wanted` (itself, before any other)."""
    covering = [prop for prop in held if covers(prop, wanted)]
    assert covering, f"{wanted} is nowhere established: the program was not verified"
    return wanted if wanted in covering else covering[0]


def _with_lifetimes(steps: Sequence[Step], kept: Iterable[Property], inspect: bool) -> tuple[Step, ...]:
    """Drop everything after its last reader; segments hand on only what is read later, unless inspected."""
    live = set(kept)
    result: list[Step] = []
    for step in reversed(steps):
        if isinstance(step, Segment) and not inspect:
            step = replace(step, gives=tuple(prop for prop in step.gives if prop in live))
        drops = tuple(prop for prop in dict.fromkeys((*step.needs, *step.gives)) if prop not in live)
        result.append(replace(step, drops=drops))
        live.difference_update(step.gives)  # what is established anew need not live until then
        live.update(step.needs)
    result.reverse()
    return tuple(result)
