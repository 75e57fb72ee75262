"""Weak types: a plan is for the types of its arguments, weak ones included, and results keep theirs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from weak_checks import fleet

import shardwright
from shardwright.backends.launch import rank_command, rank_environment

SCRIPT = str(Path(__file__).parent / "weak_checks.py")


@pytest.mark.parametrize("backend", ["reference", "spmd", "mpi"])
def test_types_are_those_of_jit(backend: str, tmp_path: Path) -> None:
    command, environment = [sys.executable, SCRIPT, backend, str(tmp_path)], dict(os.environ)
    if backend == "mpi":
        command, environment = rank_command(2, [SCRIPT, backend, str(tmp_path)]), rank_environment(2)
    if backend == "spmd":
        environment["XLA_FLAGS"] += " --xla_force_host_platform_device_count=2"
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


RATES = {"weak": jnp.asarray(0.1), "number": 0.1, "strong": jnp.float32(0.1), "numpy": np.float64(0.1)}


@pytest.mark.parametrize("order", [list(RATES), list(RATES)[::-1]], ids=["weak first", "strong first"])
def test_a_plan_is_not_taken_for_other_weak_types(order: list[str], tmp_path: Path) -> None:
    def step(w: jax.Array, rate: jax.Array) -> tuple[jax.Array, jax.Array]:
        return w - rate * w, rate

    w, single = jnp.ones((8, 8), "bfloat16"), jax.jit(step)
    for _ in range(2):  # the second time from the cache
        ours = shardwright.parallelize(step, fleet=fleet(50, 20), backend="reference", cache=tmp_path)
        for name in order:
            for got, wanted in zip(ours(w, RATES[name]), single(w, RATES[name]), strict=True):
                assert (got.dtype, got.weak_type) == (wanted.dtype, wanted.weak_type), name


def test_what_is_restored_is_typed_as_it_is_wanted(tmp_path: Path) -> None:
    shardwright.save(tmp_path / "1", {"rate": 0.1, "count": jnp.int32(3)})
    for like in (0.0, jnp.asarray(0.0), jax.ShapeDtypeStruct((), "float32", weak_type=True)):
        assert shardwright.restore(tmp_path / "1", {"rate": like, "count": 0})["rate"].weak_type
    for like in (np.float64(0), jnp.float32(0), jax.ShapeDtypeStruct((), "float32")):
        assert not shardwright.restore(tmp_path / "1", {"rate": like, "count": 0})["rate"].weak_type


def test_scanned_layers_leave_results_their_types() -> None:
    def step(layers: list[jax.Array], rate: jax.Array, x: jax.Array) -> tuple[Any, ...]:
        def loss_of(layers: list[jax.Array]) -> jax.Array:
            hidden = x
            for w in layers:
                hidden = jnp.tanh(hidden @ w)
            return jnp.mean(hidden**2)

        loss, gradients = jax.value_and_grad(loss_of)(layers)
        layers = [w - rate * g for w, g in zip(layers, gradients, strict=True)]
        return layers, rate * 0.5, {"loss": loss, "count": 3, "rate": rate * 2}

    layers, x = [jnp.full((8, 8), 0.1 * k, "bfloat16") for k in range(1, 6)], jnp.ones((12, 8), "bfloat16")
    single = jax.jit(step)
    for rate in (0.1, jnp.float32(0.1)):
        ours = shardwright.parallelize(
            step, fleet=fleet(50, 20), backend="reference", cache=False, scan_layers=True
        )
        got = wanted = (layers, rate)
        for _ in range(2):
            got, wanted = ours(*got[:2], x), single(*wanted[:2], x)
            types = [[(a.dtype, a.weak_type) for a in jax.tree.leaves(tree)] for tree in (got, wanted)]
            assert types[0] == types[1]
