"""`shardwright diff`: two plans side by side."""

from __future__ import annotations

import click

from shardwright.commands.options import json_option
from shardwright.console import say, say_json
from shardwright.plan import Plan
from shardwright.plans.diff import diff as compare
from shardwright.plans.diff import layout


@click.command()
@click.argument("first", metavar="A.json")
@click.argument("second", metavar="B.json")
@json_option
def diff(first: str, second: str, as_json: bool) -> None:
    """Say what changed from one plan to another, and why it is cheaper or dearer."""
    found = compare(Plan.load(first), Plan.load(second))
    if as_json:
        say_json({"first": first, "second": second, **found.to_dict()})
    else:
        say(layout(found))
