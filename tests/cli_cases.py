"""What the tests of the command line run: a file of steps, a fleet file, and the command itself."""

import os
import subprocess
import sys
from pathlib import Path

STEP = """
import jax, jax.numpy as jnp, numpy as np

def array(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)

def loss_of(params, x, y):
    hidden = jnp.tanh(x @ params["w1"] + params["b1"])
    return jnp.mean((hidden @ params["w2"] - y) ** 2)

def train_step(params, momentum, x, y):
    loss, gradients = jax.value_and_grad(loss_of)(params, x, y)
    momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, gradients)
    return jax.tree.map(lambda p, m: p - 0.01 * m, params, momentum), momentum, loss

def mlp():
    params = {"w1": array(8, 16), "b1": array(16, seed=1), "w2": array(16, 4, seed=2)}
    momentum = jax.tree.map(np.zeros_like, params)
    return train_step, (params, momentum, array(12, 8, seed=3), array(12, 4, seed=4))

def unknown():
    def step(x):
        return jax.lax.linalg.tridiagonal_solve(x[0], x[1] + 20, x[2], x @ x.T).sum()
    return step, (array(8, 8),)

def talkative():
    print("reading the data")
    def step(w, x):
        print("tracing")
        return w * 0.9, jnp.sum(x @ w) / 0.0
    return step, (np.zeros((8, 8), np.float32), array(12, 8))

def keyed():
    def step(w, x, key):
        key, use = jax.random.split(key)
        return w * 0.9, jnp.sum(x @ w * jax.random.bernoulli(use, 0.5)), key, x
    return step, (array(8, 8), array(12, 8), jax.random.key(0))
"""
FLEET = """
name: slow
nodes:
  - devices:
      - {type: {name: slow-3, flops: 3 MFLOP/s, memory_bandwidth: 6 MB/s, memory: 1 GB}}
      - {type: {name: slow-1, flops: 1 MFLOP/s, memory_bandwidth: 2 MB/s, memory: 1 GB}}
    link: {bandwidth: 400 GB/s, latency: 100 ns}
"""


def shell(
    cwd: Path, *arguments: str, seed: str = "0", timeout: float = 300
) -> "subprocess.CompletedProcess[str]":
    """The command in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "shardwright", *arguments],
        capture_output=True, text=True, check=False, cwd=cwd, timeout=timeout,
        env={**os.environ, "PYTHONHASHSEED": seed},
    )  # fmt: skip
