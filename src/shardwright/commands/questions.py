"""`--what-if`, `--frontier` and `--remedies` of `shardwright plan`."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import click

from shardwright.console import stages
from shardwright.fleet_questions import WhatIf, beside
from shardwright.ir.errors import InputError, ReplicatedWarning
from shardwright.memory.frontier import Frontier, around, check_parts
from shardwright.memory.remedies import Shortage, shortage
from shardwright.plan import Plan

what_if_option = click.option(
    "--what-if",
    "changes",
    metavar="CHANGES",
    help="Plan for a changed fleet, too: add=2xA100-40GB,drop=n3.",
)
frontier_option = click.option(
    "--frontier",
    "parts",
    metavar="PARTS",
    help="Plan for parts of the memory, too, and show what they cost: .9,.8,.7.",
)
remedies_option = click.option(
    "--remedies/--no-remedies",
    "with_remedies",
    default=None,
    help="Where nothing fits, plan what would help, and say at which price; so it is without --time-limit.",
)


def why_not(
    made: Plan, step: Callable[..., Any], args: tuple[Any, ...], planning: Mapping[str, Any]
) -> Shortage | None:
    """Why a plan that was made here in this way does not fit, with progress; None if it does."""
    with stages() as tick:
        changing = ("constraints", "recompute", "microbatches", "offload", "stages")
        asked = {name: planning[name] for name in changing if name in planning}
        return shortage(made, step, *args, tick=tick, **asked)


def ask(made: Plan, changes: str, planning: Mapping[str, Any]) -> WhatIf:
    """The plan for a changed fleet beside one that was made here in the same way, with progress."""
    with stages() as tick, warnings.catch_warnings():
        warnings.simplefilter("ignore", ReplicatedWarning)  # the plan beside it warned
        return beside(made, changes, tick, **planning)


def parse_parts(given: str | None) -> tuple[float, ...] | None:
    """The value of `--frontier`: parts of the memory.

    Raises:
        InputError: one of them is no number above zero.
    """
    if given is None:
        return None
    try:
        parts = tuple(float(part) for part in given.split(","))
    except ValueError:
        raise InputError(
            place=f"--frontier {given}",
            reason="is no list of numbers",
            remedy="Write parts of the memory, such as .9,.8",
        ) from None
    check_parts(parts, f"--frontier {given}")
    return parts


def over(made: Plan, parts: Sequence[float], planning: Mapping[str, Any]) -> Frontier:
    """Plans for parts of the memory beside one that was made here in the same way, with progress."""
    with stages() as tick, warnings.catch_warnings():
        warnings.simplefilter("ignore", ReplicatedWarning)  # the plan beside them warned
        return around(made, parts, tick, **planning)
