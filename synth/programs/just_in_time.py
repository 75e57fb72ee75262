"""When parameters are gathered and gradients are scattered: just in time, as sharded training does it.

`emit` puts exchanges that wait for the same segment side by side, so that all parameters would be gathered
before the first layer and all gradients summed after the last. Here each parameter is gathered right before
it is used, and each gradient is scattered as soon as it is there, so that a device has few of them whole at
a time. With `again`, a parameter that others were gathered after is gathered anew for its next use.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace

from shardwright.ir.graph import Graph, Value
from shardwright.ir.program import Instruction, Loop, Move, Program
from shardwright.ir.wires import Key, keys_made, keys_read


def just_in_time(program: Program, graph: Graph, weights: Collection[Value], *, again: bool) -> Program:
    """The same program with its gathers of `weights` and its reduce-scatters moved; loop bodies too.

    Args:
        program: a verified program.
        graph: the graph it is over.
        weights: values whose gathers are moved.
        again: gather anew for every use that another gather came before.
    """
    gathered = {value.index for value in graph.values() if value in weights}
    gathers: dict[Key, Move] = {}
    scatters: dict[Key, list[Move]] = {}
    rest: list[Instruction] = []
    for instruction in program.instructions:
        if (
            isinstance(instruction, Move)
            and instruction.kind == "all_gather"
            and instruction.value in gathered
        ):
            gathers[instruction.value, instruction.post] = instruction
        elif isinstance(instruction, Move) and instruction.kind == "reduce_scatter":
            scatters.setdefault((instruction.value, instruction.pre), []).append(instruction)
        elif isinstance(instruction, Loop):
            regions = graph.equations[instruction.equation].regions
            bodies = tuple(
                just_in_time(body, region, weights, again=again)
                for body, region in zip(instruction.bodies, regions, strict=True)
            )
            rest.append(replace(instruction, bodies=bodies))
        else:
            rest.append(instruction)
    ends = [(a.index, p) for a, p in zip(graph.outputs, program.outputs, strict=True) if isinstance(a, Value)]
    placed: list[Instruction] = []
    fresh: set[Key] = set()

    def gather(keys: Iterable[Key]) -> None:
        needed = [key for key in dict.fromkeys(keys) if key in gathers]
        missing = [key for key in needed if key not in fresh]
        if again and missing:
            fresh.intersection_update(needed)
        placed.extend(gathers[key] for key in missing)
        fresh.update(missing)

    for value, placement in zip(graph.inputs, program.inputs, strict=True):
        placed.extend(scatters.pop((value.index, placement), ()))
    for instruction in rest:
        gather(keys_read(instruction, graph))
        placed.append(instruction)
        for key in keys_made(instruction, graph):
            placed.extend(scatters.pop(key, ()))
    gather(ends)
    return replace(program, instructions=tuple(placed))
