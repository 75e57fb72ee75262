"""Where the forward part may be cut into stretches that can be computed again.

A stretch begins where the least is handed on: between the last equation that reads a parameter of one layer
and the first that reads one of the next, at the point where what is made before and read after it has the
fewest bytes. A scan is a stretch of its own, and its iterations are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from shardwright.cost.roles import roles
from shardwright.ir.graph import Equation, Graph, Value, per_graph
from shardwright.ir.recompute import Keep, Stretch, recomputing
from shardwright.ir.rewrite import saved
from shardwright.ir.rules import flop_count, rule_of


@dataclass(frozen=True, slots=True)
class Candidate:
    """A stretch that may be computed again.

    Attributes:
        stretch: which, and what of it is kept.
        freed_bytes: by how much less is kept for the backward part.
        flop: what computing it again takes.
    """

    stretch: Stretch
    freed_bytes: int
    flop: float


@per_graph
def stretches(graph: Graph) -> tuple[Stretch, ...]:
    """The layers of the forward part, in order, as stretches of which nothing is kept."""
    ahead = [equation for equation in graph.equations if equation.part != "backward"]
    end = max((e.index for e in ahead if e.part == "forward"), default=-1) + 1
    backward = min((e.index for e in graph.equations if e.part == "backward"), default=len(graph.equations))
    end = min(end, backward)
    if not end:
        return ()
    crossing = _crossing(graph, end)
    found = roles(graph)
    trained = set(found.parameters)
    # Where parameters are read, and of which layer.
    reads = [
        (equation.index, found.layer_of[equation])
        for equation in graph.equations[:end]
        if equation.part == "forward" and not equation.regions and trained.intersection(equation.input_values)
    ]
    cuts = {0: reads[0][1] if reads else "-", end: ""}
    for (before, last), (at, layer) in pairwise(reads):
        if last != layer:
            cut = min(range(before + 1, at + 1), key=lambda position: (crossing[position], position))
            cuts[cut] = layer
    for equation in graph.equations[:end]:
        if equation.primitive == "scan" and equation.part == "forward":
            cuts[equation.index] = found.layer_of[equation]
            cuts.setdefault(equation.index + 1, found.layer_of[equation])
    ordered = sorted(cuts)
    return tuple(Stretch(cuts[first], first, last) for first, last in pairwise(ordered))


def _crossing(graph: Graph, end: int) -> list[int]:
    """[position]: bytes that equations before it made and equations from it on (up to `end`) read."""
    made: dict[Value, int] = {}
    last: dict[Value, int] = {}
    for equation in graph.equations[:end]:
        for value in equation.input_values:
            if value in made:
                last[value] = equation.index
        made.update(dict.fromkeys(equation.outputs, equation.index))
    change = [0] * (end + 1)
    for value, at in last.items():
        change[made[value] + 1] += value.type.nbytes
        change[at + 1] -= value.type.nbytes
    total, found = 0, list[int]()
    for amount in change:
        total += amount
        found.append(total)
    return found


@per_graph
def candidates(graph: Graph) -> tuple[Candidate, ...]:
    """Every stretch under every policy that frees something."""
    found: list[Candidate] = []
    before = saved_bytes(graph)
    for stretch in stretches(graph):
        for keep in _POLICIES:
            one = replace(stretch, keep=keep)
            again = recomputing(graph, [one])
            freed = before - saved_bytes(again)
            if freed > 0:
                found.append(Candidate(one, freed, _copied_flop(again)))
    return tuple(found)


_POLICIES: tuple[Keep, ...] = ("products", "nothing")


def saved_bytes(graph: Graph) -> int:
    """Bytes that are kept for the backward part, each tensor whole."""
    return sum(value.type.nbytes for value in saved(graph))


def _copied_flop(graph: Graph) -> float:
    """Operations of equations that compute something again."""
    return sum(map(_flop, _copies(graph.equations)))


def _copies(equations: Sequence[Equation]) -> list[Equation]:
    found: list[Equation] = []
    for equation in equations:
        if equation.copy:
            found.append(equation)
        else:
            for region in equation.regions:
                found += _copies(region.equations)
    return found


def _flop(equation: Equation) -> float:
    if equation.regions:
        return sum(_flop(inner) for region in equation.regions for inner in region.equations)
    return flop_count(rule_of(equation), equation)
