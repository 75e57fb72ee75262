"""A segment in parts that switch on as few classes of devices as each needs.

    segment ::= front? part* strips*
    front       what all devices compute alike: no switch
    part        what hangs together, of equal classes: one switch; elementwise on short stretches: all devices
                compute on the longest, no switch
    strips      elementwise updates of state: a loop, `strips.py`

Every branch of a switch is compiled, so that what need not be in one is compiled once in place of once for
every class; and two tensors whose stretches make other classes of the devices would in one switch need a
branch for each pair. What stands in front XLA fuses across exchanges, and computes again where that is
cheaper than to keep it, as in a program without switches; what a branch hands out is written to memory.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from shardwright.backends.schedule.acts import Order
from shardwright.backends.spmd.layout import Layout
from shardwright.backends.spmd.local import Classes, classes
from shardwright.backends.spmd.strips import levels, strips_of
from shardwright.ir.flow import find, reads, writes
from shardwright.ir.placement import R, Shard
from shardwright.ir.program import Compute, Instruction, Move, Property
from shardwright.ir.registry import registry
from shardwright.ir.repeated import begins_again
from shardwright.ir.segments import Segment

#: Bytes up to which a branch is handed what it could compute for itself: it is written to memory before.
COMMON_BYTES = 4 << 10
#: Bytes up to which a padded stretch is computed on with its padding.
PADDED_BYTES = 16 << 10


@dataclass(frozen=True, slots=True)
class Part:
    """Instructions of a segment.

    Attributes:
        segment: the instructions.
        classes: of devices, which have a branch each.
        lengths: where it is computed in strips, those of all its stretches.
        over: and by its results the state whose place they take.
    """

    segment: Segment
    classes: Classes
    lengths: tuple[int, ...] = ()
    over: Mapping[Property, Property] = field(default_factory=dict[Property, Property])


def parts(
    segment: Segment, within: Order, layout: Layout, state: Mapping[Property, Property] | None = None
) -> list[Part]:
    """A segment in parts, in an order in which they can run; together they do what it does.

    Args:
        segment: what to run.
        within: the order that it is in.
        layout: the devices.
        state: results of the order that may take the place of the arguments that they continue, with these.
    """
    whole = classes(segment, within.graph, layout)
    if len(whole) == 1 or any(begins_again(i, within.graph, ()) for i in segment.instructions):
        return [Part(segment, whole)]
    return _Parts(segment, within, layout, state or {}).found(whole)


class _Parts:
    def __init__(
        self, segment: Segment, within: Order, layout: Layout, state: Mapping[Property, Property]
    ) -> None:
        self.segment, self.within, self.layout, self.state = segment, within, layout, state
        self.maker: dict[Property, int] = {}
        self.needs: list[tuple[Property, ...]] = []
        self.gives: list[tuple[Property, ...]] = []
        self.twice = False
        known: dict[int, list[Property]] = {}
        for prop in segment.needs:
            known.setdefault(prop.value, []).append(prop)
        for position, instruction in enumerate(segment.instructions):
            wanted = reads(instruction, within.graph)
            self.needs.append(tuple(find(prop, known.get(prop.value, ())) for prop in wanted))
            self.gives.append(writes(instruction, within.graph))
            for prop in self.gives[-1]:
                self.twice |= prop in known.get(prop.value, ())
                known.setdefault(prop.value, []).append(prop)
                self.maker[prop] = position

    def found(self, whole: Classes) -> list[Part]:
        if self.twice:  # readers of the first and of the second read different things
            return [Part(self.segment, whole)]
        front = self._front()
        by_classes: dict[tuple[Classes, bool], list[int]] = {}
        strips: list[Part] = []
        for group in self._hanging_together(front):
            own = classes(self._segment(group, ()), self.within.graph, self.layout)
            lengths = self._lengths(group) if len(own) > 1 else None
            in_place = None if lengths is None else self._in_place(group, lengths)
            if in_place is not None:
                strips.append(in_place)
                continue
            short = lengths is not None and max(map(self._nbytes, self._cut(group))) <= PADDED_BYTES
            key = (((lengths.index(max(lengths)),),), True) if lengths and short else (own, False)
            by_classes.setdefault(key, []).extend(group)
        result: list[Part] = []
        wanted = {prop for part in strips for prop in part.segment.needs}
        for (alike, _), group in by_classes.items():
            positions = self._with_copies(group, front)
            made = set(self._given(group))
            gives = tuple(prop for prop in self.segment.gives if prop in made)
            result.append(Part(self._segment(positions, gives), alike))
            wanted.update(result[-1].segment.needs)
        return [*self._ahead(front, wanted), *result, *strips]

    def _ahead(self, front: Collection[int], wanted: Collection[Property]) -> list[Part]:
        """What stands in front: of `front`, what is handed on or wanted by the parts that follow."""
        ends = {*self.segment.gives, *wanted}
        needed: set[int] = set()
        for position in sorted(front, reverse=True):
            if not ends.isdisjoint(self.gives[position]):
                needed.add(position)
                ends.update(self.needs[position])
        if not needed:
            return []
        ends = {*self.segment.gives, *wanted}
        positions = sorted(needed)
        gives = tuple(prop for prop in dict.fromkeys(self._given(positions)) if prop in ends)
        return [Part(self._segment(positions, gives), (tuple(range(self.layout.count)),))]

    def _given(self, group: Iterable[int]) -> Iterable[Property]:
        return (prop for i in group for prop in self.gives[i])

    def _segment(self, group: Sequence[int], gives: tuple[Property, ...]) -> Segment:
        inside = set(self._given(group))
        needs = dict.fromkeys(prop for i in group for prop in self.needs[i] if prop not in inside)
        instructions = tuple(self.segment.instructions[i] for i in group)
        return Segment(self.segment.first, instructions, tuple(needs), gives)

    def _front(self) -> set[int]:
        """What all devices compute alike, of nothing else that is made here."""
        found: set[int] = set()
        for position, instruction in enumerate(self.segment.instructions):
            props = (*self.needs[position], *self.gives[position])
            alone = Segment(self.segment.first, (instruction,), self.needs[position], self.gives[position])
            known = all(prop not in self.maker or self.maker[prop] in found for prop in self.needs[position])
            known = known and all(prop.group is None for prop in props)
            if known and len(classes(alone, self.within.graph, self.layout)) == 1:
                found.add(position)
        return found

    def _with_copies(self, group: Sequence[int], front: Collection[int]) -> list[int]:
        """A group, with what of `front` its branches compute for themselves: cheap, and fused with readers.

        What a branch is handed is in memory. That is no loss where the branch multiplies matrices by it,
        where it is handed on anyway, or where more would have to be handed over to compute it of.
        """
        positions, kept = set(group), set(self.segment.gives)
        readers: dict[Property, list[int]] = {}
        for position in group:
            for prop in self.needs[position]:
                readers.setdefault(prop, []).append(position)
        for position in sorted(front, reverse=True):
            read = [prop for prop in self.gives[position] if prop in readers]
            nbytes = sum(map(self._nbytes, read))
            if nbytes <= COMMON_BYTES or not kept.isdisjoint(read):
                continue
            cheap = self._kind(position)
            in_memory = any(self._kind(reader) is None for prop in read for reader in readers[prop])
            if cheap is None or (cheap == "elementwise" and in_memory):
                continue
            more = {p for p in self.needs[position] if p in self.maker} - kept - readers.keys()
            if sum(map(self._nbytes, more)) <= nbytes:
                positions.add(position)
                for prop in self.needs[position]:
                    readers.setdefault(prop, []).append(position)
        return sorted(positions)

    def _kind(self, position: int) -> str | None:
        """Of an instruction that XLA fuses with its readers: how it does."""
        instruction = self.segment.instructions[position]
        if isinstance(instruction, Move):
            return "movement"
        if not isinstance(instruction, Compute):
            return None
        op = registry().get(self.within.graph.equations[instruction.equation].primitive)
        return op.kind if op is not None and op.kind in ("elementwise", "movement") else None

    def _nbytes(self, prop: Property) -> int:
        return self.within.types[prop.value].nbytes

    def _hanging_together(self, without: Collection[int]) -> list[list[int]]:
        """Positions that read one another's results, in the order of their first."""
        parent = list(range(len(self.needs)))

        def root(i: int) -> int:
            while parent[i] != i:
                parent[i] = parent[parent[i]]
                i = parent[i]
            return i

        for position, needs in enumerate(self.needs):
            for prop in needs if position not in without else ():
                maker = self.maker.get(prop)
                if maker is not None and maker not in without:
                    parent[root(position)] = root(maker)
        groups: dict[int, list[int]] = {}
        for position in range(len(self.needs)):
            if position not in without:
                groups.setdefault(root(position), []).append(position)
        return list(groups.values())

    def _cut(self, group: Sequence[int]) -> list[Property]:
        """What some instructions read and write that is cut."""
        props = (prop for i in group for prop in (*self.needs[i], *self.gives[i]))
        return [prop for prop in props if isinstance(prop.placement, Shard)]

    def _lengths(self, group: Sequence[int]) -> tuple[int, ...] | None:
        """Of all stretches, if all devices could compute on stretches of any other length just as well."""
        for position in group:
            if not self._is_elementwise(self.segment.instructions[position]):
                return None
            for prop in (*self.needs[position], *self.gives[position]):
                if prop.group is not None or not (prop.placement == R or isinstance(prop.placement, Shard)):
                    return None
        cuts = {self.layout.lengths(self.within.types[p.value], p.placement) for p in self._cut(group)}
        return cuts.pop() if len(cuts) == 1 else None

    def _in_place(self, group: Sequence[int], lengths: tuple[int, ...]) -> Part | None:
        """Updates of state, if that is what they are, as strips."""
        if max(map(self._nbytes, self._cut(group))) <= PADDED_BYTES or strips_of(lengths) is None:
            return None
        kept = set(self.segment.gives)
        segment = self._segment(group, tuple(p for p in dict.fromkeys(self._given(group)) if p in kept))
        over = {prop: self.state[prop] for prop in segment.gives if prop in self.state}
        others = {prop for i in range(len(self.needs)) if i not in group for prop in self.needs[i]}
        mine = {prop for prop in segment.needs if prop in self.segment.drops and prop not in others}
        alike = all(
            old in mine
            and old.placement == new.placement
            and self.within.types[old.value] == self.within.types[new.value]
            for new, old in over.items()
        )
        if len(over) < len(segment.gives) or not alike or levels(segment, self.within.graph, over) is None:
            return None
        return Part(segment, (), lengths, over)

    def _is_elementwise(self, instruction: Instruction) -> bool:
        if not isinstance(instruction, Compute):
            return False
        primitive = self.within.graph.equations[instruction.equation].primitive
        op = registry().get(primitive)
        return op is not None and (op.kind == "elementwise" or primitive == "broadcast_in_dim")
