"""Bytes that no device of a program exceeds by the model of `liveness.py`: quickly, and mostly far too many.

Nothing is asked of what a compiler writes. Every tensor in every placement counts as written, from the
beginning of the stretch between two exchanges that makes it to the end of the last that reads it; and what an
instruction reads and makes counts once more while its stretch runs, for copies in another layout. That is
enough to see that a step fits by far.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from shardwright.cost.memory.compilers import COMPILERS
from shardwright.cost.memory.liveness import Peaks, by_device
from shardwright.cost.memory.stretches import cut_at_exchanges
from shardwright.cost.memory.tenancy import Size
from shardwright.cost.share_cost import Floats
from shardwright.ir.graph import Graph, TensorType, Value, value_types
from shardwright.ir.placement import Placement, R
from shardwright.ir.program import Move, Program
from shardwright.ir.stages import STAGES
from shardwright.ir.wires import Number, Wires, apart, wires


def peaks_at_most(program: Program, graph: Graph, ratios: Sequence[float]) -> Peaks | None:
    """Bytes that no device of a program on one mesh axis or on two exceeds; None with loops or stages.

    What these take while they run is in no tensor of the program.
    """
    if any(equation.regions or equation.primitive == STAGES for equation in graph.equations):
        return None
    return by_device(program, ratios, lambda size: _at_most(program, graph, size))


def _at_most(program: Program, graph: Graph, size: Size) -> float:
    """For one device, whose bytes of a tensor are `size`."""
    found = wires(program, graph)
    stretches, ends = cut_at_exchanges(program, graph)
    stretch_of = np.array(stretches, dtype=np.intp)
    made, made_in = _flat(found.makes, stretch_of)
    read, read_in = _flat(found.reads, stretch_of)
    numbers, at = np.unique(np.concatenate([made, read]), return_inverse=True)
    types = value_types(graph)
    nbytes = _bytes_of(numbers.tolist(), found, types, size)
    stretch_at = np.concatenate([made_in, read_in])
    #: What is given is there throughout.
    last, first = np.full((2, len(numbers)), -1)
    np.maximum.at(last, at, stretch_at)
    first[at[: len(made)][::-1]] = made_in[::-1]
    handed_out = {
        found.number(atom.index, placement)
        for atom, placement in zip(graph.outputs, program.outputs, strict=True)
        if isinstance(atom, Value)
    }
    last[np.isin(numbers, list(handed_out))] = len(ends)
    change = np.zeros(len(ends) + 2)
    change[0] = sum(size(tensor, placement)[0] for tensor, placement in _given(program, graph))
    mine = first >= 0
    np.add.at(change, first[mine], nbytes[mine])
    np.subtract.at(change, last[mine] + 1, nbytes[mine])
    held = change.cumsum()[:-1]
    np.add.at(held, stretch_at, nbytes[at])
    for instruction, stretch in zip(program.instructions, stretches, strict=True):
        # Equal blocks for all devices are packed beside what is exchanged.
        if isinstance(instruction, Move) and instruction.strategy == "padded":
            held[stretch] += types[instruction.value].nbytes
    return float(held.max()) + COMPILERS[graph.compiler].workspace_bytes


def _given(program: Program, graph: Graph) -> Iterator[tuple[TensorType, Placement]]:
    yield from ((v.type, p) for v, p in zip(graph.inputs, program.inputs, strict=True))
    yield from ((v.type, R) for v in graph.constants)


def _flat(
    each: Sequence[Sequence[Number]], stretch_of: NDArray[np.intp]
) -> tuple[NDArray[np.int64], NDArray[np.intp]]:
    """Tensors that instructions read or make, one after another, and the stretch of each instruction."""
    numbers = np.fromiter(chain.from_iterable(each), dtype=np.int64)
    return numbers, np.repeat(stretch_of, list(map(len, each)))


def _bytes_of(numbers: Sequence[Number], found: Wires, types: Mapping[int, TensorType], size: Size) -> Floats:
    """Bytes of tensors in placements."""
    placements = list(found.numbers)
    known: dict[tuple[int, int], float] = {}
    nbytes: list[float] = []
    for number in numbers:
        value, placement = apart(number)
        tensor = types[value]
        key = id(tensor), placement
        if key not in known:
            known[key] = size(tensor, placements[placement])[0]
        nbytes.append(known[key])
    return np.array(nbytes)
