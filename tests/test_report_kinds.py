"""Pages about plans on two mesh axes, and of steps that are changed."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from page_cases import Reader, shape

from shardwright import api
from shardwright.cost.fleet import Fleet
from shardwright.explain import explain
from shardwright.reports.facts import facts
from shardwright.reports.page import page
from shardwright.reports.text import layout, render


def test_a_plan_on_two_axes() -> None:
    """Two nodes of two: placements over the nodes and within them, in words; costs add up as ever."""
    kind = {"name": "c", "flops": "1 TFLOP/s", "memory_bandwidth": "100 GB/s", "memory": "8 GB"}
    node = {"count": 2, "devices": {"type": kind, "count": 2}}
    near, far = {"bandwidth": "100 GB/s", "latency": "1 us"}, {"bandwidth": "1 GB/s", "latency": "30 us"}
    fleet = Fleet.from_dict({"name": "mesh", "nodes": [node | {"link": near}], "network": far})

    def update(params: Any, x: jax.Array, y: jax.Array) -> Any:
        def loss_of(params: Any) -> jax.Array:
            return jnp.mean((jax.nn.relu(x @ params["up"]) @ params["down"] - y) ** 2)

        loss, gradients = jax.value_and_grad(loss_of)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), loss

    params = {"up": shape(2048, 4096), "down": shape(4096, 1024)}
    plan = api.synthesize(update, params, shape(8192, 2048), shape(8192, 1024), fleet=fleet, axes=2)
    assert plan.axes == 2 and plan.traced is not None
    found = facts(plan, plan.traced, "two axes")
    assert sum(layer.seconds for layer in found.layers) == pytest.approx(plan.cost_s)
    reader = Reader()
    reader.feed(page(plan, plan.traced, "two axes"))
    assert "over the nodes" in reader.said("shares") and "within a node" in reader.said("program")
    assert "2 mesh axes" in reader.said("certificate")
    assert "nothing is sharded" not in reader.said("shares")
    assert "nothing is sharded" not in render(layout(plan), colour=False)
    answer = explain(plan, "params/up", plan.traced)
    assert "over the nodes" in answer.sentences[0] and "the next best is S(1)/S(0)" in answer.sentences[-1]
    assert "sets the pace" in " ".join(explain(plan, "n1.d0", plan.traced).sentences)


@pytest.mark.parametrize(("quick", "asked", "who"), [
    (1, "auto", "one device"), (2, "auto", "every device used"), (2, "all", "every device"),
])  # fmt: skip
def test_a_step_that_nobody_shares(quick: int, asked: Any, who: str) -> None:
    """A scalar's step on alike devices, or of whose only some are used."""
    kind = {"name": "q", "flops": "1 TFLOP/s", "memory_bandwidth": "100 GB/s", "memory": "8 GB"}
    link = {"bandwidth": "1 GB/s", "latency": "1 ms"}
    nodes = [{"devices": {"type": kind, "count": quick}, "link": link}]
    if asked == "auto":
        slow = kind | {"name": "s", "flops": "1 GFLOP/s", "memory_bandwidth": "1 GB/s"}
        nodes.append({"devices": {"type": slow, "count": 1}, "link": link})
    fleet = Fleet.from_dict({"name": "scalar", "nodes": nodes, "network": link})

    def update(params: Any) -> Any:
        return jax.tree.map(lambda p: p - 0.1 * jnp.sin(p), params)

    plan = api.synthesize(update, {"w": shape()}, fleet=fleet, devices=asked)
    said = f"nothing is sharded: {who} runs the whole step"
    assert f"  {said}\n" in render(layout(plan), colour=False)
    assert plan.traced is not None
    reader = Reader()
    reader.feed(page(plan, plan.traced, "a scalar"))
    assert f"In this plan {said}." in reader.said("shares")


def test_a_step_in_micro_batches() -> None:
    """What is in the loop is of all layers and both passes; the page says how the step is changed."""
    kind = {"name": "c", "flops": "1 TFLOP/s", "memory_bandwidth": "100 GB/s", "memory": "8 GB"}
    node = {"devices": {"type": kind, "count": 2}, "link": {"bandwidth": "10 GB/s", "latency": "1 us"}}
    fleet = Fleet.from_dict({"name": "pair", "nodes": [node]})

    def update(params: Any, x: jax.Array, y: jax.Array) -> Any:
        def loss_of(params: Any) -> jax.Array:
            hidden = x
            for name in sorted(params):
                hidden = jnp.tanh(hidden @ params[name]["w"])
            return jnp.mean((hidden - y) ** 2)

        loss, gradients = jax.value_and_grad(loss_of)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), loss

    params = {f"layer{i}": {"w": shape(256, 256)} for i in range(3)}
    plan = api.synthesize(update, params, shape(4096, 256), shape(4096, 256), fleet=fleet, microbatches=4)
    assert plan.traced is not None
    traced = plan.step(plan.traced)
    found = {layer.title: layer for layer in facts(plan, traced, "pieces").layers}
    assert sum(layer.seconds for layer in found.values()) == pytest.approx(plan.cost_s)
    loop = found.pop("the whole step")
    assert loop.compute_s["both"] > 0.9 * sum(loop.compute_s.values()) and loop.exchange_s["both"] > 0
    assert sum(layer.seconds for layer in found.values()) < 0.1 * plan.cost_s
    reader = Reader()
    reader.feed(page(plan, traced, "pieces"))
    assert "4 micro-batches, one after another" in reader.said("memory")
    assert "one loop, which belongs to the whole step" in reader.said("program")


def test_a_search_on_two_axes_that_came_to_its_end() -> None:
    """The order of a sum makes no gap: no search stopped early, and nobody says so."""

    def device(name: str, rate: float) -> dict[str, str]:
        return {
            "name": name,
            "flops": f"{rate} TFLOP/s",
            "memory_bandwidth": "300 GB/s",
            "memory": "8 GB",
        }

    near, host = {"bandwidth": "20 GB/s", "latency": "5 us"}, {"bandwidth": "12 GB/s", "latency": "10 us"}
    unlike = {"devices": [{"type": device("big", 1)}, {"type": device("small", 0.5)}]}
    alike = {"devices": {"type": device("tiny", 0.4), "count": 2}}
    nodes = [node | {"link": near, "host_link": host} for node in (unlike, alike)]
    network = {"bandwidth": "10 GB/s", "latency": "10 us"}
    fleet = Fleet.from_dict({"name": "uneven", "nodes": nodes, "network": network})

    def update(params: Any, x: jax.Array, y: jax.Array) -> Any:
        def loss_of(params: Any) -> jax.Array:
            return jnp.mean((jnp.tanh(jnp.tanh(x @ params["w0"]) @ params["w1"]) - y) ** 2)

        loss, gradients = jax.value_and_grad(loss_of)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), loss

    params = {"w0": shape(64, 64), "w1": shape(64, 64)}
    batch = (shape(4096, 64), shape(4096, 64))
    plan = api.synthesize(update, params, *batch, fleet=fleet, axes=2, devices="all")
    assert plan.axes == 2 and plan.traced is not None
    assert plan.search_gap == 0 < plan.gap
    assert "stopped early" not in page(plan, plan.traced, "two axes")
