"""What layers cost as stages: a line of a price list, and before that what they take at least.

With M pieces and S stages there are M + S - 1 beats (Huang et al., GPipe, 2019), and in each of them a stage
hands on what the next one needs. The time of a stage is that of its layers: it is linear in their share.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from shardwright.cost.device import DeviceType
from shardwright.cost.fleet import Fleet
from shardwright.cost.lines import Beats, Kernel, Kernels, Line, beats_of, kernels_in
from shardwright.cost.share_cost import CostStack, Floats, ShareCost
from shardwright.ir.graph import Equation, Graph
from shardwright.ir.placement import Placement, R
from shardwright.ir.stages import Layers, layers_of


class Model(Protocol):
    """What is asked for of `shardwright.cost.model.CostModel`."""

    fleet: Fleet
    types: tuple[DeviceType, ...]
    class_of: NDArray[np.int64]

    def cost(self, line: Line) -> ShareCost:
        """Cost of one instruction."""
        ...

    def kernels(self, some: Kernels) -> CostStack:
        """Costs of many kernels."""
        ...

    def move(self, kind: str, strategy: str, tensor: int, pre: Placement, post: Placement) -> ShareCost:
        """Cost of one move."""
        ...


def staged_cost(model: Model, line: Beats) -> ShareCost:
    """Cost of layers on one piece after another; of stages, that of every beat of the slowest one."""
    every = line.length * layer_s(model, line)[None]
    if not line.sharded or len(model.class_of) == 1:
        return ShareCost.fixed([float(each) for each in line.pieces * every[0]])
    beats = line.pieces + min(len(model.class_of), line.length) - 1
    return ShareCost(beats * _handed_s(model, line.handed_bytes)[None], beats * every, np.zeros_like(every))


def layer_s(model: Model, line: Beats) -> Floats:
    """Seconds of one layer on one piece, by class."""
    seconds = (times * model.cost(kernel).constant.max(axis=0) for kernel, times in line.kernels)
    return sum(seconds, start=np.zeros(len(model.types)))


def _handed_s(model: Model, nbytes: int) -> Floats:
    """Seconds in which so many bytes are handed on, by class."""
    return model.move("send", "direct", nbytes, R, R).constant.max(axis=0)


@dataclass(frozen=True, slots=True)
class Crews:
    """The stages that a part of a fleet makes, by kind: each is one device, or all devices of a node.

    Attributes:
        model: of the part.
        counts: (kinds,) stages of every kind.
        members: (kinds, classes) devices of every class of the fleet in a stage.
        own: the same, of every class of the part.
        links: (kinds,) by how many links a stage hands on.
    """

    model: Model
    counts: NDArray[np.int64]
    members: NDArray[np.int64]
    own: NDArray[np.int64]
    links: NDArray[np.int64]

    @staticmethod
    def of(whole: Model, part: Sequence[int], model: Model, *, nodes: bool) -> Crews:
        """Those of a part of a fleet, which has a model of its own: whole nodes, or devices one by one."""
        fleet, first = model.fleet, len(whole.types)
        kinds: Counter[Sequence[int]] = Counter()
        stages: dict[int, list[int]] = {}
        for device in range(len(part)):
            stages.setdefault(fleet.devices[device].node if nodes else device, []).append(device)
        for where, some in stages.items():
            classes = np.bincount(whole.class_of[[part[device] for device in some]], minlength=first)
            own = np.bincount(model.class_of[some], minlength=len(model.types))
            rails = min(fleet.nodes[where].rails, len(some)) if nodes else 1
            kinds[(*classes.tolist(), *own.tolist(), rails)] += 1
        rows, counts = np.array(list(kinds), dtype=np.int64), np.array(list(kinds.values()), dtype=np.int64)
        return Crews(model, counts, rows[:, :first], rows[:, first:-1], rows[:, -1])

    @property
    def sizes(self) -> NDArray[np.int64]:
        """(kinds,) devices of a stage."""
        return self.members.sum(axis=1)

    def least_s(self, pieces: int, length: int, each_s: Floats, handed_s: Floats | float = 0.0) -> float:
        """Seconds that layers take at least, every stage having whole ones.

        A device with a share q of P pieces has q P + S - 1 beats of S stages; those of a stage share pieces
        out so that all take as long.

        Args:
            pieces: of the batch.
            length: number of layers.
            each_s: (classes,) seconds of one layer on one piece.
            handed_s: (kinds,) seconds in which a stage hands on a piece of every one of its devices.
        """
        idle = min(int(self.counts.sum()), length) - 1
        beats = pieces + self.sizes * idle
        # A layer that takes no time gives no share: next to none keeps that from being a division by zero.
        linear = length * beats / (self.members / np.maximum(each_s, 1e-30)).sum(axis=1)
        constant = np.broadcast_to(beats / self.sizes * handed_s, linear.shape) * (idle > 0)
        rows = constant[None], linear[None], np.zeros((1, len(linear)))
        return ShareCost(*rows).floor(self.counts, units=length)


class Scans:
    """The scans of a step over what they have a row of for every layer.

    Args:
        graph: the step.
        model: prices its kernels, on the devices of a fleet.
    """

    def __init__(self, graph: Graph, model: Model) -> None:
        self._model = model
        self._launch_s = np.array([device.launch_s for device in model.types])
        self._scans = [(e.params["length"], *self._layer(e)) for e in graph.equations if over_layers(e)]

    def _layer(self, scan: Equation) -> tuple[Floats, Floats]:
        """Seconds of one layer, by device class: to launch its kernels, and to compute the whole batch."""
        times: dict[Kernel, float] = {}
        for _, kernel, count in kernels_in(scan.regions[0]):
            times[kernel] = times.get(kernel, 0.0) + count
        lines, counts = list(times), np.array(list(times.values()))
        launches = counts @ np.array([kernel.launches for kernel in lines], dtype=np.float64)
        seconds = counts @ self._model.kernels(Kernels(lines)).constant.max(axis=1)
        return launches * self._launch_s, seconds - launches * self._launch_s

    def least_s(self, pieces: int, crews: Crews) -> float:
        """Seconds that they take at least as some stages, which hand on so many pieces of the batch.

        Every stage has whole layers, and but for launching them computes small pieces as fast as the whole
        batch; none waits but for the first piece to arrive and the last one to leave.
        """
        return sum(
            crews.least_s(pieces, length, launching + computing / pieces)
            for length, launching, computing in self._scans
        )


def relays_s(graph: Graph, model: Model, crews: Sequence[Crews]) -> float:
    """Seconds that the layers of a step that has stages take at least, as the best of some stages."""
    found = np.zeros(len(crews))
    for layers in filter(None, map(layers_of, graph.equations)):
        line = beats_of(layers, sharded=True)
        each_s = layer_s(model, line)
        for number, some in enumerate(crews):
            # A stage hands on a piece of each of its devices, over all of its links.
            sizes = np.ceil(some.sizes / some.links).astype(np.int64) * line.handed_bytes
            rows = zip(sizes.tolist(), some.own > 0, strict=True)
            handed = np.array([(_handed_s(some.model, nbytes) * has).max() for nbytes, has in rows])
            found[number] += some.least_s(layers.pieces, layers.length, each_s, handed)
    return float(found.min())


def part_of(layers: Layers, which: Callable[[Equation], bool], model: Model) -> float:
    """The part of layers' time that goes into some of their equations, on the whole batch."""
    spent = {True: 0.0, False: 0.0}
    for equation, kernel, times in kernels_in(layers.source):
        spent[which(equation)] += times * float(model.cost(kernel).constant.max())
    return spent[True] / (sum(spent.values()) or 1.0)


def over_layers(equation: Equation) -> bool:
    """Whether it is a scan of several iterations."""
    return equation.primitive == "scan" and equation.params["length"] > 1
