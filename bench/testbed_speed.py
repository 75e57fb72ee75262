"""What the ranks of the testbed reach within their quotas, as parts of what they reach without.

python -m bench.testbed_speed FOLDER

A rank that is stopped most of the time loses more than its quota takes: caches go cold, clocks go down. So
every rank takes steps of a small perceptron, for a while, all at once, as the plans will; without quota the
same steps are timed by processor time, whoever else is on the core.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import jax

from bench.testbed_models import perceptron
from shardwright.backends.mpi import abort_on_error
from shardwright.backends.mpi_link import mpi

PROBE_S = 2.5


def steps_per_s(step: Callable[[], object], clock: Callable[[], float], seconds: float) -> float:
    """Steps in a second of `clock`, over so many seconds of the wall's."""
    begin, since, steps = time.perf_counter(), clock(), 0
    while time.perf_counter() - begin < seconds:
        jax.block_until_ready(step())
        steps += 1
    return steps / (clock() - since)


def main(folder: Path) -> None:
    comm = mpi().COMM_WORLD
    with abort_on_error(comm):
        procs = json.loads((folder / "asked.json").read_text())["procs"]
        function, args = perceptron(batch=512, width=512, layers=3)
        compiled = jax.jit(function)

        def step() -> object:
            return compiled(*args)

        jax.block_until_ready(step())
        comm.Barrier()
        free = median(steps_per_s(step, time.process_time, PROBE_S / 3) for _ in range(3))
        Path(procs[comm.rank]).write_text(str(os.getpid()))
        comm.Barrier()
        steps_per_s(step, time.perf_counter, PROBE_S / 5)
        speeds = comm.allgather(steps_per_s(step, time.perf_counter, PROBE_S) / free)
        if comm.rank == 0:
            (folder / "speeds.json").write_text(json.dumps(speeds))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
