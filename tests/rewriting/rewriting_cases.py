"""What tests of changed steps share: a small step in layers, a fleet, and ways to run and to measure."""

from __future__ import annotations

import itertools
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shardwright import Fleet, Plan
from shardwright.backends.compile import Device, local_function
from shardwright.backends.layout import abstract
from shardwright.backends.reference import ReferenceExecutable
from shardwright.ir.graph import Literal
from shardwright.ir.segments import LoopStep, Schedule, Segment, schedule
from shardwright.ir.trace import Traced, trace


def fleet(memory: str = "1 GB", speeds: tuple[int, ...] = (3, 1), host: str = "") -> Fleet:
    types = [
        {"name": f"cpu-{s}", "flops": f"{s} GFLOP/s", "memory_bandwidth": f"{s} GB/s", "memory": memory}
        for s in speeds
    ]
    link = {"bandwidth": "1 GB/s", "latency": "10 us"}
    node: dict[str, Any] = {"devices": [{"type": t} for t in types], "link": link}
    if host:
        node["host_link"] = {"bandwidth": host, "latency": "10 us"}
    return Fleet.from_dict({"name": "two", "nodes": [node]})


def layered(
    scan: bool, layers: int = 3, width: int = 16, batch: int = 64, half: bool = False
) -> tuple[Any, tuple[Any, ...]]:
    """Residual layers whose activations are much larger than their weights, which may be rounded first."""

    def layer(x: Any, w: Any) -> Any:
        hidden = jnp.tanh(x @ w["up"])
        return x + jnp.sin(hidden * hidden) @ w["down"]

    def loss_of(params: Any, x: Any, y: Any) -> Any:
        if half:
            params = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)
        if scan:
            x, sums = jax.lax.scan(lambda x, w: (layer(x, w), x.sum()), x, params)
            return jnp.mean((x - y) ** 2) + 1e-3 * sums.sum()
        for w in params:
            x = layer(x, w)
        return jnp.mean((x - y) ** 2)

    def train_step(params: Any, x: Any, y: Any) -> Any:
        loss, gradients = jax.value_and_grad(loss_of)(params, x, y)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), loss

    rng = np.random.default_rng(0)

    def array(*sizes: int) -> Any:
        return (0.3 * rng.normal(size=sizes)).astype(np.float32)

    if scan:
        params: Any = {"up": array(layers, width, 2 * width), "down": array(layers, 2 * width, width)}
    else:
        params = [{"up": array(width, 2 * width), "down": array(2 * width, width)} for _ in range(layers)]
    return train_step, (params, array(batch, width), array(batch, width))


def perceptron(widths: list[int], rows: int) -> Traced:
    """Layers of tanh without biases, trained by gradient descent."""

    def step(weights: Any, x: Any) -> Any:
        def loss_of(weights: Any) -> Any:
            hidden = x
            for w in weights:
                hidden = jnp.tanh(hidden @ w)
            return jnp.mean(hidden**2)

        loss, gradients = jax.value_and_grad(loss_of)(weights)
        return [w - 0.1 * g for w, g in zip(weights, gradients, strict=True)], loss

    def shape(*sizes: int) -> Any:
        return jax.ShapeDtypeStruct(sizes, "float32")

    weights = [shape(a, b) for a, b in itertools.pairwise(widths)]
    return trace(step, weights, shape(rows, widths[0]))


def momentum() -> Traced:
    """A perceptron whose optimizer state is as large as its weights."""

    def step(weights: Any, moments: Any, x: Any) -> Any:
        def loss_of(weights: Any) -> Any:
            hidden = x
            for w in weights:
                hidden = jax.nn.gelu(hidden @ w)
            return jnp.mean(hidden**2)

        loss, gradients = jax.value_and_grad(loss_of)(weights)
        moments = [0.9 * m + g for m, g in zip(moments, gradients, strict=True)]
        return [w - 0.1 * m for w, m in zip(weights, moments, strict=True)], moments, loss

    def shape(*sizes: int) -> Any:
        return jax.ShapeDtypeStruct(sizes, "float32")

    weights = [shape(96, 40), shape(40, 96)]
    return trace(step, weights, weights, shape(64, 96))


@cache
def traced_layers(scan: bool) -> Traced:
    """`layered` as it is by default."""
    step, args = layered(scan)
    return trace(step, *args)


def on_reference(plan: Plan, args: tuple[Any, ...]) -> list[np.ndarray[Any, Any]]:
    assert plan.traced is not None
    run = ReferenceExecutable(plan.traced, plan.program, plan.used_ratios)
    return [np.asarray(x) for x in run(*jax.tree.leaves(args))]


def compiled_bytes(plan: Plan) -> int:
    """Peak of device 0 as XLA has it: what is held between its segments, their results and scratch."""
    assert plan.traced is not None
    device = Device(0, plan.used_ratios, plan.traced.primitives)
    return scheduled_bytes(schedule(plan.program, plan.traced.graph), device)


def scheduled_bytes(steps: Schedule, device: Device) -> int:
    def size(prop: Any) -> int:
        tensor = steps.types[prop.value]
        return int(np.prod(device.shape(tensor, prop.placement))) * tensor.nbytes // max(tensor.size, 1)

    held: dict[Any, int] = {}
    peak = 0
    for part in steps.steps:
        own = sum(map(size, part.gives))
        if isinstance(part, Segment):
            needs = part.needs
            avals = [
                abstract(steps.types[p.value], device.shape(steps.types[p.value], p.placement)) for p in needs
            ]
            function = jax.jit(local_function(part, steps.graph, device), keep_unused=True)
            own += function.lower(*avals).compile().memory_analysis().temp_size_in_bytes
        elif isinstance(part, LoopStep):
            own += max(scheduled_bytes(body, device) for body in part.bodies)
        peak = max(peak, sum(held.values()) + own)
        held |= {prop: size(prop) for prop in part.gives}
        for prop in part.drops:
            held.pop(prop, None)
    return peak


def evaluated(traced: Traced, flat: list[Any]) -> list[np.ndarray[Any, Any]]:
    """A graph, equation by equation."""
    env: dict[Any, Any] = dict(zip(traced.graph.inputs, flat, strict=True)) | dict(traced.graph.constants)

    def value(atom: Any) -> Any:
        return jnp.asarray(atom.value if isinstance(atom, Literal) else env[atom])

    for equation in traced.graph.equations:
        primitive = traced.primitives[equation.primitive]
        results = primitive.bind(*map(value, equation.inputs), **equation.params)
        env.update(zip(equation.outputs, results if primitive.multiple_results else [results], strict=True))
    return [np.asarray(value(atom)) for atom in traced.graph.outputs]
