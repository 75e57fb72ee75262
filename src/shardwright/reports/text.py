"""A plan in words and small tables, for people."""

from __future__ import annotations

import io
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.console import Console, Group
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from shardwright.cost.fleet import Device
from shardwright.cost.quantity import size
from shardwright.cost.topology import host_link
from shardwright.ir.placement import cuts
from shardwright.ir.program import Move, own_ratios
from shardwright.ir.rules import Signature
from shardwright.ir.serialize import program_to_json
from shardwright.reports.units import bandwidth, duration

if TYPE_CHECKING:
    from shardwright.plan import Plan
    from shardwright.synth.baselines import Baseline, Baselines

WIDTH = 110
#: Part of the predicted step from which on something is worth a line of its own.
_SHOWS = 5e-4


def describe(plan: Plan, baselines: Sequence[Baseline] = ()) -> str:
    """The plan as plain text, beside `baselines` if there are any."""
    return render(layout(plan, baselines), colour=False)


def render(content: Group, *, colour: bool, width: int = WIDTH) -> str:
    """Rich content as text, without trailing spaces."""
    console = Console(
        file=io.StringIO(), width=width, force_terminal=colour, color_system="auto" if colour else None
    )
    with console.capture() as capture:
        console.print(content)
    return "\n".join(line.rstrip() for line in capture.get().splitlines())


def layout(plan: Plan, baselines: Sequence[Baseline] = (), *, answered: bool = False) -> Group:
    """The parts of the printout; `answered`: what would make it fit is said elsewhere."""
    parts: list[Text | Padding] = [_head(plan, answered=answered), _section(_shares(plan))]
    if plan.unused:
        parts.append(_section(_unused(plan)))
    parts.append(_section(Group(_exchanges(plan), *_staged(plan))))
    parts.append(_section(_spent(plan)))
    if baselines:
        parts.append(_section(_compared(plan, baselines)))
    parts.append(_section(_held(plan)))
    if plan.rewriting.recompute:
        parts.append(_section(_recomputed(plan)))
    if plan.pins:
        parts.append(_section(_pins(plan)))
    if said := unshared(plan):
        parts.insert(1, Text(f"  {said}\n", style="bold"))
    found = notes(plan)
    if found:
        parts.append(Text("assumed, replicated, not searched:", style="bold"))
        parts.extend(Text(f"  - {note}") for note in found)
    return Group(*parts)


def notes(plan: Plan) -> tuple[str, ...]:
    """What was assumed, what runs replicated, what was not searched."""
    return (*(f"replicated: {k}: {why}" for k, why in plan.stats.replicated.items()), *plan.assumptions)


def unshared(plan: Plan) -> str:
    """What to say if no tensor of the program is cut."""
    made = (i.post if isinstance(i, Move) else i.signature for i in plan.program.all_instructions())
    placed = (p for m in made for p in ((*m.ins, *m.outs) if isinstance(m, Signature) else (m,)))
    if any(cuts(p) for p in placed):
        return ""
    who = "every device" if not plan.unused else "every device used" if len(plan.used) > 1 else "one device"
    return f"nothing is sharded: {who} runs the whole step"


def _section(content: Table | Group) -> Padding:
    return Padding(content, (0, 0, 1, 0))


def _head(plan: Plan, *, answered: bool) -> Text:
    state = ", ".join(f"{name} -> {out}" for name, out in plan.state.items()) or "none found"
    stats = plan.stats
    planning_s = stats.search_s + stats.ratio_s
    count, used = len(plan.devices), len(plan.used)
    searches = "1 search" if stats.searches == 1 else f"{stats.searches} searches"
    lines = (
        f"plan for {plan.fleet}",
        *_too_large(plan, answered=answered),
        *([f"  uses            {used} of {count} devices"] if used < count else []),
        f"  predicted step  {duration(plan.iteration_s)}",
        f"  cost            {duration(plan.cost_s)}; no plan of {_space(plan)} costs less than "
        f"{duration(plan.bound_s)} (gap {plan.gap:.1%})",
        *(f"  memory          {said}" for said in changed(plan)),
        *_own_ratios(plan),
        *_comparing(plan),
        f"  state           {state}",
        f"  planned in      {duration(planning_s)}, after {duration(stats.trace_s)} of tracing",
        f"  search          {stats.equations} equations, {stats.choices} choices, {searches}, "
        f"{stats.expanded} nodes expanded",
        "",
    )
    return Text("\n".join(lines))


def _too_large(plan: Plan, *, answered: bool) -> list[str]:
    """That it does not fit, where most is lacking, and what to do unless that is `answered`."""
    if plan.fits:
        return []
    limits = [device.type.memory_bytes for device in plan.fleet.devices]
    worst = max(plan.used, key=lambda d: plan.memory_bytes[d] / limits[d])
    name, kind = plan.devices[worst], plan.fleet.devices[worst].type.name
    lacking = f"would need {size(plan.memory_bytes[worst])}, and has {size(limits[worst])}"
    asking = "                  shardwright plan … --remedies says what would help, and at which price"
    return [f"  DOES NOT FIT    {name} ({kind}) {lacking}", *([] if answered else [asking])]


def _space(plan: Plan) -> str:
    """What the certificate is about."""
    return "the step so changed" if plan.rewriting else "this space"


def changed(plan: Plan) -> list[str]:
    """How the step is changed to take less memory, and what that costs."""
    again = sum(stretch.keep != "all" for stretch in plan.rewriting.recompute)
    away = sum(stretch.host for stretch in plan.rewriting.recompute)
    pieces, handed_on = plan.rewriting.microbatches, plan.rewriting.stages

    def price(seconds: float) -> str:
        return f"{duration(seconds)} ({seconds / plan.cost_s if plan.cost_s else 0.0:.1%})"

    def layers(count: int, one: str, many: str) -> str:
        return f"{count} layers {many}" if count > 1 else f"a layer {one}"

    computed = f"{layers(again, 'is', 'are')} computed again in the backward pass: {price(plan.again_s)}"
    waiting = f"{layers(away, 'waits', 'wait')} in host memory for the backward pass: {price(plan.host_s)}"
    return [
        *(["state is donated: what continues it takes its memory"] if plan.donate else []),
        *([computed] if again else []),
        *([waiting] if away else []),
        *([f"{pieces} micro-batches, one after another"] if pieces > 1 else []),
        *(
            [f"layers of scans may lie on different devices, which hand on {handed_on} micro-batches"]
            if handed_on > 1
            else []
        ),
    ]


def _comparing(plan: Plan) -> list[str]:
    """What it costs to keep replicated state alike, where that shows."""
    part_s = plan.comparing_s / plan.resync_every if plan.resync_every else 0.0
    if not plan.iteration_s or part_s / plan.iteration_s < _SHOWS:
        return []
    said = f"{duration(plan.comparing_s)} every {plan.resync_every} steps ({part_s / plan.iteration_s:.1%})"
    return [f"  compared        replicated state: {said} of the predicted step"]


def _own_ratios(plan: Plan) -> list[str]:
    """Ratios beside the plan's, by type of device where those of a type are alike."""
    lines: list[str] = []
    for own in own_ratios(plan.program).values():
        of_type: dict[str, dict[str, None]] = {}
        for device, share in zip(_used(plan), own.shares, strict=True):
            of_type.setdefault(device.type.name, {})[f"{share:.2%}"] = None
        said = (f"{kind} {' or '.join(shares)}" for kind, shares in of_type.items())
        lines.append(f"  shares {own}       {', '.join(said)} of what says so (S(0){own})")
    return lines


def _shares(plan: Plan) -> Table:
    table = Table(title="shares", title_justify="left", box=None, pad_edge=False)
    for name, right in (
        ("devices", False),
        ("type", False),
        ("share of each", True),
        ("", False),
        ("memory", True),
    ):
        table.add_column(name, justify="right" if right else "left")
    top = max(plan.ratios) or 1.0
    rows: dict[tuple[str, float, int, int], list[str]] = {}
    for device in _used(plan):
        key = device.type.name, plan.ratios[device.index], plan.memory_bytes[device.index]
        rows.setdefault((*key, device.type.memory_bytes), []).append(device.name)
    for (kind, ratio, used, limit), names in rows.items():
        bar = "█" * round(24 * ratio / top) or "▏"
        memory = f"{size(used)} of {size(limit)}" + ("" if used <= limit else "  TOO MUCH")
        table.add_row(_names(names), kind, f"{ratio:.2%}", bar, memory)
    return table


def _used(plan: Plan) -> list[Device]:
    devices = plan.fleet.devices
    return [devices[d] for d in plan.used]


def _unused(plan: Plan) -> Table:
    """What is left out, and why."""
    table = Table(title="left out", title_justify="left", box=None, pad_edge=False)
    for name in ("devices", "type", "because"):
        table.add_column(name, overflow="fold")
    kinds = {device.name: device.type.name for device in plan.fleet.devices}
    for each in plan.unused:
        table.add_row(_names(list(each.devices)), kinds[each.devices[0]], each.why)
    return table


def _names(names: list[str]) -> str:
    return ", ".join(names) if len(names) <= 3 else f"{names[0]} … {names[-1]} ({len(names)})"


def _exchanges(plan: Plan) -> Table:
    table = Table(title="exchanges per step", title_justify="left", box=None, pad_edge=False)
    for name in ("collective", "strategy", "times", "seconds", "of the cost"):
        table.add_column(name, justify="left" if name in ("collective", "strategy") else "right")
    if any(exchange.pattern for exchange in plan.exchanges):
        table.add_column("pattern")
    for exchange in sorted(plan.exchanges, key=lambda e: (-e.seconds, e.name)):
        kind, _, strategy = exchange.name.partition(".")
        part = exchange.seconds / plan.cost_s if plan.cost_s else 0.0
        row = (kind, strategy, f"{exchange.count:g}", duration(exchange.seconds), f"{part:.1%}")
        table.add_row(*row, *([exchange.pattern] if exchange.pattern else []))
    if not plan.exchanges:
        table.add_row("none", "", "0", "", "")
    return table


def _staged(plan: Plan) -> list[Text]:
    """Which devices exchange through their host's memory, and at which speed they reach it."""
    if plan.fleet.transport != "host-mpi" or not plan.exchanges:
        return []
    links: dict[str, None] = {}
    for device in _used(plan):
        link = host_link(device.type, device.host_link)
        if link is not None:
            speed = f"{bandwidth(link.bandwidth_byte_per_s)}, {duration(link.latency_s)}"
            assumed = " (assumed)" if device.host_link is None else ""
            links[f"{device.type.name} at {speed}{assumed}"] = None
    return [Text(f"staged through host memory (host-mpi): {'; '.join(links)}")] if links else []


def _spent(plan: Plan) -> Table:
    """Devices of one type with the same times, in three digits, share a row."""
    table = Table(title="time per step", title_justify="left", box=None, pad_edge=False)
    for name in ("devices", "type", "computing", "exchanging", "waiting for others"):
        table.add_column(name, justify="left" if name in ("devices", "type") else "right")
    rows: dict[tuple[str, ...], list[str]] = {}
    for device in _used(plan):
        spent = plan.spent[device.index]
        times = (spent.compute_s, spent.exchange_s, spent.idle_s)
        rows.setdefault((device.type.name, *map(duration, times)), []).append(device.name)
    for row, names in rows.items():
        table.add_row(_names(names), *row)
    return table


def _compared(plan: Plan, baselines: Sequence[Baseline]) -> Table:
    table = Table(title="priced by the same model", title_justify="left", box=None, pad_edge=False)
    for name, right in (("", False), ("cost per step", True), ("against the plan", True), ("", False)):
        table.add_column(name, justify="right" if right else "left")
    table.add_row(
        "this plan", duration(plan.cost_s), "1.00 ×", "" if plan.fits else "does not fit into memory"
    )
    for baseline in baselines:
        fits = "" if baseline.fits else "does not fit into memory"
        ratio = f"{baseline.cost_s / plan.cost_s:.2f} ×" if plan.cost_s else ""
        table.add_row(baseline.name, duration(baseline.cost_s), ratio, fits)
    return table


def against(plan: Plan, baselines: Baselines) -> Group:
    """The baselines beside the plan: costs, memory, and which were left out and why."""
    table = Table(title=f"baselines for {plan.fleet}", title_justify="left", box=None, pad_edge=False)
    kinds = [(kind.type.name, kind.members) for kind in plan.fleet.classes]
    types = (name for name, _ in kinds)
    table.add_column("", no_wrap=True)
    for name in ("cost per step", "predicted step", *types, "fits", "against the plan"):
        table.add_column(name, justify="right", overflow="fold")
    rows = [("this plan", plan.cost_s, plan.iteration_s, plan.memory_bytes, plan.fits)]
    rows += [(b.name, b.cost_s, b.iteration_s, b.memory_bytes, b.fits) for b in baselines]
    for name, cost_s, iteration_s, memory, fits in rows:
        peaks = (max(memory[i] for i in members) for _, members in kinds)
        ratio = f"{cost_s / plan.cost_s:.2f} ×" if plan.cost_s else ""
        used = (size(peak) if peak else "-" for peak in peaks)
        table.add_row(name, duration(cost_s), duration(iteration_s), *used, "yes" if fits else "no", ratio)
    notes = [Text(f"left out: {name}: {why}") for name, why in baselines.left_out.items()]
    return Group(_section(table), *notes)


def baselines_to_json(plan: Plan, baselines: Baselines) -> dict[str, object]:
    """The same as plain data; programs as in a plan file."""
    return {
        "fleet": plan.fleet.name,
        "axes": plan.axes,
        "devices": list(plan.devices),
        "plan": {name: getattr(plan, name) for name in ("cost_s", "iteration_s", "bound_s", "gap", "fits")}
        | {"memory_bytes": list(plan.memory_bytes), "ratios": list(plan.ratios)},
        "baselines": [
            {
                "name": b.name,
                "cost_s": b.cost_s,
                "iteration_s": b.iteration_s,
                "memory_bytes": list(b.memory_bytes),
                "fits": b.fits,
                "relative": b.cost_s / plan.cost_s if plan.cost_s else None,
                "devices": list(b.devices),
                "ratios": list(b.ratios),
                "program": program_to_json(b.program),
            }
            for b in baselines
        ],
        "left_out": dict(baselines.left_out),
    }


@dataclass(frozen=True, slots=True)
class Held:
    """Inputs of one argument that lie alike: how many, and one of them."""

    argument: str
    placement: str
    tensors: int
    example: str


def held(plan: Plan) -> tuple[Held, ...]:
    """Inputs by argument and placement: a model has hundreds of leaves and few kinds of them."""
    kinds: Counter[tuple[str, str]] = Counter()
    example: dict[tuple[str, str], str] = {}
    for name, placement in plan.held.items():
        key = (_argument(name), placement)
        kinds[key] += 1
        example.setdefault(key, name)
    order = {argument: k for k, argument in enumerate(dict.fromkeys(map(_argument, plan.held)))}
    rows = sorted(kinds.items(), key=lambda entry: (order[entry[0][0]], -entry[1], entry[0][1]))
    return tuple(Held(*key, count, example[key]) for key, count in rows)


def _held(plan: Plan) -> Table:
    table = Table(title="where inputs lie", title_justify="left", box=None, pad_edge=False)
    for name in ("argument", "placement", "tensors", "such as"):
        table.add_column(name, justify="right" if name == "tensors" else "left", overflow="fold")
    for row in held(plan):
        table.add_row(row.argument, row.placement, str(row.tensors), row.example)
    return table


def _recomputed(plan: Plan) -> Table:
    """What the backward part computes again and has from host memory; layers of which equally much is kept
    share a row."""
    again = any(stretch.keep != "all" for stretch in plan.rewriting.recompute)
    title = "computed again" if again else "in host memory"
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for name in ("layers", "kept"):
        table.add_column(name, overflow="fold")
    rows: dict[tuple[str, bool], list[str]] = {}
    for stretch in plan.rewriting.recompute:
        rows.setdefault((stretch.keep, stretch.host), []).append(stretch.name)
    kept = {"nothing": "their inputs", "products": "their inputs, and results of products", "all": "all"}
    for (keep, host), names in rows.items():
        table.add_row(_names(names), f"{kept[keep]}{', in host memory' if host else ''}")
    return table


def _pins(plan: Plan) -> Table:
    """What every pin costs."""
    table = Table(title="pins", title_justify="left", box=None, pad_edge=False)
    for name in ("pinned", "placement", "cost with it", "without it", "its price"):
        table.add_column(
            name, justify="left" if name in ("pinned", "placement") else "right", overflow="fold"
        )
    for pin in plan.pins:
        without_s = plan.cost_s - pin.price_s
        table.add_row(
            pin.name, pin.placement, duration(plan.cost_s), duration(without_s), duration(pin.price_s)
        )
    return table


def _argument(name: str) -> str:
    """`params` of `params['blocks'][0]`."""
    return re.split(r"[\[.]", name, maxsplit=1)[0]
