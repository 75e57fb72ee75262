"""Layers on different devices: what plans cost with stages and without them, and what steps take on ranks.

    python -m bench stages
    python -m bench.stages plans found          these tables alone; or ranks
    python -m bench.stages found --rows gpt2    some lines of them, the others stay

Plans are of examples whose layers are scanned, for nodes on slow and on faster networks. Layers are found in
examples that have them in a Python loop, which are planned as they are and with these layers scanned. On
ranks of this machine, joined by shaped links (`testbed_machine.py`), the best plan without stages and the one
with them run in turns. Written to bench/results/stages.json and docs/stages.md, in place of what is there of
the same part.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import re
import time
import warnings
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import jax

from bench import testbed_machine
from bench.record import RESULTS, markdown, show, table, write
from bench.search import BATCH, MIXED, SCANNED, TOKENS, UNROLLED, WIDTH, fleet_of, step_of
from bench.search import Case as Search
from bench.testbed import STEPS, Case, Plans, measured_plans, predicted_s
from bench.testbed_fleet import measured_cores
from bench.testbed_models import step_of as trained
from shardwright import Fleet, Plan, scan_layers, synthesize
from shardwright.cost.fleet import Link

PARTS = ("plans", "found", "ranks")

TWO = tuple(
    Search("", "llama3", nodes, axes="auto", factory="llama2_scan")
    for nodes in ("4 V100-32GB, 4 V100-32GB", "4 A100, 4 V100-32GB")
)
EIGHT = Search("", "llama3", MIXED, axes=2, factory="base_scan")
#: Steps whose layers are scanned, and Gbit/s between nodes where it is not what the fleet says.
PLANS = (
    *((TWO[0], gbit_per_s) for gbit_per_s in (10, 100)),
    (TWO[1], 10),
    *((EIGHT, gbit_per_s) for gbit_per_s in (25, 100, 400)),
    *((Search("", "gpt2", "hap_testbed", layers, True, BATCH, TOKENS), None) for layers in SCANNED),
    *((Search("", "gpt2", "hap_testbed", layers, True, BATCH, TOKENS, WIDTH), None) for layers in SCANNED),
)
#: Steps whose layers are in a Python loop.
FOUND = (
    *((replace(case, factory="llama2"), 10) for case in TWO),
    (replace(EIGHT, factory="base"), 100),
    *((Search("", "gpt2", "hap_testbed", layers, False, BATCH, TOKENS), None) for layers in UNROLLED),
    *((Search("", model, "hap_testbed"), None) for model in ("vit", "bert", "bert_moe")),
)
#: Ranks of these relative speeds, over links of that rate; the last in two nodes.
RANKS = (
    *(Case("scanned", speeds, "1gbit") for speeds in ((1, 1), (1, 1 / 2), (1, 1, 1, 1))),
    Case("scanned", (1, 1, 1, 1), "1gbit", (2, 2)),
)


def _fleet(case: Search, gbit_per_s: float | None) -> Fleet:
    fleet = fleet_of(case.fleet)
    return fleet if gbit_per_s is None else replace(fleet, network=Link(gbit_per_s * 1.25e8, 30e-6))


def planned(case: Search, gbit_per_s: float | None) -> dict[str, Any]:
    """A line of the table of plans."""
    fleet, (step, args) = _fleet(case, gbit_per_s), step_of(case)
    assert fleet.network is not None
    made: dict[str, Plan] = {}
    took: dict[str, float] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for stages in ("off", "auto"):
            start = time.perf_counter()
            made[stages] = synthesize(step, *args, fleet=fleet, axes=case.axes, stages=stages)
            took[stages] = time.perf_counter() - start
    without, found = made["off"], made["auto"]
    return {
        "step": case.name.removesuffix(", any axes"),
        "fleet": case.fleet,
        "Gbit/s": fleet.network.bandwidth_byte_per_s / 1.25e8,
        "without, s": without.cost_s,
        "with, s": found.cost_s,
        "faster": without.cost_s / found.cost_s,
        "pieces": found.rewriting.stages,
        "axes": found.axes,
        "bound, s": found.bound_s,
        "fits": without.fits and found.fits,
        "planned in, s": took["auto"],
        "without stages in, s": took["off"],
    }


def looked_through(case: Search, gbit_per_s: float | None) -> dict[str, Any]:
    """A line of the table of layers that were found."""
    fleet, (step, args) = _fleet(case, gbit_per_s), step_of(case)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        times = [time.perf_counter()]
        jax.make_jaxpr(step)(*args)
        times.append(time.perf_counter())
        jax.clear_caches()
        times.append(time.perf_counter())
        scanned = scan_layers(step, *args)
        times.append(time.perf_counter())
        plan = synthesize(scanned.step, *scanned.args, fleet=fleet, axes=case.axes)
        times.append(time.perf_counter())
        without = synthesize(step, *args, fleet=fleet, axes=case.axes)
        times.append(time.perf_counter())
    traced_s, _, scanned_s, planned_s, without_s = (after - before for before, after in pairwise(times))
    return {
        "step": case.name.removesuffix(", any axes"),
        "fleet": case.fleet,
        "scanned": " + ".join(map(str, scanned.layers)),
        "as it is, s": without.cost_s,
        "scanned, s": plan.cost_s,
        "faster": without.cost_s / plan.cost_s,
        "pieces": plan.rewriting.stages,
        "axes": plan.axes,
        "bound, s": plan.bound_s,
        "fits": without.fits and plan.fits,
        "traced in, s": traced_s,
        "scanned in, s": scanned_s,
        "planned in, s": planned_s,
        "planned as it is in, s": without_s,
    }


def on_ranks(case: Case, cores: Fleet, steps: int = STEPS) -> dict[str, Any] | None:
    """A line of the table of ranks; None where they do not get their part of a core."""
    step, args = trained(case.model)

    def make(fleet: Fleet) -> Plans:
        return {
            "without": synthesize(step, *args, fleet=fleet, stages="off"),
            "with": synthesize(step, *args, fleet=fleet),
        }

    found = measured_plans(case, cores, make, steps)
    if found is None:
        return None
    plans, measured = found
    seconds = {kind: median(taken) for kind, taken in measured["seconds"].items()}
    return {
        "ranks": case.name,
        "without, s": seconds["without"],
        "with, s": seconds["with"],
        "faster": seconds["without"] / seconds["with"],
        "predicted, s": predicted_s(plans["with"]),
        "predicted after, s": measured["after"]["with"],
        "predicted without, s": predicted_s(plans["without"]),
        "pieces": plans["with"].rewriting.stages,
        "load": measured["load"],
    }


def _found(cases: Sequence[tuple[Search, float | None]], pattern: str) -> list[int]:
    """The numbers of the cases whose "model on fleet" a pattern finds."""
    return [n for n, (case, _) in enumerate(cases) if re.search(pattern, f"{case.name} on {case.fleet}")]


def main(parts: Sequence[str] = PARTS, pattern: str = "") -> Path:
    """All parts, or some, and of plans all lines or some; what is there of others stays."""
    path = RESULTS / "stages.json"
    known: Mapping[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    plans, ranks = list(known.get("rows", [])), list(known.get("ranks", []))
    loops = list(known.get("found", []))
    if "plans" in parts:
        some, lines = _found(PLANS, pattern), dict(enumerate(plans))
        for number in some:
            lines[number] = planned(*PLANS[number])
            table([lines[number]], header=number == some[0])
        plans = [lines[number] for number in sorted(lines)]
        markdown("stages", plans)
        show("stages", "stages.md")
    if "found" in parts:
        some, lines = _found(FOUND, pattern), dict(enumerate(loops))
        # Each in a process of its own: a plan of a step as it is leaves much behind.
        alone = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), max_tasks_per_child=1)
        with alone:
            made = alone.map(looked_through, *zip(*[FOUND[number] for number in some], strict=True))
            for number, line in zip(some, made, strict=True):
                lines[number] = line
                table([line], header=number == some[0])
        loops = [lines[number] for number in sorted(lines)]
        markdown("stages_found", loops)
        show("stages_found", "stages.md")
    if "ranks" in parts:
        reason = testbed_machine.why_not(True)
        if reason:
            print(f"stages on ranks: skipped: {reason}")
        else:
            cores = measured_cores(RESULTS / "testbed_cores.yaml")
            rows = [on_ranks(case, cores) for case in RANKS]
            ranks = [row for row in rows if row is not None]
            table(ranks, header=True)
            markdown("stages_ranks", ranks)
            show("stages_ranks", "stages.md")
    return write("stages", plans, found=loops, ranks=ranks)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="bench.stages")
    parser.add_argument("parts", nargs="*", metavar="PART", help="plans, found, ranks; or all")
    parser.add_argument("--rows", default="", metavar="PATTERN", help="a regular expression: which plans")
    given = parser.parse_args()
    unknown = sorted(set(given.parts).difference(PARTS))
    if unknown:
        parser.error(f"no part is named {unknown[0]}: there are {', '.join(PARTS)}")
    if not _found((*PLANS, *FOUND), given.rows):
        parser.error(f"no line matches {given.rows!r}")
    main(given.parts or PARTS, given.rows)
