"""The plan where nothing is searched, beside `shardwright.synth.unsearched`: on two mesh axes, too."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from shardwright.cost.fleet import Fleet
from shardwright.cost.model import CostModel
from shardwright.ir.graph import Graph
from shardwright.synth.alternate import Synthesis
from shardwright.synth.chosen import Choice
from shardwright.synth.fallback import fits
from shardwright.synth.grid.baselines import cheapest_baseline
from shardwright.synth.grid.choice import GridChoosing
from shardwright.synth.programs.judge import Look
from shardwright.synth.unsearched import NO_TIME, NONE_FITS, said

_ONE = "the bound is of two mesh axes too, on which no baseline was considered; axes=2 does"
_BOTH = "baselines on one mesh axis and on two were considered, and the bound is of both"


def beside_one_axis(
    one: Choice,
    grid: GridChoosing,
    graph: Graph,
    fleet: Fleet,
    tick: Callable[[str], None],
    *,
    look: Look,
    baselines: bool,
    why: str = NO_TIME,
) -> Choice:
    """The best baseline, with a bound of two mesh axes.

    Args:
        one: the best on one mesh axis.
        grid: looks at the parts of the fleet on two.
        graph: the step.
        fleet: all devices.
        tick: told what begins.
        look: see `shardwright.synth.alternate.synthesize`.
        baselines: whether those on two axes are considered, on the whole fleet.
        why: a baseline is the plan.
    """
    chosen = one
    two = _cheapest(grid, graph, fleet, tick, look, why) if baselines else None
    if two is not None:
        grounds = [(not fits(each.found, each.model), each.found.cost_s) for each in (one, two)]
        chosen = two if grounds[1] < grounds[0] else one
    found = chosen.found
    bound_s = grid.glance(fitting=fits(found, chosen.model))
    bound_s = min(found.cost_s, one.found.bound_s, bound_s)
    found = replace(
        found,
        bound_s=bound_s,
        search_gap=1 - bound_s / found.cost_s if found.cost_s else 0.0,
        notes=(*found.notes, _BOTH if baselines else _ONE),
    )
    return replace(chosen, found=found, parts=(*one.parts, *grid.parts))


def _cheapest(
    grid: GridChoosing, graph: Graph, fleet: Fleet, tick: Callable[[str], None], look: Look, why: str
) -> Choice | None:
    """The cheapest baseline on two axes, on the whole fleet."""
    model, whole = CostModel(fleet), grid.parts[0]
    made = cheapest_baseline(graph, model, tick, look)
    if made is None:
        return None
    draft, memory = made
    found = Synthesis(
        program=draft.program,
        ratios=draft.ratios,
        cost_s=draft.cost_s,
        bound_s=0.0,
        search_gap=1.0,
        expanded=0,
        searches=0,
        notes=(said(draft.name, why),),
        items=tuple(draft.items),
        memory=memory,
    )
    fitting = fits(found, model)
    if not fitting:
        found = replace(found, notes=(*found.notes, NONE_FITS))
    whole.found, whole.fits = found, fitting
    return Choice(found, model, whole, ())
