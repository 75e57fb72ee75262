"""Exchanges where they cut nothing large: moved beside the exchange before or behind, if that holds less.

What a compiled segment makes for itself is mostly fused and never written to memory; what another segment
reads is. An exchange between the two writes all of that, though it may be tiny: the sum of a loss stands
between the logits and their gradient, a weight's gradient is summed while a layer's activations wait. What
is exchanged can often wait for the next exchange, or is there at the one before: the two segments then become
one, and nothing is handed on between them. No exchange is added; `sparing.py` comes first, `anew.py` after.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from shardwright.cost.share_cost import Floats
from shardwright.ir.graph import Graph
from shardwright.ir.program import Program
from shardwright.synth.memory.blocks import Blocks

#: Times that all cuts are gone through: one that joined others lets more of them join.
_ROUNDS = 4


def joined(program: Program, graph: Graph, part: float) -> Program:
    """An equal program with fewer cuts.

    Two segments are made one if then no block around holds more than the fullest of the two and the cut did.

    Args:
        program: a verified program.
        graph: what it computes.
        part: of a tensor that is cut, how much of it a device has.
    """
    blocks = Blocks(program, graph, part)
    order = _Order(blocks, blocks.of, blocks.there(blocks.of))
    for _ in range(_ROUNDS):
        before = order
        cut = 1
        while cut < blocks.last:
            order = order.without(cut) or order
            cut += 2
        if order is before:
            break
    positions = np.argsort(order.of, kind="stable")
    return replace(program, instructions=tuple([program.instructions[i] for i in positions]))


@dataclass(frozen=True, slots=True)
class _Order:
    """Instructions in blocks, some of which may be empty; and what is there in each."""

    blocks: Blocks
    of: NDArray[np.intp]
    there: Floats

    def without(self, cut: int) -> _Order | None:
        """With the segments around a cut made one; None where that cannot be, or would hold more."""
        here = np.flatnonzero(self.of == cut).tolist()
        if not here or cut in self.blocks.barriers:
            return None
        used = np.unique(self.of[self.of % 2 == 1])
        cuts = sorted({*used.tolist(), *self.blocks.barriers})
        number = cuts.index(cut)
        low = cuts[number - 1] if number else -1
        high = cuts[number + 1] if number + 1 < len(cuts) else self.blocks.last + 1
        of: list[int] = self.of.tolist()  # one number at a time is read much faster from it
        flow, sooner, later = self.blocks.flow, dict[int, set[int]](), dict[int, set[int]]()
        if low > 0 and low not in self.blocks.barriers:
            between = np.flatnonzero((self.of > low) & (self.of < cut)).tolist()
            sooner = _with_them(of, here, flow.producers, low, between)
        if high < self.blocks.last and high not in self.blocks.barriers:
            between = np.flatnonzero((self.of > cut) & (self.of < high))[::-1].tolist()
            later = _with_them(of, here, flow.consumers, high, between)
        if not all(move in sooner or move in later for move in here):
            return None
        limit = float(self.there[low + 1 : high].max())
        best: _Order | None = None
        least = np.inf
        for first, second in ((later, sooner), (sooner, later)):
            order = self._moved(here, first, second, (sooner, later), low, high)
            if order is None:
                continue
            around = slice(max(low - 1, 0), high + 2)
            most = np.maximum(self.there[around], limit * (1 + 1e-9))
            if (order.there[around] <= most).all() and order.there[around].sum() < least:
                best, least = order, float(order.there[around].sum())
        return best

    def _moved(
        self,
        here: Sequence[int],
        first: Mapping[int, set[int]],
        second: Mapping[int, set[int]],
        ways: tuple[Mapping[int, set[int]], Mapping[int, set[int]]],
        low: int,
        high: int,
    ) -> _Order | None:
        """With every exchange of a cut in the one before or behind, if it can be in the `first` way."""
        of = self.of.copy()
        sooner, _ = ways
        touched: set[int] = set()
        for move in here:
            chosen = first if move in first else second
            mine, (cut, segment) = chosen[move], (low, low - 1) if chosen is sooner else (high, high + 1)
            of[move] = cut
            of[list(mine)] = segment
            touched |= mine | {move}
        of[(of > low) & (of < high)] = low + 1
        for position in touched:
            own = of[position]
            before = [of[i] for i in self.blocks.flow.producers[position]]
            after = [of[i] for i in self.blocks.flow.consumers[position]]
            # Exchanges of one cut do not wait for each other.
            apart = own % 2
            if max(before, default=-1) + apart > own or min(after, default=own + 1) - apart < own:
                return None
        return _Order(self.blocks, of, self.blocks.there(of))


def _with_them(
    of: Sequence[int],
    moves: Sequence[int],
    beside: Sequence[Sequence[int] | set[int]],
    wall: int,
    between: Sequence[int],
) -> dict[int, set[int]]:
    """What must move with each exchange of a cut beside those of another; without those that cannot.

    Args:
        of: the block of every instruction.
        moves: the exchanges.
        beside: of every instruction, those that must stay on the side to which it moves.
        wall: the other cut.
        between: what is between the two cuts, what lies nearest to the wall first.
    """
    stuck: set[int] = set()
    for position in between:
        if any(of[other] == wall or other in stuck for other in beside[position]):
            stuck.add(position)
    free = set(between) - stuck
    found: dict[int, set[int]] = {}
    for move in moves:
        if any(other in stuck or of[other] in (wall, of[move]) for other in beside[move]):
            continue
        mine: set[int] = set()
        waiting = [move]
        while waiting:
            more = free.intersection(beside[waiting.pop()]) - mine
            mine |= more
            waiting += more
        found[move] = mine
    return found
