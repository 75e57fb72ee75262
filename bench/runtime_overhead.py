"""What the runtime itself takes of a step: a program of 100 tiny instructions on one rank.

python -m bench.runtime_overhead FOUND.json ROUNDS

Fifty times a compiled function on 8 × 8 numbers and an exchange. XLA's own calls are part of what is
measured.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp

from shardwright.backends.mpi.executable import MpiExecutable, abort_on_error
from shardwright.backends.mpi.link import mpi
from shardwright.ir.placement import Partial, R
from shardwright.ir.program import Compute, Instruction, Move, Program
from shardwright.ir.rules import Signature
from shardwright.ir.trace import trace

#: Of which half are compiled functions, the others exchanges.
INSTRUCTIONS = 100
STEPS = 50

SUM = Partial("sum")


def step(x: jax.Array) -> jax.Array:
    """Two equations for each compiled function."""
    for _ in range(INSTRUCTIONS):
        x = -x
    return x


def program(equations: Any) -> Program:
    """Every other equation on a part of a sum, which is added up afterwards."""
    found: list[Instruction] = []
    for number, equation in enumerate(equations):
        (value,), (result,) = equation.inputs, equation.outputs
        if number % 2:
            found.append(Compute(number, Signature((R,), (R,))))
            continue
        found.append(Move("own", value.index, R, SUM))
        found.append(Compute(number, Signature((SUM,), (SUM,))))
        found.append(Move("all_reduce", result.index, SUM, R, "ring"))
    return Program((R,), tuple(found), (R,))


def main(path: Path, rounds: int) -> None:
    with abort_on_error(mpi().COMM_WORLD):
        x = jnp.ones((8, 8))
        traced = trace(step, x)
        run = MpiExecutable(traced, program(traced.graph.equations), (1.0,))
        run(x)
        taken: list[float] = []
        for _ in range(rounds):
            held = x
            begin = time.perf_counter()
            for _ in range(STEPS):
                (held,) = run(held)
            held.local.block_until_ready()
            taken.append((time.perf_counter() - begin) / STEPS)
        seconds = median(taken) / INSTRUCTIONS
        path.write_text(json.dumps({"instructions": INSTRUCTIONS, "per_instruction_s": seconds}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
