"""Steps and fleets on which baselines are looked at."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from shardwright import Fleet

Made = tuple[Callable[..., Any], tuple[Any, ...]]


def draw(*shape: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def trained(loss_of: Callable[..., Any]) -> Callable[..., Any]:
    """Forward, backward and momentum."""

    def step(params: Any, momentum: Any, *batch: Any) -> Any:
        loss, gradients = jax.value_and_grad(loss_of)(params, *batch)
        momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, gradients)
        return jax.tree.map(lambda p, m: p - 0.01 * m, params, momentum), momentum, loss

    return step


def arguments(params: Any, *batch: Any) -> tuple[Any, ...]:
    return params, jax.tree.map(np.zeros_like, params), *batch


def mlp() -> Made:
    def loss_of(p: Any, x: Any, y: Any) -> Any:
        return jnp.mean((jnp.tanh(x @ p["in"] + p["bias"]) @ p["out"] - y) ** 2)

    params = {"in": draw(8, 32), "bias": draw(32), "out": draw(32, 4)}
    return trained(loss_of), arguments(params, draw(12, 8, seed=1), draw(12, 4, seed=2))


def layers() -> Made:
    """Stacked layers in a scan, and a mask that is drawn for the batch."""

    def loss_of(p: Any, x: Any) -> Any:
        def layer(h: Any, w: Any) -> tuple[Any, None]:
            return h + jnp.tanh(h @ w["up"]) @ w["down"], None

        kept = jax.random.bernoulli(jax.random.key(0), 0.5, x.shape)
        h, _ = lax.scan(layer, jnp.where(kept, x, 0.0), p)
        return jnp.mean(h**2)

    params = {"up": 0.3 * draw(3, 8, 16), "down": 0.3 * draw(3, 16, 8, seed=1)}
    return trained(loss_of), arguments(params, draw(12, 8, seed=2))


def mixture() -> Made:
    """Every group of tokens goes to all experts, weighted by a router."""

    def loss_of(p: Any, x: Any) -> Any:
        gates = jax.nn.softmax(x @ p["router"])
        sent = jnp.einsum("gse,gsd->egsd", gates, x)
        hidden = jnp.tanh(jnp.einsum("egsd,edf->egsf", sent, p["up"]) + p["bias"][:, None, None])
        back = jnp.einsum("egsf,efd->egsd", hidden, p["down"])
        return jnp.mean(jnp.einsum("gse,egsd->gsd", gates, back) ** 2)

    params = {"router": draw(8, 6), "up": draw(6, 8, 16), "bias": draw(6, 16), "down": draw(6, 16, 8)}
    return trained(loss_of), arguments(params, draw(12, 4, 8, seed=1))


STEPS: dict[str, Callable[[], Made]] = {"mlp": mlp, "layers": layers, "mixture": mixture}


def slow(*mflops: float, nodes: int = 1, network: str = "1 GB/s", memory: str = "1 GB") -> Fleet:
    """Nodes of devices so slow, on links so fast, that even tiny tensors are worth cutting."""
    devices = [
        {
            "type": {
                "name": f"slow-{speed:g}",
                "flops": f"{speed} MFLOP/s",
                "memory_bandwidth": f"{2 * speed} MB/s",
                "memory": memory,
            }
        }
        for speed in mflops
    ]
    node: dict[str, Any] = {"count": nodes, "devices": devices}
    if len(mflops) > 1:
        node["link"] = {"bandwidth": "400 GB/s", "latency": "100 ns"}
    data: dict[str, Any] = {"name": "slow", "nodes": [node]}
    if nodes > 1:
        data["network"] = {"bandwidth": network, "latency": "1 us"}
    return Fleet.from_dict(data)
