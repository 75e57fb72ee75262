"""Where the forward part may be cut into stretches that can be computed again.

A stretch begins where the least is handed on: between the last equation that applies a parameter of one layer
and the first that applies one of the next, at the point where what is made before and read after it has the
fewest bytes. Parameters may be cast, or put in order, long before: that is no beginning (`Roles.weights`). A
scan is a stretch of its own, and its iterations are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple, TypeAlias

from shardwright.cost.device import DeviceType
from shardwright.cost.fleet import Fleet
from shardwright.cost.model import CostModel
from shardwright.cost.roles import roles
from shardwright.ir.graph import Equation, Graph, Value, per_form, per_graph
from shardwright.ir.registry import rule_of
from shardwright.ir.rewrites.recompute import Gain, Keep, Stretch, gains
from shardwright.ir.rules import flop_count

#: Times that what a scan keeps is written or read for that, at most: where it is made, stacked up, taken
#: apart and used.
_PASSES = 4


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
    weights = found.weights
    # Where parameters are applied, and of which layer.
    reads = [
        (equation.index, found.layer_of[equation])
        for equation in graph.equations[:end]
        if equation.part == "forward"
        and not equation.regions
        and not weights.isdisjoint(equation.input_values)
        and weights.isdisjoint(equation.outputs)
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


#: What may be done with a stretch: what is kept, and whether that waits in host memory.
Policy: TypeAlias = tuple[Keep, bool]

#: From what is cheap to compute again to what frees most.
RECOMPUTING: tuple[Policy, ...] = (("products", False), ("nothing", False))

#: With trips to host memory, and with both.
OFFLOADING: tuple[Policy, ...] = (("all", True),)
BOTH: tuple[Policy, ...] = (*RECOMPUTING, ("all", True), ("products", True), ("nothing", True))


class Option(NamedTuple):
    """What may be done with a layer: bytes that it frees, about how long it takes, and how."""

    freed_bytes: int
    seconds: float
    stretch: Stretch


def ways(graph: Graph, model: CostModel, policies: Sequence[Policy] = RECOMPUTING) -> list[list[Stretch]]:
    """By layer, what may be done with it: each frees more than the one before, and takes longer."""
    return [[option.stretch for option in some] for some in _undominated(graph, model, policies)]


def options(graph: Graph, model: CostModel, policies: Sequence[Policy]) -> list[list[Option]]:
    """By layer, what may be done with it that frees anything; of what comes to the same, the first.

    Where no product is kept, to keep products is to keep nothing, for one.
    """
    layers = stretches(graph)
    scans = [_is_scan(stretch, graph) for stretch in layers]
    found: list[list[Option]] = [[] for _ in layers]
    known: list[set[Gain]] = [set() for _ in layers]
    for keep, host in policies:
        # What a scan keeps is read by the loop that walks back over it: there is no waiting in between.
        these = [n for n, scan in enumerate(scans) if not (scan and host)]
        some = [replace(layers[n], keep=keep, host=host) for n in these]
        for n, stretch, gain in zip(these, some, gains(graph, some), strict=True):
            if gain.freed_bytes > 0 and gain not in known[n]:
                known[n].add(gain)
                found[n].append(Option(gain.freed_bytes, _seconds(gain, model), stretch))
    return found


def in_scans(graph: Graph, policies: Sequence[Policy]) -> list[Stretch]:
    """What may be done with scans on the devices, the least first."""
    scans = [s for s in stretches(graph) if _is_scan(s, graph)]
    return [replace(scan, keep=keep) for scan in scans for keep, host in policies if not host]


def alike(stretch: Stretch, graph: Graph, changed: Graph) -> Stretch | None:
    """What is done with a scan, done with the same one of the step in so many pieces; None without it.

    Args:
        stretch: a scan of a step.
        graph: that step.
        changed: the same in pieces.
    """
    mine, theirs = ([s for s in stretches(g) if _is_scan(s, g)] for g in (graph, changed))
    number = next((n for n, scan in enumerate(mine) if scan.first == stretch.first), len(mine))
    same = number < len(mine) == len(theirs) and theirs[number].name == stretch.name
    return replace(theirs[number], keep=stretch.keep, host=stretch.host) if same else None


def surely_dearer(graph: Graph, fleet: Fleet, kept: Stretch, less: Stretch) -> bool:
    """Whether keeping less of a scan takes longer on every device than what it saves.

    At full rate, what is computed again then takes longer than what is no longer kept takes to be made,
    stacked up, taken apart and read.
    """
    more, most = gains(graph, (kept, less))
    freed = most.freed_bytes - more.freed_bytes

    def computing_s(gain: Gain, device: DeviceType) -> float:
        rates = {dtype: device.flop_rate(dtype)[0] for dtype in {_dtype(e) for e, _ in gain.again}}
        return sum(_flop(e) * times / rates[_dtype(e)] for e, times in gain.again)

    return all(
        computing_s(most, device) - computing_s(more, device) > _PASSES * freed / device.bandwidth_byte_per_s
        for device in {each.type for each in fleet.devices}
    )


def _dtype(equation: Equation) -> str:
    """Of what an equation computes with."""
    return str(equation.input_types[0].dtype) if equation.input_types else "float32"


def _is_scan(stretch: Stretch, graph: Graph) -> bool:
    return stretch.last == stretch.first + 1 and graph.equations[stretch.first].primitive == "scan"


def _undominated(
    graph: Graph, model: CostModel, policies: Sequence[Policy], saving: Stretch | None = None
) -> list[list[Option]]:
    """The same without what another way of dealing with the layer beats in both bytes and time."""
    found = options(graph, model, policies)
    for some in found:
        some[:] = [option._replace(seconds=0.0) if option.stretch == saving else option for option in some]
        some.sort(key=lambda option: (-option.freed_bytes, option.seconds))
        least, kept = float("inf"), list[Option]()
        for option in some:
            if option.seconds < least:
                kept.append(option)
                least = option.seconds
        some[:] = kept[::-1]
    return found


@dataclass(frozen=True, slots=True)
class Rung:
    """A way to keep less of the forward part on the devices.

    Attributes:
        stretches: what is done with which.
        freed_bytes: what is kept less, each tensor whole, as if no two stretches shared a tensor.
        seconds: about how long the whole fleet takes for what runs again and for trips, at least.
    """

    stretches: tuple[Stretch, ...]
    freed_bytes: int
    seconds: float


def ladder(
    graph: Graph, model: CostModel, policies: Sequence[Policy] = RECOMPUTING
) -> tuple[tuple[Stretch, ...], ...]:
    """The stretches of every rung, see `rungs_of`."""
    return tuple(rung.stretches for rung in rungs_of(graph, model, policies))


def rungs_of(
    graph: Graph,
    model: CostModel,
    policies: Sequence[Policy] = RECOMPUTING,
    saving: Stretch | None = None,
) -> tuple[Rung, ...]:
    """Ways to keep less and less of the forward part on the devices, each less than the one before.

    Every rung adds a stretch, or keeps less of one, whichever frees the most bytes for its time; of equal
    layers the first one goes first.

    Args:
        graph: the step.
        model: of the fleet.
        policies: what may be done with a stretch.
        saving: what saves time, whatever the memory: it comes first.
    """
    by_layer = _undominated(graph, model, policies, saving)
    steps: list[tuple[float, int, int]] = []
    for number, mine in enumerate(by_layer):
        before, spent_s = 0, 0.0
        least = float("inf")
        for way, (freed, seconds, _) in enumerate(mine):
            # What frees more for its time cannot be had before what it builds on.
            least = min(least, (freed - before) / max(seconds - spent_s, 1e-12))
            steps.append((-least, way, number))
            before, spent_s = freed, seconds
    chosen: dict[int, Option] = {}
    rungs: list[Rung] = []
    for _, way, number in sorted(steps):
        chosen[number] = by_layer[number][way]
        mine = [chosen[layer] for layer in sorted(chosen)]
        freed, seconds = sum(option.freed_bytes for option in mine), sum(option.seconds for option in mine)
        rungs.append(Rung(tuple(option.stretch for option in mine), freed, seconds))
    return tuple(rungs)


def seconds_of(graph: Graph, model: CostModel, stretches: Sequence[Stretch]) -> list[float]:
    """About how long the whole fleet takes for what each of some stretches computes and moves again."""
    return [_seconds(gain, model) for gain in gains(graph, stretches)]


def _seconds(gain: Gain, model: CostModel) -> float:
    """About how long the whole fleet computes what runs again: for an order, not for a price."""
    devices = [device.type for device in model.fleet.devices]
    rate = sum(device.flop_rate("float32", None)[0] for device in devices)
    bandwidth = sum(device.bandwidth_byte_per_s for device in devices)
    computed_s = sum(_flop(e) * times / rate + _moved(e) * times / bandwidth for e, times in gain.again)
    return computed_s + gain.spilled * model.trip_s + gain.spilled_bytes / model.trip_byte_per_s


@per_form
def _moved(equation: Equation) -> int:
    return sum(tensor.nbytes for tensor in (*equation.input_types, *equation.output_types))


def _flop(equation: Equation) -> float:
    if equation.regions:
        return sum(_flop(inner) for region in equation.regions for inner in region.equations)
    return _flop_of_form(equation)


@per_form
def _flop_of_form(equation: Equation) -> float:
    return flop_count(rule_of(equation), equation)
