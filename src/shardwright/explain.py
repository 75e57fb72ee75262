"""Why a plan is as it is: a placement's price against the next best, and what would let another one win.

Alternatives are priced as pins are: the best program of the space that keeps to the other placement, and to
the plan's pins of other tensors, at the plan's own shares. With other shares both might do better; the
certificate says by how much at most.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches

import numpy as np

from shardwright.alternatives import EQUAL, Alternative, Bench
from shardwright.constraints import factors, fixed_by, matching, path_of, pins_of
from shardwright.cost.bill import Shares
from shardwright.cost.grid.model import GridModel
from shardwright.cost.model import CostModel
from shardwright.cost.quantity import size
from shardwright.cost.subfleet import subfleet
from shardwright.ir.errors import InputError, PlanError
from shardwright.ir.program import own_ratios
from shardwright.ir.trace import Traced
from shardwright.outline import outline
from shardwright.plan import Plan
from shardwright.reports.facts import facts
from shardwright.reports.units import duration
from shardwright.reports.words import placed
from shardwright.synth.alternate import synthesize as search
from shardwright.synth.grid.alternate import GridSearch, is_mesh
from shardwright.synth.grid.pricing import GridPriceList
from shardwright.synth.space.space import Space
from shardwright.synth.timer import Timer

#: Parameters of a layer whose alternatives are priced: the largest.
MOST_TENSORS = 4


@dataclass(frozen=True, slots=True)
class Explanation:
    """The answer.

    Attributes:
        subject: what was asked about.
        kind: "plan", "device", "tensor" or "layer".
        sentences: the answer in words.
        alternatives: what else was priced, the cheapest of a tensor first.
    """

    subject: str
    kind: str
    sentences: tuple[str, ...]
    alternatives: tuple[Alternative, ...] = ()

    def to_dict(self) -> dict[str, object]:
        """Plain data."""
        return {
            "subject": self.subject,
            "kind": self.kind,
            "sentences": list(self.sentences),
            "alternatives": [each.to_dict() for each in self.alternatives],
        }


def explain(plan: Plan, subject: str = "", traced: Traced | None = None) -> Explanation:
    """Why the plan is as it is.

    Args:
        plan: the plan.
        subject: a device (`n0.d1`), an argument or pattern (`params['w']`, `params/*/w`), or a layer
            (`blocks[0]`); empty for the plan as a whole.
        traced: the step, without which nothing can be priced anew and layers are unknown.

    Raises:
        InputError: there is no such thing in the plan.
    """
    bench = Bench(plan, traced) if traced is not None else None
    if not subject:
        return Explanation(plan.fleet.name, "plan", tuple(_plan(plan, bench)))
    if subject in plan.devices:
        return Explanation(subject, "device", tuple(_device(plan, plan.devices.index(subject), bench)))
    layers = outline(traced.graph).layers if traced is not None else ()
    names = matching(subject, plan.held)
    if subject in layers and not any(path_of(name) == path_of(subject) for name in names):
        assert bench is not None
        return _layer(subject, bench)
    if names:
        return _tensors(plan, subject, names, bench)
    known = {**dict.fromkeys(plan.devices), **dict.fromkeys(layers), **dict.fromkeys(plan.held)}
    near = get_close_matches(subject, known, n=3, cutoff=0.4) or list(known)[:3]
    hint = "" if traced is not None else "; layers are known with --step FILE:FACTORY"
    raise InputError(
        place=f"explain {subject!r}",
        reason="is no device, argument or layer of the plan",
        remedy=f"Near matches: {', '.join(near)}{hint}",
    )


# ---------------------------------------------------------------------------------------------------
# Answers


def _plan(plan: Plan, bench: Bench | None) -> Iterator[str]:
    spent = sum(each.seconds for each in plan.exchanges)
    yield (
        f"The step costs {duration(plan.cost_s)}: {duration(plan.cost_s - spent)} of computing and "
        f"{duration(spent)} of exchanges."
    )
    yield (
        f"No plan of its space costs less than {duration(plan.bound_s)}, so that a better one could save "
        f"{plan.gap:.1%} at most."
    )
    if plan.exchanges:
        dearest = max(plan.exchanges, key=lambda each: each.seconds)
        yield f"The dearest exchange is {dearest.name}, {_times(dearest.count)}, {duration(dearest.seconds)}."
    for unused in plan.unused:
        names = unused.devices
        some = ", ".join(names) if len(names) <= 3 else f"{names[0]} … {names[-1]} ({len(names)})"
        yield f"Left out: {some}: {unused.why}."
    for each in plan.pins:
        yield f"The pin {each.name} = {each.placement} costs {duration(each.price_s)}."
    tight = [n for n, d in enumerate(plan.fleet.devices) if plan.memory_bytes[n] > 0.97 * d.type.memory_bytes]
    if tight:
        names = ", ".join(plan.devices[n] for n in tight)
        yield f"Memory is full, within 3 %, on {names}: shares and placements may be what they are for that."
    if bench is not None:
        layers = outline(bench.traced.graph).layers
        yield f"Ask about a device ({plan.devices[0]}), an argument, or a layer: {', '.join(layers[:8])}."


def _tensors(plan: Plan, subject: str, names: Sequence[str], bench: Bench | None) -> Explanation:
    said: list[str] = []
    kinds: dict[str, list[str]] = {}
    for name in names:
        kinds.setdefault(plan.held[name], []).append(name)
    for placement, some in kinds.items():
        of = some[0] if len(some) == 1 else f"{len(some)} arguments, such as {some[0]}"
        said.append(f"{of}: {placement}, {placed(placement)}.")
    pins = [pin for pin in plan.pins if not set(names).isdisjoint(fixed_by(pin, plan.held))]
    said += [f"It is pinned to {pin.placement} by {pin.name}." for pin in pins]
    if bench is None:
        said.append("What another placement would cost is priced with --step FILE:FACTORY.")
        return Explanation(subject, "tensor", tuple(said))
    found: list[Alternative] = []
    for some in kinds.values():
        found += bench.alternatives(some[0])
    said += _verdicts(found, plan)
    return Explanation(subject, "tensor", tuple(said), tuple(found))


def _verdicts(found: Sequence[Alternative], plan: Plan) -> Iterator[str]:
    """One sentence per tensor: its next best placement."""
    first: dict[str, Alternative] = {}
    for each in found:
        first.setdefault(each.tensor, each)
    for each in first.values():
        part = abs(each.change_s) / plan.cost_s if plan.cost_s else 0.0
        words = f"{each.tensor}: the next best is {each.placement}, {placed(each.placement)}"
        if abs(each.change_s) <= EQUAL * plan.cost_s:
            yield f"{words}, at the same cost."
        else:
            word = "more" if each.change_s > 0 else "less"
            change = f"{duration(abs(each.change_s))} ({part:.2%}) {word}"
            yield f"{words}: {change}. Wins with: {each.wins}."
    if found:
        return
    if len(plan.used) == 1:
        yield "The plan uses one device, on which every placement is the same."
    else:
        yield "There is no other placement to price: it cannot be cut."


def _layer(subject: str, bench: Bench) -> Explanation:
    found = outline(bench.traced.graph)
    page = facts(bench.plan, bench.traced, subject)
    group = next(group for group in page.layers if subject in group.layers)
    graph = bench.traced.graph
    positions = [p for p in found.parameters if found.of_input[p] == subject]
    positions.sort(key=lambda p: (-graph.inputs[p].type.nbytes, p))
    alike = f" (one of {len(group.layers)} alike)" if len(group.layers) > 1 else ""
    compute_s, exchange_s = sum(group.compute_s.values()), sum(group.exchange_s.values())
    said = [
        f"{subject}{alike}: {group.words}.",
        f"Together they cost {duration(group.seconds)}: {duration(compute_s)} of computing and "
        f"{duration(exchange_s)} of exchanges.",
    ]
    said += [
        f"{each.phase}: {each.name}, {_times(each.count)}, {duration(each.seconds)}: "
        f"{each.before} → {each.after}."
        for each in group.exchanges
    ]
    alternatives: list[Alternative] = []
    for position in positions[:MOST_TENSORS]:
        alternatives += bench.alternatives(graph.input_names[position])
    said += _verdicts(alternatives, bench.plan) if positions else ()
    if len(positions) > MOST_TENSORS:
        said.append(f"Of its {len(positions)} parameters, the {MOST_TENSORS} largest were priced.")
    return Explanation(subject, "layer", tuple(said), tuple(alternatives))


def _device(plan: Plan, device: int, bench: Bench | None) -> Iterator[str]:
    kind, name = plan.fleet.devices[device].type, plan.devices[device]
    for unused in plan.unused:
        if name in unused.devices:
            yield f"{name} ({kind.name}) is left out: {unused.why}."
            return
    spent, part = plan.spent[device], plan.memory_bytes[device] / kind.memory_bytes
    yield (
        f"{name} ({kind.name}) holds {plan.ratios[device]:.2%} of everything that is cut. In a step it "
        f"computes for {duration(spent.compute_s)}, exchanges for {duration(spent.exchange_s)} and waits for "
        f"{duration(spent.idle_s)}."
    )
    for own in own_ratios(plan.program).values():
        share = own.shares[plan.used.index(device)]
        yield f"Of what is cut by ratios of its own (S(…){own}) it holds {share:.2%} instead."
    yield (
        f"Its memory is filled to {part:.0%}, {size(plan.memory_bytes[device])} of {size(kind.memory_bytes)}"
        f"{': a larger share would not fit' if part > 0.97 else ''}."
    )
    types = [plan.fleet.devices[d].type for d in plan.used]
    speed = kind.flop_rate("float32", None)[0] / sum(t.flop_rate("float32", None)[0] for t in types)
    stream = kind.bandwidth_byte_per_s / sum(t.bandwidth_byte_per_s for t in types)
    yield (
        f"By float32 products alone its share would be {speed:.2%}, by memory bandwidth {stream:.2%}; the "
        "plan weighs both, exchanges and memory."
    )
    if bench is None:
        yield "What more or less of a share would cost is priced with --step FILE:FACTORY."
        return
    yield from _pace(plan, device, bench)
    yield from _shifted(plan, device, bench)
    yield from _without(plan, device, bench)


def _pace(plan: Plan, device: int, bench: Bench) -> Iterator[str]:
    """How much of the computing waits for this device, or one like it."""
    shares, seat = Shares(bench.ratios, bench.model.class_of), plan.used.index(device)
    total_s = slowest_s = 0.0
    for item in bench.items:
        if not item.exchange:
            seconds = item.weight * shares.per_device(item.cost, item.cut)
            total_s += float(seconds.max())
            slowest_s += float(seconds.max()) if seconds[seat] >= seconds.max() * (1 - 1e-9) else 0.0
    if total_s:
        yield f"It sets the pace, alone or with others, in {slowest_s / total_s:.0%} of the computing."


def _shifted(plan: Plan, device: int, bench: Bench, points: float = 0.01) -> Iterator[str]:
    """What the program costs with a point more or less of a share here, which the others give or take."""
    seat = plan.used.index(device)
    own = bench.ratios[seat]
    others = 1 - own
    said: list[str] = []
    for moved, word in ((points, "more"), (-points, "less")):
        if not 0 <= own + moved <= 1 or others <= 0:
            continue
        ratios = np.array(bench.ratios) * (others - moved) / others
        ratios[seat] = own + moved
        change_s = bench.seconds(tuple(float(r) for r in ratios)) - plan.cost_s
        sign = "costs" if change_s >= 0 else "saves"
        said.append(f"one point {word} {sign} {duration(abs(change_s))}")
    if said:
        yield f"With the same program, {' and '.join(said)}, memory aside."


def _without(plan: Plan, device: int, bench: Bench) -> Iterator[str]:
    """What the rest would do by itself, within the plan's pins."""
    rest = [d for d in plan.used if d != device]
    if not rest:
        return
    fleet, graph = subfleet(plan.fleet, rest, plan.fleet.name), bench.traced.graph
    pins = pins_of(plan.pins, graph)
    try:
        if bench.nodes is not None and is_mesh(fleet):
            space = Space(graph, tuple(len(node.devices) for node in fleet.nodes))
            listed = GridPriceList(GridModel(CostModel(fleet)))
            found = GridSearch(graph, space, listed, Timer(), factors(pins, space)).plan()
        else:
            space = bench.space if bench.nodes is None else Space(graph)
            found = search(graph, space, CostModel(fleet), Timer(), factors(pins, space))
    except PlanError:
        yield "Without it no program of the others keeps to the pins."
        return
    change_s = found.cost_s - plan.cost_s
    limits = np.array([d.type.memory_bytes for d in fleet.devices])
    fits = bool((found.memory.peak(np.asarray(found.ratios)) <= limits).all())
    change = f"{duration(abs(change_s))} {'more' if change_s >= 0 else 'less'}"
    yield (
        f"Without it the best plan of the others costs {duration(found.cost_s)}, {change}"
        f"{'' if fits else ', and does not fit into memory'}."
    )


def _times(count: float) -> str:
    return "once" if count == 1 else f"{count:g} times"
