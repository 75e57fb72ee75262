"""Where a program is cut at its exchanges, as liveness counts: what lies between two is compiled together."""

from __future__ import annotations

from shardwright.ir.collectives import registry
from shardwright.ir.graph import Graph
from shardwright.ir.host import uses_host
from shardwright.ir.program import Instruction, Loop, Move, Program
from shardwright.ir.repeated import Together, repeats
from shardwright.ir.stages import relays


def cut_at_exchanges(program: Program, graph: Graph) -> tuple[list[int], list[int]]:
    """The stretch that every instruction is in, an exchange being one of its own; and where each ends.

    What is computed again begins a stretch, too: it is compiled apart from what it repeats.
    """
    found: list[int] = []
    ends: list[int] = [0]
    before = False
    together = Together(graph) if repeats(graph) or uses_host(graph) else None
    for time, instruction in enumerate(program.instructions):
        talks = exchanges(instruction, graph)
        again = together is not None and not talks and together.end_before(instruction)
        if time and (talks or before or again):
            ends.append(time)
            if together is not None:
                together.clear()
        if together is not None:
            together.add(instruction)
        ends[-1] = time
        found.append(len(ends) - 1)
        before = talks
    return found, ends


def exchanges(instruction: Instruction, graph: Graph) -> bool:
    """Whether it is an exchange, stages, or a loop that the host runs: it exchanges, or computes again."""
    if isinstance(instruction, Move):
        return not registry()[instruction.kind].local
    if isinstance(instruction, Loop):
        regions = graph.equations[instruction.equation].regions
        pairs = zip(instruction.bodies, regions, strict=True)
        return any(map(repeats, regions)) or any(
            exchanges(inner, region) for body, region in pairs for inner in body.instructions
        )
    return relays(instruction, graph)
