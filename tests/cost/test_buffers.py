"""Peaks of small steps against what XLA's CPU compiler lays out for the same ones."""

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from shardwright.cost.memory.buffers import layout
from shardwright.ir.trace import trace

shape = partial(jax.ShapeDtypeStruct, dtype="float32")
Step = tuple[Callable[..., Any], tuple[Any, ...]]
WIDTHS = (128, 256, 256, 64)


def said_over_xla(step: Callable[..., Any], args: tuple[Any, ...], *, donated: bool) -> float:
    """Peak bytes over what XLA needs: arguments, results beside them, and buffers."""
    traced = trace(step, *args)
    leaves, tree = jax.tree.flatten(args)
    state = range(len(jax.tree.leaves(args[: len(traced.state_names)])) if donated else 0)
    flat = jax.jit(lambda *x: step(*tree.unflatten(x)), donate_argnums=tuple(state), keep_unused=True)
    found = flat.lower(*leaves).compile().memory_analysis()
    fresh = found.output_size_in_bytes - found.alias_size_in_bytes
    actual = found.argument_size_in_bytes + fresh + found.temp_size_in_bytes
    graph = traced.graph if donated else replace(traced.graph, state={}, memo={})
    return layout(graph).peak_bytes / actual


def perceptron(params: Any, x: Any, y: Any) -> Any:
    for layer in params[:-1]:
        x = jax.nn.relu(x @ layer["w"] + layer["b"])
    return jnp.mean((x @ params[-1]["w"] + params[-1]["b"] - y) ** 2)


def layers(widths: tuple[int, ...] = WIDTHS) -> list[dict[str, Any]]:
    return [{"w": shape((a, b)), "b": shape((b,))} for a, b in pairwise(widths)]


def batch(rows: int, widths: tuple[int, ...] = WIDTHS) -> tuple[Any, Any]:
    return shape((rows, widths[0])), shape((rows, widths[-1]))


def descend(loss_of: Callable[..., Any]) -> Callable[..., Any]:
    def step(params: Any, *data: Any) -> Any:
        loss, gradients = jax.value_and_grad(loss_of)(params, *data)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), loss

    return step


def sgd(rows: int) -> Step:
    return descend(perceptron), (layers(), *batch(rows))


def momentum(rows: int) -> Step:
    def step(params: Any, trail: Any, *data: Any) -> Any:
        loss, gradients = jax.value_and_grad(perceptron)(params, *data)
        trail = jax.tree.map(lambda m, g: 0.9 * m + g, trail, gradients)
        return jax.tree.map(lambda p, m: p - 0.1 * m, params, trail), trail, loss

    return step, (layers(), layers(), *batch(rows))


def rnn() -> Step:
    def loss_of(params: Any, rows: Any, y: Any) -> Any:
        def cell(h: Any, x: Any) -> Any:
            h = jnp.tanh(x @ params["w"] + h @ params["u"] + params["b"])
            return h, h

        begin = jnp.zeros((rows.shape[1], params["u"].shape[0]))
        return jnp.mean((jax.lax.scan(cell, begin, rows)[1] @ params["o"] - y) ** 2)

    params = {"w": shape((32, 128)), "u": shape((128, 128)), "b": shape((128,)), "o": shape((128, 8))}
    return descend(loss_of), (params, shape((16, 64, 32)), shape((16, 64, 8)))


@pytest.mark.parametrize("step", [sgd(256), momentum(256), rnn()], ids=["sgd", "momentum", "rnn"])
def test_kernels_run_in_the_order_of_xla(step: Step) -> None:
    # By order of the trace these were .94, .90 and .85 of what XLA needs.
    assert said_over_xla(*step, donated=True) == pytest.approx(1, abs=0.005)


def sums(depth: int) -> Step:
    def loss_of(params: Any, x: Any, y: Any) -> Any:
        for w in params:
            x = jnp.tanh(x @ w)
        return jnp.sum((x - y) ** 2)

    return descend(loss_of), ([shape((128, 128))] * depth, shape((256, 128)), shape((256, 128)))


def graph_layers() -> Step:
    def loss_of(params: Any, edges: Any, x: Any, y: Any) -> Any:
        for w in params:
            x = jax.nn.relu(edges @ (x @ w))
        return jnp.mean((x - y) ** 2)

    return descend(loss_of), ([shape((64, 64))] * 3, shape((128, 128)), shape((128, 64)), shape((128, 64)))


def normed(x: Any, layer: Any) -> Any:
    mean = x.mean(-1, keepdims=True)
    variance = ((x - mean) ** 2).mean(-1, keepdims=True)
    return (x - mean) * jax.lax.rsqrt(variance + 1e-5) * layer["g"] + layer["b"]


def layer_norms() -> Step:
    def loss_of(params: Any, x: Any, y: Any) -> Any:
        for layer in params:
            x = x + jax.nn.gelu(normed(x, layer) @ layer["up"]) @ layer["down"]
        return jnp.mean((x - y) ** 2)

    layer = {"g": shape((64,)), "b": shape((64,)), "up": shape((64, 256)), "down": shape((256, 64))}
    return descend(loss_of), ([layer] * 3, shape((128, 64)), shape((128, 64)))


def attention() -> Step:
    def loss_of(params: Any, x: Any, y: Any) -> Any:
        for layer in params:
            parts = (jnp.reshape(x @ layer[name], (4, 32, 4, 16)).transpose(0, 2, 1, 3) for name in "qkv")
            q, k, v = parts
            found = jax.nn.softmax(q @ k.swapaxes(-1, -2) / 4) @ v
            x = normed(x + found.transpose(0, 2, 1, 3).reshape(x.shape) @ layer["o"], layer)
        return jnp.mean((x - y) ** 2)

    layer = {name: shape((64, 64)) for name in "qkvo"} | {"g": shape((64,)), "b": shape((64,))}
    return descend(loss_of), ([layer] * 2, shape((4, 32, 64)), shape((4, 32, 64)))


def messages() -> Step:
    """What is gathered along edges is scattered back into zeros that several scatters begin with."""

    def loss_of(params: Any, x: Any, here: Any, there: Any, y: Any) -> Any:
        for layer in params:
            found = jax.ops.segment_sum((x @ layer["m"])[here], there, num_segments=x.shape[0])
            x = jax.nn.relu(x @ layer["s"] + found)
        return jnp.mean((x - y) ** 2)

    params = [{"m": shape((64, 64)), "s": shape((64, 64))}] * 2
    edges = jax.ShapeDtypeStruct((1024,), "int32")
    return descend(loss_of), (params, shape((256, 64)), edges, edges, shape((256, 64)))


def factors() -> Step:
    """What is scattered has another shape than what it is computed of, and cannot lie over that."""

    def loss_of(params: Any, here: Any, there: Any, y: Any) -> Any:
        return jnp.mean((jnp.sum(params["u"][here] * params["v"][there], -1) - y) ** 2)

    params = {"u": shape((500, 32)), "v": shape((300, 32))}
    places = jax.ShapeDtypeStruct((512,), "int32")
    return descend(loss_of), (params, places, places, shape((512,)))


def convolutions(size: int, rows: int) -> Step:
    numbers = ("NHWC", "HWIO", "NHWC")

    def loss_of(params: Any, x: Any, y: Any) -> Any:
        for w in params:
            x = jax.nn.relu(jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=numbers))
        return jnp.mean((x - y) ** 2)

    images = shape((rows, size, size, 32))
    return descend(loss_of), ([shape((3, 3, 32, 32))] * 3, images, images)


def scaled() -> Step:
    """Sums of what is elementwise in the parameters, which run behind what is computed of the batch."""

    def step(params: Any, *data: Any) -> Any:
        loss, gradients = jax.value_and_grad(perceptron)(params, *data)

        def new(p: Any, g: Any) -> Any:
            q = p / jnp.sqrt(jnp.sum(p * p))
            return p - 0.1 * g * jnp.sqrt(jnp.sum(jnp.abs(q) * jnp.tanh(q)))

        return jax.tree.map(new, params, gradients), loss

    return step, (layers(), *batch(256))


@pytest.mark.parametrize("donated", [True, False], ids=["donated", "kept"])
@pytest.mark.parametrize(
    "step",
    [
        # Small buffers lie in places of results that are larger, copies of state in those of other state.
        sgd(16),
        # The sum is handed out, and a library fusion all the same.
        sums(4),
        # Products are transposed by computing them of swapped operands.
        graph_layers(),
        momentum(64),
        # A sum over one element is no sum.
        layer_norms(),
        # Zeros are copied for every scatter but the last.
        messages(),
        # The gradient of filters is transposed; so it cannot lie over anything.
        convolutions(8, 16),
        # Filters that are larger than the image are slid over.
        convolutions(2, 16),
        scaled(),
    ],
    ids=["small", "sums", "graph", "momentum", "norms", "messages", "filters", "large filters", "scaled"],
)
def test_places_are_those_of_xla(step: Step, donated: bool) -> None:
    assert said_over_xla(*step, donated=donated) == pytest.approx(1, abs=0.005)


@pytest.mark.parametrize("donated", [True, False], ids=["donated", "kept"])
def test_matrices_of_a_batch_are_read_either_way(donated: bool) -> None:
    # With another transpose for the gradient of each this was 1.09 and 1.06.
    assert said_over_xla(*attention(), donated=donated) == pytest.approx(1, abs=0.02)


def test_what_is_scattered_lies_over_nothing() -> None:
    """By XLA as users run it: without emitters of fusions (tests/conftest.py) it needs a buffer less."""
    code = "import test_buffers as t; print(t.said_over_xla(*t.factors(), donated=True))"
    flags = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}
    path = os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])
    command = [sys.executable, "-c", code]
    done = subprocess.run(
        command, env={**flags, "PYTHONPATH": path}, capture_output=True, text=True, check=True
    )
    # Over its operands this was .84.
    assert float(done.stdout) == pytest.approx(1, abs=0.01)
