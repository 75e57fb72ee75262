"""One rank of bench/testbed: compiles, takes its quota and checks it, then runs the plans in turns.

python -m bench.testbed_rank FOLDER
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import jax

from bench.testbed_models import step_of
from bench.testbed_speed import Alone
from shardwright import Plan
from shardwright.backends.measuring.timing import LoadGauge
from shardwright.backends.mpi.executable import MpiExecutable, abort_on_error
from shardwright.backends.mpi.link import mpi
from shardwright.backends.run_options import RunOptions

SPIN_S = 2.0


def spin() -> float:
    """Part of a core that this rank gets while all ranks want one."""
    begin, used = time.perf_counter(), time.process_time()
    while time.perf_counter() - begin < SPIN_S:
        pass
    return (time.process_time() - used) / (time.perf_counter() - begin)


class Runner:
    """A plan that runs step after step, its state fed back."""

    def __init__(self, model: str, plan: Plan, comm: Any) -> None:
        step, args = step_of(model)
        traced = plan.attach(step, *args)
        options = RunOptions(bucket_bytes=plan.bucket_bytes, donate=True)
        known = traced, plan.program, plan.used_ratios, comm
        self.run = MpiExecutable(*known, seats=plan.seats, poll=True, options=options)
        self.state = traced.graph.state
        self.flat: list[Any] = list(jax.tree.leaves(args))
        self.comm = comm

    def step(self) -> None:
        """One step, to its end."""
        outputs = self.run(*self.flat)
        for out, position in self.state.items():
            self.flat[position] = outputs[out]
        jax.block_until_ready([output.local for output in outputs if output.local is not None])

    def meet(self) -> None:
        """Wait for all ranks."""
        self.run.world.wait([self.comm.Ibarrier()])

    def timed(self, steps: int) -> float:
        """Seconds of a step, over so many, of the slowest rank."""
        self.meet()
        begin = time.perf_counter()
        for _ in range(steps):
            self.step()
        return max(self.comm.allgather((time.perf_counter() - begin) / steps))

    def profile(self, steps: int) -> dict[str, float]:
        """Seconds of a step that this rank spends by kind, nothing overlapping."""
        self.run.machine.spent = spent = {}
        for _ in range(steps):
            self.step()
        self.run.machine.spent = None
        return {name: seconds / steps for name, seconds in spent.items()}


def main(folder: Path) -> None:
    comm = mpi().COMM_WORLD
    with abort_on_error(comm):
        asked = json.loads((folder / "asked.json").read_text())
        runners = {
            name: Runner(asked["model"], Plan.load(folder / f"{name}.json"), comm) for name in asked["plans"]
        }
        alone = Alone(asked["model"], asked["parts"][comm.rank])
        for runner in runners.values():
            runner.step()
        # Compiled at full speed; from here on the quota holds, for all of the process's threads.
        Path(asked["procs"][comm.rank]).write_text(str(os.getpid()))
        comm.Barrier()
        got = comm.allgather(spin())
        for runner in runners.values():
            for _ in range(3):
                runner.step()
        gauge = LoadGauge(comm)
        gauge.start()
        seconds: dict[str, list[float]] = {name: [] for name in runners}
        by_itself: list[float] = []
        # Seconds of a step that the slowest rank computes, where that is asked of some plans, by turn.
        computing: dict[str, list[float]] = {name: [] for name in asked.get("computing", ())}
        for turn in range(asked["turns"]):
            names = list(runners)
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                seconds[name].append(runners[name].timed(asked["row"]))
            for name, taken in computing.items():
                runners[name].meet()
                taken.append(max(comm.allgather(runners[name].profile(asked["row"])["segments"])))
            next(iter(runners.values())).meet()
            by_itself += [alone.timed() for _ in range(asked["row"])]
        load = gauge.stop()
        profiles = {name: comm.allgather(runner.profile(3)) for name, runner in runners.items()}
        alone_s = comm.allgather(by_itself)
        if comm.rank == 0:
            found = {"shares": got, "seconds": seconds, "load": load, "profiles": profiles, "alone": alone_s}
            found |= {"computing": computing}
            (folder / "measured.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
