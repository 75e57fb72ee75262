"""Memory of each device under a plan, step by step of its schedule, as the MPI backend runs it.

Between two exchanges a device runs one compiled program: what is held outside of it, its results, and its
scratch (`cost/buffers.py`, on the device's own shapes). An exchange takes its result, and what it packs or
pads. Arguments are the caller's: the old state is there until the new one is whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shardwright.backends.local_graph import LocalGraphs
from shardwright.backends.segments import Exchange, LoopStep, Schedule, Segment, schedule
from shardwright.cost.buffers import scratch_bytes
from shardwright.cost.exchange_buffers import exchange_bytes, held_bytes
from shardwright.ir.graph import Graph, TensorType
from shardwright.ir.program import Program, Property


@dataclass(frozen=True, slots=True)
class Moment:
    """One step of a device's schedule.

    Attributes:
        what: "compute", "exchange", or "loop" (run by the host).
        first: position of its first instruction in the program.
        held_bytes: what is there beside it, arguments included.
        own_bytes: its results, scratch and buffers.
    """

    what: str
    first: int
    held_bytes: int
    own_bytes: int

    @property
    def nbytes(self) -> int:
        """Both."""
        return self.held_bytes + self.own_bytes


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Memory of one device over a step.

    Attributes:
        arguments_bytes: its parts of the step's arguments and constants.
        moments: one per step of the schedule.
    """

    arguments_bytes: int
    moments: tuple[Moment, ...]

    @property
    def peak_bytes(self) -> int:
        """The most that is held at a time."""
        return max((moment.nbytes for moment in self.moments), default=self.arguments_bytes)


def device_memory(program: Program, graph: Graph, ratios: Sequence[float], device: int) -> DeviceMemory:
    """Memory of the device at position `device` of a verified program."""
    graphs = LocalGraphs(device, ratios)
    types = {value.index: value.type for value in graph.values()}
    pairs = list(zip(graph.inputs, program.inputs, strict=True))
    arguments = sum(held_bytes(value.type, placement, device, ratios) for value, placement in pairs)
    arguments += sum(value.type.nbytes for value in graph.constants)
    moments = _moments(schedule(program, graph), graphs, types, arguments)
    return DeviceMemory(arguments, tuple(moments))


def _moments(
    planned: Schedule, graphs: LocalGraphs, types: Mapping[int, TensorType], outside: int
) -> list[Moment]:
    device, ratios = graphs.device, graphs.ratios

    def size(prop: Property) -> int:
        return held_bytes(types[prop.value], prop.placement, device, ratios)

    made: dict[Property, int] = {}
    found: list[Moment] = []
    for step in planned.steps:
        if isinstance(step, Segment):
            own = scratch_bytes(graphs.segment(step, planned.graph)) + sum(map(size, step.gives))
            what = "compute"
        elif isinstance(step, Exchange):
            own = exchange_bytes(step.move, types[step.move.value], device, ratios)
            what = "exchange"
        else:
            own, what = _loop(step, planned.graph, graphs) + sum(map(size, step.gives)), "loop"
        found.append(Moment(what, step.first, outside + sum(made.values()), own))
        made.update((prop, size(prop)) for prop in step.gives)
        for prop in step.drops:
            made.pop(prop, None)
    return found


def _loop(step: LoopStep, graph: Graph, graphs: LocalGraphs) -> int:
    """Bytes of a loop that the host runs: its bodies' own, and all iterations' results until stacked."""
    equation = graph.equations[step.loop.equation]
    most = 0
    for body, region in zip(step.bodies, equation.regions, strict=True):
        types = {value.index: value.type for value in region.values()}
        moments = _moments(body, graphs, types, 0)
        entered = sum(
            held_bytes(value.type, placement, graphs.device, graphs.ratios)
            for value, placement in zip(region.inputs, body.program.inputs, strict=True)
        )
        most = max(most, entered + max((moment.nbytes for moment in moments), default=0))
    stacked = sum(
        held_bytes(value.type, placement, graphs.device, graphs.ratios)
        for value, placement in zip(equation.outputs, step.loop.signature.outs, strict=True)
    )
    return most + stacked
