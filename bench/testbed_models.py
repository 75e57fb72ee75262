"""Steps that the testbed trains: a tiny GPT, a perceptron, and two whose gradients dominate.

The layers of one of these are scanned, so that they may lie on different devices.

Batches of the first two are so large that exchanging gradients, which takes a slow rank as long whatever its
share, is a small part of the step: what the quotas promise is about computation.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from bench.record import EXAMPLES

GPT = {"batch": 256, "vocabulary": 512, "sequence": 32, "layers": 6, "d": 128, "heads": 4}
#: Batch, width and layers.
SCANNED = {"scanned": (1024, 1024, 16)}
PERCEPTRONS = {"perceptron": (8192, 512, 4), "layers": (2560, 1024, 6), "gradients": (96, 1536, 3)}


def perceptron(batch: int, width: int, layers: int) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """SGD on a perceptron of equal layers."""

    def loss(weights: list[jax.Array], x: jax.Array, y: jax.Array) -> jax.Array:
        for w in weights:
            x = jnp.tanh(x @ w)
        return jnp.mean((x - y) ** 2)

    def step(weights: list[jax.Array], x: jax.Array, y: jax.Array) -> tuple[list[jax.Array], jax.Array]:
        value, gradients = jax.value_and_grad(loss)(weights, x, y)
        return [w - 0.01 * g for w, g in zip(weights, gradients, strict=True)], value

    keys = jax.random.split(jax.random.key(0), layers + 2)
    weights = [jax.random.normal(k, (width, width)) / width**0.5 for k in keys[2:]]
    x, y = (jax.random.normal(k, (batch, width)) for k in keys[:2])
    return step, (weights, x, y)


def scanned(batch: int, width: int, layers: int) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The same with its layers stacked, and a `jax.lax.scan` over them."""

    def loss(weights: jax.Array, x: jax.Array, y: jax.Array) -> jax.Array:
        x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, weights)
        return jnp.mean((x - y) ** 2)

    def step(weights: jax.Array, x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
        value, gradients = jax.value_and_grad(loss)(weights, x, y)
        return weights - 0.01 * gradients, value

    keys = jax.random.split(jax.random.key(0), 3)
    x, y = (jax.random.normal(k, (batch, width)) for k in keys[:2])
    return step, (jax.random.normal(keys[2], (layers, width, width)) / width**0.5, x, y)


def step_of(model: str, part: float = 1.0) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """A training step and its arguments, by name.

    Args:
        model: its name; of a perceptron also "NAME@BATCH", in place of the batch that it has here.
        part: of the batch.
    """
    name, _, rows = model.partition("@")
    if name in SCANNED:
        batch, width, layers = SCANNED[name]
        return scanned(round(part * (int(rows) if rows else batch)), width, layers)
    if name in PERCEPTRONS:
        batch, width, layers = PERCEPTRONS[name]
        return perceptron(round(part * (int(rows) if rows else batch)), width, layers)
    assert model == "gpt", f"no model {model}"
    if str(EXAMPLES) not in sys.path:
        sys.path.insert(0, str(EXAMPLES))
    example = importlib.import_module("gpt2")
    sizes = GPT | {"batch": round(part * GPT["batch"])}
    return example.train_step, jax.jit(partial(example.arguments, **sizes))()
