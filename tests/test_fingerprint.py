"""Fingerprints: of what a step computes, in every process alike."""

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from trace_cases import X, by_vjp

from shardwright.ir.trace import Traced, trace


def base(x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
    return x + 1, jnp.cumsum(y, axis=0)


OTHERS: dict[str, tuple[Callable[..., Any], Sequence[Any], Any]] = {
    "shape": (base, (X, X[:3]), None),
    "dtype": (base, (X, X.astype(jnp.bfloat16)), None),
    "state": (base, (X, X), {}),
    "parameter": (lambda x, y: (x + 1, jnp.cumsum(y, axis=1)), (X, X), None),
    "literal": (lambda x, y: (x + 2, jnp.cumsum(y, axis=0)), (X, X), None),
    "primitive": (lambda x, y: (x - 1, jnp.cumsum(y, axis=0)), (X, X), None),
    "order of outputs": (lambda x, y: base(x, y)[::-1], (X, X), None),
    "another operand": (lambda x, y: (y + 1, jnp.cumsum(y, axis=0)), (X, X), None),
    "another output": (lambda x, y: (*base(x, y), x), (X, X), None),
    "inside a region": (
        lambda x, y: (x + 1, jax.lax.scan(lambda c, r: (c + r, c), y[0], y)[1]),
        (X, X),
        None,
    ),
    "inside another region": (
        lambda x, y: (x + 1, jax.lax.scan(lambda c, r: (c - r, c), y[0], y)[1]),
        (X, X),
        None,
    ),
}


def test_fingerprints_tell_steps_apart() -> None:
    found = {
        name: trace(step, *args, state=state).fingerprint for name, (step, args, state) in OTHERS.items()
    }
    found["base"] = trace(base, X, X).fingerprint
    assert len(set(found.values())) == len(found), found


def test_fingerprints_look_through_names_and_calls() -> None:
    renamed = trace(jax.jit(lambda first, second: base(first, second)), X, X)
    assert renamed.fingerprint == trace(base, X, X).fingerprint


def everything(params: Any, x: jax.Array, key: jax.Array) -> tuple[Any, jax.Array]:
    """A bit of all that might print differently from run to run: callables, regions, keys, gathers."""

    def loss_of(params: Any) -> jax.Array:
        y = by_vjp(x @ params["w"]) + jax.nn.relu(x[:, jnp.array([2, 0, 1])] @ params["w"])
        y = y * jax.random.bernoulli(key, 0.5, y.shape) + params["b"]
        y = jax.lax.scan(lambda c, row: (jax.nn.gelu(c + row), c), y[0], y)[1]
        y = jax.pure_callback(np.sin, jax.ShapeDtypeStruct(y.shape, y.dtype), jax.lax.stop_gradient(y)) + y
        return jnp.sort(y, axis=0).mean() + jax.lax.cond(y.sum() > 0, jnp.sin, jnp.cos, y.sum())

    return jax.tree.map(lambda p, g: p - g, params, jax.grad(loss_of)(params)), loss_of(params)


def everything_traced() -> Traced:
    params = {name: np.ones((3, 3), np.float32) for name in ("w", "b")}
    params["b"] = np.ones(3, np.float32)
    return trace(everything, params, X, jax.random.key(0))


def test_fingerprints_are_the_same_in_every_process() -> None:
    code = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "import test_fingerprint; print(test_fingerprint.everything_traced().fingerprint)"
    )
    runs = [
        subprocess.Popen(
            [sys.executable, "-c", code], env={**os.environ, "PYTHONHASHSEED": seed}, stdout=subprocess.PIPE
        )
        for seed in ("1", "2")
    ]
    assert {run.communicate()[0].decode().strip() for run in runs} == {everything_traced().fingerprint}
