"""The size of messages follows from the timeline."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

from shardwright import Fleet, Plan, bucketed, synthesize


def fleet(latency: str) -> Fleet:
    kind = {"name": "cpu", "flops": "20 GFLOP/s", "memory_bandwidth": "8 GB/s", "memory": "2 GB"}
    node = {"devices": {"type": kind, "count": 1}}
    network = {"bandwidth": "1 GB/s", "latency": latency}
    return Fleet.from_dict({"name": "two", "nodes": [node, node], "network": network})


def plan(latency: str) -> Plan:
    def step(weights: list[jax.Array], x: jax.Array) -> tuple[list[jax.Array], jax.Array]:
        def loss_of(weights: list[jax.Array]) -> jax.Array:
            h = x
            for w in weights:
                h = jnp.tanh(h @ w)
            return jnp.mean(h**2)

        loss, gradients = jax.value_and_grad(loss_of)(weights)
        return [w - 0.1 * g for w, g in zip(weights, gradients, strict=True)], loss

    def shape(*sizes: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, "float32")

    return synthesize(step, [shape(128, 128)] * 4, shape(4096, 128), fleet=fleet(latency), devices="all")


def test_many_messages_over_a_slow_network_travel_together() -> None:
    found = plan("2 ms")
    chosen = bucketed(found)
    assert chosen.bucket_bytes is not None
    # A new plan has them of itself; its schedule and its file keep to it, and so does who wants none.
    assert found.bucket_bytes == chosen.bucket_bytes
    apart = replace(found, bucket_bytes=None)
    messages, alone = (len(p.planned_messages() or ()) for p in (found, apart))
    assert 0 < messages < alone
    assert Plan.from_dict(found.to_dict()).planned_messages() == found.planned_messages()
    assert chosen.iteration_s < 0.98 * found.iteration_s
    predicted = found.timeline(overlap=True, bucket_bytes=chosen.bucket_bytes).iteration_s
    assert chosen.iteration_s == pytest.approx(predicted)
    assert Plan.from_dict(chosen.to_dict()).bucket_bytes == chosen.bucket_bytes
