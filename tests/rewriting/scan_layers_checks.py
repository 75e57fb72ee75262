"""Runs under mpiexec: `python scan_layers_checks.py FOLDER`. A loop whose state stays in stacks on ranks."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from layered_steps import residual, step_of
from mpi4py import MPI
from stages_cases import apart

import shardwright
from shardwright import InputError
from shardwright.backends.mpi.executable import abort_on_error
from shardwright.layer_leaf import LayerLeaf

LAYERS = 5


def close(found: Any, wanted: Any) -> None:
    """Trees of one structure, but for rounding."""
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for own, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(own, other, rtol=1e-4, atol=1e-5)


def score(params: Any, x: jax.Array) -> jax.Array:
    """Of another layer than those that the optimizer updates at once."""
    return jnp.sum(residual(x, params["blocks"][2], 0))


if __name__ == "__main__":
    comm = MPI.COMM_WORLD
    with abort_on_error(comm):
        step, (params, opt_state, x, y) = step_of(optimizer=optax.adam(1e-2), layers=LAYERS)
        fleet = apart((3, 2))
        train = shardwright.parallelize(
            step, fleet=fleet, scan_layers=True, stages=2, devices="all", cache=False
        )
        evaluate = shardwright.parallelize(score, fleet=fleet, cache=False, state={})
        state, wanted = (params, opt_state), (params, opt_state)
        plain = jax.jit(step)
        for _ in range(3):
            *state, loss = train(*state, x, y)
            *wanted, expected = plain(*wanted, x, y)
            np.testing.assert_allclose(loss, expected, rtol=1e-4)
        plan = train.plan(*state, x, y)
        assert plan.rewriting.stages == 2
        leaves = state[0]["blocks"]
        assert all(isinstance(leaf, LayerLeaf) for leaf in jax.tree.leaves(leaves))
        # Each rank has whole layers, and together they have all of them.
        held = [block["up"].local is not None for block in leaves]
        assert sum(comm.allgather(sum(held))) == LAYERS and 0 < sum(held) < LAYERS
        assert all(
            (block["up"].held_by(comm.rank) is not None) == mine
            for block, mine in zip(leaves, held, strict=True)
        )
        close(shardwright.gather(state), list(wanted))
        np.testing.assert_allclose(evaluate(state[0], x), score(wanted[0], x), rtol=1e-4)
        # What is saved by those who have it is read by anybody.
        shardwright.save(Path(sys.argv[1]) / "3", state)
        restored = shardwright.restore(Path(sys.argv[1]) / "3", state)
        for own, other in zip(
            jax.tree.leaves(restored), jax.tree.leaves(shardwright.gather(state)), strict=True
        ):
            np.testing.assert_array_equal(own, other)
        *state, loss = train(*restored, x, y)
        *wanted, expected = plain(*wanted, x, y)
        np.testing.assert_allclose(loss, expected, rtol=1e-4)
        assert train.plan(*state, x, y) is train.plan(*restored, x, y)
        # A stack that was donated is gone for all layers.
        donating = shardwright.parallelize(
            step, fleet=fleet, scan_layers=True, devices="all", cache=False, donate_argnums=(0, 1)
        )
        first = donating(*state, x, y)
        second = donating(*first[:2], x, y)
        gone = 0
        try:
            first[0]["blocks"][0]["up"].gather()
        except InputError as error:
            gone = int("took its memory" in error.reason)
        try:
            shardwright.save(Path(sys.argv[1]) / "4", first[0]["blocks"])
        except InputError as error:
            gone += int("took its memory" in error.reason)
        *wanted, _ = plain(*wanted, x, y)
        *wanted, _ = plain(*wanted, x, y)
        close(shardwright.gather(list(second[:2])), list(wanted))
        gone = comm.allreduce(gone)
        if not comm.rank:
            print(json.dumps({"ranks": comm.size, "gone": gone}))
