"""How many bytes of exchanges should travel together, by what the timeline predicts."""

from __future__ import annotations

from dataclasses import replace

from shardwright.ir.flow import is_local
from shardwright.ir.program import Move
from shardwright.ir.trace import Traced
from shardwright.plan import Plan

#: Sizes of messages that are looked at.
SIZES = (1 << 20, 4 << 20, 16 << 20, 64 << 20)
#: Part of a step that a message size must save to be chosen over none where exchanges then run beside
#: computation: predictions of that are not better. Fewer messages one after another are never slower.
WORTH = 0.02


def suggested(plan: Plan) -> int | None:
    """The `bucket_bytes` of a new plan, as `bucketed` finds it.

    Exchanges that leave early take memory that the plan's peaks do not count: they do so only where there is
    ample. And messages are priced on one mesh axis.
    """
    return _best(plan, None)[0] if plan.ample and plan.axes == 1 else None


def bucketed(plan: Plan, traced: Traced | None = None) -> Plan:
    """The plan with the `bucket_bytes` for which the shortest step is predicted, and that step's seconds.

    Exchanges between nodes run beside computation; within a node they are copies, which take the cores that
    compute. Where no size is predicted to save anything, exchanges go on travelling one by one.

    Args:
        plan: a plan for the backend `mpi`.
        traced: the step of a plan that was loaded from a file (see `Plan.attach`).

    Raises:
        PlanError: the plan was loaded from a file and no step is given.
    """
    best, iteration_s = _best(plan, traced)
    return replace(plan, bucket_bytes=best, iteration_s=iteration_s)


def _best(plan: Plan, traced: Traced | None) -> tuple[int | None, float]:
    """The size of messages, None for one by one, and the seconds predicted with it."""
    overlap = len(plan.part.nodes) > 1
    apart_s = plan.timeline(traced).iteration_s
    if all(is_local(i) for i in plan.program.all_instructions() if isinstance(i, Move)):
        return None, apart_s
    found = {size: plan.timeline(traced, overlap=overlap, bucket_bytes=size).iteration_s for size in SIZES}
    best = min(found, key=lambda size: found[size])
    if found[best] >= (1 - WORTH * overlap) * apart_s:
        return None, apart_s
    return best, found[best]
