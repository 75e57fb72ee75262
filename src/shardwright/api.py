"""`synthesize`: from a training step and a fleet to a plan; `baselines`: what people do without one."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal, TypeAlias

from shardwright.assemble import as_it_runs
from shardwright.buckets import suggested
from shardwright.constraints import Constraints
from shardwright.cost.fleet import Fleet, FleetLike
from shardwright.cost.model import CostModel
from shardwright.ir.arguments import check_choice, is_number
from shardwright.ir.donation import check_donate, donating
from shardwright.ir.errors import InputError, PlanError, ReplicatedWarning
from shardwright.ir.rewrites.rewriting import original
from shardwright.ir.state import StateMap
from shardwright.ir.trace import Traced, marked, trace
from shardwright.memory.device_memory import Looking
from shardwright.memory.rewritings import (
    Microbatches,
    Offload,
    Recompute,
    Stages,
    best_plan,
    check_rewriting,
)
from shardwright.money import cheapest, check_prices
from shardwright.pause import collector_paused
from shardwright.plan import Plan
from shardwright.planning import Planner
from shardwright.request import Axes, Request
from shardwright.synth.baselines import Baseline, Baselines, Workshop
from shardwright.synth.grid.alternate import is_mesh
from shardwright.synth.grid.baselines import grid_baselines
from shardwright.synth.recipes import RECIPES
from shardwright.synth.space.space import Space
from shardwright.synth.timer import Timer
from shardwright.whole import with_whole

#: What the best plan has least of: seconds, or money.
Objective: TypeAlias = Literal["time", "cost"]


def synthesize(
    train_step: Callable[..., Any],
    *args: Any,
    fleet: FleetLike,
    state: StateMap | None = None,
    constraints: Constraints | None = None,
    time_limit_s: float | None = None,
    devices: Literal["auto", "all"] = "auto",
    axes: Axes = "auto",
    recompute: Recompute = "auto",
    microbatches: Microbatches = "auto",
    offload: Offload = "auto",
    stages: Stages = "auto",
    objective: Objective = "time",
    donate: bool = False,
    tick: Callable[[str], None] = lambda what: None,
) -> Plan:
    """Plan a single-device training step for a fleet.

    Args:
        train_step: a function of pytrees of arrays that returns pytrees of arrays: forward, backward and
            optimizer, as one would pass to jax.jit.
        args: its positional arguments, as arrays or `jax.ShapeDtypeStruct`; nothing is executed.
        fleet: the devices, or the path of a fleet file.
        state: argument (position or name) -> output path, where the outputs that continue the arguments
            are not simply the leading ones in the same order; `{}` for none.
        constraints: placements of arguments that are fixed: path pattern -> placement, such as
            `{"params/*/kernel": Shard(0)}`, or a function of name and type that returns a placement or None.
            The state that continues an argument lies as it does. The plan shows what each pin costs.
        time_limit_s: seconds after which no further search begins; the best plan so far is returned. With 0,
            or without pins if nothing as good was found by then, it is the best baseline that fits, on all
            devices or on a node or a class of them alone.
        devices: "auto" leaves nodes or classes of devices out where the step is faster without them; with
            "all" every device takes part.
        axes: mesh axes. With 1 a tensor lies on all devices alike; with 2 first on the nodes, then in each
            on its devices (a fleet of one node, or of nodes of one device, has one axis). "auto" is the
            better of both, two on the whole fleet, unless a bound proves that they cannot be 5 % cheaper.
        recompute: "auto" computes parts of the forward pass again in the backward pass where memory is short,
            as few of them as need be; with "off" nothing is, with "all" every layer; a `Rewriting` (such as
            that of another plan) says exactly what is, in how many pieces, and what waits in host memory.
        microbatches: in how many equal pieces of the batch, one after another, forward and backward pass run,
            gradients being added up; "auto" is one, or where the step does not fit as many as need be.
        offload: "auto" lets what layers keep for the backward pass wait in host memory where memory is short,
            if every device of the fleet has a host link; with "off" nothing does, with "all" everything.
        stages: "auto" has layers of scans (`jax.lax.scan`) on different devices, as stages of a pipeline,
            where that is faster; with "off" none are; a number says how many pieces of the batch stages hand
            on, in place of micro-batches. On two mesh axes nodes are stages.
        objective: "time" for the fastest steps; "cost" for those that cost least, by the fleet's
            `price_per_hour`: of every part of the fleet that `devices` leaves open, its fastest plan is made.
        donate: state is given away at every step, as by `donate_argnums` of `jax.jit`: what continues it may
            take its memory. The plan then runs so (see `Plan.compile`).
        tick: told what begins (for progress displays).

    Returns:
        The best plan found, with its certificate.

    Raises:
        InputError: an argument is no array, a state entry does not match, a pin cannot be kept, `devices`,
            `axes`, `recompute`, `microbatches`, `offload`, `stages`, `objective`, `donate` or `tick` is
            something else, a device without a host link is to offload, one without a price is to be paid for,
            or the step cannot be run in so many micro-batches, or its layers as stages.
        TraceError: the step cannot be traced or has side effects.

    Warns:
        ReplicatedWarning: a primitive has no rule and runs replicated.
    """
    fleet = Fleet.of(fleet)
    check_tick(tick)
    tick("tracing the step")
    with collector_paused():
        traced = trace(train_step, *args, state=state)
        return synthesize_traced(
            traced,
            fleet=fleet,
            state=state,
            constraints=constraints,
            time_limit_s=time_limit_s,
            devices=devices,
            axes=axes,
            recompute=recompute,
            microbatches=microbatches,
            offload=offload,
            stages=stages,
            objective=objective,
            donate=donate,
            tick=tick,
        )


def synthesize_traced(
    traced: Traced,
    *,
    fleet: FleetLike,
    state: StateMap | None = None,
    constraints: Constraints | None = None,
    time_limit_s: float | None = None,
    devices: Literal["auto", "all"] = "auto",
    axes: Axes = "auto",
    recompute: Recompute = "auto",
    microbatches: Microbatches = "auto",
    offload: Offload = "auto",
    stages: Stages = "auto",
    objective: Objective = "time",
    donate: bool | None = None,
    first: Sequence[float] | None = None,
    tick: Callable[[str], None] = lambda what: None,
) -> Plan:
    """`synthesize` for a step that is traced already.

    Args:
        traced: the step.
        fleet: see `synthesize`.
        state: what it was traced with.
        constraints: see `synthesize`.
        time_limit_s: see `synthesize`.
        devices: see `synthesize`.
        axes: see `synthesize`.
        recompute: see `synthesize`.
        microbatches: see `synthesize`.
        offload: see `synthesize`.
        stages: see `synthesize`.
        objective: see `synthesize`.
        donate: see `synthesize`; None: as of the step, which may come from a plan.
        first: a share per device of the fleet from which the search for ratios starts, such as those of a
            plan for a fleet much like this one.
        tick: see `synthesize`.

    Raises:
        InputError: see `synthesize`.

    Warns:
        ReplicatedWarning: see `synthesize`.
    """
    fleet = Fleet.of(fleet)
    time_limit_s = _seconds(time_limit_s, constraints)
    check_choice("devices", devices, ("auto", "all"))
    _check_axes(axes)
    check_rewriting(recompute, microbatches, offload, fleet, stages)
    _check_objective(objective, fleet)
    check_donate(donate)
    check_tick(tick)
    timer = Timer(tick, time_limit_s)
    start = time.perf_counter()
    known = original(traced) if donate is None else donating(original(traced), donate)

    def planned(asked: Request) -> Plan:
        planner = Planner(asked, timer)
        # A plan for part of the fleet is one for the fleet: its step has the compiler of all.
        step = marked(known, compiler=fleet.compiler)
        changes = recompute, microbatches, offload
        best = best_plan(step, asked.fleet, *changes, planner, timer.late, stages)
        return with_whole(as_it_runs(planner.certified(best)))

    def on_all_of(part: Fleet) -> Plan:
        tick(f"planning for {part}")
        shares = first if part is fleet else None
        return planned(replace(asked, fleet=part, devices="all", first=shares, spaces={}))

    asked = Request(fleet, state, constraints, time_limit_s, devices, axes, first, tick)
    with collector_paused():
        if objective == "cost" and devices == "auto":
            found = cheapest(fleet, on_all_of, timer.late)
        else:
            found = planned(asked)
    for primitive, why in found.stats.replicated.items():
        warnings.warn(f"{primitive} runs replicated: {why}", ReplicatedWarning, stacklevel=3)
    # All plans that were made on the way count.
    search_s = traced.graph_s + time.perf_counter() - start - timer.ratio_s
    return found.finished(replace(found.stats, search_s=search_s, ratio_s=timer.ratio_s), suggested)


def baselines(
    train_step: Callable[..., Any],
    *args: Any,
    fleet: FleetLike,
    state: StateMap | None = None,
    axes: Axes = "auto",
    plan: Plan | None = None,
    tick: Callable[[str], None] = lambda what: None,
) -> Baselines:
    """What people do without a planner: programs of the same IR, priced by the same model.

    Args:
        train_step: see `synthesize`.
        args: see `synthesize`.
        fleet: the devices, or the path of a fleet file.
        state: see `synthesize`.
        axes: mesh axes of the programs. With 2 they treat nodes and the devices of each apart; else they use
            one, which is a special case of two.
        plan: a plan of the same step and fleet, to which each baseline's cost is related (`relative`).
        tick: told what begins (for progress displays).

    Returns:
        A list of `Baseline`; its `left_out` says of every other one why it does not apply.

    Raises:
        InputError: an argument is no array, a state entry does not match, or there are no such axes.
        PlanError: `plan` is of another step or fleet.
        TraceError: the step cannot be traced or has side effects.
    """
    fleet = Fleet.of(fleet)
    _check_axes(axes)
    check_tick(tick)
    tick("tracing the step")
    _check_plan(plan)
    if plan is not None and plan.fleet != fleet:
        raise PlanError(place="plan", reason="is for another fleet", remedy="Pass a plan for this fleet")
    traced = trace(train_step, *args, state=state) if plan is None else plan.attach(train_step, *args)
    traced = marked(original(traced), compiler=fleet.compiler)
    tick("building the choice graph")
    if axes == 2 and is_mesh(fleet):
        found = grid_baselines(traced.graph, CostModel(fleet), tick, Looking(traced.graph))
    else:
        found = _workshop(traced, fleet, tick).all()
    if plan is None or not plan.cost_s:
        return found
    return Baselines([replace(b, relative=b.cost_s / plan.cost_s) for b in found], found.left_out)


def data_parallel(traced: Traced, fleet: Fleet) -> tuple[Baseline, ...]:
    """Even and proportional data parallelism of a traced step, priced like a plan."""
    traced = marked(original(traced), compiler=fleet.compiler)
    recipes = [recipe for recipe in RECIPES if recipe.name.endswith("data parallelism")]
    return tuple(_workshop(traced, fleet).whole_fleet(recipes))


def on_the_whole_fleet(
    traced: Traced, fleet: Fleet, tick: Callable[[str], None] = lambda what: None
) -> Baselines:
    """Every baseline of a traced step that uses all devices, priced like a plan."""
    traced = marked(original(traced), compiler=fleet.compiler)
    return _workshop(traced, fleet, tick).whole_fleet()


def _workshop(traced: Traced, fleet: Fleet, tick: Callable[[str], None] = lambda what: None) -> Workshop:
    return Workshop(traced.graph, Space(traced.graph), CostModel(fleet), tick, Looking(traced.graph))


def _check_plan(plan: object) -> None:
    if plan is not None and not isinstance(plan, Plan):
        raise InputError(place="plan", reason=f"is {plan!r}", remedy="Pass a plan; Plan.load reads a file")


def _check_axes(axes: object) -> None:
    if isinstance(axes, bool) or not isinstance(axes, int | str) or axes not in (1, 2, "auto"):
        raise InputError(place="axes", reason=f"is {axes!r}", remedy="Pass 1, 2 or 'auto'")


def check_tick(tick: object) -> None:
    """Raises InputError for what cannot be told what begins."""
    if not callable(tick):
        raise InputError(
            place="tick", reason=f"is {tick!r}", remedy="Pass a function of one text, or leave it out"
        )


def _check_objective(objective: object, fleet: Fleet) -> None:
    check_choice("objective", objective, ("time", "cost"))
    if objective == "cost":
        check_prices(fleet)


def _seconds(time_limit_s: object, constraints: Constraints | None) -> float | None:
    """A time limit; any type of number will do."""
    if time_limit_s is None:
        return None
    try:
        seconds = float(time_limit_s) if is_number(time_limit_s) else math.nan
    except OverflowError:
        seconds = math.nan
    if not seconds >= 0:
        reason = f"is {f'{time_limit_s!r}':.40}"
        raise InputError(place="time limit", reason=reason, remedy="Pass a number of seconds, from 0 on")
    if seconds == 0 and constraints:
        raise InputError(
            place="time limit",
            reason="is 0, which leaves no time to look for a program that keeps to the pins",
            remedy="Allow some time, or leave the pins out",
        )
    return seconds
