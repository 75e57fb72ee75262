"""Memory of each device under a plan, step by step of its schedule, as the MPI backend runs it.

Between two exchanges a device runs one compiled program: what is held outside of it, its results, and its
scratch (`cost/memory/buffers.py`, on the device's own shapes). An exchange takes its result, and what it
packs or pads. Arguments are the caller's: the old state is there until the new one is whole, unless it is
donated (`shardwright/ir/donation.py`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from shardwright.backends.layout import holds
from shardwright.backends.local_graph import LocalGraphs
from shardwright.cost.memory.buffers import layout_apart, scratch_bytes
from shardwright.cost.memory.exchange_buffers import exchange_bytes, held_bytes
from shardwright.ir.donation import taken_over
from shardwright.ir.flow import find, reads, writes
from shardwright.ir.graph import Equation, Graph, TensorType, Value, value_types
from shardwright.ir.jaxpr import source_text
from shardwright.ir.placement import Grid, Placement, Shard, by_node, cuts, lengths, seat
from shardwright.ir.program import Move, Program, Property
from shardwright.ir.regions import entering
from shardwright.ir.segments import Away, Back, Exchange, LoopStep, Schedule, Segment, schedule


@dataclass(frozen=True, slots=True)
class Moment:
    """One step of a device's schedule.

    Attributes:
        what: "compute", "exchange", "loop" (run by the host), "away" or "back" (to and from host memory).
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
    return _device_memory(schedule(program, graph), ratios, device)


def peaks(program: Program, graph: Graph, ratios: Sequence[float]) -> tuple[int, ...]:
    """Peak bytes of every device of a verified program; devices that hold the same count once."""
    planned = schedule(program, graph)
    known: dict[Hashable, int] = {}
    found: list[int] = []
    for device, kind in enumerate(_kinds(program, graph, ratios)):
        if kind not in known:
            known[kind] = _device_memory(planned, ratios, device).peak_bytes
        found.append(known[kind])
    return tuple(found)


@dataclass(frozen=True, slots=True)
class Held:
    """Something that is in memory, and its bytes."""

    what: str
    nbytes: int


def fullest(
    program: Program, graph: Graph, ratios: Sequence[float], device: int, most: int = 6
) -> tuple[Held, ...]:
    """What is in a device's memory when it is fullest, the largest first: inputs by name, the rest by source.

    Args:
        program: a verified program.
        graph: what it computes.
        ratios: share of every device.
        device: its position in the program.
        most: entries, the last of which sums up what is left.
    """
    planned = schedule(program, graph)
    moments = _device_memory(planned, ratios, device).moments
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
            own = layout_apart(LocalGraphs(device, ratios).segment(step, graph))
            at = own.peak_kernel
            for buffer in own.buffers:
                if buffer.first <= at <= buffer.last:
                    note(_made_by(buffer.equation, buffer.role), buffer.nbytes)
        if number < peak:
            alive.difference_update(step.needs if isinstance(step, Away) else step.drops)
    for prop in alive:
        maker = makers.get(prop.value)
        if maker is not None:
            nbytes = held_bytes(planned.types[prop.value], prop.placement, device, ratios)
            note(_made_by(maker, "held between programs"), nbytes)
        else:
            note("inputs gathered", held_bytes(planned.types[prop.value], prop.placement, device, ratios))
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
    planned = schedule(program, graph)
    graphs = LocalGraphs(device, ratios)
    steps = _device_memory(planned, ratios, device).moments
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
                own = layout_apart(graphs.segment(step, graph))
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


def _made_by(equation: Equation | None, role: str) -> str:
    if equation is None:
        return "copies of inputs"
    where = source_text(equation.source)
    return f"{role}: {equation.primitive}{f' at {where}' if where else ''}"


def _kinds(program: Program, graph: Graph, ratios: Sequence[float]) -> Iterator[Hashable]:
    """Of every device, what decides how much it holds: its stretches, and the groups it is in."""
    flat: dict[tuple[int, Shard], None] = {}
    grids: dict[tuple[tuple[int, int], tuple[int, int], bool], None] = {}
    groups: dict[tuple[int, ...], None] = {}
    # Many equations are of one form and have one signature.
    met: set[tuple[int, int]] = set()
    nodes: tuple[int, ...] | None = None

    def note(program: Program, graph: Graph) -> None:
        nonlocal nodes
        types = value_types(graph)
        pairs = [(v.type, p) for v, p in zip(graph.inputs, program.inputs, strict=True)]
        for instruction in program.instructions:
            if isinstance(instruction, Move):
                tensor = types[instruction.value]
                pairs += [(tensor, instruction.pre), (tensor, instruction.post)]
                if instruction.group is not None:
                    groups[instruction.group] = None
                continue
            equation = graph.equations[instruction.equation]
            key = id(equation.form), id(instruction.signature)
            if key not in met:
                met.add(key)
                pairs += zip(equation.input_types, instruction.signature.ins, strict=True)
                pairs += zip(equation.output_types, instruction.signature.outs, strict=True)
            for body, region in zip(getattr(instruction, "bodies", ()), equation.regions, strict=False):
                note(body, region)
        for tensor, placement in set(pairs):
            if isinstance(placement, Grid):
                nodes = placement.nodes
                across, within = (
                    (tensor.shape[p.dim], p.unit) if isinstance(p, Shard) else (0, 1)
                    for p in (placement.across, placement.within)
                )
                grids[across, within, len({cut.dim for cut in cuts(placement)}) < len(cuts(placement))] = None
            else:
                for cut in cuts(placement):
                    flat[tensor.shape[cut.dim] // cut.unit, Shard(0, by=cut.by)] = None

    note(program, graph)
    stretches = [lengths(units, 1, cut.ratios(ratios)) for units, cut in flat]
    if nodes is not None:
        stretches += _on_nodes(grids, ratios, nodes)
    for device in range(len(ratios)):
        own = tuple(stretch[device] for stretch in stretches)
        yield own, tuple(device in group for group in groups)


def _on_nodes(
    grids: Iterable[tuple[tuple[int, int], tuple[int, int], bool]],
    ratios: Sequence[float],
    nodes: tuple[int, ...],
) -> list[Sequence[int]]:
    """Elements per device of what is cut over the nodes, and of what is cut within them.

    Args:
        grids: size and unit of a dimension that is cut over the nodes, those of one that is cut within them
            (0 where none is), and whether they are one dimension.
        ratios: share of every device.
        nodes: devices of every node.
    """
    shares, inside = by_node(ratios, nodes)
    # Equal nodes are cut alike.
    cut = cache(lengths)
    found: dict[tuple[object, ...], Sequence[int]] = {}
    for (size, unit), (own, own_unit), nested in grids:
        of_node = cut(size, unit, shares)
        if (size, unit) not in found:
            found[size, unit] = [of_node[seat(d, nodes)[0]] for d in range(len(ratios))]
        key = (size, unit, own_unit) if nested else (own, own_unit, "within")
        if key not in found:
            parts = of_node if nested else [own] * len(nodes)
            pairs = zip(parts, inside, strict=True)
            found[key] = [n for part, mine in pairs for n in cut(part, own_unit, mine)]
    return list(found.values())


def _device_memory(planned: Schedule, ratios: Sequence[float], device: int) -> DeviceMemory:
    program, graph = planned.program, planned.graph
    graphs = LocalGraphs(device, ratios)
    pairs = list(zip(graph.inputs, program.inputs, strict=True))
    arguments = sum(held_bytes(value.type, placement, device, ratios) for value, placement in pairs)
    arguments += sum(value.type.nbytes for value in graph.constants)
    moments = _moments(planned, graphs, planned.types, arguments, {})
    return DeviceMemory(arguments, tuple(moments))


def _scratch(
    segment: Segment, graphs: LocalGraphs, graph: Graph, alike: int, known: dict[Hashable, int]
) -> int:
    """Scratch of a segment; those that are alike but for names, as repeated layers are, count once.

    Args:
        segment: of the schedule.
        graphs: makes what a device runs of it.
        graph: of the step, or of a loop's body.
        alike: segments of as many instructions as this one.
        known: scratch of those met so far that have others beside them.
    """
    key = _likeness(segment, graph, graphs.device) if alike > 1 else None
    if key is None:
        return scratch_bytes(graphs.segment(segment, graph))
    if key not in known:
        known[key] = scratch_bytes(graphs.segment(segment, graph))
    return known[key]


def _likeness(segment: Segment, graph: Graph, device: int) -> Hashable | None:
    """Equal for segments that a device runs as equal graphs (`LocalGraphs.segment`); None where loops are."""
    types = value_types(graph)
    numbers: dict[Property, int] = {}
    made = 0
    key: list[Hashable] = []
    for prop in segment.needs:
        if holds(prop, device):
            key.append((types[prop.value], prop.placement))
            numbers[prop], made = made, made + 1
    key.append(made)
    for instruction in segment.instructions:
        written = writes(instruction, graph)
        if isinstance(instruction, Move):
            if not holds(written[0], device):
                continue
            (wanted,) = reads(instruction, graph)
            source = numbers[wanted if wanted in numbers else find(wanted, numbers)]
            key.append((source, types[written[0].value], written[0].placement))
        else:
            equation = graph.equations[instruction.equation]
            if equation.regions:
                return None
            pairs = zip(equation.inputs, instruction.signature.ins, strict=True)
            ins = [numbers[Property(a.index, p)] if isinstance(a, Value) else str(a) for a, p in pairs]
            key.append((id(equation.form), equation.part, instruction.signature, *ins))
        for prop in written:
            numbers[prop], made = made, made + 1
    key += [numbers[prop] for prop in segment.gives if holds(prop, device)]
    return tuple(key)


def _moments(
    planned: Schedule,
    graphs: LocalGraphs,
    types: Mapping[int, TensorType],
    outside: int,
    known: dict[Hashable, int],
) -> list[Moment]:
    device, ratios = graphs.device, graphs.ratios
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

    over = taken_over(planned)
    as_long = Counter(len(step.instructions) for step in planned.steps if isinstance(step, Segment))
    made: dict[Property, int] = {}
    found: list[Moment] = []
    for step in planned.steps:
        for prop in over.get(step, ()):
            sizes[prop] = 0  # it lies where the old state lay
        if isinstance(step, Segment):
            others = as_long[len(step.instructions)]
            own = _scratch(step, graphs, planned.graph, others, known) + sum(map(size, step.gives))
            what = "compute"
        elif isinstance(step, Exchange):
            own = exchange_bytes(step.move, types[step.move.value], device, ratios)
            what = "exchange"
        elif isinstance(step, Away):
            own, what = sum(made.pop(prop) for prop in step.needs), "away"
            found.append(Moment(what, step.first, outside + sum(made.values()), own))
            continue
        elif isinstance(step, Back):
            own, what = sum(map(size, step.gives)), "back"
        else:
            own, what = _loop(step, planned.graph, graphs) + sum(map(size, step.gives)), "loop"
        found.append(Moment(what, step.first, outside + sum(made.values()), own))
        made.update((prop, size(prop)) for prop in step.gives)
        for prop in step.drops:
            made.pop(prop, None)
    return found


def _loop(step: LoopStep, graph: Graph, graphs: LocalGraphs) -> int:
    """Bytes of a loop that the host runs, beside its results: those of its bodies, one at a time."""
    equation = graph.equations[step.loop.equation]
    most = 0
    for number, (body, region) in enumerate(zip(step.bodies, equation.regions, strict=True)):
        types, inside = value_types(region), entering(equation, number)
        moments = _moments(body, graphs, types, 0, {})
        entered = sum(
            held_bytes(value.type, placement, graphs.device, graphs.ratios)
            for i, (value, placement) in enumerate(zip(region.inputs, body.program.inputs, strict=True))
            if i in inside
        )
        most = max(most, entered + max((moment.nbytes for moment in moments), default=0))
    return most
