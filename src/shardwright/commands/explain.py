"""`shardwright explain`: why a plan is as it is."""

from __future__ import annotations

import click
from rich.console import Group
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from shardwright.commands.options import json_option
from shardwright.console import say, say_json, stages
from shardwright.explain import Explanation
from shardwright.explain import explain as answer
from shardwright.factory import load_factory
from shardwright.plan import Plan
from shardwright.reports.units import duration
from shardwright.reports.words import placed


@click.command()
@click.argument("plan_path", metavar="PLAN.json")
@click.argument("subject", metavar="[TENSOR|LAYER|DEVICE]", default="")
@click.option("--step", "target", metavar="FILE:FACTORY", help="The step: price alternatives, know layers.")
@json_option
def explain(plan_path: str, subject: str, target: str | None, as_json: bool) -> None:
    """Say why a plan is as it is, and what would let another one win.

    TENSOR is an argument or a pattern (params['w'], 'params/*/w'), LAYER a part of the model as the names of
    its parameters tell (blocks[0]), DEVICE a device (n0.d1). Without any: the plan as a whole.

    A plan file holds placements and prices, but not the step. With --step, alternatives are priced anew.
    """
    plan = Plan.load(plan_path)
    traced = None
    with stages() as tick:
        if target is not None:
            step, args = load_factory(target)
            tick("tracing the step")
            traced = plan.attach(step, *args)
            tick("pricing alternatives")
        found = answer(plan, subject, traced)
    if as_json:
        say_json(found.to_dict())
    else:
        say(layout(found))


def layout(found: Explanation) -> Group:
    """The printout."""
    parts: list[Text | Padding] = [Text(sentence) for sentence in found.sentences]
    if found.alternatives:
        table = Table(title="alternatives", title_justify="left", box=None, pad_edge=False)
        for name, right in (("tensor", False), ("placement", False), ("cost", True), ("more", True)):
            table.add_column(name, justify="right" if right else "left", overflow="fold")
        table.add_column("wins with", overflow="fold")
        for each in found.alternatives:
            sign = "−" if each.change_s < 0 else ""
            table.add_row(
                each.tensor,
                placed(each.placement),
                duration(each.priced.cost_s),
                f"{sign}{duration(abs(each.change_s))}",
                each.wins,
            )
        parts.append(Padding(table, (1, 0, 0, 0)))
    return Group(*parts)
