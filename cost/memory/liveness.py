"""Bytes that each device holds over a program, by liveness.

What is written is what a compiler writes for the whole step (`cost/memory/written.py`), and beside it what an
exchange reads or makes. All else is computed where it is read, so that what it is made of lives until then.

- Between two exchanges a device runs one compiled program: what that reads from outside is there until it
  ends, and what it hands on has its place from its beginning.
- A buffer lives from the instruction that writes it to the last that reads it; an elementwise result is
  written over an operand of its size that nobody reads afterwards.
- What is cheaply made of arguments alone, for one later stretch, is made there.
- Arguments and constants are there throughout: the caller may read the old state again, unless it is
  donated (`shardwright/ir/donation.py`).

The plan's figures come from a closer look at fewer programs: `shardwright/memory/walk.py`. This one is for
programs of which there are many. It does not know in which order a compiler runs a stretch, nor how buffers
are packed; `Footprint.peak` is within a tenth of the other for most.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod

import numpy as np

from shardwright.cost.memory.tenancy import Bytes, Size
from shardwright.cost.memory.tenants import front, moments
from shardwright.cost.memory.written import written
from shardwright.cost.share_cost import Floats
from shardwright.ir.donation import continued
from shardwright.ir.graph import Graph, TensorType, Value, per_graph
from shardwright.ir.placement import Placement, Shard, by_node, region, seat
from shardwright.ir.program import Program, Property, nodes_of, own_ratios
from shardwright.ir.stages import layers_of


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
    found = front(moments(program, graph, written(graph), top=True, size=_size))
    return Footprint(found[:, 0], found[:, 1])


def at_the_end(program: Program, graph: Graph) -> Footprint:
    """What is there at the end: what the program was handed and, unless that is written over it, hands out.

    No order of its instructions needs less, nor does one that keeps less for its backward part.
    """
    there = {Property(value.index, at): value for value, at in zip(graph.inputs, program.inputs, strict=True)}
    over = continued(program, graph)
    for atom, at in zip(graph.outputs, program.outputs, strict=True):
        if isinstance(atom, Value) and Property(atom.index, at) not in over:
            there[Property(atom.index, at)] = atom
    sizes = [_size(value.type, held.placement) for held, value in there.items()]
    found = np.array(sizes).reshape(-1, 2).sum(axis=0, keepdims=True)
    return Footprint(found[:, 0], found[:, 1])


@dataclass(frozen=True, slots=True)
class Footprints:
    """A `Footprint` of a program with several ratios.

    Attributes:
        fixed: (moments,) bytes whatever the shares.
        shared: (moments, ratios) bytes times a device's share: the plan's ratios first, then by number.
    """

    fixed: Floats
    shared: Floats

    def peak(self, shares: Floats) -> Floats:
        """Peak bytes of devices whose shares are (ratios, devices)."""
        return (self.fixed[:, None] + self.shared @ shares).max(axis=0)


def footprints(program: Program, graph: Graph) -> Footprints:
    """`footprint` of a program with ratios of its own, which `own_ratios` numbers."""
    columns = {number: 2 + place for place, number in enumerate(own_ratios(program))}
    width = 2 + len(columns)

    def size(tensor: TensorType, placement: Placement) -> Bytes:
        column = 0
        if isinstance(placement, Shard):
            column = 1 if placement.by is None else columns[placement.by.number]
        return tuple([float(tensor.nbytes) if place == column else 0.0 for place in range(width)])

    found = front(moments(program, graph, written(graph), top=True, size=size))
    return Footprints(found[:, 0], found[:, 1:])


def peak_bytes(program: Program, graph: Graph, ratios: Sequence[float]) -> tuple[int, ...]:
    """Peak bytes of every device at its ratio, and at those that the program has of its own."""
    others = own_ratios(program)
    if others:
        shares = np.array([ratios, *(other.shares for other in others.values())])
        return tuple(int(b) for b in footprints(program, graph).peak(shares))
    return tuple(int(b) for b in footprint(program, graph).peak(np.asarray(ratios)))


@per_graph
def all_bytes(graph: Graph) -> int:
    """Bytes of all tensors of a step, each whole: what a device needs that holds all of them at once, twice.

    Twice, because of what a compiler keeps in two forms, and exchanges pack.
    """
    inner = sum([all_bytes(region) for equation in graph.equations for region in equation.regions])
    return 2 * total_bytes(graph) + inner + sum(_in_stages(graph))


def within_stages(graph: Graph) -> int:
    """Bytes that stages take at most beside what they read and make; the model has about what they do."""
    return max(_in_stages(graph), default=0)


def _in_stages(graph: Graph) -> list[int]:
    """Of stages, bytes of all tensors of a layer on a piece, twice."""
    return [all_bytes(layers.graph) for layers in map(layers_of, graph.equations) if layers is not None]


@per_graph
def total_bytes(graph: Graph) -> int:
    """Bytes of all tensors of a step, each whole and once, those within loops and branches aside."""
    return sum(_bytes(graph))


@per_graph
def largest_bytes(graph: Graph) -> int:
    """Bytes of the largest tensor of a step, those within loops and branches aside."""
    return max(_bytes(graph), default=0)


@per_graph
def _bytes(graph: Graph) -> list[int]:
    """Of all values."""
    made = [value.type.nbytes for equation in graph.equations for value in equation.outputs]
    return [*(value.type.nbytes for value in (*graph.inputs, *graph.constants)), *made]


def _size(tensor: TensorType, placement: Placement) -> Bytes:
    return (0.0, float(tensor.nbytes)) if isinstance(placement, Shard) else (float(tensor.nbytes), 0.0)


@dataclass(frozen=True, slots=True)
class Peaks:
    """Peak bytes of every device at ratios that are settled.

    `seen` says whether that is of the program as it will run, rather than of the model.
    """

    bytes: tuple[int, ...]
    seen: bool = False

    def peak(self, share: Floats) -> Floats:
        """As `Footprint.peak`, for the ratios that are settled."""
        assert len(share) == len(self.bytes), f"{len(share)} shares for {len(self.bytes)} devices"
        return np.asarray(self.bytes, dtype=np.float64)


def peaks_by_device(program: Program, graph: Graph, ratios: Sequence[float]) -> Peaks:
    """Peak bytes of every device of a program on one mesh axis or on two."""

    def peak(size: Size) -> float:
        return float(moments(program, graph, written(graph), top=True, size=size)[:, 0].max())

    return by_device(program, ratios, peak)


def by_device(program: Program, ratios: Sequence[float], peak: Callable[[Size], float]) -> Peaks:
    """What `peak` makes of the bytes that a device has of a tensor, for every device of a program.

    Devices of equal ratio, in nodes of equal ratio, count as the first of them: it gets what rounding leaves
    over.
    """
    nodes = nodes_of(program)
    others = own_ratios(program).values()
    of_node = () if nodes is None else by_node(ratios, nodes)[0]
    known: dict[tuple[object, ...], int] = {}
    found: list[int] = []
    for device, ratio in enumerate(ratios):
        own = None if nodes is None else round(of_node[seat(device, nodes)[0]], 9)
        key = (round(ratio, 9), own, *(round(other.shares[device], 9) for other in others))
        if key not in known:
            known[key] = int(peak(partial(_held, device=device, ratios=tuple(ratios), known={})))
        found.append(known[key])
    return Peaks(tuple(found))


def _held(
    tensor: TensorType,
    placement: Placement,
    device: int,
    ratios: tuple[float, ...],
    known: dict[tuple[TensorType, Placement], float],
) -> Bytes:
    """Bytes that a device has of a tensor."""
    key = tensor, placement
    if key not in known:
        lengths = [length for _, length in region(tensor.shape, placement, device, ratios)]
        known[key] = tensor.nbytes * prod(lengths) / max(prod(tensor.shape), 1)
    return known[key], 0.0


@per_graph
def stored(graph: Graph) -> frozenset[int]:
    """Indices of values that are written to memory."""
    return written(graph).values.union(value.index for value in graph.inputs)
