"""What a step takes the ranks of the testbed within their quotas, each by itself.

python -m bench.testbed_speed FOLDER

A rank that is stopped most of the time loses more than its quota takes: caches go cold, clocks go down. And
kernels of one model are predicted better than those of another. So every rank takes steps of the model, with
its quota's part of the batch and no exchange, for a while, all at once, as the plans will.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import jax

from bench.testbed_models import step_of
from shardwright.backends.mpi.executable import abort_on_error
from shardwright.backends.mpi.link import mpi

#: For so long, and not fewer steps than that.
PROBE_S = 3.0
LEAST = 5


class Alone:
    """Steps of a model that a rank takes by itself, with its part of the batch; compiled."""

    def __init__(self, model: str, part: float) -> None:
        function, self.args = step_of(model, part)
        self.run: Any = jax.jit(function)
        jax.block_until_ready(self.run(*self.args))

    def timed(self) -> float:
        """Seconds of a step."""
        begin = time.perf_counter()
        jax.block_until_ready(self.run(*self.args))
        return time.perf_counter() - begin


def main(folder: Path) -> None:
    comm = mpi().COMM_WORLD
    with abort_on_error(comm):
        asked = json.loads((folder / "asked.json").read_text())
        alone = Alone(asked["model"], asked["parts"][comm.rank])
        comm.Barrier()
        Path(asked["procs"][comm.rank]).write_text(str(os.getpid()))
        comm.Barrier()
        alone.timed()
        taken: list[float] = []
        begin = time.perf_counter()
        while len(taken) < LEAST or time.perf_counter() - begin < PROBE_S:
            taken.append(alone.timed())
        everyone = comm.allgather(median(taken))
        if comm.rank == 0:
            (folder / "alone.json").write_text(json.dumps(everyone))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
