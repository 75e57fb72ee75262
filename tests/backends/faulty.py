"""Runs under mpiexec: `python faulty.py FAULT`. Rank 1 does FAULT in the third step, or before the first."""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any

import jax
import numpy as np
from greedy import build
from mpi4py import MPI
from steps import starts

from shardwright.backends.mpi.executable import MpiExecutable, abort_on_error
from shardwright.backends.run_options import RunOptions
from shardwright.execute import CompiledStep
from shardwright.ir.trace import trace

comm = MPI.COMM_WORLD
fault = sys.argv[1]
mine = comm.rank == 1


def strike() -> None:
    if fault == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    if fault == "leaves":
        sys.exit(0)
    while fault == "hangs":
        time.sleep(0.1)
    if fault == "raises":
        raise ValueError("no more")


def main() -> None:
    args = np.ones(4, np.float32), np.ones((8, 4), np.float32)
    traced = trace(lambda w, x: w - 0.1 * x.sum(axis=0), *args)
    program = build(traced.graph, starts(traced.graph)["data"], None)
    options = RunOptions(timeout_s=1.5)
    if fault in ("no data", "no batch"):
        step = CompiledStep(lambda *args: traced, program, (0.5, 0.5), "mpi", options=options)
        if mine and fault == "no data":
            raise ValueError(fault)
        if not mine:
            step(*args)
        return
    run = MpiExecutable(traced, program, (0.5, 0.5), comm, options=options)
    flat: list[Any] = jax.tree.leaves(args)
    assert run.script is not None
    segment = next(i for i, name in enumerate(run.script.order.steps) if type(name).__name__ == "Segment")
    plain = run.script.steps[segment]

    def struck(env: Any) -> None:
        if mine and run.calls == 2 and fault != "leaves":
            strike()
        plain(env)

    run.script.steps[segment] = struck
    for number in range(5):
        if mine and number == 2 and fault == "leaves":
            strike()
        run(*flat)
    print("survived", flush=True)


if __name__ == "__main__":
    print(f"pid {os.getpid()}", flush=True)
    if fault == "raises":
        with abort_on_error():
            main()
    else:
        main()
