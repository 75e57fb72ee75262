"""A program as a list of steps: local stretches that are compiled whole, and the exchanges between them.

    schedule ::= step*
    step     ::= segment     instructions that every device runs alone, as one compiled function; it ends
                             where something is computed again: a compiler would do it once
               | exchange    one collective
               | loop        a loop whose body exchanges: its schedules, run iteration by iteration

The order is the program's, but for cheap instructions that only later steps need (`late.py`). Every step
names the properties it reads and those it hands on; what no later step reads is dropped, so that buffers live
no longer than needed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from shardwright.ir.flow import Flow, is_local, outputs
from shardwright.ir.graph import Graph, TensorType
from shardwright.ir.hoist import hoisted
from shardwright.ir.late import as_they_are, late
from shardwright.ir.program import Instruction, Loop, Move, Program, Property
from shardwright.ir.recompute import begins_again


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
    for position, instruction in enumerate(program.instructions):
        if is_local(instruction, graph) and not (isinstance(instruction, Loop) and inspect):
            if runs[-1] and begins_again(instruction, graph, (program.instructions[i] for i in runs[-1])):
                barriers.append(_CUT)
                runs.append([])
            runs[-1].append(position)
        else:
            barriers.append(position)
            runs.append([])
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
        elif isinstance(instruction, Loop):
            regions = graph.equations[instruction.equation].regions
            bodies = tuple(
                schedule(body, region, inspect=inspect)
                for body, region in zip(instruction.bodies, regions, strict=True)
            )
            steps.append(LoopStep(position, instruction, bodies, needs, gives))
    return Schedule(program, graph, _with_lifetimes(steps, outputs(program, graph), inspect), flow.types)


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
