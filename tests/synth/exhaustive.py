"""The naive twin of the search: tries every sequence of instructions of a small graph, equation by equation.

Nothing is fused, no set of placements is left out: for every combination of signatures, every value is
brought from the placement it is made in to all placements it is needed in by the cheapest set of moves,
each paid once. Exponential, and obviously right.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from shardwright.cost.bill import cut_of
from shardwright.cost.traffic import traffic
from shardwright.ir.graph import Equation, Graph, Value
from shardwright.ir.placement import REDUCE_OPS, Partial, Placement, R
from shardwright.ir.registry import rule_of
from shardwright.ir.rules import Signature
from shardwright.synth.prices.tables import Prices
from shardwright.synth.space.conversions import shards
from shardwright.synth.space.space import Space


class Moves:
    """Cheapest sets of moves of one value, by dynamic programming over sets of placements."""

    def __init__(self, value: Value, units: Sequence[int], prices: Prices) -> None:
        self.placements: tuple[Placement, ...] = (R, *shards(units), *(Partial(op) for op in REDUCE_OPS))
        self.index = {p: i for i, p in enumerate(self.placements)}
        n = len(self.placements)
        step = np.full((n, n), np.inf)
        for i, pre in enumerate(self.placements):
            for j, post in enumerate(self.placements):
                if i != j:
                    step[i, j] = prices.step(value.type, pre, post)
        self.least = [self._from(start, step) for start in range(n)]
        self.sharded_or_whole = [i for i, p in enumerate(self.placements) if not isinstance(p, Partial)]

    @staticmethod
    def _from(start: int, step: np.ndarray) -> np.ndarray:
        """By set (bits): the least cost of holding all of it, made in placement `start`."""
        n = len(step)
        exactly = np.full(1 << n, np.inf)
        exactly[1 << start] = 0.0
        for held in range(1 << n):
            if np.isfinite(exactly[held]):
                for j in range(n):
                    if not held >> j & 1:
                        cheapest = min(step[i, j] for i in range(n) if held >> i & 1)
                        grown = held | 1 << j
                        exactly[grown] = min(exactly[grown], exactly[held] + cheapest)
        least = exactly.copy()
        for held in reversed(range(1 << n)):
            for j in range(n):
                if not held >> j & 1:
                    least[held] = min(least[held], least[held | 1 << j])
        return least

    def cost(self, made: Placement, needed: set[Placement], handed_out: bool = False) -> float:
        """Seconds until all of `needed` is held; if handed out, something that is not Partial as well."""
        if made not in self.index or any(p not in self.index for p in needed):
            return float("inf")
        bits = sum(1 << self.index[p] for p in needed)
        table = self.least[self.index[made]]
        if handed_out:
            return float(min(table[bits | 1 << i] for i in self.sharded_or_whole))
        return float(table[bits])


def kernels(graph: Graph, space: Space, prices: Prices) -> dict[Equation, list[tuple[Signature, float]]]:
    """Signatures of every equation with the seconds of the local computation."""
    through = traffic(graph)
    found: dict[Equation, list[tuple[Signature, float]]] = {}
    for equation in graph.equations:
        assert not equation.regions, "the naive twin knows no loops"
        tensors = (*equation.input_types, *equation.output_types)
        found[equation] = []
        for signature in space.signatures(equation):
            cost = prices.model.compute(equation, rule_of(equation), signature, through[equation])
            cut = cut_of(tensors, (*signature.ins, *signature.outs))
            found[equation].append((signature, prices.evaluate(cost, cut)))
    return found


def assignments(
    options: Mapping[Equation, Sequence[tuple[Signature, float]]],
) -> Iterator[tuple[dict[Equation, Signature], float]]:
    for combination in itertools.product(*options.values()):
        yield (
            {e: s for e, (s, _) in zip(options, combination, strict=True)},
            sum(price for _, price in combination),
        )


def cheapest(graph: Graph, space: Space, prices: Prices) -> float:
    """Seconds of the best program there is at these prices."""
    options = kernels(graph, space, prices)
    moves = {value: Moves(value, space.units.of(value), prices) for value in graph.values()}
    producer = {value: (e, k) for e in graph.equations for k, value in enumerate(e.outputs)}
    state = {graph.outputs[out]: graph.inputs[inp] for out, inp in graph.state.items()}
    handed_out = {
        atom: position
        for position, atom in enumerate(graph.outputs)
        if isinstance(atom, Value) and atom not in state
    }
    best = float("inf")
    for signatures, total in assignments(options):
        if total >= best:
            continue
        needed: dict[Value, set[Placement]] = {value: set() for value in moves}
        for equation, signature in signatures.items():
            for atom, placement in zip(equation.inputs, signature.ins, strict=True):
                if isinstance(atom, Value):
                    needed[atom].add(placement)
        for value, position in handed_out.items():
            if graph.outputs[position].type.rank == 0:
                needed[value].add(R)
        returning = set(state) | set(state.values())
        for value in moves:
            if value in returning:
                continue
            if value in producer:
                equation, k = producer[value]
                total += moves[value].cost(signatures[equation].outs[k], needed[value], value in handed_out)
            else:
                starts = [R] if value in graph.constants else _starts(moves[value])
                total += min(moves[value].cost(start, needed[value]) for start in starts)
        for out, inp in state.items():
            equation, k = producer[out]
            total += min(
                moves[inp].cost(start, needed[inp])
                + moves[out].cost(signatures[equation].outs[k], needed[out] | {start})
                for start in _starts(moves[inp])
            )
        best = min(best, total)
    return best


def _starts(moves: Moves) -> list[Placement]:
    """Where an input may lie: anything but Partial."""
    return [moves.placements[i] for i in moves.sharded_or_whole]
