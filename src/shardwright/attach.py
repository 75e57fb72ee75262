"""Whether a plan and a step belong together: asked before anything runs, with the traced step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardwright.ir.donation import donating
from shardwright.ir.errors import PlanError, ProgramError
from shardwright.ir.program import verify
from shardwright.ir.rewrites.rewriting import rewritten
from shardwright.ir.trace import Traced

if TYPE_CHECKING:
    from shardwright.plan import Plan


def attached(plan: Plan, traced: Traced) -> Traced:
    """See `Plan.attach_traced`."""
    if traced.fingerprint != plan.fingerprint:
        raise _unlike(plan, traced)
    traced = rewritten(donating(traced, plan.donate), plan.rewriting)
    try:
        verify(plan.program, traced.graph)
    except ProgramError as error:
        raise PlanError(
            place=f"plan: {error.place}",
            reason=error.reason,
            remedy="The plan was changed by hand: plan again",
        ) from error
    return traced


def _unlike(plan: Plan, traced: Traced) -> PlanError:
    """What a plan and another step than its own differ in: an argument, or what is computed."""
    graph = traced.graph
    given = {name: str(value.type) for name, value in zip(graph.input_names, graph.inputs, strict=True)}
    for name in {**plan.arguments, **given} if plan.arguments else ():
        mine, theirs = plan.arguments.get(name), given.get(name)
        if mine != theirs:
            planned = f"it was planned for {mine}" if mine else "the plan was made for a step without it"
            return PlanError(
                place=name,
                reason=f"is {theirs or 'no argument'}, {planned}",
                remedy="Pass arguments like those that were planned for, or plan again for these",
            )
    made_with = ", ".join(f"{name} {version}" for name, version in plan.versions.items())
    return PlanError(
        place="plan",
        reason=f"was made for another step (plan {plan.fingerprint[:12]}, step {traced.fingerprint[:12]})",
        remedy=f"Use the step, shapes and versions it was made with ({made_with}), or plan again",
    )
