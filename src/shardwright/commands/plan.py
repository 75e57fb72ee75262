"""`shardwright plan` and `shardwright baselines`: from a step and a fleet to a plan."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from typing import Any

import click

from shardwright import api
from shardwright.commands.options import factory_argument, fleet_option, json_option, planning_options
from shardwright.commands.questions import (
    ask,
    frontier_option,
    over,
    parse_parts,
    remedies_option,
    what_if_option,
    why_not,
)
from shardwright.console import say, say_json, stages, warn
from shardwright.cost.fleet import Fleet
from shardwright.cost.trace_events import trace_events
from shardwright.factory import load_factory, step_file
from shardwright.files import check_outputs, write_whole
from shardwright.fleet_questions import check_change
from shardwright.ir.errors import ReplicatedWarning
from shardwright.plan import Plan
from shardwright.reports.text import against, baselines_to_json, layout
from shardwright.synth.baselines import Baseline

#: Exit code of `plan` where no plan was found that fits into the devices' memory.
DOES_NOT_FIT = 3


@click.command()
@factory_argument
@fleet_option
@click.option("-o", "--output", metavar="PLAN.json", help="Write the plan to this file.")
@click.option("--baselines", "with_baselines", is_flag=True, help="Price data parallelism beside the plan.")
@click.option("--program", "with_program", is_flag=True, help="Print the program, too.")
@click.option("--timeline", "trace_path", metavar="TRACE.json", help="Write the step in time, for Perfetto.")
@click.option("--report", "page_path", metavar="PAGE.html", help="Write a page about it, for a browser.")
@what_if_option
@frontier_option
@remedies_option
@planning_options
@json_option
def plan(
    target: str,
    fleet_path: str,
    output: str | None,
    with_baselines: bool,
    with_program: bool,
    trace_path: str | None,
    page_path: str | None,
    changes: str | None,
    parts: str | None,
    with_remedies: bool | None,
    planning: dict[str, Any],
    as_json: bool,
) -> None:
    """Plan the step that FACTORY() returns, as (train_step, args), for a fleet.

    Exit code 3: the plan does not fit into the memory there is; what would help is part of the answer.
    """
    fleet = Fleet.load(fleet_path)
    check_outputs(
        {"-o": output, "--timeline": trace_path, "--report": page_path},
        {"--fleet": fleet_path, "the step": step_file(target)},
    )
    if changes is not None:
        check_change(fleet, changes, planning)
    budgets = parse_parts(parts)
    step, args = load_factory(target)
    made = make_plan(step, args, fleet, **planning)
    frontier = None if budgets is None else over(made, budgets, planning)
    if frontier is not None:
        made = frontier.whole
    # Who limits the time to plan asks for no dozen plans more.
    answer = planning.get("time_limit_s") is None if with_remedies is None else with_remedies
    lacking = why_not(made, step, args, planning) if answer else None
    asked = None if changes is None else ask(made, changes, planning)
    if output is not None:
        made.save(output)
    if trace_path is not None:
        events = trace_events(made.timeline(), made.used_devices, f"{target} on {fleet.name}")
        write_whole(trace_path, json.dumps(events) + "\n")
    assert made.traced is not None
    if page_path is not None:
        with stages() as tick:
            beside = api.on_the_whole_fleet(made.traced, fleet, tick)
        made.save_report(page_path, title=target, baselines=beside)
    if as_json:
        data = made.to_dict()
        if asked is not None:
            data["what_if"] = asked.to_dict()
        if frontier is not None:
            data["frontier"] = frontier.to_dict()
        if lacking is not None:
            data["shortage"] = lacking.to_dict()
        say_json(data)
        _leave(made)
        return
    compared: tuple[Baseline, ...] = ()
    if with_baselines:
        with stages() as tick:
            tick("pricing data parallelism")
            compared = api.data_parallel(made.traced, fleet)
    say(layout(made, compared, answered=lacking is not None))
    if asked is not None:
        click.echo(asked.text())
    if frontier is not None:
        click.echo(frontier.text())
    if lacking is not None:
        click.echo(lacking.text())
    if with_program:
        click.echo(made.text())
    _leave(made)


def _leave(made: Plan) -> None:
    """End the command with a code of its own where the plan does not fit."""
    if not made.fits:
        click.get_current_context().exit(DOES_NOT_FIT)


@click.command()
@factory_argument
@fleet_option
@planning_options
@json_option
def baselines(target: str, fleet_path: str, planning: dict[str, Any], as_json: bool) -> None:
    """Price what people do without a planner, beside the plan."""
    fleet = Fleet.load(fleet_path)
    step, args = load_factory(target)
    made = make_plan(step, args, fleet, **planning)
    axes = planning.get("axes", "auto")
    with stages() as tick:
        found = api.baselines(step, *args, fleet=fleet, axes=axes, plan=made, tick=tick)
    if as_json:
        say_json(baselines_to_json(made, found))
    else:
        say(against(made, found))


def make_plan(step: Callable[..., Any], args: tuple[Any, ...], fleet: Fleet, **planning: Any) -> Plan:
    """Plan with progress; warnings become lines on stderr."""
    with stages() as tick, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ReplicatedWarning)
        made = api.synthesize(step, *args, fleet=fleet, tick=tick, **planning)
    for warning in caught:
        if issubclass(warning.category, ReplicatedWarning):
            warn(str(warning.message))
    return made
