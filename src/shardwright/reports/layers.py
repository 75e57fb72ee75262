"""A plan's program layer by layer, for the report."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from shardwright.cost.bill import Item
from shardwright.cost.share_cost import Floats
from shardwright.ir.graph import Graph
from shardwright.ir.program import Instruction, Move
from shardwright.outline import PHASES, WHOLE, Outline, Phase, Place, outline
from shardwright.plan import Plan
from shardwright.reports.words import exchanged, placed

#: Parameters of a layer that are listed one by one.
MOST_TENSORS = 40


@dataclass(frozen=True, slots=True)
class Tensor:
    """A parameter of a layer: its name within the layer, type, where it lies, and the same in words."""

    name: str
    type: str
    placement: str
    words: str


@dataclass(frozen=True, slots=True)
class LayerExchange:
    """Exchanges of a layer that are alike: how often per step, and all their seconds."""

    phase: Phase
    name: str
    nbytes: int
    before: str
    after: str
    words: str
    count: float
    seconds: float


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers that lie and exchange alike; times are of all of them together.

    Attributes:
        layers: their names.
        tensors: parameters of the first one, at most `MOST_TENSORS`.
        left_out: how many more it has.
        exchanges: of the first one.
        compute_s: by phase, the slowest device's of every instruction.
        exchange_s: by phase.
    """

    layers: tuple[str, ...]
    tensors: tuple[Tensor, ...]
    left_out: int
    exchanges: tuple[LayerExchange, ...]
    compute_s: dict[Phase, float]
    exchange_s: dict[Phase, float]

    @property
    def title(self) -> str:
        """Its layers in short."""
        return self.layers[0] if len(self.layers) == 1 else f"{self.layers[0]} … {self.layers[-1]}"

    @property
    def seconds(self) -> float:
        """All that its layers cost."""
        return sum(self.compute_s.values()) + sum(self.exchange_s.values())

    @property
    def words(self) -> str:
        """How its parameters lie, most of them first."""
        kinds = Counter(tensor.words for tensor in self.tensors)
        if not kinds:
            return "no parameters of its own"
        if len(kinds) == 1:
            return f"all parameters {next(iter(kinds))}"
        return "; ".join(f"{count} × {words}" for words, count in kinds.most_common())


def layer_groups(
    plan: Plan,
    graph: Graph,
    places: Sequence[tuple[Instruction, Place]],
    items: Sequence[Item],
    seconds: Sequence[Floats],
) -> tuple[LayerGroup, ...]:
    """Layers that lie and exchange alike, together.

    Args:
        plan: the plan.
        graph: of its step.
        places: every instruction, and where in the step it is.
        items: the bill, in the same order.
        seconds: of every item, by device.
    """
    found = outline(graph)
    compute: dict[str, Counter[Phase]] = {layer: Counter() for layer in found.layers}
    exchange: dict[str, Counter[Phase]] = {layer: Counter() for layer in found.layers}
    exchanges: dict[str, dict[tuple[Phase, str, int, str, str], list[float]]] = {}
    for (instruction, place), item, spent in zip(places, items, seconds, strict=True):
        cost_s = float(spent.max())
        into = exchange if item.exchange else compute
        into[place.layer][place.phase] += cost_s  # pyright: ignore[reportArgumentType]
        if item.exchange and isinstance(instruction, Move):
            key = (place.phase, item.label, item.nbytes, str(instruction.pre), str(instruction.post))
            times = exchanges.setdefault(place.layer, {}).setdefault(key, [0.0, 0.0])
            times[0] += item.weight
            times[1] += cost_s
    groups: dict[object, list[str]] = {}
    described: dict[str, tuple[list[Tensor], list[LayerExchange]]] = {}
    for layer in found.layers:
        if layer == WHOLE and not (compute[layer] or exchange[layer]):
            continue
        tensors = list(_tensors(plan, graph, found, layer))
        some = [
            LayerExchange(phase, name, nbytes, placed(pre), placed(post), exchanged(name), *times)
            for (phase, name, nbytes, pre, post), times in exchanges.get(layer, {}).items()
        ]
        some.sort(key=lambda each: (PHASES.index(each.phase), -each.seconds, each.name))
        described[layer] = tensors, some
        alike = (
            re.sub(r"\d+", "#", layer),
            tuple((t.name, t.type, t.placement) for t in tensors),
            tuple((e.phase, e.name, e.nbytes, e.before, e.after, e.count) for e in some),
        )
        groups.setdefault(alike, []).append(layer)
    return tuple(
        LayerGroup(
            layers=tuple(layers),
            tensors=tuple(described[layers[0]][0][:MOST_TENSORS]),
            left_out=max(len(described[layers[0]][0]) - MOST_TENSORS, 0),
            exchanges=tuple(described[layers[0]][1]),
            compute_s={phase: sum(compute[layer][phase] for layer in layers) for phase in PHASES},
            exchange_s={phase: sum(exchange[layer][phase] for layer in layers) for phase in PHASES},
        )
        for layers in groups.values()
    )


def _tensors(plan: Plan, graph: Graph, found: Outline, layer: str) -> Iterator[Tensor]:
    """Parameters of a layer, and where they lie."""
    held = list(plan.program.inputs)
    names = [graph.input_names[p] for p in found.parameters if found.of_input[p] == layer]
    begin = _shared_beginning(names)
    for position in found.parameters:
        if found.of_input[position] == layer:
            placement = str(held[position])
            name = graph.input_names[position][begin:].lstrip(".")
            yield Tensor(name, str(graph.inputs[position].type), placement, placed(placement))


def _shared_beginning(names: Sequence[str]) -> int:
    """How many characters, up to the end of a part of the path, all names have in common."""
    if len(names) < 2:
        whole = names[0] if names else ""
        return max(whole.rfind("["), whole.rfind("."), 0)
    first, last = min(names), max(names)
    length = next((i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), len(first))
    return max(first.rfind("[", 0, length), first.rfind(".", 0, length), 0)
