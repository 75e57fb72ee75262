"""Runs under mpiexec: `python mpi_part.py PLAN.json`. A plan that leaves devices out, in a user's loop."""

from __future__ import annotations

import sys

import jax
import numpy as np
import pytest
from mpi4py import MPI
from steps import STEPS

from shardwright import Plan
from shardwright.backends.mpi.executable import abort_on_error
from shardwright.ir.errors import PlanError

comm = MPI.COMM_WORLD


def main(path: str) -> None:
    step, args = STEPS["mlp"]()
    plan = Plan.load(path)
    state = plan.attach(step, *args).graph.state
    used = len(plan.used) == comm.size or comm.rank in plan.used
    run, jitted = plan.compile(step, backend="mpi"), jax.jit(step)
    flat, single = jax.tree.leaves(args), jax.tree.leaves(args)
    structure = jax.tree.structure(args)
    for _ in range(3):
        outputs = jax.tree.leaves(run(*jax.tree.unflatten(structure, flat)))
        wanted = jax.tree.leaves(jitted(*jax.tree.unflatten(structure, single)))
        for i, (got, expected) in enumerate(zip(outputs, wanted, strict=True)):
            assert got.shape == expected.shape and got.dtype == expected.dtype
            np.testing.assert_allclose(got.gather(), expected, rtol=1e-5, atol=1e-6)
            if got.shape == ():
                assert float(got) == float(got.gather())
            elif not used:
                assert got.local is None and "local none" in repr(got), i
                with pytest.raises(PlanError, match=r"gather\(\)"):
                    np.asarray(got)
        for out, position in state.items():
            flat[position], single[position] = outputs[out], wanted[out]
    assert len(set(comm.allgather(used))) == (1 if len(plan.used) == comm.size else 2)


if __name__ == "__main__":
    with abort_on_error():
        main(sys.argv[1])
