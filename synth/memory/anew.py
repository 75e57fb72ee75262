"""Cheap results computed anew in the segment that reads them, from less than what they take in memory.

A segment hands on what later ones read, and of a layer that may be several tensors that elementwise equations
make of one: a product, its activation, and what the activation's gradient needs. Where memory binds, the one
alone is handed on, and the others are computed again by whoever reads them, which costs next to no time.
A product that reads them and nothing else that the segment makes goes first, apart: a compiler would have
its operand in memory together with all others. `joined.py` comes before; `ir/late.py` does the same where it
costs no time at all.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass, replace

from shardwright.ir.graph import Graph
from shardwright.ir.late import COPIED
from shardwright.ir.program import Compute, Instruction, Move, Program
from shardwright.ir.registry import registry
from shardwright.synth.memory.blocks import Blocks

#: What frees less than this part of what is there when most is stays as it is.
_WORTH = 1 / 256

#: So does what is handed on while less than this part of that is there.
_FULL = 0.5


def anew(program: Program, graph: Graph, part: float) -> Program:
    """An equal program that hands on less between its segments.

    Args:
        program: a verified program.
        graph: what it computes.
        part: of a tensor that is cut, how much of it a device has.
    """
    blocks = Blocks(program, graph, part)
    there = blocks.there(blocks.of)
    most = float(there.max(initial=0.0))
    last = [max((int(blocks.of[i]) for i in some), default=-1) for some in blocks.readers]
    for prop in blocks.kept:
        last[prop] = blocks.last
    made: dict[int, list[int]] = {}
    for prop, makers in enumerate(blocks.makers):
        for position in makers:
            made.setdefault(int(blocks.of[position]), []).append(prop)
    wanted: dict[int, set[int]] = {}
    for segment, props in sorted(made.items()):
        ends = max(last[prop] for prop in props)
        if segment % 2 or float(there[segment : ends + 1].max(initial=0.0)) < _FULL * most:
            continue
        handed = _Handed(blocks, segment, last, most * _WORTH)
        for prop, readers in handed.less(props):
            for block in readers:
                wanted.setdefault(block, set()).add(prop)
    return replace(program, instructions=tuple(_Written(blocks, wanted).instructions()))


class _Handed:
    """What one segment hands on; `last` is the last block in which each property is read."""

    def __init__(self, blocks: Blocks, segment: int, last: list[int], worth: float) -> None:
        self.blocks, self.segment, self.last, self.worth = blocks, segment, last, worth
        self._given = set(blocks.given)
        self._kept = set(blocks.kept)

    def less(self, props: Iterable[int]) -> list[tuple[int, tuple[int, ...]]]:
        """What need not be handed on, as it can be computed anew; and the blocks that want it."""
        nbytes = self.blocks.nbytes
        crossing = {prop: blocks for prop in props if (blocks := self._later(prop))}
        wanted = dict(crossing)
        again: dict[int, tuple[int, ...]] = {}
        waiting = [(-self._maker(prop), prop) for prop in wanted]
        heapq.heapify(waiting)
        done: set[int] = set()
        while waiting:
            _, prop = heapq.heappop(waiting)
            if prop in done:
                continue
            done.add(prop)
            mine = self._operands(prop, wanted[prop][-1])
            if mine is None or sum(nbytes[o] for o in mine if o not in wanted) > nbytes[prop]:
                continue
            again[prop] = wanted[prop]
            for operand in mine:
                wanted[operand] = tuple(sorted({*wanted.get(operand, ()), *wanted[prop]}))
                heapq.heappush(waiting, (-self._maker(operand), operand))
        return self._that_pay(crossing, wanted, again)

    def _maker(self, prop: int) -> int:
        return self.blocks.makers[prop][-1]

    def _later(self, prop: int) -> tuple[int, ...]:
        """Blocks behind the next cut that read a property."""
        found = {int(self.blocks.of[i]) for i in self.blocks.readers[prop]}
        return tuple(sorted(block for block in found if block > self.segment + 1))

    def _operands(self, prop: int, until: int) -> list[int] | None:
        """What else the segment makes that a property is computed of; None where it cannot be anew."""
        blocks = self.blocks
        if prop in self._kept or len(blocks.makers[prop]) > 1 or any(b % 2 for b in self._later(prop)):
            return None
        maker = self._maker(prop)
        if not _is_light(blocks.program.instructions[maker], blocks.graph) or len(blocks.gives[maker]) > 1:
            return None
        found: list[int] = []
        for operand in blocks.needs[maker]:
            if operand in self._given:
                continue
            if len(blocks.makers[operand]) > 1:
                return None
            if blocks.of[self._maker(operand)] == self.segment:
                found.append(operand)
            elif self.last[operand] < until:
                return None  # it would have to be kept for this
        return found

    def _that_pay(
        self,
        crossing: dict[int, tuple[int, ...]],
        wanted: dict[int, tuple[int, ...]],
        again: dict[int, tuple[int, ...]],
    ) -> list[tuple[int, tuple[int, ...]]]:
        """Those of which all that are made of the same together free enough."""
        blocks, leader = self.blocks, {prop: prop for prop in wanted}

        def group(prop: int) -> int:
            while leader[prop] != prop:
                prop = leader[prop]
            return prop

        for prop in again:
            for operand in blocks.needs[self._maker(prop)]:
                if operand in wanted:
                    leader[group(operand)] = group(prop)
        freed = dict.fromkeys(map(group, wanted), 0.0)
        for prop in wanted:
            handed_on_before, handed_on_now = prop in crossing, prop not in again
            freed[group(prop)] += blocks.nbytes[prop] * (handed_on_before - handed_on_now)
        return [(prop, at) for prop, at in again.items() if freed[group(prop)] > self.worth]


@dataclass(frozen=True, slots=True)
class _Written:
    """The program in which each block computes anew what is `wanted` of it."""

    blocks: Blocks
    wanted: dict[int, set[int]]

    def instructions(self) -> list[Instruction]:
        """In order."""
        instructions, of = self.blocks.program.instructions, self.blocks.of.tolist()
        found: list[Instruction] = []
        begin = 0
        while begin < len(of):
            end = begin
            while end < len(of) and of[end] == of[begin]:
                end += 1
            members = list(range(begin, end))
            here = self._within(of[begin], members) if of[begin] in self.wanted else members
            found += [instructions[i] for i in here]
            begin = end
        return found

    def _within(self, block: int, members: list[int]) -> list[int]:
        """Positions of a block's instructions, those that are there again before their readers."""
        blocks, here = self.blocks, self.wanted[block]
        first: dict[tuple[int, ...], list[int]] = {}
        for position in members:
            mine = [prop for prop in blocks.needs[position] if prop in here]
            if mine and self._is_product(position) and self._there_before(position, block):
                first.setdefault(self._made_of(mine, here), []).append(position)
        gone = {position for some in first.values() for position in some}
        rest = [position for position in members if position not in gone]
        read = dict.fromkeys(prop for position in rest for prop in blocks.needs[position] if prop in here)
        apart = [position for makers, products in first.items() for position in (*makers, *products)]
        return [*apart, *self._made_of(read, here), *rest]

    def _made_of(self, props: Iterable[int], here: set[int]) -> tuple[int, ...]:
        """Positions of what computes them, and of what that is computed of."""
        found: set[int] = set()
        waiting = list(props)
        while waiting:
            position = self.blocks.makers[waiting.pop()][-1]
            if position not in found:
                found.add(position)
                waiting += [prop for prop in self.blocks.needs[position] if prop in here]
        return tuple(sorted(found))

    def _is_product(self, position: int) -> bool:
        instruction = self.blocks.program.instructions[position]
        return isinstance(instruction, Compute) and _kind(instruction, self.blocks.graph) == "contraction"

    def _there_before(self, position: int, block: int) -> bool:
        """Whether an instruction reads nothing that its block makes, other than anew."""
        blocks, here = self.blocks, self.wanted[block]
        others = (prop for prop in blocks.needs[position] if prop not in here)
        return all(block not in {int(blocks.of[i]) for i in blocks.makers[prop]} for prop in others)


def _kind(instruction: Compute, graph: Graph) -> str:
    op = registry().get(graph.equations[instruction.equation].primitive)
    return "" if op is None else op.kind


def _is_light(instruction: Instruction, graph: Graph) -> bool:
    """Whether it takes next to no time: elementwise, or a broadcast, or a part of what is there."""
    if isinstance(instruction, Move):
        return True
    if not isinstance(instruction, Compute):
        return False
    return (
        graph.equations[instruction.equation].primitive in COPIED
        or _kind(instruction, graph) == "elementwise"
    )
