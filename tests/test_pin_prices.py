"""What a pin costs where memory is short."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from shardwright import Fleet, synthesize
from shardwright.constraints import ELSEWHERE
from shardwright.ir.program import own_ratios


def train_step(weights: Any, x: Any) -> Any:
    def loss_of(weights: Any) -> Any:
        hidden = x
        for weight in weights:
            hidden = jnp.tanh(hidden @ weight)
        return jnp.mean(hidden**2)

    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, jax.grad(loss_of)(weights))


def fleet(memory: str, bandwidth: str = "1 GB/s") -> Fleet:
    def device(speed: int) -> Any:
        rates = {"flops": f"{speed} MFLOP/s", "memory_bandwidth": f"{2 * speed} MB/s", "memory": memory}
        return {"type": {"name": f"slow-{speed}", **rates}}

    link = {"bandwidth": bandwidth, "latency": "1 us"}
    return Fleet.from_dict({"name": "slow", "nodes": [{"devices": [device(30), device(10)], "link": link}]})


def test_want_of_memory_is_no_price_of_a_pin() -> None:
    """Pinned as it lies anyway: what makes the plan dear is the memory."""
    square = jax.ShapeDtypeStruct((64, 64), "float32")
    step: Any = (train_step, [square] * 3, square)
    options: Any = {"devices": "all", "recompute": "off", "microbatches": 1}
    ample = synthesize(*step, fleet=fleet("1 GB"), **options)
    tight = fleet(f"{int(0.8 * max(ample.memory_bytes))} B")
    free = synthesize(*step, fleet=tight, **options)
    assert free.fits and free.cost_s > ample.cost_s * 1.001
    held = {name: free.held[name] for name in ("weights[0]", "weights[1]")}
    plan = synthesize(*step, fleet=tight, constraints=held, **options)
    assert plan.cost_s == free.cost_s
    assert all(pin.price_s < 1e-9 * plan.cost_s for pin in plan.pins)


def test_where_pins_leave_devices_out_their_prices_are_said_to_be_those_of_the_others() -> None:
    """On the one device that is left all placements are the same, and no pin costs anything."""
    square = jax.ShapeDtypeStruct((64, 64), "float32")
    step: Any = (train_step, [square] * 3, square)
    slow = fleet("1 GB", "1 MB/s")
    free = synthesize(*step, fleet=slow)
    plan = synthesize(*step, fleet=slow, constraints={"x": "S(1)"})
    every = synthesize(*step, fleet=slow, constraints={"x": "S(1)"}, devices="all")
    assert (free.used, plan.used) == ((0, 1), (0,)) and free.cost_s < plan.cost_s < every.cost_s
    assert [pin.price_s for pin in plan.pins] == [0.0] and every.pins[0].price_s > 0
    assert [ELSEWHERE in each.assumptions for each in (free, plan, every)] == [False, True, False]


def test_on_one_device_a_pin_changes_nothing() -> None:
    """Every placement is the same there: what is pinned is not gathered, nor cuts it the step in two."""
    square = jax.ShapeDtypeStruct((64, 64), "float32")
    nodes = [
        {
            "devices": [
                {"type": {"name": "c", "flops": "5 GFLOP/s", "memory_bandwidth": "1 GB/s", "memory": "1 GB"}}
            ]
        }
    ]
    alone = Fleet.from_dict({"name": "alone", "nodes": nodes})
    free = synthesize(train_step, [square] * 3, square, fleet=alone)
    pinned = synthesize(
        train_step, [square] * 3, square, fleet=alone, constraints={"x": "S(1)", "weights*": "S(0)"}
    )
    assert pinned.program == free.program
    assert (pinned.cost_s, pinned.memory_bytes) == (free.cost_s, free.memory_bytes)
    assert all(pin.price_s == 0 for pin in pinned.pins) and len(pinned.pins) == 2


def test_a_program_that_ratios_of_its_own_make_the_best_is_found_without_a_pin() -> None:
    """With one vector of ratios it costs more than the best one."""

    def loss_of(params: Any, x: Any) -> Any:
        hidden, _ = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, params["w"])
        return jnp.mean((hidden @ params["o"]) ** 2)

    def step(params: Any, momenta: Any, x: Any) -> Any:
        momenta = jax.tree.map(lambda m, g: 0.9 * m + g, momenta, jax.grad(loss_of)(params, x))
        return jax.tree.map(lambda p, m: p - 0.1 * m, params, momenta), momenta

    params = {
        "w": jax.ShapeDtypeStruct((5, 40, 40), "float32"),
        "o": jax.ShapeDtypeStruct((40, 8), "float32"),
    }
    x = jax.ShapeDtypeStruct((64, 40), "float32")
    types = [
        {"name": f"g{speed}", "flops": f"{speed} GFLOP/s", "memory_bandwidth": "8 GB/s", "memory": "1 GB"}
        for speed in (40, 10, 10)
    ]
    node = {
        "devices": [{"type": kind} for kind in types],
        "link": {"bandwidth": "1 GB/s", "latency": "20 us"},
    }
    options: Any = {"fleet": Fleet.from_dict({"name": "three", "nodes": [node]}), "devices": "all"}
    options |= {"axes": 1, "recompute": "off", "microbatches": 1}
    free = synthesize(step, params, params, x, **options)
    pinned = synthesize(step, params, params, x, constraints={"params/w": "S(1)"}, **options)
    assert own_ratios(pinned.program)
    assert free.cost_s <= pinned.cost_s
