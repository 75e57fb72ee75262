"""`synthesize`: from a training step and a fleet to a plan."""

from __future__ import annotations

import time
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import Any

import jax

from shardwright.cost.bill import Item, bill
from shardwright.cost.fleet import Fleet
from shardwright.cost.memory import peak_bytes
from shardwright.cost.model import CostModel
from shardwright.cost.timeline import timeline
from shardwright.ir.errors import InputError
from shardwright.ir.graph import Equation, Graph
from shardwright.ir.rules import rule_of
from shardwright.ir.trace import StateMap, Traced, source_line, trace
from shardwright.plan import Exchanged, Plan, Spent, Stats
from shardwright.synth import baselines
from shardwright.synth.alternate import Synthesis, Timer
from shardwright.synth.alternate import synthesize as search
from shardwright.synth.baselines import Baseline
from shardwright.synth.space import Space


class ReplicatedWarning(UserWarning):
    """Part of the step runs on every device alike, because no rule says how to shard it."""


def synthesize(
    train_step: Callable[..., Any],
    *args: Any,
    fleet: Fleet,
    state: StateMap | None = None,
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
        tick: told what begins (for progress displays).

    Returns:
        The best plan found, with its certificate.

    Raises:
        InputError: an argument is no array, or a state entry does not match.
        TraceError: the step cannot be traced or has side effects.

    Warns:
        ReplicatedWarning: a primitive has no rule and runs replicated.
    """
    if not isinstance(fleet, Fleet):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InputError(
            place="fleet",
            reason=f"is a {type(fleet).__name__}",
            remedy="Pass shardwright.Fleet.load('fleet.yaml')",
        )
    tick("tracing the step")
    traced = trace(train_step, *args, state=state)
    model = CostModel(fleet)
    tick("building the choice graph")
    start = time.perf_counter()
    space = Space(traced.graph)
    space_s = time.perf_counter() - start
    timer = Timer(tick)
    found = search(traced.graph, space, model, timer)
    replicated = _replicated(traced.graph, space)
    for primitive, why in replicated.items():
        warnings.warn(f"{primitive} runs replicated: {why}", ReplicatedWarning, stacklevel=2)
    stats = Stats(
        trace_s=traced.trace_s,
        space_s=space_s,
        search_s=timer.search_s,
        ratio_s=timer.ratio_s,
        expanded=found.expanded,
        searches=found.searches,
        equations=sum(1 for _ in traced.graph.all_equations()),
        choices=len(space.choices),
        replicated=replicated,
    )
    return _plan(traced, space, model, found, stats, state)


def data_parallel(traced: Traced, fleet: Fleet) -> tuple[Baseline, ...]:
    """Even and proportional data parallelism of a traced step, priced like a plan."""
    return baselines.data_parallel(traced.graph, Space(traced.graph), CostModel(fleet))


def _plan(
    traced: Traced, space: Space, model: CostModel, found: Synthesis, stats: Stats, state: StateMap | None
) -> Plan:
    items = bill(found.program, traced.graph, model)
    memory = peak_bytes(found.program, traced.graph, found.ratios)
    laid_out = timeline(items, model, found.ratios)
    names = traced.graph.input_names
    return Plan(
        program=found.program,
        ratios=found.ratios,
        iteration_s=laid_out.iteration_s,
        cost_s=found.cost_s,
        bound_s=found.bound_s,
        memory_bytes=memory,
        fits=all(b <= d.type.memory_bytes for b, d in zip(memory, model.fleet.devices, strict=True)),
        exchanges=_exchanges(items, model, found.ratios),
        held={name: str(p) for name, p in zip(names, found.program.inputs, strict=True)},
        state=traced.state_names,
        state_override=state,
        assumptions=(*model.assumptions, *space.assumptions, *found.notes),
        fleet=model.fleet,
        fingerprint=traced.fingerprint,
        versions={"shardwright": version("shardwright"), "jax": jax.__version__},
        stats=stats,
        spent=Spent.of(laid_out),
        traced=traced,
    )


def _exchanges(items: Sequence[Item], model: CostModel, ratios: Sequence[float]) -> tuple[Exchanged, ...]:
    count: Counter[str] = Counter()
    spent: Counter[str] = Counter()
    for item in items:
        if item.exchange:
            count[item.label] += item.weight  # pyright: ignore[reportArgumentType]  (a Counter of floats)
            spent[item.label] += item.seconds(model, ratios)  # pyright: ignore[reportArgumentType]
    return tuple(Exchanged(name, float(count[name]), float(spent[name])) for name in sorted(count))


def _replicated(graph: Graph, space: Space) -> dict[str, str]:
    """Primitives that run replicated although they might be sharded, and why."""
    found = {name: f"no rule for it ({source_line(e)})" for name, e in space.replicated.items()}

    def note(equation: Equation) -> str:
        return "" if equation.regions or equation.primitive in found else rule_of(equation).note

    for equation in graph.all_equations():
        if text := note(equation):
            found[equation.primitive] = f"{text} ({source_line(equation)})"
    return found
