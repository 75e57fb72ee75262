"""Scratch of segments on one device; those that are alike but for names are worked out once.

Repeated layers are alike, and so is most of what programs of one step run that are looked at one after
another. What is alike is found in two parts: how a segment's tensors hang together, the same on all devices,
and the shapes of what one device holds of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping
from dataclasses import dataclass

from shardwright.backends.layout import holds
from shardwright.backends.local_graph import LocalGraphs
from shardwright.cost.memory.buffers import scratch_bytes
from shardwright.ir.flow import find, reads, writes
from shardwright.ir.graph import Graph, TensorType, Value, per_graph, value_types
from shardwright.ir.placement import Placement
from shardwright.ir.program import Move, Property
from shardwright.ir.segments import Schedule, Segment, Step

#: Where so few programs of a step are looked at, what is in one of them once is worked out as it is met: of
#: long segments that takes no longer than to say what they are like.
_FEW = 3


@dataclass(frozen=True, slots=True)
class Likeness:
    """What a segment is but for names, and for the shapes of what a device holds.

    Attributes:
        number: equal for segments that devices run as equal graphs where they hold equal shapes.
        tensors: what those shapes are of, each once.
    """

    number: int
    tensors: tuple[tuple[TensorType, Placement], ...]


class _Met:
    """What was met of one graph: programs, numbers of segments, scratch by number, compiler and shapes."""

    def __init__(self) -> None:
        self.programs = 0
        self.numbers: dict[Hashable, int] = {}
        self.scratch: dict[tuple[int, str, tuple[tuple[int, ...], ...]], int] = {}


@per_graph
def _met(graph: Graph) -> _Met:
    del graph
    return _Met()


class Scratch:
    """Scratch of the segments of one schedule.

    Args:
        planned: the schedule.
        over: what its segments make in the place of donated state, see `shardwright.ir.donation.taken_over`.
    """

    def __init__(self, planned: Schedule, over: Mapping[Step, Mapping[Property, Property]]) -> None:
        self._graph, self._met, self._over = planned.graph, _met(planned.graph), over
        self._met.programs += 1
        lengths = [len(step.instructions) for step in planned.steps if isinstance(step, Segment)]
        #: How many instructions segments have that others may be like.
        self._shared = {n for n, times in Counter(lengths).items() if times > 1 or self._met.programs > _FEW}
        moves = [i for i in planned.program.instructions if isinstance(i, Move)]
        #: Whether not all devices have a part in everything.
        self._grouped = any(move.group is not None for move in moves)
        #: By segment, and by device where they differ.
        self._like: dict[tuple[Segment, int], Likeness | None] = {}

    def nbytes(self, segment: Segment, graphs: LocalGraphs) -> int:
        """Bytes of the arena of a segment on the device of `graphs`."""
        shared = len(segment.instructions) in self._shared
        like = self._likeness(segment, graphs.device) if shared else None
        if like is None:
            return self._worked_out(segment, graphs)
        shapes = tuple([graphs.type(*tensor).shape for tensor in like.tensors])
        key = like.number, graphs.compiler, shapes
        if key not in self._met.scratch:
            self._met.scratch[key] = self._worked_out(segment, graphs)
        return self._met.scratch[key]

    def _worked_out(self, segment: Segment, graphs: LocalGraphs) -> int:
        return scratch_bytes(graphs.segment(segment, self._graph, self._over.get(segment, {})))

    def _likeness(self, segment: Segment, device: int) -> Likeness | None:
        key = segment, device if self._grouped else -1
        if key not in self._like:
            self._like[key] = self._found(segment, device)
        return self._like[key]

    def _found(self, segment: Segment, device: int) -> Likeness | None:
        """The likeness of a segment as a device runs it; None where loops are."""
        graph, types = self._graph, value_types(self._graph)
        numbers: dict[Property, int] = {}
        tensors: dict[tuple[TensorType, Placement], None] = {}
        key: list[Hashable] = []
        made = 0
        for prop in segment.needs:
            if holds(prop, device):
                tensor = types[prop.value], prop.placement
                key.append(tensor)
                tensors[tensor] = None
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
                key.append((id(equation.form), instruction.signature, *ins))
            for prop in written:
                tensors[types[prop.value], prop.placement] = None
                numbers[prop], made = made, made + 1
        over = self._over.get(segment, {})
        for prop in segment.gives:
            if holds(prop, device):
                key.append((numbers[prop], numbers.get(over[prop]) if prop in over else None))
        known = self._met.numbers
        return Likeness(known.setdefault(tuple(key), len(known)), tuple(tensors))
