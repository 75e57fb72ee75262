"""Whether a plan and a step belong together: asked before anything runs, with the traced step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
from jax.tree_util import keystr, tree_flatten_with_path

from shardwright.backends.layout import type_of, weak_of
from shardwright.ir.dtypes import dtype_of
from shardwright.ir.errors import InputError, PlanError, ProgramError, TraceError
from shardwright.ir.program import verify
from shardwright.ir.rewrites.rewriting import rewritten
from shardwright.ir.trace import Traced, argument_names, marked, trace

if TYPE_CHECKING:
    from shardwright.plan import Plan

_WEAK = "weak "
_LIKE_PLANNED = "Pass arguments like those that were planned for, or plan again for these"


def traced_for(plan: Plan, train_step: Callable[..., Any], args: tuple[Any, ...]) -> Traced:
    """The step traced with arguments as the plan has them.

    Raises:
        PlanError: it cannot be, with other arguments than those that were planned for.
        TraceError: it cannot be.
        InputError: an argument is no array or number.
    """
    try:
        return trace(train_step, *as_planned(plan, args), state=plan.state_override)
    except TraceError as error:
        given = _named(args, argument_names(train_step, args))
        if not plan.arguments or not (found := misplaced(given, plan.arguments)):
            raise
        raise PlanError(place=found[0], reason=found[1], remedy=_LIKE_PLANNED) from error


def attached(plan: Plan, traced: Traced) -> Traced:
    """See `Plan.attach_traced`."""
    if traced.fingerprint != plan.fingerprint:
        raise _unlike(plan, traced)
    traced = rewritten(marked(traced, donated=plan.donate, compiler=plan.fleet.compiler), plan.rewriting)
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


def restructured(traced: Traced, args: tuple[Any, ...]) -> InputError:
    """What arguments of another structure than the step was traced with differ in."""
    wanted = jax.tree.unflatten(traced.in_tree, range(traced.in_tree.num_leaves))
    planned = types_of(traced)
    names = [f"arg{i}" for i in range(len(args))]
    for (path, _), name in zip(tree_flatten_with_path(wanted)[0], planned, strict=True):
        if path[0].idx < len(args):
            names[path[0].idx] = name.removesuffix(keystr(path[1:]))
    found = misplaced(_named(args, names), planned)
    if found is None:
        pairs = zip(names, jax.tree.structure(args).children(), traced.in_tree.children(), strict=True)
        # Containers of another type, or what they hold beside arrays.
        found = next((n, f"is {a}, it was planned for {b}") for n, a, b in pairs if a != b)
    return InputError(place=found[0], reason=found[1], remedy=_LIKE_PLANNED)


def misplaced(given: Mapping[str, Any], planned: Mapping[str, str]) -> tuple[str, str] | None:
    """The first leaf that is not given, or another, or else not planned for, and what is wrong with it."""
    for name, wanted in planned.items():
        if name not in given:
            under = [other for other in given if other.startswith((f"{name}[", f"{name}."))]
            there = f"is a tree with leaves such as {under[0]}" if under else "is not given"
            return name, f"{there}, it was planned for {wanted}"
        found = type_of(given[name])
        if str(found) != wanted.removeprefix(_WEAK):
            return name, f"is {found}, it was planned for {wanted}"
    return next(((name, "was not there when it was planned") for name in given if name not in planned), None)


def _named(args: Sequence[Any], names: Sequence[str]) -> dict[str, Any]:
    ends = zip(names, args, strict=True)
    return {name + keystr(path): leaf for name, arg in ends for path, leaf in tree_flatten_with_path(arg)[0]}


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
                remedy=_LIKE_PLANNED,
            )
    made_with = ", ".join(f"{name} {version}" for name, version in plan.versions.items())
    return PlanError(
        place="plan",
        reason=f"was made for another step (plan {plan.fingerprint[:12]}, step {traced.fingerprint[:12]})",
        remedy=f"Use the step, shapes and versions it was made with ({made_with}), or plan again",
    )
