"""A program as a list of steps: local stretches that are compiled whole, and the exchanges between them.

    schedule ::= step*
    step     ::= segment     instructions that every device runs alone, as one compiled function; it ends
                             where something is computed again: a compiler would do it once
               | exchange    one collective
               | away        to host memory goes what nobody reads until it comes back
               | back        from there it comes
               | relay       layers as stages, which hand pieces of the batch on to each other
               | loop        a loop whose body exchanges: its schedules, run iteration by iteration

The order is the program's, but for cheap instructions that only later steps need (`late.py`). Every step
names the properties it reads and those it hands on; what no later step reads is dropped, so that buffers live
no longer than needed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, TypeAlias, TypeVar, runtime_checkable

from shardwright.ir.flow import Flow, inputs, is_local, outputs, reads, writes
from shardwright.ir.graph import Graph, TensorType
from shardwright.ir.hoist import hoisted
from shardwright.ir.host import reloads
from shardwright.ir.late import as_they_are, late
from shardwright.ir.program import Compute, Instruction, Loop, Move, Program, Property
from shardwright.ir.repeated import Together


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
class Relay:
    """Layers that lie on different devices: see `shardwright.ir.stages`."""

    first: int
    compute: Compute
    needs: tuple[Property, ...]
    gives: tuple[Property, ...]
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


@dataclass(frozen=True, slots=True, eq=False)
class Away:
    """What nobody reads until it comes back goes to the host's memory: `gives` are `needs`, there."""

    first: int
    needs: tuple[Property, ...]
    gives: tuple[Property, ...]
    drops: tuple[Property, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Back:
    """It comes back: `gives` are on the device, from `needs`, some of which never left it (`stayed`)."""

    first: int
    instructions: tuple[Instruction, ...]
    needs: tuple[Property, ...]
    gives: tuple[Property, ...]
    stayed: frozenset[Property] = frozenset()
    drops: tuple[Property, ...] = ()


Step: TypeAlias = Segment | Exchange | Relay | LoopStep | Away | Back


class Lasting(Protocol):
    """A step of a schedule or an order."""

    @property
    def first(self) -> int: ...
    @property
    def needs(self) -> tuple[Property, ...]: ...
    @property
    def gives(self) -> tuple[Property, ...]: ...
    @property
    def drops(self) -> tuple[Property, ...]: ...


_Step = TypeVar("_Step", bound=Lasting, covariant=True)


class Stepped(Protocol[_Step]):
    """A schedule or an order: steps of a program over a graph."""

    @property
    def program(self) -> Program: ...
    @property
    def graph(self) -> Graph: ...
    @property
    def steps(self) -> Sequence[_Step]: ...


@runtime_checkable
class Looping(Lasting, Protocol):
    """A loop that the host runs, as such a step."""

    @property
    def loop(self) -> Loop: ...
    @property
    def bodies(self) -> Sequence[Stepped[Lasting]]: ...


_S = TypeVar("_S", bound=Lasting)


def check_order(steps: Iterable[Lasting], given: Iterable[Property]) -> None:
    """Everything is there before it is read: the order is not that of the program, which was verified.

    Args:
        steps: of a schedule, or in a rank's order.
        given: what there is before them.
    """
    held = set(given)
    for step in steps:
        missing = [prop for prop in step.needs if prop not in held]
        assert not missing, f"{missing[0]} is read at instruction {step.first} before it is established"
        held.update(step.gives)


def with_host(steps: Sequence[_S], program: Program, graph: Graph) -> tuple[_S | Away | Back, ...]:
    """The steps, with tensors in host memory while nobody but a reload is to read them.

    Args:
        steps: of a schedule, or in a rank's order, with lifetimes.
        program: what they carry out.
        graph: what it computes.
    """
    if not any(_brings_back(step, graph) for step in steps):
        return tuple(steps)
    arguments: Collection[Property] = frozenset(inputs(program, graph))
    touched: dict[Property, int] = {}
    leaving: dict[int, list[Property]] = {}
    found: list[_S | Back] = []
    for position, step in enumerate(steps):
        if isinstance(step, Segment) and _brings_back(step, graph):
            # Arguments are the caller's, and what is read later as well has to be there.
            going = [prop for prop in step.needs if prop in step.drops and prop not in arguments]
            for prop in going:
                leaving.setdefault(touched[prop], []).append(prop)
            pairs = [(reads(i, graph)[0], writes(i, graph)[0]) for i in step.instructions]
            found.append(
                Back(
                    step.first,
                    step.instructions,
                    tuple([source for source, _ in pairs]),
                    tuple([result for _, result in pairs]),
                    frozenset(step.needs).difference(going),
                    step.drops,
                )
            )
        else:
            found.append(step)
        touched.update(dict.fromkeys((*step.needs, *step.gives), position))
    result: list[_S | Away | Back] = []
    for position, step in enumerate(found):
        result.append(step)
        if position in leaving:
            gone = tuple(leaving[position])
            result.append(Away(step.first, gone, gone))
    return tuple(result)


def _brings_back(step: Lasting, graph: Graph) -> bool:
    return isinstance(step, Segment) and all(reloads(i, graph) for i in step.instructions)


@dataclass(frozen=True, slots=True, eq=False)
class Schedule:
    """The steps of `program` over `graph`, and the global types of its values by index."""

    program: Program
    graph: Graph
    steps: tuple[Step, ...]
    types: Mapping[int, TensorType]


#: In place of what stands between two runs: nothing; the second computes something of the first again.
_CUT = -2


def schedule(program: Program, graph: Graph, *, inspect: bool = False, early: bool = False) -> Schedule:
    """Cut a verified program into steps.

    Args:
        inspect: segments hand on everything they compute and every loop is run by the host, so that
            each single value can be looked at.
        early: all instructions stay where the program has them.
    """
    if not inspect and not early:
        program, _ = hoisted(program, graph)
    flow = Flow(program, graph)
    runs: list[list[int]] = [[]]
    barriers: list[int] = []
    # What one function computes twice, a compiler computes once. By equation: few are met twice at all.
    computed: dict[int, list[Compute]] = {}
    together = Together(graph)
    for position, instruction in enumerate(program.instructions):
        if is_local(instruction, graph) and not (isinstance(instruction, Loop) and inspect):
            twice = isinstance(instruction, Compute) and instruction in computed.get(instruction.equation, ())
            if runs[-1] and (twice or together.end_before(instruction)):
                barriers.append(_CUT)
                runs.append([])
                computed.clear()
                together.clear()
            runs[-1].append(position)
            together.add(instruction)
            if isinstance(instruction, Compute):
                computed.setdefault(instruction.equation, []).append(instruction)
        else:
            barriers.append(position)
            runs.append([])
            computed.clear()
            together.clear()
    between = [() if position == _CUT else (position,) for position in barriers]
    found = as_they_are(runs) if inspect or early else late(flow, runs, between)
    steps: list[Step] = []
    for run, position in zip(found, (*barriers, -1), strict=True):
        if run.positions:
            instructions = tuple(program.instructions[i] for i in run.positions)
            steps.append(Segment(run.first, instructions, *run.interface(flow)))
        if position == _CUT:
            continue
        if position < 0:
            break
        instruction, needs, gives = program.instructions[position], flow.needs[position], flow.gives[position]
        if isinstance(instruction, Move):
            steps.append(Exchange(position, instruction, (needs[0],), (gives[0],)))
        elif isinstance(instruction, Compute):
            steps.append(Relay(position, instruction, needs, gives))
        else:
            regions = graph.equations[instruction.equation].regions
            bodies = tuple(
                schedule(body, region, inspect=inspect)
                for body, region in zip(instruction.bodies, regions, strict=True)
            )
            steps.append(LoopStep(position, instruction, bodies, needs, gives))
    check_order(steps, inputs(program, graph))
    lasting = _with_lifetimes(steps, outputs(program, graph), inspect)
    return Schedule(program, graph, lasting if inspect else with_host(lasting, program, graph), flow.types)


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
