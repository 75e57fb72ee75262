"""A mixed fleet on one machine: the plan against data parallelism, even and proportional to speed.

    python -m bench testbed [CASE…]

Ranks are pinned and capped to unlike speeds, links are shaped (`testbed_machine.py`). For every case: the
ranks are calibrated in their seats, the step is planned for what came out, and plan, even and proportional
data parallelism run in turns. A rank that does not get its quota, because something else runs, ends the case
without a row. Written to bench/results/testbed.json; skipped, with the reason, where this is not root.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import yaml

from bench import testbed_machine
from bench.record import ROOT, markdown, table, write
from bench.testbed_models import step_of
from shardwright import Fleet, Plan, synthesize
from shardwright.api import data_parallel
from shardwright.backends.launch import find_mpiexec, rank_environment

STEPS = 15
#: How far a rank's share of its core may be from its quota.
TOLERANCE = 0.06


@dataclass(frozen=True)
class Case:
    """Ranks of these relative speeds train a model, over links of a rate or through shared memory."""

    model: str
    speeds: tuple[float, ...]
    rate: str = ""

    @property
    def name(self) -> str:
        speeds = ":".join(f"{speed:.2g}" for speed in self.speeds)
        return f"{self.model} {speeds}{' over ' + self.rate if self.rate else ''}"

    @property
    def ideal(self) -> float:
        """Speed-up over even shares, were computation all there is."""
        return sum(self.speeds) / (len(self.speeds) * min(self.speeds))


SPEEDS = ((1, 1 / 2), (1, 1 / 3), (1, 1, 1 / 2, 1 / 2), (1, 3 / 4, 1 / 2, 1 / 4))
CASES = (
    *(Case(model, speeds) for model in ("gpt", "perceptron") for speeds in SPEEDS),
    Case("gradients", (1, 1 / 2), "1gbit"),
    Case("gradients", (1, 1, 1 / 2, 1 / 2), "1gbit"),
)


class Seats:
    """Ranks in their seats, for as long as the context lasts."""

    def __init__(self, case: Case, folder: Path, stack: ExitStack) -> None:
        cores = sorted(os.sched_getaffinity(0))
        self.quotas, seats = testbed_machine.share_out(case.speeds, cores)
        procs = stack.enter_context(testbed_machine.quotas(self.quotas))
        entries = [{"procs": str(p), "cores": [core]} for p, core in zip(procs, seats, strict=True)]
        self.file = folder / "seats.json"
        self.file.write_text(json.dumps(entries))
        ranks = len(case.speeds)
        self.mpiexec = [find_mpiexec(), "-n", str(ranks)]
        # One thread each, whatever the machine has: a rank has one core at most.
        self.environment = rank_environment(max(ranks, len(cores)))
        self.environment["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
        self.environment["JAX_PLATFORMS"] = "cpu"
        if case.rate:
            more, variables = stack.enter_context(testbed_machine.links(ranks, case.rate, folder))
            self.mpiexec[1:1] = more
            self.environment |= variables

    def run(self, *arguments: str) -> None:
        """Run `python arguments…` as ranks."""
        seat = [sys.executable, "-S", str(Path(__file__).with_name("testbed_seat.py")), str(self.file)]
        subprocess.run(
            [*self.mpiexec, *seat, sys.executable, *arguments], env=self.environment, check=True, cwd=ROOT
        )


def blank_fleet(case: Case) -> dict[str, Any]:
    """A fleet to be measured: every rank a kind of its own; over links, a node of its own, too."""

    def node(ranks: Sequence[int]) -> dict[str, Any]:
        kinds = [
            {
                "type": {
                    "name": f"rank{rank}",
                    "flops": "20 GFLOP/s",
                    "memory_bandwidth": "8 GB/s",
                    "memory": "2 GB",
                },
                "count": 1,
            }
            for rank in ranks
        ]
        return {"devices": kinds, "link": {"bandwidth": "2 GB/s", "latency": "50 us"}}

    ranks = range(len(case.speeds))
    fleet: dict[str, Any] = {"name": "testbed"}
    if case.rate:
        fleet["nodes"] = [node([rank]) for rank in ranks]
        fleet["network"] = {"bandwidth": "125 MB/s", "latency": "50 us"}
    else:
        fleet["nodes"] = [node(ranks)]
    return fleet


def plans_of(case: Case, fleet: Fleet) -> dict[str, Plan]:
    """The planner's, and data parallelism with even and with proportional shares."""
    step, args = step_of(case.model)
    plan = synthesize(step, *args, fleet=fleet, devices="all")
    assert plan.traced is not None
    found = {"plan": plan}
    for baseline in data_parallel(plan.traced, fleet):
        kind = "even" if baseline.name.startswith("even") else "proportional"
        found[kind] = replace(
            plan, program=baseline.program, ratios=baseline.ratios, iteration_s=baseline.iteration_s
        )
    return found


def run_case(case: Case, steps: int = STEPS) -> dict[str, Any] | None:
    """A row; None where the quotas do not bind."""
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        seats = Seats(case, folder, stack)
        blank, fleet_path = folder / "blank.yaml", folder / "fleet.yaml"
        blank.write_text(yaml.safe_dump(blank_fleet(case)))
        calibrate = ["-m", "shardwright", "calibrate", "--fleet", str(blank), "-o", str(fleet_path)]
        seats.run(*calibrate, "--force", "--quiet")
        plans = plans_of(case, Fleet.load(fleet_path))
        for kind, plan in plans.items():
            plan.save(folder / f"{kind}.json")
        asked = {"model": case.model, "plans": list(plans), "steps": steps}
        (folder / "asked.json").write_text(json.dumps(asked))
        seats.run("-m", "bench.testbed_rank", str(folder))
        measured = json.loads((folder / "measured.json").read_text())
    if wrong := unbound(seats.quotas, measured["shares"]):
        print(f"{case.name}: {wrong}; nothing is reported")
        return None
    return row_of(case, plans, measured, seats.quotas)


def unbound(quotas: Sequence[float], got: Sequence[float]) -> str:
    """Which rank does not get its quota, "" if all do."""
    for rank, (quota, share) in enumerate(zip(quotas, got, strict=True)):
        if abs(share / quota - 1) > TOLERANCE:
            return f"rank {rank} spins at {share:.3f} of a core, its quota is {quota:.3f}"
    return ""


def row_of(
    case: Case, plans: Mapping[str, Plan], measured: Mapping[str, Any], quotas: Sequence[float]
) -> dict[str, Any]:
    """One line of the table."""
    seconds = {kind: median(taken) for kind, taken in measured["seconds"].items()}
    return {
        "case": case.name,
        "even_s": seconds["even"],
        "proportional_s": seconds["proportional"],
        "plan_s": seconds["plan"],
        "predicted_s": plans["plan"].iteration_s,
        "ideal_speedup": case.ideal,
        "load": measured["load"],
        "predicted_even_s": plans["even"].iteration_s,
        "predicted_proportional_s": plans["proportional"].iteration_s,
        "ratios": list(plans["plan"].ratios),
        "quotas": list(quotas),
        "shares": measured["shares"],
        "profiles": measured["profiles"],
    }


SHOWN = ("case", "even_s", "proportional_s", "plan_s", "predicted_s", "ideal_speedup", "load")


def main(cases: Sequence[Case] = CASES, steps: int = STEPS) -> Path:
    """Run all cases; an empty list of rows, and the reason, where that is impossible."""
    if reason := testbed_machine.why_not(any(case.rate for case in cases)):
        print(f"testbed: skipped: {reason}")
        return write("testbed", [], skipped=reason)
    rows: list[dict[str, Any]] = []
    refused: list[str] = []
    for case in cases:
        row = run_case(case, steps)
        if row is None:
            refused.append(case.name)
            continue
        rows.append(row)
        table([{key: row[key] for key in SHOWN}], header=len(rows) == 1)
    if rows:
        markdown("testbed", [{key: row[key] for key in SHOWN} for row in rows])
    errors = [abs(row["predicted_s"] / row["plan_s"] - 1) for row in rows]
    return write("testbed", rows, refused=refused, MAPE=sum(errors) / len(errors) if errors else None)
