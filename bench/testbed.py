"""A mixed fleet on one machine: the plan against data parallelism, even and proportional to speed.

    python -m bench testbed
    python -m bench.testbed CASE…

Ranks are pinned and capped to unlike speeds, links are shaped (`testbed_machine.py`). A core is calibrated
once (`testbed_fleet.py`). For every case it is measured what a step takes the ranks by themselves
(`testbed_speed.py`), the step is planned for ranks so fast, and plan, even and proportional data parallelism
run in turns. `predicted_s` is what was predicted before that. Such a machine is up to a fifth faster or
slower from one minute to the next: in every turn ranks take steps by themselves again, and
`predicted_after_s` is for ranks as fast as they then were, which tells errors of the model from those of the
minute. A rank that does not get its quota, because something else runs, ends the case without a row. Written
to bench/results/testbed.json, in place of the rows of the same cases; skipped, with the reason, where this is
not root.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from statistics import fmean, median
from typing import Any, TypeAlias

from bench import testbed_machine
from bench.record import RESULTS, ROOT, markdown, show, table, write
from bench.testbed_fleet import alone_s, fleet_of, measured_cores
from bench.testbed_models import PERCEPTRONS, step_of
from shardwright import Fleet, Plan, bucketed, synthesize
from shardwright.api import data_parallel
from shardwright.backends.launch import find_mpiexec, rank_environment

STEPS = 27
#: Steps in a row that are timed as one: ranks leave the barrier before them as their quotas let them.
ROW = 3
#: Part of a step that exchanges are in that case: its batch is chosen so. Exchanges can only hide behind the
#: backward pass, two thirds of what is computed, and not behind its first layer, whose gradients end it.
EXCHANGE_PART = 0.37
#: Of messages that overlap with computation.
BUCKET_BYTES = 4 << 20
#: A rank's part of a batch is a multiple of these.
ROWS = 16
#: Byte per second of the links, by their names; None: shared memory.
RATES = {"": None, "1gbit": 1.25e8}
#: How far a rank's share of its core may be from its quota.
TOLERANCE = 0.06
#: Shares that differ by less are those of one program: a rank computes as much longer or shorter, and
#: turns of one plan differ by several per cent.
SAME_SHARES = 1e-3


@dataclass(frozen=True)
class Case:
    """Ranks of these relative speeds train a model, over links of a rate or through shared memory.

    With links every rank is a node, unless `nodes` says how many ranks each has.
    """

    model: str
    speeds: tuple[float, ...]
    rate: str = ""
    nodes: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        texts = iter(f"{speed:.2g}" for speed in self.speeds)
        nodes = [":".join(islice(texts, ranks)) for ranks in self.nodes or (len(self.speeds),)]
        speeds = " + ".join(nodes)
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
OVERLAP = Case("layers", (1, 1), "1gbit")


Plans: TypeAlias = dict[str, Plan]


class Seats:
    """Ranks in their seats, for as long as the context lasts."""

    def __init__(self, case: Case, folder: Path, stack: ExitStack) -> None:
        cores = sorted(os.sched_getaffinity(0))
        self.quotas, seats = testbed_machine.share_out(case.speeds, cores)
        procs = stack.enter_context(testbed_machine.quotas(self.quotas))
        self.procs = [str(p) for p in procs]
        entries = [{"cores": [core]} for core in seats]
        self.file = folder / "seats.json"
        self.file.write_text(json.dumps(entries))
        ranks = len(case.speeds)
        self.mpiexec = [find_mpiexec(), "-n", str(ranks)]
        # One thread each, whatever the machine has: a rank has one core at most.
        self.environment = rank_environment(max(ranks, len(cores)))
        self.environment["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
        self.environment["JAX_PLATFORMS"] = "cpu"
        if case.rate:
            nodes = case.nodes or (1,) * ranks
            more, variables = stack.enter_context(testbed_machine.links(nodes, case.rate, folder))
            self.mpiexec[1:1] = more
            self.environment |= variables

    def run(self, *arguments: str) -> None:
        """Run `python arguments…` as ranks."""
        seat = [sys.executable, "-S", str(Path(__file__).with_name("testbed_seat.py")), str(self.file)]
        subprocess.run(
            [*self.mpiexec, *seat, sys.executable, *arguments], env=self.environment, check=True, cwd=ROOT
        )


def plans_of(case: Case, fleet: Fleet) -> Plans:
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
    # Exchanges of all of them travel in messages of the size predicted best, over links beside computation.
    return {kind: bucketed(plan) for kind, plan in found.items()}


def run_case(case: Case, cores: Fleet, steps: int = STEPS) -> dict[str, Any] | None:
    """A row; None where the quotas do not bind."""
    found = measured_plans(case, cores, partial(plans_of, case), steps)
    return None if found is None else row_of(case, *found)


def measured_plans(
    case: Case, cores: Fleet, make: Callable[[Fleet], Plans], steps: int, computing: Sequence[str] = ()
) -> tuple[Plans, dict[str, Any]] | None:
    """Plans for the ranks in their seats, and what these write down after they ran them in turns.

    None where the quotas do not bind. Of the plans named in `computing` ranks also measure in every turn what
    they compute.
    """
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        seats = Seats(case, folder, stack)
        parts = [quota / sum(seats.quotas) for quota in seats.quotas]
        asked: dict[str, Any] = {"model": case.model, "procs": seats.procs, "parts": parts}
        asked |= {"turns": max(1, steps // ROW), "row": ROW}
        (folder / "asked.json").write_text(json.dumps(asked))
        seats.run("-m", "bench.testbed_speed", str(folder))
        on_core_s = {part: alone_s(cores, *step_of(case.model, part)) for part in parts}

        def fleet(alone_s: Sequence[float]) -> Fleet:
            speeds = [on_core_s[part] / taken for part, taken in zip(parts, alone_s, strict=True)]
            return fleet_of(cores, seats.quotas, speeds, RATES[case.rate], case.nodes)

        before_s = json.loads((folder / "alone.json").read_text())
        plans = make(fleet(before_s))
        for kind, plan in plans.items():
            plan.save(folder / f"{kind}.json")
        asked |= {"plans": list(plans), "computing": list(computing)}
        (folder / "asked.json").write_text(json.dumps(asked))
        seats.run("-m", "bench.testbed_rank", str(folder))
        measured = json.loads((folder / "measured.json").read_text())
    if wrong := unbound(seats.quotas, measured["shares"]):
        print(f"{case.name}: {wrong}; nothing is reported")
        return None
    then = fleet([median(taken) for taken in measured["alone"]])
    after = {kind: predicted_s(replace(plan, fleet=then)) for kind, plan in plans.items()}
    return plans, measured | {"quotas": seats.quotas, "before_s": before_s, "after": after}


def predicted_s(plan: Plan) -> float:
    """Seconds of a step of a plan as it is run, with the messages that it has."""
    overlap = plan.bucket_bytes is not None and len(plan.part.nodes) > 1
    return plan.timeline(overlap=overlap, bucket_bytes=plan.bucket_bytes or 0).iteration_s


def balanced(case: Case, cores: Fleet) -> Case:
    """The case with the batch for which exchanges are predicted to be `EXCHANGE_PART` of a step here.

    Computation is in proportion to the batch: what the case's own takes the slowest rank is measured.
    """
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        seats = Seats(case, folder, stack)
        parts = [quota / sum(seats.quotas) for quota in seats.quotas]
        asked = {"model": case.model, "procs": seats.procs, "parts": parts}
        (folder / "asked.json").write_text(json.dumps(asked))
        seats.run("-m", "bench.testbed_speed", str(folder))
        alone_s = max(json.loads((folder / "alone.json").read_text()))
        fleet = fleet_of(cores, seats.quotas, seats.quotas, RATES[case.rate])
    even = replace(plans_of(case, fleet)["even"], bucket_bytes=None)
    wanted_s = even.timeline().exchange_s * (1 - EXCHANGE_PART) / EXCHANGE_PART
    batch = PERCEPTRONS[case.model][0] * wanted_s / alone_s
    ranks = len(case.speeds)
    return replace(case, model=f"{case.model}@{ROWS * ranks * max(1, round(batch / ROWS / ranks))}")


def overlap_row(case: Case, cores: Fleet, steps: int = STEPS) -> dict[str, Any] | None:
    """Even data parallelism, every exchange by itself and waited for, against buckets beside computation.

    What is exposed is what a step takes beyond what the slowest rank computes in it, which is measured in the
    same turns: from the beginning of a run to its end the machine changes by more than what is looked for.
    """

    sized = balanced(case, cores)

    def make(fleet: Fleet) -> Plans:
        even = replace(plans_of(sized, fleet)["even"], bucket_bytes=None)
        return {"blocking": even, "overlapping": replace(even, bucket_bytes=BUCKET_BYTES)}

    found = measured_plans(sized, cores, make, steps, ["blocking"])
    if found is None:
        return None
    plans, measured = found
    seconds = {kind: median(taken) for kind, taken in measured["seconds"].items()}
    compute_s = median(measured["computing"]["blocking"])
    exposed = {kind: seconds[kind] - compute_s for kind in plans}
    return {
        "case": case.name,
        "batch": int(sized.model.partition("@")[2]),
        "blocking_s": seconds["blocking"],
        "overlapping_s": seconds["overlapping"],
        "compute_s": compute_s,
        "exchange part": exposed["blocking"] / seconds["blocking"],
        "exposed part left": exposed["overlapping"] / exposed["blocking"],
        "load": measured["load"],
    }


def unbound(quotas: Sequence[float], got: Sequence[float]) -> str:
    """Which rank does not get its quota, "" if all do."""
    for rank, (quota, share) in enumerate(zip(quotas, got, strict=True)):
        if abs(share / quota - 1) > TOLERANCE:
            return f"rank {rank} spins at {share:.3f} of a core, its quota is {quota:.3f}"
    return ""


def one_program(one: Plan, other: Plan) -> bool:
    """Whether two plans are the same instructions and messages, by shares too near to tell apart."""
    apart = max(abs(a - b) for a, b in zip(one.ratios, other.ratios, strict=True))
    return (one.program, one.bucket_bytes) == (other.program, other.bucket_bytes) and apart <= SAME_SHARES


def row_of(case: Case, plans: Plans, measured: Mapping[str, Any]) -> dict[str, Any]:
    """One line of the table.

    Where the plan is proportional data parallelism, that is one program that ran twice as often: both have
    the median of all its turns.
    """
    taken = measured["seconds"]
    same = one_program(plans["plan"], plans["proportional"])
    if same:
        both = [*taken["plan"], *taken["proportional"]]
        taken = taken | {"plan": both, "proportional": both}
    seconds = {kind: median(some) for kind, some in taken.items()}
    return {
        "case": case.name,
        "even_s": seconds["even"],
        "proportional_s": seconds["proportional"],
        "plan_s": seconds["plan"],
        "predicted_s": predicted_s(plans["plan"]),
        "ideal_speedup": case.ideal,
        "load": measured["load"],
        "predicted_after_s": measured["after"]["plan"],
        "predicted_even_after_s": measured["after"]["even"],
        "predicted_proportional_after_s": measured["after"]["proportional"],
        "same_program": same,
        "ratios": list(plans["plan"].ratios),
        "quotas": measured["quotas"],
        "shares": measured["shares"],
        "alone_before_s": measured["before_s"],
        "alone_s": [median(taken) for taken in measured["alone"]],
        "profiles": measured["profiles"],
    }


SHOWN = (
    "case", "even_s", "proportional_s", "plan_s", "predicted_s", "predicted_after_s", "ideal_speedup", "load",
)  # fmt: skip


#: Mean absolute errors that are written, and of which predictions.
MAPES = (("MAPE", "predicted_s"), ("MAPE_after", "predicted_after_s"))


def main(cases: Sequence[Case] = (OVERLAP, *CASES), steps: int = STEPS) -> Path:
    """Run the cases; an empty list of rows, and the reason, where that is impossible."""
    if reason := testbed_machine.why_not(any(case.rate for case in cases)):
        print(f"testbed: skipped: {reason}")
        return write("testbed", [], skipped=reason)
    cores = measured_cores(RESULTS / "testbed_cores.yaml")
    known = RESULTS / "testbed.json"
    before: dict[str, Any] = {}
    if known.exists() and len(cases) <= len(CASES):
        before = json.loads(known.read_text())
    rows: dict[str, dict[str, Any]] = {row["case"]: row for row in before.get("rows", [])}
    overlap = before.get("overlap")
    for case in cases:
        if case == OVERLAP:
            overlap = overlap_row(case, cores)
            table([overlap or {}], header=True)
        elif row := run_case(case, cores, steps):
            rows[case.name] = row
            table([shown(row)], header=True)
        save([rows[known.name] for known in CASES if known.name in rows], overlap)
    return known


def save(rows: Sequence[Mapping[str, Any]], overlap: Mapping[str, Any] | None) -> None:
    """Write what there is so far."""
    if rows:
        markdown("testbed", [shown(row) for row in rows])
        show("testbed", "execution.md")
    if overlap:
        markdown("testbed_overlap", [overlap])
        show("testbed_overlap", "execution.md")
    found = {name: fmean(abs(row[key] / row["plan_s"] - 1) for row in rows) for name, key in MAPES if rows}
    if found:
        markdown("testbed_mape", [found])
        show("testbed_mape", "execution.md")
    print(found)
    write("testbed", rows, overlap=overlap, **found)


def shown(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row of the table: what is written, and what it says of the plan."""
    speed = row["even_s"] / row["plan_s"]
    return {key: row[key] for key in SHOWN} | {
        "over even": speed,
        "of the ideal": speed / row["ideal_speedup"],
        "over proportional": row["proportional_s"] / row["plan_s"],
    }


if __name__ == "__main__":
    every = {case.name: case for case in (OVERLAP, *CASES)}
    if unknown := [name for name in sys.argv[1:] if name not in every]:
        sys.exit(f"bench.testbed: no case {', '.join(unknown)}; there are {', '.join(every)}")
    main([every[name] for name in sys.argv[1:] or every])
