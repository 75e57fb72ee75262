"""Between a program that is too large and one under rent that fits: as many equal layers pay as need be."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from shardwright import Fleet, Plan
from shardwright.api import synthesize_traced
from shardwright.ir.placement import Shard
from shardwright.ir.trace import Traced, trace
from shardwright.synth.memory import between
from shardwright.synth.search.solution import Solution

LAYERS, WIDTH = 8, 128
EXAMPLES = Path(__file__).parents[2] / "examples"


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
        return synthesize_traced(
            traced, fleet=_fleet(nbytes), axes=1, recompute="off", microbatches=1, stages="off"
        )

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


@pytest.mark.parametrize(
    ("layers", "scan", "budgets"),
    [
        (96, True, (14.0, 16.0, 18.0)),  # the state alone, old and new, is more than a device has
        # What fits by the model leaves room as it runs; unrolled layers are those of the test above, too.
        pytest.param(12, False, (1.8, 2.0, 2.2), marks=pytest.mark.full),
    ],
)
def test_gpt2_is_dearer_by_degrees_too(
    layers: int, scan: bool, budgets: Sequence[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    gpt2 = importlib.import_module("gpt2")
    sizes = gpt2.SMALL | {"layers": layers, "scan": scan, "batch": 16, "sequence": 256}
    traced = trace(gpt2.train_step, *jax.eval_shape(partial(gpt2.arguments, **sizes)))
    link = {"bandwidth": "130 GB/s", "latency": "5 us"}
    node = {"devices": {"type": "V100-16GB", "count": 8}, "link": link}
    eight = Fleet.from_dict({"name": "eight", "nodes": [node]})

    def planned(gigabytes: float) -> Plan:
        cards = [replace(card, memory_bytes=int(gigabytes * 1e9)) for card in eight.nodes[0].devices]
        small = replace(eight, nodes=(replace(eight.nodes[0], devices=tuple(cards)),))
        return synthesize_traced(traced, fleet=small, axes=1, recompute="off", microbatches=1, stages="off")

    plans = [planned(budget) for budget in budgets]
    for budget, plan in zip(budgets, plans, strict=True):
        assert plan.fits and max(plan.memory_bytes) > 0.85e9 * budget
    assert all(more.cost_s < less.cost_s * (1 - 1e-3) for less, more in pairwise(plans))


def test_what_takes_the_search_long_is_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[int] = []
    solved, moved = between._solved, between._moved

    def inexact(*given: Any) -> tuple[Solution, Any]:
        looks[-1] += 1
        found, prices = solved(*given)
        return replace(found, bound_s=0.5 * found.seconds), prices

    def asked(*given: Any) -> list[int]:
        looks.append(0)
        return moved(*given)

    monkeypatch.setattr(between, "_solved", inexact)
    monkeypatch.setattr(between, "_moved", asked)
    plan = synthesize_traced(_layers(), fleet=_fleet(900_000), axes=1, recompute="off", microbatches=1)
    assert plan.fits and looks and max(looks) == 1
