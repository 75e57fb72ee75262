"""Memory of each device under a plan, step by step of its schedule, as the MPI backend runs it.

Between two exchanges a device runs one compiled program: what is held outside of it, its results, and its
scratch (`scratch.py`, on the device's own shapes). An exchange takes its result, and what it packs or pads.
Arguments are the caller's: the old state is there until the new one is whole, unless it is donated
(`shardwright/ir/donation.py`). What a loop carries from iteration to iteration stays in one place
(`shardwright/ir/carried.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from shardwright.backends.local_graph import LocalGraphs
from shardwright.backends.relay import Course
from shardwright.cost.device import DeviceType
from shardwright.cost.memory.buffers import scratch_bytes
from shardwright.cost.memory.compilers import compilers
from shardwright.cost.memory.exchange_buffers import exchange_bytes, held_bytes
from shardwright.ir.carried import carried_in_place, handed_over, olds, stacked, written_over
from shardwright.ir.donation import taken_over
from shardwright.ir.graph import Graph, TensorType
from shardwright.ir.placement import Placement
from shardwright.ir.program import Program, Property
from shardwright.ir.regions import entering
from shardwright.ir.segments import Away, Back, Exchange, LoopStep, Relay, Schedule, Segment, Step, schedule
from shardwright.ir.stages import carried_on
from shardwright.memory.kinds import Kinds
from shardwright.memory.scratch import Scratch


@dataclass(frozen=True, slots=True)
class Moment:
    """One step of a device's schedule.

    Attributes:
        what: "compute", "exchange", "stages", "loop" (run by the host), "away" or "back" (to and from host
            memory).
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


class Walk:
    """A verified program, step by step of its schedule; what does not depend on ratios is worked out once."""

    def __init__(self, program: Program, graph: Graph) -> None:
        planned = schedule(program, graph)
        self._steps = _Steps(planned, taken_over(planned))
        self._inputs = [(v.type, p) for v, p in zip(graph.inputs, program.inputs, strict=True)]
        self._constants = sum(value.type.nbytes for value in graph.constants)

    @property
    def planned(self) -> Schedule:
        """The schedule."""
        return self._steps.planned

    @cached_property
    def _kinds(self) -> Kinds:
        return Kinds(self.planned.program, self.planned.graph)

    def of_device(
        self, ratios: Sequence[float], device: int, types: Sequence[DeviceType] = ()
    ) -> DeviceMemory:
        """Memory of the device at position `device`, at these shares of all, which are of these types."""
        arguments = self._constants + sum(held_bytes(*each, device, ratios) for each in self._inputs)
        moments = self._steps.moments(self.graphs(ratios, device, types), arguments)
        return DeviceMemory(arguments, tuple(moments))

    def graphs(self, ratios: Sequence[float], device: int, types: Sequence[DeviceType] = ()) -> LocalGraphs:
        """What makes the graphs of the device at position `device`, as its compiler has them."""
        return LocalGraphs(device, ratios, self._compilers(ratios, types)[device])

    def peaks(self, ratios: Sequence[float], types: Sequence[DeviceType] = ()) -> tuple[int, ...]:
        """Peak bytes of every device; devices that hold the same, by compilers that are one, count once."""
        kinds = list(zip(self._kinds.of_devices(ratios), self._compilers(ratios, types), strict=True))
        first = {kind: kinds.index(kind) for kind in dict.fromkeys(kinds)}
        found = {kind: self.of_device(ratios, device, types).peak_bytes for kind, device in first.items()}
        return tuple([found[kind] for kind in kinds])

    def _compilers(self, ratios: Sequence[float], types: Sequence[DeviceType]) -> Sequence[str]:
        """By device; that of the step where nothing is said of devices."""
        graph = self.planned.graph
        return compilers(graph, types) if types else (graph.compiler,) * len(ratios)


class _Steps:
    """The steps of a schedule, and of the loops in it.

    Args:
        planned: the schedule.
        over: by segment or loop, what it makes in the place of what it reads as the last: new -> old.
    """

    def __init__(self, planned: Schedule, over: Mapping[Step, Mapping[Property, Property]]) -> None:
        self.planned = planned
        self._over = over
        self._scratch = Scratch(planned, over)
        self._bodies: dict[LoopStep, list[_Steps]] = {}
        #: What loops begin with in the place where it was made.
        self._handed: dict[LoopStep, frozenset[Property]] = {}
        for step in planned.steps:
            if isinstance(step, LoopStep):
                equation = planned.graph.equations[step.loop.equation]
                over_in = [written_over(body, equation, number) for number, body in enumerate(step.bodies)]
                self._bodies[step] = list(map(_Steps, step.bodies, over_in))
                kept = carried_in_place(step.bodies, equation, list(map(olds, over_in)))
                self._handed[step] = handed_over(planned, step, kept)

    def moments(self, graphs: LocalGraphs, outside: int) -> list[Moment]:
        """Of every step, on the device of `graphs`, which has so many bytes of others."""
        device, ratios, types = graphs.device, graphs.ratios, self.planned.types
        sizes: dict[Property, int] = {}
        alike: dict[tuple[TensorType, Placement], int] = {}

        def size(prop: Property) -> int:
            found = sizes.get(prop)
            if found is None:
                key = types[prop.value], prop.placement
                found = alike.get(key)
                if found is None:
                    found = alike[key] = held_bytes(*key, device, ratios)
                sizes[prop] = found
            return found

        made: dict[Property, int] = {}
        found: list[Moment] = []
        for step in self.planned.steps:
            for prop in self._over.get(step, ()):
                sizes[prop] = 0  # it lies where the old state lay
            if isinstance(step, Segment):
                own, what = self._scratch.nbytes(step, graphs) + sum(map(size, step.gives)), "compute"
            elif isinstance(step, Exchange):
                own, what = exchange_bytes(step.move, types[step.move.value], device, ratios), "exchange"
            elif isinstance(step, Away):
                own, what = sum(made.pop(prop) for prop in step.needs), "away"
                found.append(Moment(what, step.first, outside + sum(made.values()), own))
                continue
            elif isinstance(step, Back):
                own, what = sum(map(size, step.gives)), "back"
            elif isinstance(step, Relay):
                own, what = self._relay(step, graphs) + sum(map(size, step.gives)), "stages"
            else:
                for prop in self._handed[step]:
                    made.pop(prop, None)
                # What it carries, or a branch makes, is counted inside.
                rows = sum(map(size, stacked(step, self.planned.graph)))
                again = sum(map(size, self._over.get(step, {}).values()))
                own, what = self._loop(step, graphs) + rows - again, "loop"
            found.append(Moment(what, step.first, outside + sum(made.values()), own))
            made.update((prop, size(prop)) for prop in step.gives)
            for prop in step.drops:
                made.pop(prop, None)
        return found

    def _relay(self, step: Relay, graphs: LocalGraphs) -> int:
        """Bytes of stages beside their results: a piece goes in and comes out, others arrive and leave."""
        stage = graphs.stage(step, self.planned.graph)
        if stage is None:
            return 0
        equation = self.planned.graph.equations[step.compute.equation]
        carried = sum(atom.type.nbytes for atom in stage.outputs[: carried_on(equation)])
        course = Course.of(equation, step.compute.signature, graphs.ratios)
        place = course.place(graphs.device)
        # The first stage has none that arrives, the last none that leaves.
        pieces = 2 + (place > 0) + (place < len(course.owners) - 1)
        return scratch_bytes(stage) + pieces * carried

    def _loop(self, step: LoopStep, graphs: LocalGraphs) -> int:
        """Bytes of a loop that the host runs, beside its results: those of its bodies, one at a time."""
        equation = self.planned.graph.equations[step.loop.equation]
        most = 0
        for number, body in enumerate(self._bodies[step]):
            inside, planned = entering(equation, number), body.planned
            pairs = zip(planned.graph.inputs, planned.program.inputs, strict=True)
            entered = sum(
                held_bytes(value.type, placement, graphs.device, graphs.ratios)
                for i, (value, placement) in enumerate(pairs)
                if i in inside
            )
            within = max([moment.nbytes for moment in body.moments(graphs, 0)], default=0)
            most = max(most, entered + within)
        return most
