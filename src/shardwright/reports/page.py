"""The report: one page that needs no network, no script and nothing beside it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING

import jinja2

from shardwright.cost.quantity import size
from shardwright.reports.facts import COLUMNS, Facts, Run, facts
from shardwright.reports.units import bandwidth, duration, flop_rate
from shardwright.reports.words import exchanged, placed

if TYPE_CHECKING:
    from shardwright.cost.fleet import Link
    from shardwright.ir.trace import Traced
    from shardwright.plan import Plan
    from shardwright.synth.baselines import Baseline

#: Height of a lane in its own units.
HEIGHT = 24

#: Colours of device types; a ninth type has that of the first.
COLOURS = 8


def page(plan: Plan, traced: Traced, title: str, baselines: Sequence[Baseline] = ()) -> str:
    """The report on a plan as HTML.

    Args:
        plan: what it is about.
        traced: the step the plan was made for.
        title: what was planned, for the heading.
        baselines: what is priced beside it.
    """
    found = facts(plan, traced, title, baselines)
    return _template().render(f=found, plan=plan, scales=_scales(found)) + "\n"


def _scales(found: Facts) -> dict[str, float]:
    """Scales that several bars share."""
    plan, best = found.plan, found.best_baseline
    costs = [plan.cost_s, *(b.cost_s for b in found.baselines)]
    return {
        "share": max((g.share for g in found.groups), default=1.0) or 1.0,
        "cost": max(costs) or 1.0,
        "kind": max((kind.seconds for kind in found.kinds), default=1.0) or 1.0,
        "layer": max((layer.seconds for layer in found.layers), default=1.0) or 1.0,
        "iteration": plan.iteration_s or 1.0,
        "certificate": max(plan.cost_s, plan.bound_s, best.cost_s if best else 0.0) or 1.0,
    }


def area(runs: Sequence[Run], upper: bool) -> str:
    """The SVG path of a lane: what is computed from the ground up, or what is exchanged on top of it."""
    parts: list[str] = []
    for run in runs:
        height = run.exchange if upper else run.compute
        if height:
            top = HEIGHT * (1 - run.compute - (run.exchange if upper else 0.0))
            parts.append(f"M{run.start} {top:g}h{run.columns}v{HEIGHT * height:g}h-{run.columns}z")
    return "".join(parts)


def link(found: Link | None) -> str:
    """A link in words."""
    if found is None:
        return "none"
    return f"{bandwidth(found.bandwidth_byte_per_s)}, {duration(found.latency_s)}"


def phase_name(phase: str) -> str:
    """A phase in words."""
    return "forward and backward" if phase == "both" else phase


def percent(part: float, digits: int = 1) -> str:
    """A part of a whole."""
    return f"{100 * part:.{digits}f}%"


@cache
def _template() -> jinja2.Template:
    folder = resources.files("shardwright.reports").joinpath("template")

    def read(name: str) -> str:
        return folder.joinpath(name).read_text(encoding="utf-8")

    environment = jinja2.Environment(
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
        loader=jinja2.FunctionLoader(read),
    )
    environment.filters.update(
        duration=duration,
        size=size,
        percent=percent,
        flops=flop_rate,
        bandwidth=bandwidth,
        link=link,
        placed=placed,
        exchanged=exchanged,
        phase=phase_name,
    )
    known = {"area": area, "COLUMNS": COLUMNS, "HEIGHT": HEIGHT, "COLOURS": COLOURS}
    return environment.get_template("report.html", globals=known)
