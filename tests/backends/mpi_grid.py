"""Runs under mpiexec: `python mpi_grid.py PLAN.json SUMMARY.json`, a rank per device of the nodes.

Every exchange across or within nodes, by every strategy, against its definition; then two steps of the plan
against one device.
"""

from __future__ import annotations

import functools
import itertools
import json
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
from mpi4py import MPI
from steps import STEPS

import shardwright
from shardwright.backends.layout import from_numpy
from shardwright.backends.mpi.executable import abort_on_error
from shardwright.backends.reference import collective
from shardwright.backends.schedule.table import builders
from shardwright.backends.world import World
from shardwright.ir.collectives import between
from shardwright.ir.graph import TensorType
from shardwright.ir.placement import Grid, Partial, Placement, R, Shard, grid, owns, region
from shardwright.ir.program import Move
from shardwright.ir.wiring import Seats, Wiring

comm = MPI.COMM_WORLD
NODES = {4: (1, 3), 5: (2, 3)}[comm.size]
RATIOS = {4: ((0.4, 0.3, 0.1, 0.2), (0.5, 0.0, 0.3, 0.2)), 5: ((0.25, 0.25, 0.0, 0.3, 0.2),)}[comm.size]
SINGLE = (R, Shard(0), Shard(1), Partial("sum"))


@functools.cache
def held(tensor: TensorType, placement: Placement, ratios: tuple[float, ...]) -> list[Any]:
    """What every device has of a tensor, a Partial being the owner's and a constant on the others."""
    whole = np.arange(np.prod(tensor.shape)).reshape(tensor.shape)
    found: list[Any] = []
    for device in range(comm.size):
        stretches = region(tensor.shape, placement, device, ratios)
        if owns(placement, device):
            part = whole[tuple(slice(first, first + n) for first, n in stretches)]
        else:
            part = np.full([n for _, n in stretches], device)
        found.append(from_numpy(part, tensor.dtype))  # compiles nothing
    return found


@functools.cache
def expected(
    kind: str, pre: Placement, post: Placement, tensor: TensorType, ratios: tuple[float, ...]
) -> np.ndarray:
    """What this rank has after an exchange, by its definition, whatever the strategy."""
    after = collective(Move(kind, 0, pre, post), tensor, held(tensor, pre, ratios), ratios)
    return np.asarray(after[comm.rank], np.float64)


def exchanges(tensor: TensorType) -> list[Move]:
    placements = list(dict.fromkeys(grid(a, b, NODES) for a, b in itertools.product(SINGLE, SINGLE)))
    found: list[Move] = []
    for pre, post in itertools.permutations(placements, 2):
        kind = between(pre, post)
        if kind is None or kind.local or not (isinstance(pre, Grid) or isinstance(post, Grid)):
            continue
        names = [name for name in kind.strategies if (kind.kind, name) in builders()]
        found += [Move(kind.kind, 0, pre, post, name) for name in names]
    return found


def main(plan_path: str, summary: Path) -> None:
    failures: list[str] = []
    checked = 0
    for ratios in RATIOS:
        seats = Seats(tuple(range(comm.size)), comm.size, Wiring(tuple(np.repeat((0, 1), NODES).tolist())))
        world = World(ratios, comm, seats=seats)
        world.join([None])
        for dtype in ("float32", "bfloat16", "int32"):
            tensor = TensorType((7, 6), dtype)
            for move in exchanges(tensor) if dtype == "float32" else exchanges(tensor)[::5]:
                before = held(tensor, move.pre, ratios)
                wanted = expected(move.kind, move.pre, move.post, tensor, ratios)
                got = np.asarray(world.move(move, tensor, before[comm.rank]), np.float64)
                checked += 1
                if got.shape != wanted.shape or not np.allclose(got, wanted, rtol=1e-2, atol=1e-5):
                    failures.append(f"rank {comm.rank}: {move} of {tensor} at {ratios}")
    plan = shardwright.Plan.load(plan_path)
    step, args = STEPS["mlp"]()
    kept = plan.attach(step, *args).graph.state
    run, plain = plan.compile(step, backend="mpi"), jax.jit(step)
    structure, flat, single = jax.tree.structure(args), jax.tree.leaves(args), jax.tree.leaves(args)
    for _ in range(2):
        results = jax.tree.leaves(run(*jax.tree.unflatten(structure, flat)))
        wanted = jax.tree.leaves(plain(*jax.tree.unflatten(structure, single)))
        for number, (got, one) in enumerate(zip(results, wanted, strict=True)):
            checked += 1
            if not np.allclose(np.asarray(got.gather()), one, rtol=1e-3, atol=1e-5):
                failures.append(f"rank {comm.rank}: output {number}")
        for out, into in kept.items():
            flat[into], single[into] = results[out], wanted[out]
    everybody = comm.gather((checked, failures))
    if everybody is not None:
        told = {"checked": sum(n for n, _ in everybody), "failures": [f for _, fs in everybody for f in fs]}
        summary.write_text(json.dumps(told))


if __name__ == "__main__":
    with abort_on_error(comm):
        main(sys.argv[1], Path(sys.argv[2]))
