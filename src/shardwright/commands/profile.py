"""`shardwright profile`: work, traffic and memory of a step, and of each device under a plan."""

from __future__ import annotations

import warnings
from typing import Any

import click

from shardwright.commands.options import check_made, factory_argument, json_option, planning_options
from shardwright.console import say, say_json, stages
from shardwright.cost.fleet import Fleet
from shardwright.cost.memory.compilers import COMPILERS
from shardwright.factory import load_factory, step_file
from shardwright.ir.errors import InputError, ReplicatedWarning
from shardwright.plan import Plan
from shardwright.profile_api import profile
from shardwright.reports.picture import check_plot
from shardwright.reports.profile import layout, plot


@click.command("profile")
@factory_argument
@click.option("--fleet", "fleet_path", metavar="FLEET.yaml", help="Plan for this fleet; profile its devices.")
@click.option("--plan", "plan_path", metavar="PLAN.json", help="Profile the devices of this plan.")
@click.option(
    "--compiler",
    type=click.Choice(tuple(COMPILERS)),
    help="Without fleet or plan: XLA's for cpu (default) or gpu; gpu-float32: cards without bfloat16 (T4).",
)
@click.option("--plot", "picture", metavar="PICTURE.svg", help="Draw memory over time, and by layer.")
@planning_options
@json_option
def profile_command(
    target: str,
    fleet_path: str | None,
    plan_path: str | None,
    compiler: str | None,
    picture: str | None,
    planning: dict[str, Any],
    as_json: bool,
) -> None:
    """Profile the step that FACTORY() returns; nothing is executed."""
    if fleet_path is not None and plan_path is not None:
        raise InputError(place="profile", reason="has --fleet and --plan", remedy="Pass one of them")
    if fleet_path is None:
        check_made(planning)
    if picture is not None:
        check_plot(picture, {"--fleet": fleet_path, "--plan": plan_path, "the step": step_file(target)})
    fleet = None if fleet_path is None else Fleet.load(fleet_path)
    loaded = None if plan_path is None else Plan.load(plan_path)
    step, args = load_factory(target)
    with stages() as tick, warnings.catch_warnings():
        warnings.simplefilter("ignore", ReplicatedWarning)
        found = profile(step, *args, fleet=fleet, plan=loaded, compiler=compiler, tick=tick, **planning)
    if picture is not None:
        plot(found, picture)
    if as_json:
        say_json(found.to_dict())
    else:
        say(layout(found))
