"""How long planning takes, against the time JAX takes to trace the same step, and how good plans are.

    python -m bench search                                        all rows, five fresh processes each
    python -m bench.search --rows 'depth|hap_testbed' --repeat 1  some rows, the others stay as they are

Every figure comes from fresh processes, each of which traces a step once, cold, and plans it: medians. Rows
of a group, such as those by depth, take turns, so that they compare on a machine that is not always as fast.
Of some rows others trace it alone, as anybody does (`jax_alone_s`): with Python's garbage collector at work,
which rests while we plan. Rows are the full-size examples on a fleet, GPT-2 by depth (unrolled and scanned),
by the number of devices, GPT-2 and Llama-3-8B on two mesh axes, Llama-2-7B on devices of less and less
memory, and some of them on few cards that are unlike each other and have no room for them. Written group by
group to bench/results/search.json and .md, with the machine's load at each, and to docs/benchmarks.md; drawn
to docs/planning-time.svg. `python -m bench.compare OLD.json NEW.json` compares two runs.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import resource
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

import jax

from bench.record import EXAMPLES, FLEETS, RESULTS, ROOT, markdown, table, write
from shardwright import Fleet, synthesize
from shardwright.factory import load_factory
from shardwright.reports.picture import figure, save

FACTORY = {
    "gpt2": "small",
    "vit": "base",
    "bert": "base",
    "bert_moe": "base",
    "vgg19": "base",
    "resnet50": "base",
}
UNROLLED = (12, 24, 48)
SCANNED = (12, 48, 96)
DEVICES = (64, 512, 4096)
CARDS = {"A100": "A100-PCIE-40GB", "V100": "V100-SXM2-16GB", "P100": "P100-16GB", "T4": "T4"}
CARDS |= {"V100-32GB": "V100-SXM2-32GB"}
CLASSES = ("A100-40GB", "V100-16GB", "P100-16GB", "T4")
#: What Llama-3-8B is planned for on two axes: bfloat16 with adam in float32 keeps 96 GB of state.
MIXED = "32 A100 + 32 V100"
#: Gigabytes of each of eight devices for Llama-2-7B, whose state takes 40 GB.
BUDGETS = (40, 24, 16)
#: Boxes and a cluster of unlike cards: too small for GPT-2 as it is.
UNLIKE = ("a100_t4", "2 V100 + 2 T4", "2 A100, 4 T4", "4 classes of 4")
#: Two generations of nodes, on a slow network.
GENERATIONS = "4 V100, 4 V100, 4 P100, 4 P100"
#: A card that has no room for GPT-2, ViT and BERT as they are.
ONE = "1 A100"
#: Sequences per step at which GPT-2 of 12 layers fits the testbed's memory; by depth, 96 layers and so many
#: tokens a sequence: what a device keeps of one sequence of 1,024 tokens in 48 layers is more than its 16 GB.
BATCH, TOKENS = 16, 256
#: Rows of which it is also measured what JAX takes to trace the step in a process without us.
ALONE = ("models", "axes")
#: In 96 layers memory binds all the same, by their state. Of layers so wide it does not; and size of a head.
WIDTH, HEAD = 256, 64

PICTURE = ROOT / "docs" / "planning-time.svg"
PAGE = ROOT / "docs" / "benchmarks.md"
SHOWN = (
    "model", "fleet", "jax_alone_s", "trace_s", "search_s", "ratio_s", "planning_over_trace", "expanded",
    "search_gap", "gap", "fits", "peak_MiB",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Case:
    """What is planned; `layers` is None for the example as it is, `factory` for the one of `FACTORY`."""

    group: str
    model: str
    fleet: str
    layers: int | None = None
    scan: bool = False
    batch: int | None = None
    tokens: int | None = None
    width: int | None = None
    axes: Literal[1, 2, "auto"] = 1
    factory: str | None = None
    donate: bool = False

    @property
    def name(self) -> str:
        """As the table shows it."""
        layers = "" if self.layers is None else f" {self.layers}"
        batch = "" if self.batch is None else f", batch {self.batch}"
        tokens = "" if self.tokens is None else f" of {self.tokens} tokens"
        width = "" if self.width is None else f", {self.width} wide"
        axes = {1: "", 2: ", two axes", "auto": ", any axes"}[self.axes]
        model = self.factory or self.model
        donated = ", state donated" * self.donate
        return f"{model}{layers}{' scanned' * self.scan}{batch}{tokens}{width}{axes}{donated}"


CASES = (
    *(Case("models", model, "hap_testbed") for model in FACTORY),
    Case("models", "gpt2", "hap_testbed", 12, batch=BATCH),
    *(Case("depth", "gpt2", "hap_testbed", layers, False, BATCH, TOKENS) for layers in UNROLLED),
    *(Case("depth scanned", "gpt2", "hap_testbed", layers, True, BATCH, TOKENS) for layers in SCANNED),
    *(
        Case("depth with room", "gpt2", "hap_testbed", layers, True, BATCH, TOKENS, WIDTH)
        for layers in SCANNED
    ),
    Case("memory", "gpt2", "hap_testbed", 48),
    *(Case("devices", "gpt2", f"{devices} devices") for devices in DEVICES),
    *(Case("axes", "gpt2", fleet, axes=2) for fleet in ("2 x 4", "8 x 8")),
    *(Case("axes", "gpt2", fleet, 12, batch=BATCH, axes=2) for fleet in ("2 x 4", "8 x 8")),
    *(Case("axes", "llama3", MIXED, axes=2, factory=each) for each in ("base_scan", "base")),
    *(
        Case("budgets", "llama3", f"8 devices of {memory} GB", factory=each)
        for each in ("llama2_scan", "llama2")
        for memory in BUDGETS
    ),
    *(Case("unlike cards", "gpt2", fleet, axes="auto") for fleet in UNLIKE),
    *(Case("unlike cards", "gpt2", fleet, axes="auto", factory="small_scan") for fleet in UNLIKE[:2]),
    *(Case("unlike cards", model, "a100_t4", axes="auto") for model in ("vit", "bert")),
    Case("unlike cards", "gpt2", "a100_t4", 12, batch=32, axes="auto"),
    Case("unlike cards", "bert_moe", GENERATIONS),
    *(Case("unlike cards", "bert_moe", fleet, axes="auto") for fleet in ("hap_testbed", UNLIKE[2])),
    *(Case("unlike cards", "bert_moe", fleet, axes="auto", donate=True) for fleet in ("a100_t4", UNLIKE[2])),
    Case("unlike cards", "llama3", "a100_t4", factory="llama2_scan", axes="auto", donate=True),
    *(Case("one card", model, ONE, axes="auto") for model in ("gpt2", "vit", "bert")),
)


def fleet_of(name: str) -> Fleet:
    """An example fleet, or one of these.

    "N devices": of four classes, in nodes of eight. "N x D": N nodes of D V100. `MIXED`: nodes of eight with
    80 and with 32 GB. "N devices of M GB": one node, with the rates and links of A100 SXM. "N CARD + …": one
    node, on PCIe; "…, …": such nodes. "4 classes of N": a node of N of each class.
    """
    link = {"bandwidth": "16 GB/s", "latency": "10 us"}
    network = {"bandwidth": "100 Gbit/s", "latency": "10 us"}
    if name == MIXED:
        kinds = ("A100-SXM-80GB", "V100-SXM2-32GB")
        nodes = [{"count": 4, "devices": {"type": kind, "count": 8}, "link": link} for kind in kinds]
    elif name.endswith(" GB"):
        count, memory = int(name.split()[0]), name.split(" of ")[1]
        kind = {"name": f"{memory} device", "flops": "19.5 TFLOP/s", "bfloat16": "312 TFLOP/s"}
        kind |= {"memory_bandwidth": "1555 GB/s", "memory": memory}
        nvlink = {"bandwidth": "240 GB/s", "latency": "5 us"}
        nodes = [{"count": 1, "devices": {"type": kind, "count": count}, "link": nvlink}]
    elif " classes of " in name:
        size = int(name.split()[-1])
        nodes = [{"count": 1, "devices": {"type": kind, "count": size}, "link": link} for kind in CLASSES]
    elif any(card in name for card in CARDS):
        nodes = []
        for box in name.split(", "):
            cards = [each.split() for each in box.split(" + ")]
            devices = [{"type": CARDS[card], "count": int(count)} for count, card in cards]
            nodes.append({"devices": devices, "link": {"bandwidth": "12 GB/s", "latency": "10 us"}})
        network = {"bandwidth": "10 Gbit/s", "latency": "30 us"}
    elif name.endswith(" devices"):
        count = int(name.split()[0]) // (8 * len(CLASSES))
        nodes = [{"count": count, "devices": {"type": kind, "count": 8}, "link": link} for kind in CLASSES]
    elif " x " in name:
        count, size = map(int, name.split(" x "))
        nodes = [{"count": count, "devices": {"type": "V100-16GB", "count": size}, "link": link}]
    else:
        return Fleet.load(FLEETS / f"{name}.yaml")
    return Fleet.from_dict({"name": name, "nodes": nodes, "network": network})


def step_of(case: Case) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The training step of a row, and its arguments."""
    step, args = load_factory(f"{EXAMPLES / case.model}.py:{case.factory or FACTORY[case.model]}")
    if case.layers is not None:
        example = importlib.import_module(case.model)
        sizes = example.SMALL | {"layers": case.layers, "scan": case.scan}
        sizes |= {} if case.batch is None else {"batch": case.batch}
        sizes |= {} if case.tokens is None else {"sequence": case.tokens}
        sizes |= {} if case.width is None else {"d": case.width, "heads": case.width // HEAD}
        args = jax.eval_shape(partial(example.arguments, **sizes))
    return step, args


def trace_once(case: Case) -> dict[str, Any]:
    """What JAX takes to trace the step in this process, by itself."""
    step, args = step_of(case)
    start = time.perf_counter()
    jax.make_jaxpr(step)(*args)
    return {"jax_alone_s": time.perf_counter() - start}


def plan_once(case: Case) -> dict[str, Any]:
    """Trace and plan in this process; what `synthesize` took, and what JAX's tracing took of that."""
    inventory = fleet_of(case.fleet)
    step, args = step_of(case)
    start = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plan = synthesize(step, *args, fleet=inventory, axes=case.axes, donate=case.donate)
    total_s = time.perf_counter() - start
    stats = plan.stats
    return {
        "equations": stats.equations,
        "choices": stats.choices,
        "trace_s": stats.trace_s,
        "search_s": stats.search_s,
        "ratio_s": stats.ratio_s,
        "total_s": total_s,
        "planning_over_trace": (stats.search_s + stats.ratio_s) / stats.trace_s,
        "searches": stats.searches,
        "expanded": stats.expanded,
        "search_gap": plan.search_gap,
        "gap": plan.gap,
        "cost_s": plan.cost_s,
        "bound_s": plan.bound_s,
        "devices_used": len(plan.used),
        "fits": plan.fits,
        "peak_MiB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def _fresh(what: str, case: Case) -> dict[str, Any]:
    command = [sys.executable, "-m", "bench.search", what, json.dumps(asdict(case))]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def in_turn(repeat: int, cases: Sequence[Case]) -> Iterator[tuple[Case, dict[str, Any]]]:
    """Rows of medians over fresh processes, which cases take turns at: a machine may slow down meanwhile."""
    runs: dict[Case, list[dict[str, Any]]] = {case: [] for case in cases}
    for _ in range(repeat):
        for case, some in runs.items():
            alone = _fresh("--alone", case) if case.group in ALONE else {}
            some.append(_fresh("--once", case) | alone)
    for case, some in runs.items():
        middle = {name: statistics.median(run[name] for run in some) for name in some[0]}
        middle["fits"] = all(run["fits"] for run in some)
        row = {"model": case.name, "fleet": case.fleet, **middle}
        yield case, row | {"repeat": repeat, "load_1min": os.getloadavg()[0]}


def draw(rows: Mapping[tuple[str, str], Mapping[str, Any]]) -> None:
    """Seconds of tracing and of planning, against depth and devices."""
    drawn = figure(9, 3.6)
    by_group: dict[str, list[Case]] = {}
    for case in CASES:
        if (case.name, case.fleet) in rows:
            by_group.setdefault(case.group, []).append(case)
    depth, devices = drawn.subplots(1, 2)
    lines = (
        (depth, "depth", "unrolled", "o"),
        (depth, "depth scanned", "scanned", "s"),
        (devices, "devices", "12 layers", "o"),
    )
    for axes, group, label, marker in lines:
        cases = by_group.get(group, [])
        x = [case.layers or int(case.fleet.split()[0]) for case in cases]
        mine = [rows[case.name, case.fleet] for case in cases]
        planning = [row["search_s"] + row["ratio_s"] for row in mine]
        axes.plot(x, planning, marker=marker, label=f"planning, {label}")
        axes.plot(
            x, [row["trace_s"] for row in mine], marker=marker, linestyle=":", label=f"tracing, {label}"
        )
    depth.set(xlabel="layers of GPT-2", ylabel="seconds", ylim=(0, None))
    devices.set(xlabel="devices in four classes", xscale="log", ylim=(0, None))
    devices.set_xticks(DEVICES, [str(count) for count in DEVICES], minor=False)
    for axes in (depth, devices):
        axes.legend(fontsize=8)
    save(drawn, str(PICTURE))


def main(repeat: int = 5, wanted: str = "") -> Path:
    """The rows that the pattern finds in "group: model on fleet", as JSON, as a table and as a picture."""
    path = RESULTS / "search.json"
    known = json.loads(path.read_text())["rows"] if path.exists() and wanted else []
    rows = {(row["model"], row["fleet"]): row for row in known}
    chosen = [case for case in CASES if re.search(wanted, f"{case.group}: {case.name} on {case.fleet}")]
    if not chosen:
        sys.exit(f"bench.search: no row matches {wanted!r}")
    for _, some in groupby(chosen, key=lambda case: case.group):
        for case, row in in_turn(repeat, list(some)):
            rows[case.name, case.fleet] = row
            table([_shown(row)], header=case is chosen[0])
        _write([rows[c.name, c.fleet] for c in CASES if (c.name, c.fleet) in rows])
    draw(rows)
    return path


def _shown(row: Mapping[str, Any]) -> dict[str, Any]:
    return {name: row.get(name, "") for name in SHOWN}


def _write(rows: Sequence[Mapping[str, Any]]) -> None:
    shown = markdown("search", list(map(_shown, rows))).read_text()
    page = PAGE.read_text()
    before, after = page.split("<!-- search -->")[0], page.split("<!-- /search -->")[1]
    PAGE.write_text(f"{before}<!-- search -->\n\n{shown}\n<!-- /search -->{after}")
    write("search", rows)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="bench.search")
    parser.add_argument("--rows", default="", metavar="PATTERN", help="a regular expression: which rows")
    parser.add_argument("--repeat", type=int, default=5, help="fresh processes per row")
    parser.add_argument("--once", default="", help=argparse.SUPPRESS)
    parser.add_argument("--alone", default="", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.once:
        print(json.dumps(plan_once(Case(**json.loads(given.once)))))
    elif given.alone:
        print(json.dumps(trace_once(Case(**json.loads(given.alone)))))
    else:
        main(given.repeat, given.rows)
