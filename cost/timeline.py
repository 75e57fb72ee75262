"""When everything happens: the iteration time of the schedule the backends run.

Devices run their local segment without waiting and meet at each exchange: a step takes, per segment,
the slowest device's *sum* of kernels (not the sum of the slowest kernels, as cost_s has it) and what it takes
to get into the segment and out of it (`DeviceType.resume_s`), plus the exchanges. Overlap of exchanges with
computation is not assumed, because the backends do not do it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shardwright.cost.bill import Item, Shares
from shardwright.cost.model import CostModel


@dataclass(frozen=True, slots=True)
class Timeline:
    """Seconds of one iteration.

    Attributes:
        iteration_s: all of it.
        exchange_s: spent in exchanges.
        busy_s: spent computing, per device.
    """

    iteration_s: float
    exchange_s: float
    busy_s: tuple[float, ...]


def timeline(items: Sequence[Item], model: CostModel, ratios: Sequence[float]) -> Timeline:
    """Lay the items of a bill out in time, at the rounded shard sizes."""
    shares = Shares(ratios, model.class_of)
    busy = np.zeros(len(model.class_of))
    segment = np.zeros_like(busy)
    resume = np.array([model.types[c].resume_s for c in model.class_of])
    total = exchange = 0.0
    for item in items:
        times = item.weight * shares.per_device(item.cost, item.cut)
        if item.exchange:
            segment = segment + resume * bool(segment.any())
            total += float(segment.max()) + float(times.max())
            exchange += float(times.max())
            busy += segment
            segment = np.zeros_like(busy)
        else:
            segment = segment + times
    segment = segment + resume * bool(segment.any())
    busy += segment
    return Timeline(total + float(segment.max()), exchange, tuple(float(b) for b in busy))
