"""`shardwright emit`: the collective schedule of a plan, for something else to run."""

from __future__ import annotations

import json

import click

from shardwright.commands.options import json_option
from shardwright.console import say_json
from shardwright.files import check_outputs, write_whole
from shardwright.plan import Plan


@click.command()
@click.argument("plan_path", metavar="PLAN.json")
@click.option("--rank", type=int, metavar="N", help="Of this rank only.  [default: of all]")
@click.option("-o", "--output", metavar="SCHEDULE.json", help="Write to this file.  [default: print]")
@json_option
def emit(plan_path: str, rank: int | None, output: str | None, as_json: bool) -> None:
    """Write what every rank of a plan exchanges in a step, as JSON.

    In order: messages with collective, strategy, participants, counts and displacements, buffers, and the
    messages that each waits for. Its form is that of schedule.schema.json.
    """
    check_outputs({"-o": output}, {"PLAN.json": plan_path})
    found = Plan.load(plan_path).schedule(None if rank is None else [rank])
    if output is not None:
        write_whole(output, json.dumps(found, indent=1) + "\n")
    if output is None or as_json:
        say_json(found)
    else:
        messages = sum(len(one["messages"]) for one in found["ranks"])
        click.echo(f"written to {output}: {messages} messages of {len(found['ranks'])} ranks")
