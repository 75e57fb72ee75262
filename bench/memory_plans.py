"""Memory under plans: the tiny examples on three fleets against XLA, and time against budget.

Per example, fleet and kind of device: peak bytes that the plan states, over those of the programs that XLA
compiles for that device (`memory_analysis()`, nothing is run), what is held beside them and what exchanges
hold and pack. The frontier is one step planned for ever less memory; refused, one that fits nowhere, with the
answer to that.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax

from bench.record import EXAMPLES, ROOT
from bench.search import fleet_of
from shardwright import Fleet, Plan, synthesize
from shardwright.api import synthesize_traced
from shardwright.backends.compile import Device, local_function
from shardwright.backends.layout import abstract, holds
from shardwright.factory import load_factory
from shardwright.ir.graph import value_types
from shardwright.ir.segments import Segment, schedule
from shardwright.memory.device_memory import device_memory
from shardwright.memory.remedies import shortage

FLEETS = ("a100_t4", "hap_testbed", "laptop")
STEPS = ("gpt2:tiny", "gpt2:tiny_scan", "vit:tiny", "bert:tiny", "bert_moe:tiny", "vgg19:tiny")

#: Devices that Llama-2-7B does not fit on.
REFUSED = "8 devices of 6 GB"

#: Parts of the memory that the plan without a limit takes.
PARTS = (1.0, 0.85, 0.7, 0.55, 0.45, 0.35)


#: Compiles a function of so many arguments, of these shapes.
Compiler = Callable[[Callable[..., Any], Sequence[Any]], Any]


def compiled_here(function: Callable[..., Any], arguments: Sequence[Any]) -> Any:
    """A function, compiled for this machine."""
    return jax.jit(function, keep_unused=True).lower(*arguments).compile()


def compiled_bytes(plan: Plan, device: int, compiled: Compiler = compiled_here) -> int:
    """What XLA allocates on a device of the plan's program at its fullest step, as `compiled` compiles it."""
    assert plan.traced is not None
    graph, ratios = plan.traced.graph, plan.used_ratios
    types = value_types(graph)
    own = Device(device, ratios, plan.traced.primitives, separate=True)
    steps = schedule(plan.program, graph).steps
    peak = 0
    held = device_memory(plan.program, graph, ratios, device, plan.part.types)
    for step, moment in zip(steps, held.moments, strict=True):
        nbytes = moment.nbytes
        if isinstance(step, Segment):
            needs = [prop for prop in step.needs if holds(prop, device)]
            avals = [abstract(types[p.value], own.shape(types[p.value], p.placement)) for p in needs]
            found = compiled(local_function(step, graph, own), avals).memory_analysis()
            nbytes = moment.held_bytes + found.output_size_in_bytes + found.temp_size_in_bytes
        peak = max(peak, nbytes)
    return peak


def plan_rows(target: str, name: str) -> list[dict[str, Any]]:
    """One row for every kind of device of an example's plan."""
    module, factory = target.split(":")
    step, args = load_factory(f"{EXAMPLES / module}.py:{factory}")
    return rows_of(target, step, args, _processors(Fleet.load(EXAMPLES / "fleets" / f"{name}.yaml")), name)


def _processors(fleet: Fleet) -> Fleet:
    """A fleet whose cards are processors as far as memory goes: of what XLA's CPU compiler lays out."""
    kinds = [[replace(kind, sm_count=None) for kind in node.devices] for node in fleet.nodes]
    nodes = (replace(node, devices=tuple(own)) for node, own in zip(fleet.nodes, kinds, strict=True))
    return replace(fleet, nodes=tuple(nodes))


def rows_of(
    target: str,
    step: Callable[..., Any],
    args: Sequence[Any],
    fleet: Fleet,
    name: str,
    compiled: Compiler = compiled_here,
    **how: Any,
) -> list[dict[str, Any]]:
    """The same of a step on a fleet of that name; how it is planned, `synthesize` says."""
    plan = synthesize(step, *args, fleet=fleet, **{"devices": "all", **how})
    seen: set[tuple[str, int]] = set()
    rows: list[dict[str, Any]] = []
    for position, device in enumerate(plan.part.devices):
        kind = (device.type.name, plan.memory_bytes[plan.used[position]])
        if kind in seen:
            continue
        seen.add(kind)
        actual = compiled_bytes(plan, position, compiled)
        rows.append(
            {
                "example": target,
                "fleet": name,
                "device": device.type.name,
                "plan_bytes": kind[1],
                "xla_bytes": actual,
                "plan_over_xla": kind[1] / actual,
            }
        )
    return rows


def frontier(part: float, target: str = "gpt2:tiny", name: str = "laptop") -> dict[str, Any]:
    """Time against budget: a step where every device has so much of the memory that the free plan takes."""
    module, factory = target.split(":")
    step, args = load_factory(f"{EXAMPLES / module}.py:{factory}")
    fleet = Fleet.load(EXAMPLES / "fleets" / f"{name}.yaml")
    free = synthesize(step, *args, fleet=fleet, devices="all")
    assert free.traced is not None
    budget = int(part * max(free.memory_bytes))
    nodes = tuple(
        replace(node, devices=tuple(replace(kind, memory_bytes=budget) for kind in node.devices))
        for node in fleet.nodes
    )
    plan = synthesize_traced(free.traced, fleet=replace(fleet, nodes=nodes), devices="all")
    return {
        "example": target,
        "fleet": name,
        "budget_bytes": budget,
        "fits": plan.fits,
        "cost_s": plan.cost_s,
        "bound_s": plan.bound_s,
        "gap": plan.gap,
        "again": sum(stretch.keep != "all" for stretch in plan.rewriting.recompute),
        "microbatches": plan.rewriting.microbatches,
        "plan_s": plan.stats.search_s + plan.stats.ratio_s,
    }


def refused(memory: str = REFUSED) -> dict[str, Any]:
    """Llama-2-7B in one scan where no program fits: how long until that is said, and what would do."""
    step, args = load_factory(f"{EXAMPLES / 'llama3'}.py:llama2_scan")
    fleet = fleet_of(memory)
    start = time.perf_counter()
    plan = synthesize(step, *args, fleet=fleet)
    planned = time.perf_counter()
    found = shortage(plan, step, *args)
    answered = time.perf_counter()
    row = {"example": "llama2_scan", "fleet": memory, "fits": plan.fits, "plan_s": planned - start}
    if found is None:
        return row
    cheapest = found.remedies[0]
    return row | {
        "answer_s": answered - planned,
        "device": found.device,
        "needs_bytes": found.needs_bytes,
        "factor": found.factor,
        "tried": found.tried,
        "remedy": cheapest.what,
        "price": cheapest.price,
    }


def refused_summary(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What people read: times in seconds, the least memory as a multiple of what there is."""
    return [
        {
            "example": row["example"],
            "fleet": row["fleet"],
            "fits": "yes" if row["fits"] else "no",
            "traced and planned in, s": f"{row['plan_s']:.1f}",
            "answered in, s": f"{row['answer_s']:.0f}",
            "fits with so many times the memory": f"{row['factor']:.3g}",
            "not found with": f"{row['tried']:.3g}",
            "cheapest remedy": f"{row['remedy']}: {row['price']:+.0%}",
        }
        for row in rows
    ]


def draw(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """docs/memory-frontier.svg: cost and bound of what fits, by budget. Returns what people read."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    pyplot.rcParams["svg.hashsalt"] = "shardwright"
    fitting = [row for row in rows if row["fits"]]
    figure, axes = pyplot.subplots(figsize=(6.4, 3.6), layout="constrained")
    budgets = [row["budget_bytes"] / 2**20 for row in fitting]
    axes.step(budgets, [1e3 * row["cost_s"] for row in fitting], where="post", marker=".", label="plan")
    axes.step(budgets, [1e3 * row["bound_s"] for row in fitting], where="post", ls=":", label="no plan below")
    none = [row["budget_bytes"] / 2**20 for row in rows if not row["fits"]]
    if none:
        axes.axvspan(0, max(none), alpha=0.15, color="grey", label="nothing found that fits")
    axes.set(xlabel="memory of every device, MiB", ylabel="ms", xlim=(0, None), ylim=(0, None))
    axes.set_title(f"{rows[0]['example']} on {rows[0]['fleet']}")
    axes.legend()
    figure.savefig(ROOT / "docs" / "memory-frontier.svg", metadata={"Date": None})
    pyplot.close(figure)
    return [
        {
            "memory of each device": f"{row['budget_bytes'] / 2**10:,.0f} KiB",
            "fits": "yes" if row["fits"] else "no",
            "costs, ms": f"{1e3 * row['cost_s']:.3f}",
            "at least, ms": f"{1e3 * row['bound_s']:.3f}",
            "gap": f"{row['gap']:.1%}",
            "stretches again": row["again"],
            "micro-batches": row["microbatches"],
            "planned in, s": f"{row['plan_s']:.0f}",
        }
        for row in rows
    ]


def summary(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row for every plan: the least and the largest of what it states over what XLA allocates."""
    found: dict[tuple[str, str], list[float]] = {}
    for row in rows:
        found.setdefault((row["example"], row["fleet"]), []).append(row["plan_over_xla"])
    return [
        {"example": e, "fleet": f, "kinds of device": len(some), "least": min(some), "most": max(some)}
        for (e, f), some in found.items()
    ]
