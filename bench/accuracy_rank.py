"""One rank of bench/accuracy: runs all plans in turns, keeps the rounds that nothing else disturbed.

python -m bench.accuracy_rank FOLDER
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import jax

from bench.accuracy_plans import step_of
from shardwright import Plan
from shardwright.backends.measuring.timing import QUIET, LoadGauge
from shardwright.backends.mpi.executable import MpiExecutable, abort_on_error
from shardwright.backends.mpi.moves import mpi
from shardwright.ir.trace import Traced

SAMPLE_S = 0.25


class Runner:
    """A plan that runs step after step, its state fed back."""

    def __init__(self, model: str, plan: Plan, comm: Any) -> None:
        step, args = step_of(model)
        traced: Traced = plan.attach(step, *args)
        self.run = MpiExecutable(traced, plan.program, plan.ratios, comm)
        self.state = traced.graph.state
        self.flat: list[Any] = list(jax.tree.leaves(args))
        self.comm = comm
        for _ in range(3):
            self.step()
        begin = time.perf_counter()
        self.step()
        own = max(1, round(SAMPLE_S / (time.perf_counter() - begin)))
        self.steps: int = min(comm.allgather(own))

    def step(self) -> None:
        """One step."""
        outputs = self.run(*self.flat)
        for out, position in self.state.items():
            self.flat[position] = outputs[out]
        jax.block_until_ready([output.local for output in outputs])

    def sample(self) -> float:
        """Seconds of a step, of the slowest rank."""
        self.run.world.wait([self.comm.Ibarrier()])
        begin = time.perf_counter()
        for _ in range(self.steps):
            self.step()
        return max(self.comm.allgather((time.perf_counter() - begin) / self.steps))

    def profile(self) -> dict[str, float]:
        """Seconds of a step by kind: segments of the slowest rank, and each strategy's exchanges."""
        spent: dict[str, float] = {}
        self.run.machine.spent = spent
        turns = 10
        for _ in range(turns):
            self.run.world.wait([self.comm.Ibarrier()])
            self.step()
        self.run.machine.spent = None
        everyone = self.comm.allgather(spent)
        return {name: max(mine.get(name, 0.0) for mine in everyone) / turns for name in spent}


def main(folder: Path) -> None:
    comm = mpi().COMM_WORLD
    with abort_on_error(comm):
        asked = json.loads((folder / "asked.json").read_text())
        runners = [Runner(c["model"], Plan.load(folder / c["file"]), comm) for c in asked["cases"]]
        gauge = LoadGauge(comm)
        records: list[list[tuple[float, float]]] = [[] for _ in runners]

        def sample(number: int) -> None:
            gauge.start()
            seconds = runners[number].sample()
            records[number].append((gauge.stop(), seconds))

        def missing() -> list[int]:
            quiet = [sum(load <= QUIET for load, _ in record) for record in records]
            return [number for number, good in enumerate(quiet) if good < asked["rounds"]]

        if comm.rank == 0:
            print(f"{len(runners)} plans compiled; sampling", flush=True)
        for _ in range(asked["rounds"]):
            for number in range(len(runners)):
                sample(number)
        deadline = time.monotonic() + asked["patience_s"]
        while comm.bcast(bool(missing()) and time.monotonic() < deadline):
            for number in missing():
                sample(number)
        profiles = [runner.profile() for runner in runners]
        if comm.rank == 0:
            kept = [sorted(record)[: asked["rounds"]] for record in records]
            found = [{"samples": k, "profile": p} for k, p in zip(kept, profiles, strict=True)]
            (folder / "measured.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
