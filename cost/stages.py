"""What layers cost as stages: a line of a price list, and before that what they take at least.

With M pieces and S stages there are M + S - 1 beats (Huang et al., GPipe, 2019), and in each of them a stage
hands on what the next one needs. The time of a stage is that of its layers: it is linear in their share.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from shardwright.cost.device import DeviceType
from shardwright.cost.lines import Beats, Kernel, Kernels, Line, beats_of, kernels_in
from shardwright.cost.share_cost import CostStack, Floats, ShareCost
from shardwright.ir.graph import Equation, Graph
from shardwright.ir.placement import Placement, R
from shardwright.ir.stages import Layers, layers_of


class Model(Protocol):
    """What is asked for of `shardwright.cost.model.CostModel`."""

    types: tuple[DeviceType, ...]
    counts: NDArray[np.int64]
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
    return ShareCost(beats * _handed_s(model, line)[None], beats * every, np.zeros_like(every))


def layer_s(model: Model, line: Beats) -> Floats:
    """Seconds of one layer on one piece, by class."""
    seconds = (times * model.cost(kernel).constant.max(axis=0) for kernel, times in line.kernels)
    return sum(seconds, start=np.zeros(len(model.types)))


def _handed_s(model: Model, line: Beats) -> Floats:
    """Seconds in which a piece is handed on, by class."""
    return model.move("send", "direct", line.handed_bytes, R, R).constant.max(axis=0)


class Scans:
    """The scans of a step over what they have a row of for every layer.

    Args:
        graph: the step.
        model: prices its kernels, on the devices of a fleet.
    """

    def __init__(self, graph: Graph, model: Model) -> None:
        self._model = model
        self._launch_s = np.array([device.launch_s for device in model.types])
        self._scans = [(e.params["length"], *self._layer(e)) for e in graph.equations if _over_layers(e)]

    def _layer(self, scan: Equation) -> tuple[Floats, Floats]:
        """Seconds of one layer, by device class: to launch its kernels, and to compute the whole batch."""
        times: dict[Kernel, float] = {}
        for _, kernel, count in kernels_in(scan.regions[0]):
            times[kernel] = times.get(kernel, 0.0) + count
        lines, counts = list(times), np.array(list(times.values()))
        launches = counts @ np.array([kernel.launches for kernel in lines], dtype=np.float64)
        seconds = counts @ self._model.kernels(Kernels(lines)).constant.max(axis=1)
        return launches * self._launch_s, seconds - launches * self._launch_s

    def least_s(self, pieces: int, members: Sequence[int]) -> float:
        """Seconds that they take at least on some devices, which hand on so many pieces of the batch.

        Every device has whole layers, and but for launching them computes small pieces as fast as the whole
        batch; none waits but for the first piece to arrive and the last one to leave.
        """
        return sum(
            _pipeline_s(self._model, members, pieces, length, launching + computing / pieces)
            for length, launching, computing in self._scans
        )


def relays_s(graph: Graph, model: Model, members: Sequence[int]) -> float:
    """Seconds that the layers of a step that has stages take at least on some devices."""
    found = 0.0
    for layers in filter(None, map(layers_of, graph.equations)):
        line = beats_of(layers, sharded=True)
        seconds = layer_s(model, line), _handed_s(model, line)
        found += _pipeline_s(model, members, layers.pieces, layers.length, *seconds)
    return found


def _pipeline_s(
    model: Model,
    members: Sequence[int],
    pieces: int,
    length: int,
    layer_s: Floats,
    handed_s: Floats | float = 0.0,
) -> float:
    """Seconds that layers take at least as stages, each of whole layers.

    Args:
        model: of the fleet.
        members: the devices that have layers.
        pieces: that they hand on.
        length: number of layers.
        layer_s: seconds of one layer on one piece, by class.
        handed_s: seconds in which a piece is handed on, by class.
    """
    counts = np.bincount(model.class_of[list(members)], minlength=len(model.counts))
    own = np.flatnonzero(counts)
    beats = pieces + min(len(members), length) - 1
    linear = (beats * length * layer_s[own])[None]
    constant = np.broadcast_to(beats * np.asarray(handed_s), counts.shape)[own][None] * (len(members) > 1)
    return ShareCost(constant, linear, np.zeros_like(linear)).floor(counts[own], units=length)


def part_of(layers: Layers, which: Callable[[Equation], bool], model: Model) -> float:
    """The part of layers' time that goes into some of their equations, on the whole batch."""
    spent = {True: 0.0, False: 0.0}
    for equation, kernel, times in kernels_in(layers.source):
        spent[which(equation)] += times * float(model.cost(kernel).constant.max())
    return spent[True] / (sum(spent.values()) or 1.0)


def _over_layers(equation: Equation) -> bool:
    return equation.primitive == "scan" and equation.params["length"] > 1
