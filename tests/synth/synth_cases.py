"""Small steps, fleets and ratios that the tests of the planner share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st

from shardwright.cost.fleet import Fleet
from shardwright.cost.model import CostModel
from shardwright.ir.trace import Traced, trace
from shardwright.synth.space.space import Space

Step = Callable[..., Any]


def fleet(
    speeds: Sequence[float],
    *,
    bandwidth: str = "50 GB/s",
    latency: str = "1 us",
    launch: str = "0.1 us",
    memory: str = "4 GB",
    nodes: int = 1,
) -> Fleet:
    """Nodes of devices with these speeds, in units of 10 GFLOP/s and 10 GB/s of memory bandwidth."""
    devices = [
        {
            "type": {
                "name": f"speed-{speed:g}",
                "flops": f"{10 * speed} GFLOP/s",
                "memory_bandwidth": f"{10 * speed} GB/s",
                "memory": memory,
                "launch": launch,
            }
        }
        for speed in speeds
    ]
    link = {"bandwidth": bandwidth, "latency": latency}
    return Fleet.from_dict(
        {"name": "test", "nodes": [{"count": nodes, "devices": devices, "link": link}], "network": link}
    )


#: Fleets of two to five devices: fast links, slow links, two nodes.
FLEETS = {
    "two": lambda: fleet((4, 1)),
    "three": lambda: fleet((4, 2, 1)),
    "alike": lambda: fleet((2, 2, 2)),
    "slow-links": lambda: fleet((4, 2, 1), bandwidth="200 MB/s", latency="50 us"),
    "nodes": lambda: fleet((3, 1), nodes=2, bandwidth="5 GB/s"),
}


@cache
def model(name: str) -> CostModel:
    return CostModel(FLEETS[name]())


# ---------------------------------------------------------------------------------------------------
# Steps


def shape(*dims: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(dims, dtype)


def sgd(loss: Callable[..., Any]) -> Step:
    def step(params: Any, *args: Any) -> Any:
        value, gradients = jax.value_and_grad(loss)(params, *args)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), value

    return step


def mlp() -> tuple[Step, tuple[Any, ...]]:
    def loss(p: Any, x: Any, y: Any) -> Any:
        return ((jnp.tanh(x @ p["a"] + p["bias"]) @ p["b"] - y) ** 2).mean()

    params = {"a": shape(48, 64), "b": shape(64, 32), "bias": shape(64)}
    return sgd(loss), (params, shape(96, 48), shape(96, 32))


def attention() -> tuple[Step, tuple[Any, ...]]:
    def loss(p: Any, x: Any) -> Any:
        q, k, v = (jnp.einsum("bsd,dhk->bshk", x, w) for w in p["qkv"])
        weights = jax.nn.softmax(jnp.einsum("bqhk,bshk->bhqs", q, k))
        mixed = jnp.einsum("bhqs,bshk->bqhk", weights, v)
        return (jnp.einsum("bqhk,hkd->bqd", mixed, p["out"]) ** 2).mean()

    params = {"qkv": [shape(16, 4, 8)] * 3, "out": shape(4, 8, 16)}
    return sgd(loss), (params, shape(8, 12, 16))


def normed() -> tuple[Step, tuple[Any, ...]]:
    def norm(g: Any, x: Any) -> Any:
        centred = x - x.mean(axis=-1, keepdims=True)
        return g * centred * jax.lax.rsqrt((centred**2).mean(axis=-1, keepdims=True) + 1e-6)

    def loss(p: Any, x: Any) -> Any:
        x = x + jax.nn.gelu(norm(p["g"], x) @ p["up"]) @ p["down"]
        return jnp.abs(norm(p["h"], x)).sum()

    params = {"g": shape(24), "h": shape(24), "up": shape(24, 96), "down": shape(96, 24)}
    return sgd(loss), (params, shape(8, 6, 24))


def labelled() -> tuple[Step, tuple[Any, ...]]:
    def loss(p: Any, tokens: Any, labels: Any) -> Any:
        logits = jnp.tanh(p["table"][tokens]) @ p["table"].T
        picked = jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], axis=-1)
        return -picked.mean()

    return sgd(loss), ({"table": shape(60, 16)}, shape(12, 6, dtype=jnp.int32), shape(12, 6, dtype=jnp.int32))


def scanned() -> tuple[Step, tuple[Any, ...]]:
    def loss(p: Any, x: Any) -> Any:
        def layer(h: Any, w: Any) -> tuple[Any, Any]:
            h = jnp.tanh(h @ w)
            return h, h.sum()

        h, sums = jax.lax.scan(layer, x, p)
        return (h**2).mean() + 1e-3 * sums.sum()

    return sgd(loss), (shape(5, 32, 32), shape(24, 32))


def branched() -> tuple[Step, tuple[Any, ...]]:
    def step(x: Any, y: Any, flag: Any) -> Any:
        chosen = jax.lax.cond(flag > 0, lambda a, b: a @ b, lambda a, b: jnp.sin(a) @ b * 2.0, x, y)
        return chosen, chosen.max()

    return step, (shape(24, 16), shape(16, 20), shape(dtype=jnp.int32))


def looped() -> tuple[Step, tuple[Any, ...]]:
    def step(x: Any, y: Any) -> Any:
        def more(state: Any) -> Any:
            return (jnp.sum(state[1] ** 2) < 400.0) & (state[0] < 20)

        return jax.lax.while_loop(more, lambda s: (s[0] + 1, jnp.tanh(s[1] @ y)), (0, x))

    return step, (shape(24, 16), shape(16, 16))


STEPS: dict[str, Callable[[], tuple[Step, tuple[Any, ...]]]] = {
    "mlp": mlp,
    "attention": attention,
    "normed": normed,
    "labelled": labelled,
    "scanned": scanned,
    "branched": branched,
    "looped": looped,
}


@cache
def traced(name: str) -> Traced:
    step, args = STEPS[name]()
    return trace(step, *args)


@cache
def space(name: str) -> Space:
    return Space(traced(name).graph)


# ---------------------------------------------------------------------------------------------------
# Ratios


def normalised(weights: Sequence[float]) -> tuple[float, ...]:
    """Ratios in proportion to weights, of which one at least is positive."""
    total = float(np.sum(weights))
    return tuple(float(w) / total for w in weights)


def ratios(devices: int) -> st.SearchStrategy[tuple[float, ...]]:
    """Any ratios, devices without a share included."""
    weight = st.one_of(st.just(0.0), st.floats(0.01, 1.0))
    some = st.lists(weight, min_size=devices, max_size=devices).filter(any)
    return some.map(normalised)
