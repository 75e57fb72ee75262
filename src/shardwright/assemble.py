"""What was found, as a plan: every figure that a plan carries is worked out here."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from importlib.metadata import version

import jax
import numpy as np

from shardwright.attach import types_of
from shardwright.cost.bill import Item
from shardwright.cost.drift import comparing_s, with_comparisons
from shardwright.cost.fleet import Fleet
from shardwright.cost.grid.settled import pricing
from shardwright.cost.memory.liveness import Peaks
from shardwright.cost.model import CostModel
from shardwright.cost.stages import part_of
from shardwright.cost.timeline import Timeline, predict, timed_bill
from shardwright.ir.graph import Equation, Form, Graph
from shardwright.ir.host import is_reload
from shardwright.ir.jaxpr import source_line
from shardwright.ir.patterns import patterns
from shardwright.ir.program import Program, nodes_of
from shardwright.ir.registry import rule_of
from shardwright.ir.repeated import equations_of, is_again
from shardwright.ir.rewrites.rewriting import rewriting_of
from shardwright.ir.stages import layers_of
from shardwright.ir.state import StateMap
from shardwright.ir.trace import Traced
from shardwright.memory.device_memory import Looking, peaks
from shardwright.plan import Plan
from shardwright.plans.parts import Exchanged, PinPrice, Spent, Stats, Unused, spread
from shardwright.plans.record import when_asked
from shardwright.synth.alternate import Synthesis
from shardwright.synth.chosen import Choice
from shardwright.synth.fallback import fits
from shardwright.synth.programs.judge import SHORT, Judge, lacking
from shardwright.synth.space.space import Space
from shardwright.synth.timer import Timer
from shardwright.synth.unsearched import NONE_FITS


def assembled(
    traced: Traced,
    space: Space,
    fleet: Fleet,
    chosen: Choice,
    stats: Stats,
    state: StateMap | None,
    pins: tuple[PinPrice, ...],
    *,
    ample: bool,
    free_s: float | None,
) -> Plan:
    """The plan that a search chose.

    Args:
        traced: the step.
        space: its programs on one mesh axis.
        fleet: all devices.
        chosen: program, ratios and devices.
        stats: of tracing and search.
        state: which outputs continue which arguments, as the user said it.
        pins: what each pin costs.
        ample: whether memory need not be looked at before somebody asks.
        free_s: what the best program found costs if memory were no limit; None if none was searched for.
    """
    model, found, used = chosen.model, chosen.found, chosen.members
    items = found.items
    laid_out = cache(lambda: _laid_out(chosen, traced.graph))
    names = traced.graph.input_names
    devices = fleet.devices
    count = len(devices)
    return Plan(
        program=found.program,
        ratios=spread(found.ratios, used, count, 0.0),
        iteration_s=when_asked(lambda: laid_out().iteration_s),
        cost_s=found.cost_s,
        bound_s=found.bound_s,
        memory_bytes=when_asked(lambda: spread(_peaks(found, traced.graph, model), used, count, 0)),
        fits=fits(found, model),
        exchanges=when_asked(
            lambda: _exchanges(items, patterns(found.program, traced.graph), model, found.ratios)
        ),
        held={name: str(p) for name, p in zip(names, found.program.inputs, strict=True)},
        arguments=types_of(traced),
        state=traced.state_names,
        state_override=state,
        assumptions=(
            *model.assumptions,
            *space.assumptions,
            *_of_memory(fleet, traced.graph.compiler),
            *found.notes,
        ),
        fleet=fleet,
        fingerprint=when_asked(lambda: traced.fingerprint),
        versions={"shardwright": _own_version(), "jax": jax.__version__},
        stats=stats,
        search_gap=found.search_gap,
        axes=1 if nodes_of(found.program) is None else 2,
        pins=pins,
        spent=when_asked(lambda: spread(Spent.of(laid_out()), used, count, Spent(0.0, 0.0, 0.0))),
        used=used,
        unused=tuple(Unused(tuple(devices[d].name for d in some), why) for some, why in chosen.unused(fleet)),
        rewriting=rewriting_of(traced),
        donate=traced.graph.donated,
        again_s=when_asked(lambda: _spent_s(is_again, items, found.program, traced, model, found.ratios)),
        host_s=when_asked(lambda: _spent_s(is_reload, items, found.program, traced, model, found.ratios)),
        comparing_s=when_asked(lambda: _comparing_s(found.program, traced.graph, model)),
        traced=traced,
        free_s=free_s,
        ample=ample,
    )


def _of_memory(fleet: Fleet, compiler: str) -> tuple[str, ...]:
    """What is said of memory that is not so on every device."""
    if compiler == "gpu" or not any(each.is_card for each in fleet.types):
        return ()
    return ("memory is as XLA's CPU compiler lays it out: not all devices are cards, which mostly take less",)


def looked_at(chosen: Choice, look: Looking, timer: Timer) -> tuple[Choice, bool]:
    """With the memory that the program takes as it will run, unless it has ample; and whether it has."""
    found = chosen.found
    if isinstance(found.memory, Peaks) and found.memory.seen:
        return chosen, False
    judge = Judge(look.graph, chosen.model, look)
    if judge.ample(found.memory, found.ratios):
        return chosen, True
    with timer.ratios():
        seen = judge.seen(found.program, found.ratios)
    assert seen is not None, "what has no ample room is looked at"
    return replace(chosen, found=replace(found, memory=seen)), False


def as_it_runs(plan: Plan) -> Plan:
    """A plan, with what it lacks told by the memory that its program takes as it will run.

    Of what hardly fits, a search may have asked no more than the model.
    """
    devices = plan.fleet.devices
    if plan.fits or all(n <= d.type.memory_bytes for n, d in zip(plan.memory_bytes, devices, strict=True)):
        kept = tuple(note for note in plan.assumptions if not note.startswith((SHORT, NONE_FITS)))
        return plan.but(fits=True, assumptions=kept)
    peaks = np.array([plan.memory_bytes[d] for d in plan.used], dtype=np.float64)
    said = lacking(peaks, [devices[d] for d in plan.used])
    return plan.but(assumptions=tuple(said if note.startswith(SHORT) else note for note in plan.assumptions))


def _laid_out(chosen: Choice, graph: Graph) -> Timeline:
    """When everything of a step happens."""
    found, model = chosen.found, chosen.model
    priced = pricing(found.program, model, found.ratios)
    laid_out = predict(timed_bill(found.program, graph, priced, model, found.items), model, found.ratios)
    return with_comparisons(laid_out, found.program, graph, model)


def _comparing_s(program: Program, graph: Graph, model: CostModel) -> float:
    """What one comparison of replicated state takes."""
    checksums_s, exchange_s = comparing_s(program, graph, model)
    return float(checksums_s.max()) + exchange_s


@cache
def _own_version() -> str:
    return version("shardwright")


def _peaks(found: Synthesis, graph: Graph, model: CostModel) -> tuple[int, ...]:
    """How much memory every device takes; looked at now, where nobody has yet."""
    if isinstance(found.memory, Peaks) and found.memory.seen:
        return found.memory.bytes
    return peaks(found.program, graph, found.ratios, model.fleet.types)


def _spent_s(
    which: Callable[[Equation], bool],
    items: Sequence[Item],
    program: Program,
    traced: Traced,
    model: CostModel,
    ratios: Sequence[float],
) -> float:
    """Seconds of a bill that go into some equations of a step that was changed, such as copies."""
    if not rewriting_of(traced).recompute:
        return 0.0

    def part(equation: Equation) -> float:
        layers = layers_of(equation)
        return float(which(equation)) if layers is None else part_of(layers, which, model)

    pairs = zip(items, equations_of(program, traced.graph), strict=True)
    parts = ((item, part(equation)) for item, equation in pairs if equation is not None)
    return sum(spent * item.seconds(model, ratios) for item, spent in parts if spent)


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


def replicated_in(graph: Graph, space: Space) -> dict[str, str]:
    """Primitives that run replicated although they might be sharded, and why."""
    found = {name: f"no rule for it ({source_line(e)})" for name, e in space.replicated.items()}

    def note(equation: Equation) -> str:
        return "" if equation.regions or equation.primitive in found else rule_of(equation).note

    # What a rule says of equations of one form is the same.
    first: dict[Form, Equation] = {}
    for equation in graph.all_equations():
        first.setdefault(equation.form, equation)
    for equation in first.values():
        if text := note(equation):
            found[equation.primitive] = f"{text} ({source_line(equation)})"
    return found
