"""What scans over layers take at least if their layers are stages, before any such program is made."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from shardwright.cost.lines import Kernel, Kernels, kernels_in
from shardwright.cost.model import CostModel
from shardwright.cost.share_cost import Floats, ShareCost
from shardwright.ir.graph import Equation, Graph
from shardwright.ir.stages import Layers


class Scans:
    """The scans of a step over what they have a row of for every layer.

    Args:
        graph: the step.
        model: prices its kernels, on the devices of a fleet.
    """

    def __init__(self, graph: Graph, model: CostModel) -> None:
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
        counts = np.bincount(self._model.class_of[list(members)], minlength=len(self._model.counts))
        own = np.flatnonzero(counts)
        total = 0.0
        for length, launching, computing in self._scans:
            beats = pieces + min(len(members), length) - 1
            linear = (beats * length * (launching + computing / pieces)[own])[None]
            nothing = np.zeros_like(linear)
            total += ShareCost(nothing, linear, nothing).floor(counts[own], units=length)
        return total


def part_of(layers: Layers, which: Callable[[Equation], bool], model: CostModel) -> float:
    """The part of layers' time that goes into some of their equations, on the whole batch."""
    spent = {True: 0.0, False: 0.0}
    for equation, kernel, times in kernels_in(layers.source):
        spent[which(equation)] += times * float(model.cost(kernel).constant.max())
    return spent[True] / (sum(spent.values()) or 1.0)


def _over_layers(equation: Equation) -> bool:
    return equation.primitive == "scan" and bool(equation.part) and equation.params["length"] > 1
