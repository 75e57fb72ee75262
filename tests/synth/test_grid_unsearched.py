"""Where nothing is searched, fleets of several nodes get the best baseline and a bound of two mesh axes."""

from __future__ import annotations

import re
from typing import Any, Literal

import jax
import jax.numpy as jnp
import pytest
from grid_cases import FLEETS, arguments, train_step

import shardwright
from shardwright.cost.fleet import Fleet
from shardwright.plan import Plan


def apart() -> Fleet:
    """Nodes between which little can be sent: programs on two axes are far better than those on one."""
    rates = {"flops": "200 MFLOP/s", "memory_bandwidth": "200 MB/s", "memory": "4 GB"}
    link = {"bandwidth": "200 MB/s", "latency": "1 us"}
    node = {"count": 2, "devices": {"type": {"name": "slow", **rates}, "count": 8}, "link": link}
    network = {"bandwidth": "2 MB/s", "latency": "20 us"}
    return Fleet.from_dict({"name": "apart", "nodes": [node], "network": network})


WHERE = {**FLEETS, "apart": apart()}

#: What would have been searched: the step as it is.
AS_IT_IS: dict[str, Any] = {"recompute": "off", "microbatches": 1, "offload": "off"}


def wide_step(weights: Any, x: Any) -> Any:
    """Gradients of weights that are large beside the batch: cut within nodes."""

    def loss_of(weights: Any) -> Any:
        return jnp.mean((jnp.tanh(x @ weights[0]) @ weights[1] - x) ** 2)

    return jax.value_and_grad(loss_of)(weights)


def wide_arguments() -> tuple[Any, Any]:
    square = jax.ShapeDtypeStruct((256, 256), "float32")
    return (square, square), jax.ShapeDtypeStruct((64, 256), "float32")


def planned(where: str, axes: Literal[1, 2, "auto"], **options: Any) -> Plan:
    step, args = (wide_step, wide_arguments()) if where == "apart" else (train_step, arguments())
    return shardwright.synthesize(step, *args, fleet=WHERE[where], axes=axes, **AS_IT_IS, **options)


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("axes", [2, "auto"])
@pytest.mark.parametrize("devices", ["auto", "all"])
def test_the_bound_covers_what_would_have_been_searched(
    where: str, axes: Literal[2, "auto"], devices: str
) -> None:
    plan = planned(where, axes, time_limit_s=0, devices=devices)
    searched = planned(where, axes, devices=devices)
    assert plan.stats.searches == 0
    assert 0 < plan.bound_s <= searched.cost_s * (1 + 1e-9)
    assert searched.cost_s <= plan.cost_s * (1 + 1e-9)
    assert plan.search_gap <= plan.gap + 1e-12
    for unused in plan.unused:  # what it says of plans on these devices is true of those on two axes, too
        said = re.search(r"no plan that uses .* costs less than ([\d.]+) (ms|us|s)", unused.why)
        if said and len(unused.devices) == len(WHERE[where].devices) - len(plan.used):
            scale = {"s": 1.0, "ms": 1e-3, "us": 1e-6}[said[2]]
            assert float(said[1]) * scale <= planned(where, axes, devices="all").cost_s * 1.01


@pytest.mark.parametrize("where", WHERE)
def test_baselines_on_two_axes_are_considered_where_these_are_wanted(where: str) -> None:
    plan = planned(where, 2, time_limit_s=0)
    step, args = (wide_step, wide_arguments()) if where == "apart" else (train_step, arguments())
    found = shardwright.baselines(step, *args, fleet=WHERE[where], axes=2)
    costs = [baseline.cost_s for baseline in found if baseline.fits]
    assert costs
    assert plan.cost_s <= min(costs) * (1 + 1e-9)
    assert any("baselines on one mesh axis and on two" in said for said in plan.assumptions)
    hurried = planned(where, 2, time_limit_s=1e-9)
    assert 0 < hurried.bound_s <= hurried.cost_s <= plan.cost_s * (1 + 1e-9)
    whole = planned(where, 2, time_limit_s=0, devices="all")
    assert whole.cost_s <= min(costs) * (1 + 1e-9)
    assert (whole.axes == 2) is (where == "apart")
    keys = iter(jax.random.split(jax.random.key(0), 8))
    concrete = jax.tree.map(lambda leaf: 0.1 * jax.random.normal(next(keys), leaf.shape), args)
    assert whole.verify(step, *concrete).ok


def test_what_was_not_considered_is_said() -> None:
    plan = planned("apart", "auto", time_limit_s=0, devices="all")
    assert plan.axes == 1
    assert any("no baseline was considered; axes=2 does" in said for said in plan.assumptions)
