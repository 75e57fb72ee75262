"""What it takes to keep replicated state alike: every K steps devices compare checksums of it.

A checksum reads the tensor twice, as the sum and the parity of its words (`backends/mpi/drift.py`). On a card
with memory of its own the tensor goes to the host first, whose memory is taken to be read faster than the
link brings it. One small all-reduce tells whether all checksums are equal. What is sent anew where they are
not is no part of the price: nobody knows how often.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from shardwright.cost.model import CostModel
from shardwright.cost.share_cost import Floats
from shardwright.cost.timeline import Span, Timeline
from shardwright.cost.topology import host_link
from shardwright.ir.graph import Graph
from shardwright.ir.placement import Partial, R
from shardwright.ir.program import Program
from shardwright.ir.redundant import RESYNC_EVERY, redundant

#: Bytes by tensor that are compared: its checksum, and its negative.
_COMPARED_BYTES = 16
_LABEL = "part of a comparison of state"


def comparing_s(program: Program, graph: Graph, model: CostModel) -> tuple[Floats, float]:
    """Seconds of one comparison: by device, of checksums; and of the all-reduce. Zero where nothing drifts.

    Args:
        program: verified.
        graph: what it computes.
        model: of the devices.
    """
    count = len(model.class_of)
    compared = redundant(program, graph) if count > 1 else ()
    if not compared:
        return np.zeros(count), 0.0
    tensors, nbytes = len(compared), sum(graph.outputs[i].type.nbytes for i in compared)
    by_class: list[float] = []
    for each in model.classes:
        link = host_link(each.type, model.fleet.devices[each.members[0]].host_link)
        if link is None:
            by_class.append(2 * nbytes / each.type.bandwidth_byte_per_s)
        else:
            latency_s = each.type.launch_s + link.latency_s
            by_class.append(tensors * latency_s + nbytes / link.bandwidth_byte_per_s)
    pre, at = Partial("min"), np.full(count, 1 / count)
    prices = [
        model.move("all_reduce", strategy, tensors * _COMPARED_BYTES, pre, R).per_device(at, model.class_of)
        for strategy in model.strategies("all_reduce", pre, R)
    ]
    return np.array(by_class)[model.class_of], min(float(price.max()) for price in prices)


def with_comparisons(
    found: Timeline, program: Program, graph: Graph, model: CostModel, every: int = RESYNC_EVERY
) -> Timeline:
    """A step in time, with its part of a comparison every so many steps; of none where that is 0."""
    if not every:
        return found
    checksums_s, exchange_s = comparing_s(program, graph, model)
    if not checksums_s.any():
        return found
    checksums_s, exchange_s = checksums_s / every, exchange_s / every
    begin_s = np.full(len(checksums_s), found.iteration_s)
    summed_s = begin_s + checksums_s.max()
    spans = (
        Span(_LABEL, False, begin_s, begin_s + checksums_s),
        Span(_LABEL, True, summed_s, summed_s + exchange_s),
    )
    return replace(
        found,
        iteration_s=float(summed_s.max()) + exchange_s,
        spans=(*found.spans, *spans) if found.spans else (),
        compute_s=tuple(s + float(more) for s, more in zip(found.compute_s, checksums_s, strict=True)),
        exposed_s=tuple(s + exchange_s for s in found.exposed_s),
        exchange_s=found.exchange_s + exchange_s,
    )
