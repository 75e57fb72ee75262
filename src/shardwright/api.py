"""`synthesize`: from a training step and a fleet to a plan; `baselines`: what people do without one."""

from __future__ import annotations

import contextlib
import math
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from typing import Any, Literal, TypeAlias

import jax

from shardwright.constraints import Constraints, conflict, factors, priced, resolve, takes_two_axes
from shardwright.cost.bill import Item
from shardwright.cost.fleet import Fleet
from shardwright.cost.grid_model import pricing
from shardwright.cost.memory import Peaks
from shardwright.cost.model import CostModel
from shardwright.cost.timeline import predict, timed_bill
from shardwright.device_memory import peaks
from shardwright.ir.errors import InputError, PlanError, ReplicatedWarning
from shardwright.ir.graph import Equation, Graph
from shardwright.ir.jaxpr import source_line
from shardwright.ir.patterns import patterns
from shardwright.ir.program import Program, nodes_of
from shardwright.ir.recompute import brought_back, computed_again
from shardwright.ir.rewriting import original, rewriting_of
from shardwright.ir.rules import rule_of
from shardwright.ir.state import StateMap
from shardwright.ir.trace import Traced, trace
from shardwright.pause import collector_paused
from shardwright.plan import Plan
from shardwright.plan_parts import Exchanged, PinPrice, Spent, Stats, Unused, spread
from shardwright.plan_record import when_asked
from shardwright.rewritings import Microbatches, Offload, Recompute, best_plan, check_rewriting
from shardwright.synth.alternate import Synthesis
from shardwright.synth.baselines import Baseline, Baselines, Workshop
from shardwright.synth.fallback import fits, fullest
from shardwright.synth.grid_alternate import is_mesh
from shardwright.synth.grid_baselines import grid_baselines
from shardwright.synth.grid_choice import choose_on_grid, on_grid
from shardwright.synth.judge import AMPLE, Look
from shardwright.synth.recipes import RECIPES
from shardwright.synth.space import Space
from shardwright.synth.subfleets import Choice, candidates, choose_below, unsearched
from shardwright.synth.timer import Timer

#: Mesh axes of programs.
Axes: TypeAlias = Literal[1, 2, "auto"]


def synthesize(
    train_step: Callable[..., Any],
    *args: Any,
    fleet: Fleet,
    state: StateMap | None = None,
    constraints: Constraints | None = None,
    time_limit_s: float | None = None,
    devices: Literal["auto", "all"] = "auto",
    axes: Axes = "auto",
    recompute: Recompute = "auto",
    microbatches: Microbatches = "auto",
    offload: Offload = "auto",
    tick: Callable[[str], None] = lambda what: None,
) -> Plan:
    """Plan a single-device training step for a fleet.

    Args:
        train_step: a function of pytrees of arrays that returns pytrees of arrays: forward, backward and
            optimizer, as one would pass to jax.jit.
        args: its positional arguments, as arrays or `jax.ShapeDtypeStruct`; nothing is executed.
        fleet: the devices.
        state: argument (position or name) -> output path, where the outputs that continue the arguments
            are not simply the leading ones in the same order; `{}` for none.
        constraints: placements of arguments that are fixed: path pattern -> placement, such as
            `{"params/*/kernel": Shard(0)}`, or a function of name and type that returns a placement or None.
            The state that continues an argument lies as it does. The plan shows what each pin costs.
        time_limit_s: seconds after which no further search begins; the best plan so far is returned. With 0
            it is the best baseline on all devices that fits.
        devices: "auto" leaves nodes or classes of devices out where the step is faster without them; with
            "all" every device takes part.
        axes: mesh axes. With 1 a tensor lies on all devices alike; with 2 first on the nodes, then in each
            on its devices (a fleet of one node, or of nodes of one device, has one axis). "auto" is the
            better of both, two on the whole fleet, unless a bound proves that they cannot be 5 % cheaper.
        recompute: "auto" computes parts of the forward pass again in the backward pass where memory is short,
            as few of them as need be; with "off" nothing is, with "all" every layer; a `Rewriting` (such as
            that of another plan) says exactly what is.
        microbatches: in how many equal pieces of the batch, one after another, forward and backward pass run,
            gradients being added up; "auto" is one, or where the step does not fit as many as need be.
        offload: "auto" lets what layers keep for the backward pass wait in host memory where memory is short,
            if every device of the fleet has a host link; with "off" nothing does, with "all" everything.
        tick: told what begins (for progress displays).

    Returns:
        The best plan found, with its certificate.

    Raises:
        InputError: an argument is no array, a state entry does not match, a pin cannot be kept, `devices`,
            `axes`, `recompute`, `microbatches` or `offload` is something else, a device without a host link
            is to offload, or the step cannot be run in so many micro-batches.
        TraceError: the step cannot be traced or has side effects.

    Warns:
        ReplicatedWarning: a primitive has no rule and runs replicated.
    """
    _check_fleet(fleet)
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
            tick=tick,
        )


def synthesize_traced(
    traced: Traced,
    *,
    fleet: Fleet,
    state: StateMap | None = None,
    constraints: Constraints | None = None,
    time_limit_s: float | None = None,
    devices: Literal["auto", "all"] = "auto",
    axes: Axes = "auto",
    recompute: Recompute = "auto",
    microbatches: Microbatches = "auto",
    offload: Offload = "auto",
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
        first: a share per device of the fleet from which the search for ratios starts, such as those of a
            plan for a fleet much like this one.
        tick: see `synthesize`.

    Raises:
        InputError: see `synthesize`.

    Warns:
        ReplicatedWarning: see `synthesize`.
    """
    _check_fleet(fleet)
    _check_limit(time_limit_s, constraints)
    if devices not in ("auto", "all"):
        raise InputError(place="devices", reason=f"is {devices!r}", remedy="Pass 'auto' or 'all'")
    _check_axes(axes)
    check_rewriting(recompute, microbatches, offload, fleet)
    timer = Timer(tick, time_limit_s)
    start = time.perf_counter()

    def plan_of(step: Traced, rival_s: float) -> Plan | None:
        limits = fleet, state, constraints, time_limit_s, devices, axes
        return _synthesize(step, *limits, first, tick, timer, rival_s)

    with collector_paused():
        found = best_plan(original(traced), fleet, recompute, microbatches, offload, plan_of, timer.late)
    for primitive, why in found.stats.replicated.items():
        warnings.warn(f"{primitive} runs replicated: {why}", ReplicatedWarning, stacklevel=3)
    # All plans that were made on the way count.
    search_s = traced.graph_s + time.perf_counter() - start - timer.ratio_s
    return found.timed(replace(found.stats, search_s=search_s, ratio_s=timer.ratio_s))


def _synthesize(
    traced: Traced,
    fleet: Fleet,
    state: StateMap | None,
    constraints: Constraints | None,
    time_limit_s: float | None,
    devices: Literal["auto", "all"],
    axes: Axes,
    first: Sequence[float] | None,
    tick: Callable[[str], None],
    timer: Timer,
    rival_s: float,
) -> Plan | None:
    """The plan of a step as it is, or None if none costs less than a rival; what it took the caller knows."""
    tick("building the choice graph")
    start = time.perf_counter()
    space = Space(traced.graph)
    space_s = time.perf_counter() - start
    pins = () if constraints is None else resolve(constraints, traced.graph, space)
    parts = candidates(fleet)[: 1 if devices == "all" else None]
    meshes = () if axes == 1 or time_limit_s == 0 or not is_mesh(fleet) else on_grid(fleet, parts)
    if axes == "auto":  # parts of the fleet on two axes are for those who ask for two: each takes as long
        meshes = meshes[:1]
    flat = not takes_two_axes(pins, bool(meshes))
    try:
        if time_limit_s == 0:
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
                    first,
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
    replicated = _replicated(traced.graph, space)
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
    return _plan(traced, space, fleet, chosen, stats, state, prices, ample=ample)


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


def baselines(
    train_step: Callable[..., Any],
    *args: Any,
    fleet: Fleet,
    state: StateMap | None = None,
    axes: Axes = "auto",
    plan: Plan | None = None,
    tick: Callable[[str], None] = lambda what: None,
) -> Baselines:
    """What people do without a planner: programs of the same IR, priced by the same model.

    Args:
        train_step: see `synthesize`.
        args: see `synthesize`.
        fleet: the devices.
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
    _check_fleet(fleet)
    _check_axes(axes)
    tick("tracing the step")
    if plan is not None and plan.fleet != fleet:
        raise PlanError(place="plan", reason="is for another fleet", remedy="Pass a plan for this fleet")
    traced = trace(train_step, *args, state=state) if plan is None else plan.attach(train_step, *args)
    traced = original(traced)
    tick("building the choice graph")
    if axes == 2 and is_mesh(fleet):
        found = grid_baselines(traced.graph, CostModel(fleet), tick)
    else:
        found = _workshop(traced, fleet, tick).all()
    if plan is None or not plan.cost_s:
        return found
    return Baselines([replace(b, relative=b.cost_s / plan.cost_s) for b in found], found.left_out)


def data_parallel(traced: Traced, fleet: Fleet) -> tuple[Baseline, ...]:
    """Even and proportional data parallelism of a traced step, priced like a plan."""
    traced = original(traced)
    recipes = [recipe for recipe in RECIPES if recipe.name.endswith("data parallelism")]
    return tuple(_workshop(traced, fleet).whole_fleet(recipes))


def on_the_whole_fleet(
    traced: Traced, fleet: Fleet, tick: Callable[[str], None] = lambda what: None
) -> Baselines:
    """Every baseline of a traced step that uses all devices, priced like a plan."""
    traced = original(traced)
    return _workshop(traced, fleet, tick).whole_fleet()


def looking(traced: Traced) -> Look:
    """What says how much memory a program of a step takes on every device, as the MPI backend runs it."""
    return lambda program, ratios: peaks(program, traced.graph, ratios)


def _workshop(traced: Traced, fleet: Fleet, tick: Callable[[str], None] = lambda what: None) -> Workshop:
    return Workshop(traced.graph, Space(traced.graph), CostModel(fleet), tick, looking(traced))


def _check_fleet(fleet: object) -> None:
    if not isinstance(fleet, Fleet):
        raise InputError(
            place="fleet",
            reason=f"is a {type(fleet).__name__}",
            remedy="Pass shardwright.Fleet.load('fleet.yaml')",
        )


def _check_axes(axes: object) -> None:
    if axes not in (1, 2, "auto"):
        raise InputError(place="axes", reason=f"is {axes!r}", remedy="Pass 1, 2 or 'auto'")


def _check_limit(time_limit_s: float | None, constraints: Constraints | None) -> None:
    if time_limit_s is None:
        return
    if not time_limit_s >= 0:
        raise InputError(place="time limit", reason=f"is {time_limit_s:g} s", remedy="Pass 0 or more seconds")
    if time_limit_s == 0 and constraints:
        raise InputError(
            place="time limit",
            reason="is 0, which leaves no time to look for a program that keeps to the pins",
            remedy="Allow some time, or leave the pins out",
        )


def _plan(
    traced: Traced,
    space: Space,
    fleet: Fleet,
    chosen: Choice,
    stats: Stats,
    state: StateMap | None,
    pins: tuple[PinPrice, ...],
    *,
    ample: bool,
) -> Plan:
    model, found, used = chosen.model, chosen.found, chosen.members
    items = found.items
    priced = pricing(found.program, model, found.ratios)
    laid_out = predict(timed_bill(found.program, traced.graph, priced, model, items), model, found.ratios)
    names = traced.graph.input_names
    devices = fleet.devices
    count = len(devices)
    return Plan(
        program=found.program,
        ratios=spread(found.ratios, used, count, 0.0),
        iteration_s=laid_out.iteration_s,
        cost_s=found.cost_s,
        bound_s=found.bound_s,
        memory_bytes=when_asked(lambda: spread(_peaks(found, traced.graph), used, count, 0)),
        fits=fits(found, model),
        exchanges=_exchanges(items, patterns(found.program, traced.graph), model, found.ratios),
        held={name: str(p) for name, p in zip(names, found.program.inputs, strict=True)},
        state=traced.state_names,
        state_override=state,
        assumptions=(*model.assumptions, *space.assumptions, *found.notes),
        fleet=fleet,
        fingerprint=traced.fingerprint,
        versions={"shardwright": version("shardwright"), "jax": jax.__version__},
        stats=stats,
        search_gap=found.search_gap,
        axes=1 if nodes_of(found.program) is None else 2,
        pins=pins,
        spent=spread(Spent.of(laid_out), used, count, Spent(0.0, 0.0, 0.0)),
        used=used,
        unused=tuple(Unused(tuple(devices[d].name for d in some), why) for some, why in chosen.unused),
        rewriting=rewriting_of(traced),
        again_s=_spent_s(computed_again, items, found.program, traced, model, found.ratios),
        host_s=_spent_s(brought_back, items, found.program, traced, model, found.ratios),
        traced=traced,
        free_s=found.free_s,
        ample=ample,
    )


def _peaks(found: Synthesis, graph: Graph) -> tuple[int, ...]:
    """How much memory every device takes; looked at now, where nobody has yet."""
    if isinstance(found.memory, Peaks) and found.memory.seen:
        return found.memory.bytes
    return peaks(found.program, graph, found.ratios)


def _spent_s(
    which: Callable[[Program, Graph], Iterable[bool]],
    items: Sequence[Item],
    program: Program,
    traced: Traced,
    model: CostModel,
    ratios: Sequence[float],
) -> float:
    """Seconds of a bill that go into some instructions of a step that was changed, such as copies."""
    if not rewriting_of(traced).recompute:
        return 0.0
    pairs = zip(items, which(program, traced.graph), strict=True)
    return sum(item.seconds(model, ratios) for item, again in pairs if again)


def _exchanges(
    items: Sequence[Item], named: Mapping[int, str], model: CostModel, ratios: Sequence[float]
) -> tuple[Exchanged, ...]:
    """Exchanges by strategy and pattern; `named` are patterns by `id` of the move."""
    count: defaultdict[tuple[str, str], float] = defaultdict(float)
    spent: defaultdict[tuple[str, str], float] = defaultdict(float)
    for item in items:
        if item.exchange:
            key = item.label, named.get(id(item.move), "")
            count[key] += item.weight
            spent[key] += item.seconds(model, ratios)
    return tuple(
        Exchanged(name, count[name, pattern], spent[name, pattern], pattern)
        for name, pattern in sorted(count)
    )


def _replicated(graph: Graph, space: Space) -> dict[str, str]:
    """Primitives that run replicated although they might be sharded, and why."""
    found = {name: f"no rule for it ({source_line(e)})" for name, e in space.replicated.items()}

    def note(equation: Equation) -> str:
        return "" if equation.regions or equation.primitive in found else rule_of(equation).note

    for equation in graph.all_equations():
        if text := note(equation):
            found[equation.primitive] = f"{text} ({source_line(equation)})"
    return found
