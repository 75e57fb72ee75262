"""Between a program that is too large and one under rent that fits: as many equal layers pay as need be."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from shardwright import Fleet, Plan
from shardwright.api import synthesize_traced
from shardwright.ir.placement import Shard
from shardwright.ir.trace import Traced, trace

LAYERS, WIDTH = 8, 128


def _layers() -> Traced:
    """Equal layers with momentum, of which data parallelism is the best program by a little."""

    def loss_of(params: Any, x: jax.Array) -> jax.Array:
        for w in params:
            x = jnp.tanh(x @ w)
        return jnp.mean(x**2)

    def step(params: Any, momenta: Any, x: jax.Array) -> Any:
        loss, gradients = jax.value_and_grad(loss_of)(params, x)
        momenta = jax.tree.map(lambda m, g: 0.9 * m + g, momenta, gradients)
        return jax.tree.map(lambda p, m: p - 0.1 * m, params, momenta), momenta, loss

    params = [jnp.zeros((WIDTH, WIDTH)) for _ in range(LAYERS)]
    return trace(step, params, params, jnp.zeros((64, WIDTH)))


def _fleet(nbytes: int) -> Fleet:
    kind = {"name": "z", "flops": "1 TFLOP/s", "memory_bandwidth": "100 GB/s", "memory": f"{nbytes} B"}
    link = {"bandwidth": "10 GB/s", "latency": "5 us"}
    node = {"devices": {"type": kind | {"launch": "1 us"}, "count": 4}, "link": link}
    return Fleet.from_dict({"name": "four", "nodes": [node]})


def _cut(plan: Plan) -> int:
    """Of how many arguments devices hold stretches."""
    return sum(isinstance(placement, Shard) for placement in plan.program.inputs)


def test_less_memory_makes_a_plan_of_equal_layers_dearer_by_degrees() -> None:
    traced = _layers()

    def planned(nbytes: int) -> Plan:
        return synthesize_traced(traced, fleet=_fleet(nbytes), axes=1, recompute="off", microbatches=1)

    roomy = planned(10**9)
    most = max(roomy.memory_bytes)
    parts = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
    plans = [planned(int(part * most)) for part in parts]
    assert all(plan.fits for plan in plans)
    assert all(more.cost_s <= less.cost_s * (1 + 1e-9) for less, more in pairwise(plans))
    assert plans[-1].cost_s == pytest.approx(roomy.cost_s) and _cut(roomy) == 0
    for part, plan in zip(parts[:-1], plans[:-1], strict=True):
        # No layer is cut for nothing: what is not needed for other layers is used.
        assert plan.cost_s > roomy.cost_s and 0 < _cut(plan) < 2 * LAYERS
        assert max(plan.memory_bytes) > 0.8 * part * most
