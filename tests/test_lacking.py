"""Where nothing fits, a plan says what it lacks by the memory that its program takes as it will run."""

from __future__ import annotations

import re
from functools import cache
from typing import Any, Literal

import jax
import jax.numpy as jnp
import pytest

from shardwright import Fleet, Plan, synthesize

WIDTH, HIDDEN, LAYERS = 32, 64, 12


def step(params: Any, momenta: Any, x: Any) -> Any:
    """Of more than 300 equations: steps of fewer are planned in every way there is."""

    def loss_of(params: Any) -> Any:
        h = x
        for layer in params:
            z = (h - h.mean(-1, keepdims=True)) * layer["g"]
            h = h + jax.nn.gelu(z @ layer["a"] + layer["c"]) @ layer["b"]
        return jnp.mean(h**2)

    loss, gradients = jax.value_and_grad(loss_of)(params)
    momenta = jax.tree.map(lambda m, g: 0.9 * m + g, momenta, gradients)
    return jax.tree.map(lambda p, m: p - 0.1 * m, params, momenta), momenta, loss


def shape(*sizes: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, "float32")


@cache
def planned(memory: str, axes: Literal[1, 2, "auto"]) -> Plan:
    layer = {"a": shape(WIDTH, HIDDEN), "b": shape(HIDDEN, WIDTH), "c": shape(HIDDEN), "g": shape(WIDTH)}
    rates = {"flops": "200 MFLOP/s", "memory_bandwidth": "200 MB/s", "memory": memory}
    link = {"bandwidth": "400 MB/s", "latency": "1 us"}
    node = {"count": 2, "devices": {"type": {"name": "c", **rates}, "count": 2}, "link": link}
    network = {"bandwidth": "6 MB/s", "latency": "20 us"}
    fleet = Fleet.from_dict({"name": "small", "nodes": [node], "network": network})
    return synthesize(step, [layer] * LAYERS, [layer] * LAYERS, shape(64, WIDTH), fleet=fleet, axes=axes)


@pytest.mark.parametrize("axes", [1, 2, "auto"])
def test_what_is_lacking_is_what_the_program_takes(axes: Literal[1, 2, "auto"]) -> None:
    plan = planned("180 KiB", axes)
    assert plan.stats.equations > 300
    assert not plan.fits
    (said,) = [note for note in plan.assumptions if "lacks least" in note]
    needed = re.search(r"needs ([\d.]+) KiB on n\d.d\d .*; with ([\d.]+) times", said)
    assert needed is not None
    assert float(needed[1]) == pytest.approx(max(plan.memory_bytes) / 1024, rel=0.01)
    assert float(needed[2]) == pytest.approx(max(plan.memory_bytes) / (180 * 1024), rel=0.01)
    assert Plan.from_dict(plan.to_dict()).assumptions == plan.assumptions


def test_with_any_axes_no_more_is_lacking_than_on_one() -> None:
    least, one = planned("180 KiB", "auto"), planned("180 KiB", 1)
    assert not least.fits
    assert max(least.memory_bytes) <= max(one.memory_bytes)
    assert max(least.memory_bytes) < max(planned("180 KiB", 2).memory_bytes)
