"""`--what-if`, `--objective` and `--remedies` of `shardwright plan`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from shardwright.console import stages
from shardwright.plan import Plan
from shardwright.remedies import Shortage, shortage
from shardwright.what_if import WhatIf, cheapest, what_if

what_if_option = click.option(
    "--what-if",
    "changes",
    metavar="CHANGES",
    help="Plan for a changed fleet, too: add=2xA100-40GB,drop=n3.",
)
objective_option = click.option(
    "--objective",
    type=click.Choice(["time", "cost"]),
    default="time",
    help="The fastest steps, or those that cost least, by the fleet's price_per_hour.",
)
remedies_option = click.option(
    "--remedies",
    "with_remedies",
    is_flag=True,
    help="Where nothing fits, plan what would help, and say at which price.",
)


def why_not(made: Plan, step: Callable[..., Any], args: tuple[Any, ...]) -> Shortage | None:
    """Why a plan does not fit, with progress; None if it does."""
    with stages() as tick:
        return shortage(made, step, *args, tick=tick)


def ask(made: Plan, changes: str, **options: Any) -> WhatIf:
    """The plan for a changed fleet beside one that was made here, with progress."""
    assert made.traced is not None
    with stages() as tick:
        return what_if(made.traced, made, changes, tick, state=made.state_override, **options)


def for_money(made: Plan, **options: Any) -> Plan:
    """The plan whose steps cost the least money, with progress, for the step and fleet of another."""
    assert made.traced is not None
    with stages() as tick:
        return cheapest(made.traced, made.fleet, tick, state=made.state_override, **options)
