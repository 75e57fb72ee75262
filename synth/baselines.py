"""What people do without a planner, priced by the same model as programs of the same space.

Data parallelism: state is replicated, every other input is split along its first dimension, and nothing
but all-reduces is exchanged. Even: every device the same share; proportional: by arithmetic speed.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from shardwright.cost.bill import bill, seconds
from shardwright.cost.memory import peak_bytes
from shardwright.cost.model import CostModel
from shardwright.ir.graph import Graph
from shardwright.ir.program import Program
from shardwright.synth.emit import emit
from shardwright.synth.factors import Use
from shardwright.synth.pricing import Prices
from shardwright.synth.solve import solve
from shardwright.synth.space import Space


@dataclass(frozen=True, slots=True)
class Baseline:
    """A baseline's program and price.

    Attributes:
        name: what people call it.
        ratios: share per device.
        program: its program.
        cost_s: its price by the plan's own model.
        fits: whether its predicted peak is within every device's memory.
    """

    name: str
    ratios: tuple[float, ...]
    program: Program
    cost_s: float
    fits: bool


def data_parallel(graph: Graph, space: Space, model: CostModel) -> tuple[Baseline, ...]:
    """Even and proportional data parallelism, each the best program that keeps to its rules."""
    state = set(graph.state.values())
    pinned: list[Use] = []
    for position, value in enumerate(graph.inputs):
        choice = space.root.choice[value]
        if position in state or value.type.rank == 0 or not space.units.unit(value, 0):
            pinned.append(space.link("whole", choice))
        else:
            pinned.append(space.link("first dimension", choice))
    speed = np.array([device.flop_rate("float32", None)[0] for device in model.types])
    shares = {
        "even data parallelism": np.ones_like(speed) / float(model.counts.sum()),
        "proportional data parallelism": speed / float(model.counts @ speed),
    }
    found: list[Baseline] = []
    for name, per_class in shares.items():
        ratios = tuple(float(per_class[c]) for c in model.class_of)
        prices = Prices.at(model, ratios, allowed=frozenset({"all_reduce"}))
        program = emit(space, solve(space, prices, extra=pinned).assignment, prices)
        cost_s = seconds(bill(program, graph, model), model, ratios)
        limits = (device.type.memory_bytes for device in model.fleet.devices)
        peaks = peak_bytes(program, graph, ratios)
        fits = all(peak <= limit for peak, limit in zip(peaks, limits, strict=True))
        found.append(Baseline(name, ratios, program, cost_s, fits))
    return tuple(found)
