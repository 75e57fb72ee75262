"""How long planning takes, against the time JAX takes to trace the same step, and how good plans are.

    python -m bench search

Every figure comes from a fresh process, which traces a step once, cold, and plans it; medians over five of
them. Rows: the full-size examples on a fleet, GPT-2 by depth (unrolled and scanned), and by the number of
devices. Written to bench/results/search.json and .md with the machine's load; `python -m bench.compare`
compares two runs.
"""

from __future__ import annotations

import importlib
import json
import resource
import statistics
import subprocess
import sys
import time
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import jax

from bench.record import EXAMPLES, FLEETS, markdown, table, write
from shardwright import Fleet, synthesize
from shardwright.factory import load_factory

FACTORY = {"gpt2": "small", "vit": "base", "bert": "base", "bert_moe": "base", "vgg19": "base"}
DEPTHS = (12, 24, 48)
SCANNED = (12, 48, 96)
DEVICES = (64, 512, 4096)
CLASSES = ("A100-40GB", "V100-16GB", "P100-16GB", "T4")


def fleet_of(name: str) -> Fleet:
    """An example fleet, or "N devices": N in four classes, in nodes of eight."""
    if not name.endswith(" devices"):
        return Fleet.load(FLEETS / f"{name}.yaml")
    count = int(name.split()[0]) // (8 * len(CLASSES))
    link = {"bandwidth": "16 GB/s", "latency": "10 us"}
    nodes = [{"count": count, "devices": {"type": kind, "count": 8}, "link": link} for kind in CLASSES]
    network = {"bandwidth": "100 Gbit/s", "latency": "10 us"}
    return Fleet.from_dict({"name": name, "nodes": nodes, "network": network})


def plan_once(model: str, layers: int | None, scan: bool, fleet: str) -> dict[str, Any]:
    """Trace and plan in this process; what `synthesize` took, and what JAX's tracing took of that."""
    inventory = fleet_of(fleet)
    step, args = load_factory(f"{EXAMPLES / model}.py:{FACTORY[model]}")
    if layers is not None:
        example = importlib.import_module(model)
        sizes = example.SMALL | {"layers": layers, "scan": scan}
        args = jax.eval_shape(partial(example.arguments, **sizes))
    start = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plan = synthesize(step, *args, fleet=inventory)
    total_s = time.perf_counter() - start
    stats = plan.stats
    return {
        "equations": stats.equations,
        "choices": stats.choices,
        "trace_s": stats.trace_s,
        "planning_s": total_s - stats.trace_s,
        "search_s": stats.search_s + stats.space_s,
        "ratio_s": stats.ratio_s,
        "expanded": stats.expanded,
        "search_gap": plan.search_gap,
        "gap": plan.gap,
        "cost_s": plan.cost_s,
        "bound_s": plan.bound_s,
        "fits": plan.fits,
        "peak_MiB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def median_of(repeat: int, model: str, layers: int | None, scan: bool, fleet: str) -> dict[str, Any]:
    """The median of every number over fresh processes."""
    command = [sys.executable, "-m", "bench.search", json.dumps([model, layers, scan, fleet])]
    runs = [
        json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
        for _ in range(repeat)
    ]
    middle = {name: statistics.median(run[name] for run in runs) for name in runs[0]}
    ratio = statistics.median(run["planning_s"] / run["trace_s"] for run in runs)
    what = model + ("" if layers is None else f" {layers}") + (" scanned" if scan else "")
    return {"model": what, "fleet": fleet, **middle, "planning_over_trace": ratio}


def main(repeat: int = 5) -> Path:
    """All rows, written as JSON and as a table."""
    cases: list[tuple[str, int | None, bool, str]] = [(m, None, False, "hap_testbed") for m in FACTORY]
    cases += [("gpt2", layers, False, "hap_testbed") for layers in DEPTHS]
    cases += [("gpt2", layers, True, "hap_testbed") for layers in SCANNED]
    cases += [("gpt2", None, False, f"{devices} devices") for devices in DEVICES]
    rows: list[dict[str, Any]] = []
    for case in cases:
        rows.append(median_of(repeat, *case))
        table(rows[-1:], header=len(rows) == 1)
    shown = ("model", "fleet", "trace_s", "planning_s", "planning_over_trace", "search_gap", "gap")
    markdown("search", [{name: row[name] for name in shown} for row in rows])
    return write("search", rows, repeat=repeat)


if __name__ == "__main__":
    print(json.dumps(plan_once(*json.loads(sys.argv[1]))))
