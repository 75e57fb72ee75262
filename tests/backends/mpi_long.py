"""Runs under mpiexec: `python mpi_long.py FOUND.json`. 2,000 steps, twice; then with noise on one rank.

Rank 0 writes what was measured.
"""

from __future__ import annotations

import json
import resource
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
from greedy import build
from mpi4py import MPI
from steps import STEPS, starts

from shardwright.backends.mpi.executable import MpiExecutable, abort_on_error
from shardwright.backends.run_options import RunOptions
from shardwright.backends.world import ShardedArray
from shardwright.ir.graph import Graph
from shardwright.ir.placement import R
from shardwright.ir.program import Compute, Program
from shardwright.ir.rules import Signature
from shardwright.ir.trace import trace

STEPS_RUN, SETTLED, EVERY = 2000, 400, 100

comm = MPI.COMM_WORLD


def train(noisy: bool) -> dict[str, Any]:
    """Train for 2,000 steps; `noisy` adds a unit in the last place to one rank's state in each of them."""
    step, args = STEPS["mlp"]()
    traced = trace(step, *args)
    graph = traced.graph
    program = redundant(graph) if noisy else build(graph, starts(graph)["data"])
    ratios = tuple(2.0 * (comm.size - i) / (comm.size * (comm.size + 1)) for i in range(comm.size))
    options = RunOptions(bucket_bytes=1 << 12, donate=not noisy, resync_every=EVERY)
    run = MpiExecutable(traced, program, ratios, comm, options=options)
    flat: list[Any] = jax.tree.leaves(args)
    before: tuple[int, int, int] = (0, 0, 0)
    drift: list[float] = []
    results: list[ShardedArray] = []
    for number in range(1, STEPS_RUN + 1):
        results = run(*flat)
        for out, position in graph.state.items():
            flat[position] = results[out]
        if noisy:
            if number % EVERY in (0, EVERY - 1):  # after a comparison, and before the next one
                drift.append(apart(results, graph.state))
            if comm.rank == comm.size - 1:
                for out, position in graph.state.items():
                    held = results[out]
                    more = jax.numpy.asarray(np.nextafter(np.asarray(held.local), np.float32(9)))
                    flat[position] = ShardedArray(more, held.placement, held.tensor, held.world)
        if number == SETTLED:
            before = held_now(run)
    after = held_now(run)
    names = "resident_bytes", "arrays", "pool_bytes"
    return {
        "grown": {name: b - a for name, a, b in zip(names, before, after, strict=True)},
        "bits": [np.asarray(x.gather()).tobytes().hex() for x in results],
        "drift": drift,
        "resynced": run.resynced,
    }


def redundant(graph: Graph) -> Program:
    """Every rank computes everything."""
    whole = [
        Compute(e.index, Signature((R,) * len(e.inputs), (R,) * len(e.outputs))) for e in graph.equations
    ]
    return Program((R,) * len(graph.inputs), tuple(whole), (R,) * len(graph.outputs))


def held_now(run: MpiExecutable) -> tuple[int, int, int]:
    jax.block_until_ready(jax.live_arrays())
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return most, len(jax.live_arrays()), run.world.pool.nbytes


def apart(results: list[ShardedArray], state: Any) -> float:
    """Largest difference of replicated state to rank 0's, in units of the largest value's last place."""
    most = 0.0
    for out in state:
        parts = comm.allgather(np.asarray(results[out].local))
        unit = np.spacing(np.abs(parts[0]).max(initial=1.0))
        most = max(most, *(float(np.abs(part - parts[0]).max() / unit) for part in parts))
    return most


if __name__ == "__main__":
    with abort_on_error(comm):
        first, second, noisy = train(False), train(False), train(True)
        found = {
            "grown": comm.allgather(second["grown"]),
            "equal": comm.allgather(first["bits"] == second["bits"]),
            "alike": len(set(map(tuple, comm.allgather(first["bits"])))),
            "drift": noisy["drift"],
            "resynced": noisy["resynced"],
        }
        if comm.rank == 0:
            Path(sys.argv[1]).write_text(json.dumps(found))
