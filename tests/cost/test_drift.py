"""What comparing replicated state costs, and that a step has its part of it."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardwright import Fleet, Plan, Shard, synthesize
from shardwright.constraints import Constraints
from shardwright.cost.drift import comparing_s
from shardwright.cost.model import CostModel
from shardwright.ir.placement import R
from shardwright.ir.program import Compute, Move, Program
from shardwright.ir.redundant import redundant
from shardwright.ir.rules import Signature
from shardwright.ir.trace import Traced, trace

SIZE = 256


def step(w: jax.Array, b: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Two tensors of state, which are whole on every device."""
    return w * 0.5, b + 1, jnp.sum(x)


def traced() -> Traced:
    return trace(step, *(jax.ShapeDtypeStruct(s, "float32") for s in ((SIZE, SIZE), (SIZE,), (8,))))


def whole(of: Traced) -> Program:
    """Every device computes everything."""
    graph = of.graph
    made = [Compute(e.index, Signature((R,) * len(e.inputs), (R,) * len(e.outputs))) for e in graph.equations]
    return Program((R,) * len(graph.inputs), tuple(made), (R,) * len(graph.outputs))


def fleet(count: int, **node: object) -> Fleet:
    kind = {"name": "cpu", "flops": "20 GFLOP/s", "memory_bandwidth": "8 GB/s", "memory": "2 GB"}
    link = {"bandwidth": "2 GB/s", "latency": "50 us"}
    return Fleet.from_dict(
        {"name": "some", "nodes": [{"devices": {"type": kind, "count": count}, "link": link, **node}]}
    )


def test_checksums_read_twice_or_go_to_the_host_and_one_device_compares_nothing() -> None:
    of = traced()
    program, nbytes = whole(of), 4 * (SIZE * SIZE + SIZE)
    checksums_s, exchange_s = comparing_s(program, of.graph, CostModel(fleet(2)))
    assert checksums_s == pytest.approx([2 * nbytes / 8e9] * 2)
    assert 50e-6 < exchange_s < 150e-6
    host = {"bandwidth": "4 GB/s", "latency": "10 us"}
    checksums_s, _ = comparing_s(program, of.graph, CostModel(fleet(2, host_link=host)))
    assert checksums_s == pytest.approx([2 * (5e-6 + 10e-6) + nbytes / 4e9] * 2)
    checksums_s, exchange_s = comparing_s(program, of.graph, CostModel(fleet(1)))
    assert not checksums_s.any() and exchange_s == 0


def test_what_is_cut_or_comes_out_of_a_collective_is_not_compared() -> None:
    of = traced()
    program = whole(of)
    assert redundant(program, of.graph) == (0, 1)
    last = of.graph.outputs[0]
    sent = Move("all_gather", last.index, Shard(0), R, "exact")  # pyright: ignore[reportAttributeAccessIssue]
    assert redundant(replace(program, instructions=(*program.instructions, sent)), of.graph) == (1,)
    assert redundant(replace(program, outputs=(Shard(0), *program.outputs[1:])), of.graph) == (1,)


def test_a_plan_s_step_has_its_part() -> None:
    args = [jax.ShapeDtypeStruct(s, "float32") for s in ((SIZE, SIZE), (SIZE,), (8,))]
    pinned: Constraints = {"w": R, "b": R, "x": R}
    plan = synthesize(step, *args, fleet=fleet(2), constraints=pinned, devices="all")
    assert plan.comparing_s > 60e-6
    never = replace(plan, resync_every=0).timeline()
    assert plan.iteration_s == pytest.approx(never.iteration_s + plan.comparing_s / 100)
    found = plan.timeline()
    assert found.iteration_s == pytest.approx(plan.iteration_s)
    assert max(float(np.max(span.end_s)) for span in found.spans) == pytest.approx(plan.iteration_s)
    assert "replicated state: " in str(plan) and "every 100 steps" in str(plan)
    assert "replicated state: " not in str(replace(plan, resync_every=0))
    assert Plan.from_dict(plan.to_dict()).comparing_s == plan.comparing_s
