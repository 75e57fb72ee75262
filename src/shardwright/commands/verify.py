"""`shardwright verify`: a plan against one device."""

from __future__ import annotations

import sys

import click

from shardwright.commands.options import factory_argument, json_option
from shardwright.console import say_json, stages
from shardwright.factory import check_concrete, load_factory
from shardwright.plan import Plan


@click.command()
@click.argument("plan_path", metavar="PLAN.json")
@factory_argument
@json_option
def verify(plan_path: str, target: str, as_json: bool) -> None:
    """Run a plan on the reference backend and compare it with one device.

    Exit code 1 if anything is outside its tolerance.
    """
    loaded = Plan.load(plan_path)
    step, args = load_factory(target)
    check_concrete(target, args)
    with stages() as tick:
        tick("running the program on all devices of this process")
        result = loaded.verify(step, *args)
    if as_json:
        say_json({name: getattr(result, name) for name in type(result).__slots__})
    else:
        click.echo(str(result))
    sys.exit(0 if result.ok else 1)
