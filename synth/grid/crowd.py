"""What fills a device when it is fullest: it pays rent where nothing fits (`synth/grid/memory.py`)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from shardwright.cost.memory.liveness import stored
from shardwright.ir.graph import Graph, Value, value_types
from shardwright.ir.placement import Placement, region
from shardwright.ir.program import Loop, Move, Program
from shardwright.ir.wires import keys_made, keys_read


def crowd(program: Program, graph: Graph, ratios: Sequence[float], device: int) -> tuple[Value, ...]:
    """Tensors that a device has in memory when it is fullest, as far as a step's own instructions tell.

    A loop has its operands and results throughout.
    """
    written, types = stored(graph), value_types(graph)
    span: dict[tuple[int, Placement], list[int]] = {}
    for time, instruction in enumerate(program.instructions):
        for key in keys_read(instruction, graph):
            if key in span:
                span[key][1] = time
        for key in keys_made(instruction, graph):
            span.setdefault(key, [time, time])
    change = np.zeros(len(program.instructions) + 1)
    nbytes: dict[tuple[int, Placement], float] = {}
    for (index, placement), (first, last) in span.items():
        if index in written or isinstance(program.instructions[first], Loop | Move):
            shape = [n for _, n in region(types[index].shape, placement, device, ratios)]
            nbytes[index, placement] = types[index].nbytes * math.prod(shape) / max(types[index].size, 1)
            change[first] += nbytes[index, placement]
            change[last + 1] -= nbytes[index, placement]
    moment = int(np.cumsum(change).argmax())
    alive = {
        index
        for (index, placement) in nbytes
        if span[index, placement][0] <= moment <= span[index, placement][1]
    }
    return tuple(value for value in graph.values() if value.index in alive)
