"""What a plan's ranks exchange: which tensors travel together, and the schedule that is emitted of it.

A plan that was made in this process has its step, and messages follow from that; a plan file carries them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from shardwright.backends.schedule.document import Planned, emit, planned
from shardwright.backends.schedule.order import arrange
from shardwright.cost.topology import Topology
from shardwright.ir.errors import PlanError
from shardwright.ir.flow import is_local
from shardwright.ir.program import Move

if TYPE_CHECKING:
    from shardwright.plan import Plan


def planned_messages(plan: Plan) -> tuple[Planned, ...] | None:
    """See `Plan.planned_messages`."""
    if plan.traced is not None:
        return planned(arrange(plan.program, plan.traced.graph, plan.bucket_bytes, near=plan.near))
    has_none = not any(isinstance(i, Move) and not is_local(i) for i in plan.program.all_instructions())
    return plan.messages if plan.messages or has_none else None


def schedule(plan: Plan, ranks: Sequence[int] | None) -> dict[str, Any]:
    """See `Plan.schedule`."""
    messages = planned_messages(plan)
    if plan.rewriting.stages > 1:
        raise PlanError(
            place="plan",
            reason="has stages, which hand on pieces while they compute: those are no messages of a schedule",
            remedy="Plan with stages='off'",
        )
    if messages is None:
        raise PlanError(
            place="plan",
            reason="has no messages: it was written by an earlier version",
            remedy="Make the plan again with `shardwright plan`",
        )
    return emit(
        messages,
        plan.used_ratios,
        Topology.of(plan.part).wiring,
        devices=plan.used_devices,
        plan=plan.fingerprint,
        ranks=ranks,
    )
