"""The order of a program's instructions: by *rounds*, local instructions first, then exchanges.

Everything local that can run before the next exchange runs before it, so that local segments are as long as
possible and exchanges that wait for the same segment stand side by side.
"""

from __future__ import annotations

from collections.abc import Sequence

from shardwright.ir.collectives import registry as collectives
from shardwright.ir.graph import Graph, Value
from shardwright.ir.program import Compute, Instruction, Loop, Move, Program
from shardwright.ir.wires import Number, Wires, with_wires


def exchanges(instruction: Instruction) -> bool:
    """Whether devices talk to each other in an instruction."""
    if isinstance(instruction, Loop):
        return any(exchanges(inner) for body in instruction.bodies for inner in body.instructions)
    return isinstance(instruction, Move) and not collectives()[instruction.kind].local


def ordered(program: Program, graph: Graph, found: Wires) -> Program:
    """The program without what nobody needs, in stable order by round.

    A round is local instructions first, then its exchanges. `found`: what they read and make.
    """
    kept = _live(found, ends(program, graph, found))
    order = _in_rounds(program.instructions, kept, found, graph)
    instructions = tuple([program.instructions[position] for position in order])
    return with_wires(Program(program.inputs, instructions, program.outputs), graph, found.taken(order))


def ends(program: Program, graph: Graph, found: Wires) -> set[Number]:
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
