"""Steps, and bodies of loops and branches, in which nothing is computed: what they are given they hand on."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from plan_cases import array, assert_same

from shardwright import Fleet, baselines, synthesize, what_if
from shardwright.ir.trace import trace
from shardwright.plans.diff import diff
from shardwright.reports.page import page
from shardwright.reports.text import layout, render


def fleet(*nodes: tuple[float, ...]) -> Fleet:
    def device(speed: float) -> dict[str, str]:
        rates = {"flops": f"{speed} MFLOP/s", "memory_bandwidth": f"{2 * speed} MB/s"}
        return {"name": f"d{speed:g}", "memory": "1 GB", "launch": "10 ns", **rates}

    link = {"bandwidth": "400 MB/s", "latency": "100 ns"}
    made = [{"devices": [{"type": device(speed)} for speed in node], "link": link} for node in nodes]
    return Fleet.from_dict({"name": "f", "nodes": made, "network": link})


FLEETS = {"one device": fleet((3,)), "one node": fleet((3, 1)), "two nodes": fleet((3,), (1, 1))}


def guarded(p: Any, x: Any) -> Any:
    """An update that is left out where a loss is not finite."""
    loss, gradient = jax.value_and_grad(lambda p: jnp.mean((x @ p) ** 2))(p)
    return lax.cond(jnp.isfinite(loss), lambda: p - 0.1 * gradient, lambda: p), loss


def flagged(p: Any, x: Any) -> Any:
    """A loop whose condition is a flag that it carries."""

    def body(carry: Any) -> Any:
        _, h, i = carry
        return (i < 3) & (jnp.sum(h) < 1e3), jnp.tanh(h @ p), i + 1

    _, h, count = lax.while_loop(lambda carry: carry[0], body, (True, x, 0))
    return p, jnp.mean(h), count


def carried(p: Any, x: Any) -> Any:
    """A scan that passes on what it carries."""
    last, every = lax.scan(lambda carry, _: (carry, carry), p, None, length=3)
    return p - 0.1 * (x.T @ (x @ jnp.sum(every, 0))), jnp.mean(x @ last)


def chosen(p: Any, x: Any) -> Any:
    """A switch with a branch that does nothing."""
    branches = [lambda y: y, lambda y: jnp.sin(y) @ y, lambda y: -y]
    return p - 0.1 * lax.switch(jnp.int32(jnp.sum(x) > 0), branches, p @ x)


@pytest.mark.parametrize("name", FLEETS)
@pytest.mark.parametrize("step", [guarded, flagged, carried, chosen])
def test_bodies_that_hand_on_what_they_are_given(step: Callable[..., Any], name: str) -> None:
    args = (array(16, 16), array(16, 16, seed=1))
    plan = synthesize(step, *args, fleet=FLEETS[name])
    assert plan.fits and 0 < plan.bound_s <= plan.cost_s
    result = plan.verify(step, *args)
    assert result.ok, result
    assert_same(plan.compile(step)(*args), jax.jit(step)(*args), rtol=1e-4)


STEPS: dict[str, Callable[[Any], Any]] = {
    "handed on": lambda x: x,
    "named": lambda x: {"a": x},
    "nothing": lambda x: None,
    "a constant": lambda x: 3.0,
}


@pytest.mark.parametrize("name", FLEETS)
@pytest.mark.parametrize("step", STEPS)
def test_steps_that_compute_nothing_cost_nothing(step: str, name: str) -> None:
    x, where = array(4, 4), FLEETS[name]
    ways: list[dict[str, Any]] = [{}, {"axes": 1}, {"devices": "all"}]
    for how in [*ways, *([{"axes": 2}] if name == "two nodes" else [])]:
        plan = synthesize(STEPS[step], x, fleet=where, **how)
        assert plan.fits and plan.cost_s == plan.bound_s == plan.gap == 0
        assert_same(plan.compile(STEPS[step])(x), jax.jit(STEPS[step])(x))
    assert all(each.cost_s == 0 for each in baselines(STEPS[step], x, fleet=where))


def test_what_costs_nothing_can_be_told() -> None:
    step, x, where = STEPS["handed on"], array(4, 4), FLEETS["two nodes"]
    free = synthesize(step, x, fleet=where)
    beside = baselines(step, x, fleet=where, plan=free)
    assert "node n0 alone" in render(layout(free, beside), colour=False)
    assert "node n0 alone" in page(free, trace(step, x), "handed on", beside)
    same, slower = (what_if(step, x, fleet=where, changes=changes) for changes in ("drop=n1", "drop=n0"))
    assert same.change == 0 and "(+0.0%)" in same.text()
    assert slower.change == math.inf and "%" not in slower.text()  # two devices compare their state


def test_what_costs_nothing_beside_another_plan() -> None:
    x, where = array(16, 16), FLEETS["two nodes"]
    free, everywhere = (synthesize(STEPS["handed on"], x, fleet=where, devices=d) for d in ("auto", "all"))
    dear = synthesize(chosen, x, x, fleet=where)
    assert list(diff(free, everywhere).why()) == ["Both cost 0 s.", "It uses 3 devices, not 1."]
    assert any(said.startswith("The first costs nothing") for said in diff(free, dear).why())
    assert any("100.0% cheaper" in said for said in diff(dear, free).why())


@pytest.mark.parametrize("name", FLEETS)
@pytest.mark.parametrize("how", [{}, {"devices": "all"}])
def test_tensors_of_no_elements(name: str, how: dict[str, Any]) -> None:
    x = jnp.zeros((0, 8))
    plan = synthesize(lambda x: x * 2, x, fleet=FLEETS[name], **how)
    assert plan.fits and plan.cost_s > 0
    assert plan.compile(lambda x: x * 2)(x).shape == x.shape
