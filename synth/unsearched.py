"""The plan where nothing is searched: the best baseline, and what no plan costs less than.

Baselines are on all devices (`shardwright.synth.recipes`), or on a node or a class of devices alone.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from shardwright.cost.fleet import Fleet
from shardwright.cost.memory.liveness import footprint
from shardwright.ir.errors import PlanError
from shardwright.ir.graph import Graph
from shardwright.synth.alternate import Synthesis, synthesize
from shardwright.synth.baselines import Workshop
from shardwright.synth.chosen import Choice, choice_of
from shardwright.synth.fallback import fits
from shardwright.synth.memory.rent import too_small
from shardwright.synth.part import Part, parts_of
from shardwright.synth.parts import Members
from shardwright.synth.prices.tables import Prices
from shardwright.synth.search.solve import SpaceSolver
from shardwright.synth.space.factors import EquationFactor
from shardwright.synth.space.space import Space
from shardwright.synth.timer import Timer

#: What is said where none does.
NONE_FITS = "no baseline fits into every device's memory"


def arithmetic_s(space: Space, floors: Prices) -> float:
    """What the kernels of every program cost at least, each under shares of its own; no exchange counts."""
    uses = Counter([use.factor for use in space.uses])
    kernels = {factor: floors.list.kernels(factor) for factor in uses if isinstance(factor, EquationFactor)}
    seconds = floors.seconds
    return sum(uses[f] * f.weight * float(seconds[lines].min()) for f, lines in kernels.items())


def unsearched(
    graph: Graph,
    solver: SpaceSolver,
    space: Space,
    fleet: Fleet,
    timer: Timer,
    parts: Sequence[Members] | None = None,
) -> Choice:
    """The best baseline, one that fits before any that does not; the bound is that of all parts.

    Args:
        graph: the step.
        solver: of its programs.
        space: these.
        fleet: the devices.
        timer: is told where time goes.
        parts: of the fleet, the whole first; those of `shardwright.synth.parts.candidates` by default.

    Raises:
        PlanError: no baseline applies to the step.
    """
    made = parts_of(fleet, parts)
    with timer.search():
        for part in made:
            part.bound_s = arithmetic_s(space, part.floors)
            devices = part.model.fleet.devices
            part.impossible = too_small(graph, [device.type.memory_bytes for device in devices])
        workshop = Workshop(graph, space, made[0].model)
        names = {members: name for name, members in workshop.parts({})}
        best: Part | None = None
        # The whole fleet first; then nodes and classes that might be better.
        for part in sorted(made, key=lambda part: (not part.whole, part.bound_s)):
            if not part.whole and (part.members not in names or part.impossible):
                continue
            rival_s = best.cost_s if best is not None and best.fits else math.inf
            if part.bound_s < rival_s:
                part.bound_s = solver.bound(part.floors)
                name = names.get(part.members, "")
                part.found = _best_baseline(workshop.on(part.model), part.bound_s, rival_s, name)
            if part.found is not None:
                part.fits = fits(part.found, part.model)
                best = part if best is None or part.beats(best) else best
    if best is None:
        raise PlanError(
            place="time limit",
            reason="is 0, and no baseline applies to this step",
            remedy="Allow some time to search",
        )
    return choice_of(best, made, ended=False)


def _best_baseline(workshop: Workshop, bound_s: float, rival_s: float, where: str) -> Synthesis | None:
    """The best baseline on all devices of a workshop; None where none applies, or is cheaper than a rival.

    Args:
        workshop: makes baselines.
        bound_s: what no program on them costs less than.
        rival_s: what there is already that fits.
        where: which part of a fleet they are; empty for all of it.
    """
    graph, space, model = workshop.graph, workshop.space, workshop.model
    if len(model.fleet.devices) == 1:  # all programs are one, whatever baseline it would be
        only = synthesize(graph, space, model, Timer())
        return replace(only, expanded=0, searches=0, notes=(said(where or "one device"), *only.notes))
    first: Synthesis | None = None
    for draft in workshop.cheaper(rival_s):
        least_s = min(bound_s, draft.cost_s)
        found = Synthesis(
            program=draft.program,
            ratios=draft.ratios,
            cost_s=draft.cost_s,
            bound_s=least_s,
            search_gap=1 - least_s / draft.cost_s if draft.cost_s else 0.0,
            expanded=0,
            searches=0,
            notes=(said(f"{draft.name} on {where}" if where else draft.name),),
            items=tuple(draft.items),
            memory=footprint(draft.program, graph),
        )
        if fits(found, model):
            return found
        first = first or found
    return None if first is None else replace(first, notes=(*first.notes, NONE_FITS))


def said(name: str) -> str:
    """What a plan says of the baseline that it is."""
    return f"nothing was searched: the time limit is 0, and this is {name}"
