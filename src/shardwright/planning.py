"""The plan of a step as it is: spaces on one mesh axis and on two, parts of the fleet, pins, memory."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, TypeAlias

from shardwright.assemble import assembled, replicated_in
from shardwright.constraints import Constraints, conflict, factors, priced, resolve, takes_two_axes
from shardwright.cost.fleet import Fleet
from shardwright.cost.memory import Peaks
from shardwright.cost.model import CostModel
from shardwright.device_memory import peaks
from shardwright.ir.errors import PlanError
from shardwright.ir.state import StateMap
from shardwright.ir.trace import Traced
from shardwright.plan import Plan
from shardwright.plan_parts import Stats
from shardwright.synth.fallback import fullest
from shardwright.synth.grid_alternate import is_mesh
from shardwright.synth.grid_choice import choose_on_grid, on_grid
from shardwright.synth.judge import AMPLE, Look
from shardwright.synth.space import Space
from shardwright.synth.subfleets import Choice, candidates, choose_below, unsearched
from shardwright.synth.timer import Timer

#: Mesh axes of programs.
Axes: TypeAlias = Literal[1, 2, "auto"]


@dataclass(frozen=True, slots=True)
class Request:
    """What is to be planned for, and how; see `shardwright.api.synthesize`."""

    fleet: Fleet
    state: StateMap | None = None
    constraints: Constraints | None = None
    time_limit_s: float | None = None
    devices: Literal["auto", "all"] = "auto"
    axes: Axes = "auto"
    first: Sequence[float] | None = None
    tick: Callable[[str], None] = lambda what: None


def planned(traced: Traced, asked: Request, timer: Timer, rival_s: float = math.inf) -> Plan | None:
    """The plan of a step as it is, or None if none costs less than a rival; what it took the caller knows.

    Args:
        traced: the step.
        asked: what for.
        timer: is told where time goes, and says when it is over.
        rival_s: cost of a plan that there is already.

    Raises:
        InputError: a pin cannot be kept.
        PlanError: no program carries out the step.
    """
    fleet, constraints, axes = asked.fleet, asked.constraints, asked.axes
    asked.tick("building the choice graph")
    start = time.perf_counter()
    space = Space(traced.graph)
    space_s = time.perf_counter() - start
    pins = () if constraints is None else resolve(constraints, traced.graph, space)
    parts = candidates(fleet)[: 1 if asked.devices == "all" else None]
    meshes = () if axes == 1 or asked.time_limit_s == 0 or not is_mesh(fleet) else on_grid(fleet, parts)
    if axes == "auto":  # parts of the fleet on two axes are for those who ask for two: each takes as long
        meshes = meshes[:1]
    flat = not takes_two_axes(pins, bool(meshes))
    try:
        if asked.time_limit_s == 0:
            chosen = unsearched(traced.graph, space, fleet, timer, parts)
        else:
            one = two = None
            if not meshes or (axes == "auto" and flat):
                one = choose_below(
                    rival_s if not meshes else math.inf,
                    traced.graph,
                    space,
                    fleet,
                    timer,
                    factors(pins, space),
                    parts,
                    asked.first,
                    looking(traced),
                )
            if meshes:
                pinned = partial(factors, pins)
                # Pins that one axis keeps and two cannot leave the plan on one axis.
                with contextlib.suppress(*([PlanError] if pins and one is not None else [])):
                    two = choose_on_grid(traced.graph, fleet, timer, meshes, pinned, one, looking(traced))
            chosen = two or one
            if chosen is None:
                return None
    except PlanError as error:
        if not pins:
            raise
        raise conflict(pins, traced.graph, space, CostModel(fleet)) from error
    chosen, ample = _looked_at(chosen, traced, timer)
    found = chosen.found
    prices = priced(pins, traced.graph, space, chosen.model, found)
    replicated = replicated_in(traced.graph, space)
    stats = Stats(
        trace_s=traced.trace_s,
        space_s=space_s,
        search_s=0.0,
        ratio_s=0.0,
        expanded=found.expanded,
        searches=found.searches,
        equations=sum(1 for _ in traced.graph.all_equations()),
        choices=len(space.choices),
        replicated=replicated,
    )
    return assembled(traced, space, fleet, chosen, stats, asked.state, prices, ample=ample)


def _looked_at(chosen: Choice, traced: Traced, timer: Timer) -> tuple[Choice, bool]:
    """With the memory that the program takes as it will run, unless it has ample; and whether it has."""
    found = chosen.found
    if isinstance(found.memory, Peaks) and found.memory.seen:
        return chosen, False
    if fullest(found, chosen.model) <= AMPLE:
        return chosen, True
    with timer.ratios():
        seen = Peaks(peaks(found.program, traced.graph, found.ratios), seen=True)
    return replace(chosen, found=replace(found, memory=seen)), False


def looking(traced: Traced) -> Look:
    """What says how much memory a program of a step takes on every device, as the MPI backend runs it."""
    return lambda program, ratios: peaks(program, traced.graph, ratios)
