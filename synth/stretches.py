"""Where the forward part may be cut into stretches that can be computed again.

A stretch begins where the least is handed on: between the last equation that reads a parameter of one layer
and the first that reads one of the next, at the point where what is made before and read after it has the
fewest bytes. A scan is a stretch of its own, and its iterations are.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from shardwright.cost.model import CostModel
from shardwright.cost.roles import roles
from shardwright.ir.graph import Equation, Graph, Value, per_graph
from shardwright.ir.recompute import Gain, Keep, Stretch, gains
from shardwright.ir.rules import flop_count, rule_of


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


#: From what is cheap to compute again to what frees most.
_POLICIES: tuple[Keep, ...] = ("products", "nothing")


def ladder(graph: Graph, model: CostModel) -> tuple[tuple[Stretch, ...], ...]:
    """Ways to compute more and more of the forward part again, each keeping less than the one before.

    Every rung adds a stretch, or keeps less of one, whichever frees the most bytes for its time; of equal
    layers the first one goes first.
    """
    layers = stretches(graph)
    found = {keep: gains(graph, [replace(s, keep=keep) for s in layers]) for keep in _POLICIES}
    steps: list[tuple[float, int, int]] = []
    for number in range(len(layers)):
        before, spent_s = 0, 0.0
        least = float("inf")
        for policy, keep in enumerate(_POLICIES):
            gain = found[keep][number]
            freed, seconds = gain.freed_bytes - before, _seconds(gain, model) - spent_s
            if freed <= 0:
                continue
            # What frees more for its time cannot be had before what it builds on.
            least = min(least, freed / max(seconds, 1e-12))
            steps.append((-least, policy, number))
            before, spent_s = gain.freed_bytes, _seconds(gain, model)
    chosen: dict[int, Stretch] = {}
    rungs: list[tuple[Stretch, ...]] = []
    for _, policy, number in sorted(steps):
        chosen[number] = replace(layers[number], keep=_POLICIES[policy])
        rungs.append(tuple(chosen[layer] for layer in sorted(chosen)))
    return tuple(rungs)


def _seconds(gain: Gain, model: CostModel) -> float:
    """About how long the whole fleet computes what runs again: for an order, not for a price."""
    devices = [device.type for device in model.fleet.devices]
    rate = sum(device.flop_rate("float32", None)[0] for device in devices)
    bandwidth = sum(device.bandwidth_byte_per_s for device in devices)
    return sum(_flop(e) * times / rate + _moved(e) * times / bandwidth for e, times in gain.again)


def _moved(equation: Equation) -> int:
    return sum(tensor.nbytes for tensor in (*equation.input_types, *equation.output_types))


def _flop(equation: Equation) -> float:
    if equation.regions:
        return sum(_flop(inner) for region in equation.regions for inner in region.equations)
    return flop_count(rule_of(equation), equation)
