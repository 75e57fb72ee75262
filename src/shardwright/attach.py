"""Whether a plan and a step belong together: asked before anything runs, with the traced step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax

from shardwright.backends.layout import type_of, weak_of
from shardwright.ir.donation import donating
from shardwright.ir.dtypes import dtype_of
from shardwright.ir.errors import PlanError, ProgramError
from shardwright.ir.program import verify
from shardwright.ir.rewrites.rewriting import rewritten
from shardwright.ir.trace import Traced

if TYPE_CHECKING:
    from shardwright.plan import Plan

_WEAK = "weak "


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


def types_of(traced: Traced) -> dict[str, str]:
    """The arguments of a step with their types, in order: see `PlanRecord.arguments`."""
    ends = enumerate(zip(traced.graph.input_names, traced.graph.inputs, strict=True))
    return {name: f"{_WEAK if i in traced.weak else ''}{value.type}" for i, (name, value) in ends}


def as_planned(plan: Plan, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments, for tracing, with weak types where the plan has them and nowhere else.

    A count of steps that began as a number comes back as an array, from a step or from a checkpoint, and a
    learning rate may be either. They are values of one dtype, and the plan says how it promotes.
    """
    flat, structure = jax.tree.flatten(args)
    if len(flat) != len(plan.arguments):
        return args
    leaves = map(_like, flat, plan.arguments.values())
    return jax.tree.unflatten(structure, leaves)


def _like(leaf: Any, planned: str) -> Any:
    number = isinstance(leaf, (bool, int, float, complex))
    wanted = planned.startswith(_WEAK)
    if weak_of(leaf) == wanted or not (number or hasattr(leaf, "dtype")):
        return leaf
    found = type_of(leaf)
    if str(found) != planned.removeprefix(_WEAK):
        return leaf
    return jax.ShapeDtypeStruct(found.shape, dtype_of(found.dtype), weak_type=wanted)


def _unlike(plan: Plan, traced: Traced) -> PlanError:
    """What a plan and another step than its own differ in: an argument, or what is computed."""
    given = types_of(traced)
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
