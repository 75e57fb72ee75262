"""What a verified program takes of each device's memory as the MPI backend runs it, and whose it is."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shardwright.cost.device import DeviceType
from shardwright.cost.memory.buffers import Buffer, layout
from shardwright.cost.memory.exchange_buffers import held_bytes
from shardwright.ir.donation import taken_over
from shardwright.ir.flow import writes
from shardwright.ir.graph import Equation, Graph, Value
from shardwright.ir.jaxpr import source_text, summary
from shardwright.ir.program import Program, Property
from shardwright.ir.segments import Away, Exchange, Segment
from shardwright.memory.walk import DeviceMemory, Walk

#: Instructions of programs whose walks are remembered, together.
_REMEMBERED = 1 << 18


def device_memory(
    program: Program, graph: Graph, ratios: Sequence[float], device: int, types: Sequence[DeviceType] = ()
) -> DeviceMemory:
    """Memory of the device at position `device` of a verified program, whose devices are of these types."""
    return Walk(program, graph).of_device(ratios, device, types)


def peaks(
    program: Program, graph: Graph, ratios: Sequence[float], types: Sequence[DeviceType] = ()
) -> tuple[int, ...]:
    """Peak bytes of every device of a verified program, which are of these types."""
    return Walk(program, graph).peaks(ratios, types)


class Looking:
    """Says how much memory the programs of one step take: see `shardwright.synth.programs.judge.CloseLook`.

    A program is often looked at again at other ratios.

    Args:
        graph: the step.
        types: of the devices of the programs; without them memory is what the graph's compiler makes of it.
        walks: those that are known.
    """

    def __init__(self, graph: Graph, types: Sequence[DeviceType] = (), walks: _Walks | None = None) -> None:
        self.graph, self._types = graph, tuple(types)
        self._walks = walks or _Walks(graph)

    def on(self, types: Sequence[DeviceType]) -> Looking:
        """The same for programs on devices of these types."""
        return Looking(self.graph, types, self._walks)

    def __call__(self, program: Program, ratios: Sequence[float]) -> tuple[int, ...]:
        return self._walks.of(program).peaks(ratios, self._types)

    def crowds(
        self, program: Program, ratios: Sequence[float], device: int, limit: float
    ) -> tuple[tuple[int, Mapping[int, int]], ...]:
        """See `crowds`."""
        return _crowds(self._walks.of(program), ratios, device, limit, self._types)


class _Walks:
    """Walks of programs of one step."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        #: By identity; a walk keeps its program, so that no other has its identity.
        self._known: dict[int, tuple[Program, Walk]] = {}
        self._instructions = 0

    def of(self, program: Program) -> Walk:
        """That of a program, remembered."""
        known = self._known.get(id(program))
        if known is None:
            self._instructions += len(program.instructions)
            if self._instructions > _REMEMBERED:
                self._known.clear()
                self._instructions = len(program.instructions)
            known = self._known[id(program)] = program, Walk(program, self._graph)
        return known[1]


@dataclass(frozen=True, slots=True)
class Held:
    """Something that is in memory, and its bytes."""

    what: str
    nbytes: int


def fullest(
    program: Program,
    graph: Graph,
    ratios: Sequence[float],
    device: int,
    types: Sequence[DeviceType] = (),
    most: int = 6,
) -> tuple[Held, ...]:
    """What is in a device's memory when it is fullest, the largest first: inputs by name, the rest by source.

    Args:
        program: a verified program.
        graph: what it computes.
        ratios: share of every device.
        device: its position in the program.
        types: of all devices, see `Looking`.
        most: entries, the last of which sums up what is left.
    """
    walk = Walk(program, graph)
    planned, moments = walk.planned, walk.of_device(ratios, device, types).moments
    peak = max(range(len(moments)), key=lambda i: moments[i].nbytes, default=-1)
    found: dict[str, int] = {}

    def note(what: str, nbytes: int) -> None:
        found[what] = found.get(what, 0) + nbytes

    state = set(graph.state.values())
    for number, (value, placement) in enumerate(zip(graph.inputs, program.inputs, strict=True)):
        note("state" if number in state else "data", held_bytes(value.type, placement, device, ratios))
    makers = {v.index: e for e in graph.equations for v in e.outputs}
    alive: set[Property] = set()
    over = taken_over(planned)
    for number, step in enumerate(planned.steps[: peak + 1]):
        alive.update(() if isinstance(step, Away) else set(step.gives).difference(over.get(step, ())))
        if number == peak and isinstance(step, Segment):
            own = layout(walk.graphs(ratios, device, types).segment(step, graph, over.get(step, {})))
            at = own.peak_kernel
            for buffer in own.buffers:
                if buffer.first <= at <= buffer.last:
                    note(_in_segment(buffer, step, graph), buffer.nbytes)
        if number < peak:
            alive.difference_update(step.needs if isinstance(step, Away) else step.drops)
    for prop in alive:
        maker = makers.get(prop.value)
        made_by = "" if maker is None else _made_by(maker, prop.value, graph)
        what = f"held between programs: {made_by}" if made_by else "inputs gathered"
        note(what, held_bytes(planned.types[prop.value], prop.placement, device, ratios))
    rows = sorted((Held(*row) for row in found.items() if row[1]), key=lambda row: (-row.nbytes, row.what))
    if len(rows) > most:
        rest = sum(row.nbytes for row in rows[most - 1 :])
        rows = [*rows[: most - 1], Held(f"{len(found) - most + 1} others", rest)]
    return tuple(rows)


def crowds(
    program: Program, graph: Graph, ratios: Sequence[float], device: int, limit: float
) -> tuple[tuple[int, Mapping[int, int]], ...]:
    """The steps of a device's schedule that take more than `limit` bytes: bytes, and whose they are.

    Returns:
        Of every such step its bytes, and how many of them belong to which value (by index): inputs, what is
        held, results, and what was made of a value in scratch when that is fullest.
    """
    return _crowds(Walk(program, graph), ratios, device, limit)


def _crowds(
    walk: Walk, ratios: Sequence[float], device: int, limit: float, types: Sequence[DeviceType] = ()
) -> tuple[tuple[int, Mapping[int, int]], ...]:
    planned, graphs = walk.planned, walk.graphs(ratios, device, types)
    program, graph, over = planned.program, planned.graph, taken_over(planned)
    steps = walk.of_device(ratios, device, types).moments
    found: list[tuple[int, Mapping[int, int]]] = []
    alive: dict[Property, None] = {}
    for step, moment in zip(planned.steps, steps, strict=True):
        alive.update(() if isinstance(step, Away) else dict.fromkeys(step.gives))
        if moment.nbytes > limit:
            mine: Counter[int] = Counter()
            for value, placement in zip(graph.inputs, program.inputs, strict=True):
                mine[value.index] += held_bytes(value.type, placement, device, ratios)
            for prop in alive:
                mine[prop.value] += held_bytes(planned.types[prop.value], prop.placement, device, ratios)
            if isinstance(step, Segment):
                own = layout(graphs.segment(step, graph, over.get(step, {})))
                at = own.peak_kernel
                for buffer in own.buffers:
                    if buffer.equation is not None and buffer.first <= at <= buffer.last:
                        # Equations of a segment's graph are numbered as its instructions.
                        made = writes(step.instructions[buffer.equation.index], graph)
                        mine[made[0].value] += buffer.nbytes
            elif isinstance(step, Exchange):
                mine[step.move.value] += moment.own_bytes
            found.append((moment.nbytes, mine))
        for prop in step.needs if isinstance(step, Away) else step.drops:
            alive.pop(prop, None)
    return tuple(found)


def _in_segment(buffer: Buffer, step: Segment, graph: Graph) -> str:
    if buffer.equation is None:
        return "copies of inputs"
    # Equations of a segment's graph are numbered as its instructions.
    made = writes(step.instructions[buffer.equation.index], graph)
    return f"{buffer.role}: {_made_by(buffer.equation, made[0].value, graph)}"


def _made_by(equation: Equation, value: int, graph: Graph) -> str:
    """What makes a value, by index, and where: at a line of the user's, or for one if a rewriting adds it."""
    if summary(equation.source):
        return f"{equation.primitive} at {source_text(equation.source)}"
    made = next((v for each in graph.equations for v in each.outputs if v.index == value), None)
    origin = "" if made is None else _origin(made, graph)
    return f"{equation.primitive}{f' for {origin}' if origin else ''}"


def _origin(value: Value, graph: Graph) -> str:
    """The line of the user's, or the argument, nearest to what makes a value; "" if there is none."""
    makers = {made: equation for equation in graph.equations for made in equation.outputs}
    names = dict(zip(graph.inputs, graph.input_names, strict=False))
    waiting, seen = deque([value]), {value}
    while waiting:
        near = waiting.popleft()
        maker = makers.get(near)
        if maker is None:
            if names.get(near):
                return names[near]
            continue
        if summary(maker.source):
            return f"{maker.primitive} at {source_text(maker.source)}"
        for region in maker.regions:
            # A loop's results are those of its body, in the same order.
            inside = dict(zip(maker.outputs, region.outputs, strict=False)).get(near)
            if isinstance(inside, Value) and (origin := _origin(inside, region)):
                return origin
        read = [atom for atom in maker.inputs if isinstance(atom, Value) and atom not in seen]
        seen.update(read)
        waiting.extend(read)
    return ""
