"""The plan where nothing is searched: the best baseline, and what no plan costs less than.

It is the plan, too, where a time limit ended the search before that found anything as good. Baselines are on
all devices (`shardwright.synth.recipes`), or on a node or a class of devices alone.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from shardwright.cost.fleet import Fleet
from shardwright.ir.errors import PlanError
from shardwright.ir.graph import Graph
from shardwright.synth.alternate import Synthesis, within_memory
from shardwright.synth.baselines import Workshop
from shardwright.synth.chosen import Choice, choice_of
from shardwright.synth.fallback import fits
from shardwright.synth.freely import freely
from shardwright.synth.memory.rent import too_small
from shardwright.synth.part import Part, parts_of
from shardwright.synth.parts import Members
from shardwright.synth.prices.tables import Prices
from shardwright.synth.programs.judge import Judge, Look
from shardwright.synth.search.priced import SpaceSolver
from shardwright.synth.space.factors import EquationFactor
from shardwright.synth.space.space import Space
from shardwright.synth.timer import Timer

#: What is said where none does.
NONE_FITS = "no baseline fits into every device's memory"

#: Why a baseline is the plan.
NO_TIME = "only baselines were made: the time limit is 0"
CUT_SHORT = "the time limit ended the search before it found anything as good"


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
    parts: Sequence[Members] | None,
    look: Look,
    why: str = NO_TIME,
    below_s: float = math.inf,
) -> Choice:
    """The best baseline, one that fits before any that does not; the bound is that of all parts.

    Args:
        graph: the step.
        solver: of its programs.
        space: these.
        fleet: the devices.
        timer: is told where time goes.
        parts: of the fleet, the whole first; None: those of `shardwright.synth.parts.candidates`.
        look: see `shardwright.synth.alternate.synthesize`.
        why: it is the plan.
        below_s: what a plan that fits costs; baselines that cost as much are not looked for.

    Raises:
        PlanError: no baseline applies to the step, or costs less.
    """
    made = parts_of(fleet, parts)
    with timer.search():
        for part in made:
            part.bound_s = arithmetic_s(space, part.floors)
            devices = part.model.fleet.devices
            part.impossible = too_small(graph, [device.type.memory_bytes for device in devices])
        workshop = Workshop(graph, space, made[0].model, look=look)
        names = {members: name for name, members in workshop.parts({})}
        best: Part | None = None
        # Nodes and classes first, which are one search each; then the whole fleet if it might be better.
        for part in sorted(made, key=lambda part: (part.whole, part.bound_s)):
            if not part.whole and (part.members not in names or part.impossible):
                continue
            rival_s = min(below_s, best.cost_s if best is not None and best.fits else math.inf)
            if part.bound_s < rival_s:
                part.bound_s = solver.bound(part.floors)
            if part.bound_s < rival_s:
                name = names.get(part.members, "")
                part.found = _best_baseline(workshop.on(part.model), look, part.bound_s, rival_s, name, why)
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


def _best_baseline(
    workshop: Workshop, look: Look, bound_s: float, rival_s: float, where: str, why: str
) -> Synthesis | None:
    """The best baseline on all devices of a workshop; None where none applies, or is cheaper than a rival.

    Args:
        workshop: makes baselines.
        look: see `unsearched`.
        bound_s: what no program on them costs less than.
        rival_s: what there is already that fits.
        where: which part of a fleet they are; empty for all of it.
        why: a baseline is the plan.
    """
    graph, space, model = workshop.graph, workshop.space, workshop.model
    one = len(model.fleet.devices) == 1
    first: Synthesis | None = None
    if one or where:
        # What fits only if it is searched for would take longer than anything here may.
        alone = within_memory(freely(graph, space, model, Timer(), look=look), briefly=True)
        if one or fits(alone, model):
            notes = said(where or "one device", why), *alone.notes
            first = replace(alone, expanded=0, searches=0, notes=notes)
        if first is not None and fits(first, model):
            return first if first.cost_s < rival_s else None
    judge = Judge(graph, model, look)
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
            notes=(said(f"{draft.name} on {where}" if where else draft.name, why),),
            items=tuple(draft.items),
            memory=judge.closely(draft.program, draft.ratios, judge.footprint(draft.program)),
        )
        if fits(found, model):
            return found
        first = first or found
    return None if first is None else replace(first, notes=(*first.notes, NONE_FITS))


def said(name: str, why: str) -> str:
    """What a plan says of the baseline that it is, and why that is the plan."""
    return f"{why}, and this is {name}"


def cut_short(found: Choice | None, other: Choice, below_s: float, *, alike: bool) -> Choice | None:
    """What a search found that a time limit ended, or the best baseline if that is better.

    Args:
        found: by the search; None if nothing that costs less than a rival.
        other: the best baseline.
        below_s: what a rival costs that fits.
        alike: whether the bounds of both are of the same programs, so that either holds.
    """
    cost_s, bound_s = other.found.cost_s, other.found.bound_s
    fitting = fits(other.found, other.model)
    if found is None:
        return other if fitting and cost_s < below_s else None
    if fitting < fits(found.found, found.model):
        return found
    if fitting == fits(found.found, found.model) and cost_s >= found.found.cost_s * (1 - 1e-9):
        return found
    if alike:  # what nothing costs less than, memory aside, nothing does that fits
        bound_s = max(bound_s, min(cost_s, found.found.bound_s))
    best = replace(
        other.found,
        bound_s=bound_s,
        search_gap=min(other.found.search_gap, 1 - bound_s / cost_s if cost_s else 0.0),
        expanded=found.found.expanded + other.found.expanded,
        searches=found.found.searches + other.found.searches,
        # What there was no time for is still true.
        notes=(*other.found.notes, *(note for note in found.found.notes if "time limit" in note)),
    )
    return replace(other, found=best, parts=(*found.parts, *other.parts))
