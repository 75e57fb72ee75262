"""Bytes that each device holds over a program, by liveness.

A property (a value in a placement) is allocated where it is established and freed after its last use, or its
last before it is established anew; inputs, constants and state live throughout, and a state output takes
over its input's buffer. Tensors that XLA keeps in registers are not counted; neither are its scratch buffers
nor padding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import TypeAlias

import numpy as np

from shardwright.cost.lines import ALIASES
from shardwright.cost.share_cost import Floats
from shardwright.cost.traffic import traffic
from shardwright.ir.graph import Graph, TensorType, Value, per_graph
from shardwright.ir.placement import Placement, R, Shard, by_node, region, seat
from shardwright.ir.program import Compute, Instruction, Loop, Move, Program, nodes_of

Key: TypeAlias = tuple[int, Placement]
#: Bytes of a tensor in a placement: fixed, and times a device's share.
Size: TypeAlias = Callable[[TensorType, Placement], tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes over time as affine functions of a device's share: `fixed[t] + shared[t] * share`.

    Only moments that can be the peak under some share are kept (the Pareto front).
    """

    fixed: Floats
    shared: Floats

    def peak(self, share: Floats) -> Floats:
        """Peak bytes of devices with these shares."""
        return (self.fixed[:, None] + self.shared[:, None] * share[None, :]).max(axis=0)


def footprint(program: Program, graph: Graph) -> Footprint:
    """The program's memory over time; loop bodies add their own peak moments to that of the loop."""
    return _front(_moments(program, graph, top=True))


def peak_bytes(program: Program, graph: Graph, ratios: Sequence[float]) -> tuple[int, ...]:
    """Peak bytes of every device at its ratio."""
    return tuple(int(b) for b in footprint(program, graph).peak(np.asarray(ratios)))


def _size(tensor: TensorType, placement: Placement) -> tuple[float, float]:
    return (0.0, float(tensor.nbytes)) if isinstance(placement, Shard) else (float(tensor.nbytes), 0.0)


@dataclass(frozen=True, slots=True)
class Peaks:
    """Peak bytes of every device at ratios that are settled."""

    bytes: tuple[int, ...]

    def peak(self, share: Floats) -> Floats:
        """As `Footprint.peak`, for the ratios that are settled."""
        assert len(share) == len(self.bytes), f"{len(share)} shares for {len(self.bytes)} devices"
        return np.asarray(self.bytes, dtype=np.float64)


def peaks_by_device(program: Program, graph: Graph, ratios: Sequence[float]) -> Peaks:
    """Peak bytes of every device of a program on one mesh axis or on two.

    Devices of equal ratio, in nodes of equal ratio, count as the first of them: it gets what rounding leaves
    over.
    """
    nodes = nodes_of(program)
    known: dict[tuple[object, ...], int] = {}
    found: list[int] = []
    for device, ratio in enumerate(ratios):
        home = (None, 0) if nodes is None else seat(device, nodes)
        own = None if nodes is None else round(by_node(ratios, nodes)[0][home[0] or 0], 9)
        key = (round(ratio, 9), own)
        if key not in known:
            held = partial(_held, device=device, ratios=tuple(ratios), known={})
            known[key] = int(_moments(program, graph, top=True, size=held)[:, 0].max())
        found.append(known[key])
    return Peaks(tuple(found))


def _held(
    tensor: TensorType,
    placement: Placement,
    device: int,
    ratios: tuple[float, ...],
    known: dict[tuple[TensorType, Placement], float],
) -> tuple[float, float]:
    """Bytes that a device has of a tensor."""
    key = tensor, placement
    if key not in known:
        lengths = [length for _, length in region(tensor.shape, placement, device, ratios)]
        known[key] = tensor.nbytes * prod(lengths) / max(prod(tensor.shape), 1)
    return known[key], 0.0


def _moments(program: Program, graph: Graph, top: bool, size: Size = _size) -> Floats:
    """(time, 2): fixed and shared bytes after every instruction, `size` being those of one tensor."""
    types = {value.index: value.type for value in graph.values()}
    written = stored(graph)
    inputs = [(v.index, p) for v, p in zip(graph.inputs, program.inputs, strict=True)]
    handed_out = list(_keys(graph, program))
    reused = {key for out, key in enumerate(handed_out) if top and out in graph.state}
    end = len(program.instructions)
    # A reshape is its operand by another name: it takes no memory and keeps its operand alive.
    buffer: dict[Key, Key] = {}
    reads: list[list[Key]] = []
    for instruction in program.instructions:
        read = [buffer.get(key, key) for key in keys_read(instruction, graph)]
        reads.append(read)
        if read and isinstance(instruction, Compute) and _renames(instruction, graph):
            buffer.update(dict.fromkeys(keys_made(instruction, graph), read[0]))
    # What is made anew later (a parameter gathered for each use) is freed after its last use before that.
    last = {buffer.get(key, key): end for key in handed_out if key is not None}
    until: list[list[int]] = []
    for time in reversed(range(end)):
        until.append([last.pop(key, time) for key in keys_made(program.instructions[time], graph)])
        for key in reads[time]:
            last.setdefault(key, time)
    until.reverse()
    change = np.zeros((end + 2, 2))
    held = [(v.index, R) for v in graph.constants]
    for key in [*inputs, *held] if top else held:
        change[0] += size(types[key[0]], key[1])
    seen = {*inputs, *held, *buffer}
    inner: list[tuple[int, Floats]] = []
    for time, instruction in enumerate(program.instructions):
        if isinstance(instruction, Loop):
            regions = graph.equations[instruction.equation].regions
            bodies = [
                _moments(b, r, top=False, size=size) for b, r in zip(instruction.bodies, regions, strict=True)
            ]
            inner.extend((time, _front_array(body)) for body in bodies)
        for key, used in zip(keys_made(instruction, graph), until[time], strict=True):
            if key in seen or key[0] not in written or key in reused:
                continue
            nbytes = np.asarray(size(types[key[0]], key[1]))
            change[time + 1] += nbytes
            freed = used + 2
            if freed < end + 2:
                change[freed] -= nbytes
    over_time = change.cumsum(axis=0)
    # While a loop runs, what it stacks up is allocated already.
    extra = [over_time[time + 1] + rows for time, rows in inner]
    return np.concatenate([over_time, *extra])


def _renames(instruction: Compute, graph: Graph) -> bool:
    return graph.equations[instruction.equation].primitive in ALIASES


def _keys(graph: Graph, program: Program) -> Iterator[Key | None]:
    for atom, placement in zip(graph.outputs, program.outputs, strict=True):
        yield (atom.index, placement) if isinstance(atom, Value) else None


@per_graph
def stored(graph: Graph) -> frozenset[int]:
    """Indices of values that are written to memory."""
    through = traffic(graph)
    found = {value.index for value in graph.inputs}
    for equation in graph.equations:
        if equation not in through or equation.regions:
            found.update(v.index for v in equation.outputs)
            continue
        found.update(v.index for v, out in zip(equation.outputs, through[equation].outs, strict=True) if out)
    return frozenset(found)


def keys_read(instruction: Instruction, graph: Graph) -> list[Key]:
    """What an instruction reads, as (value, placement)."""
    if isinstance(instruction, Move):
        return [(instruction.value, instruction.pre)]
    equation = graph.equations[instruction.equation]
    pairs = zip(equation.inputs, instruction.signature.ins, strict=True)
    return [(a.index, p) for a, p in pairs if isinstance(a, Value)]


def keys_made(instruction: Instruction, graph: Graph) -> list[Key]:
    """What an instruction makes, as (value, placement)."""
    if isinstance(instruction, Move):
        return [(instruction.value, instruction.post)]
    outputs = graph.equations[instruction.equation].outputs
    return [(v.index, p) for v, p in zip(outputs, instruction.signature.outs, strict=True)]


def _front_array(moments: Floats) -> Floats:
    """Moments not dominated in both columns."""
    order = np.lexsort((-moments[:, 1], -moments[:, 0]))
    best = -np.inf
    kept: list[int] = []
    for row in order:
        if moments[row, 1] > best:
            kept.append(int(row))
            best = float(moments[row, 1])
    return moments[kept]


def _front(moments: Floats) -> Footprint:
    front = _front_array(moments)
    return Footprint(front[:, 0], front[:, 1])
