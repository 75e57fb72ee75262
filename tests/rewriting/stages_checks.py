"""Runs under mpiexec: `python stages_checks.py PLAN.json`. Stages on ranks against the step itself.

On three ranks each is a stage; of four, the first one is, and the others together.
"""

from __future__ import annotations

import json
import sys

import jax
import numpy as np
from mpi4py import MPI
from rewriting_cases import layered

from shardwright import Plan
from shardwright.backends.mpi.executable import MpiExecutable, abort_on_error

RATIOS = {
    3: [(0.4, 0.2, 0.4), (0.6, 0.0, 0.4), (0.0, 1.0, 0.0)],
    4: [(0.4, 0.2, 0.3, 0.1), (0.2, 0.4, 0.0, 0.4), (0.0, 0.2, 0.2, 0.6), (1.0, 0.0, 0.0, 0.0)],
}

if __name__ == "__main__":
    comm = MPI.COMM_WORLD
    with abort_on_error(comm):
        step, args = layered(scan=True, layers=5, width=128)
        plan = Plan.load(sys.argv[1])
        traced = plan.attach(step, *args)
        flat, checked = jax.tree.leaves(args), 0
        plain = jax.jit(step)
        wanted = [np.asarray(x) for x in jax.tree.leaves(plain(*args))]
        for ratios in RATIOS[comm.size]:
            run = MpiExecutable(traced, plan.program, ratios, comm)
            got = [np.asarray(x.gather()) for x in run(*flat)]
            for a, b in zip(got, wanted, strict=True):
                np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5)
            checked += 1
        # What a step returns is the next one's argument: two in a row, compared one by one, since the second
        # makes differences in its arguments hundreds of times as large.
        compiled = plan.compile(step, backend="mpi")
        params, *rest = args
        whole = params
        for _ in range(2):
            params, loss = compiled(params, *rest)
            wanted, whole = (
                plain(whole, *rest)[0],
                {name: np.asarray(p.gather()) for name, p in params.items()},
            )
            for name in whole:
                np.testing.assert_allclose(whole[name], wanted[name], rtol=2e-4, atol=5e-5)
        assert np.isfinite(float(loss))
        if not comm.rank:
            print(json.dumps({"checked": checked + 1}))
