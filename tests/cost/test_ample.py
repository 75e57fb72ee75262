"""The quick bound on memory: by hand, above the model for programs of all kinds, and enough for a plan."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from cost_cases import S0, f32, graph_of

from shardwright import Fleet, assemble, synthesize
from shardwright.cost.memory.ample import peaks_at_most
from shardwright.cost.memory.liveness import all_bytes, largest_bytes, peaks_by_device, total_bytes
from shardwright.ir.graph import Graph
from shardwright.ir.placement import Partial, Placement, R, Shard, grid
from shardwright.ir.program import Compute, Instruction, Move, Program
from shardwright.ir.rules import Signature
from shardwright.memory.device_memory import peaks
from shardwright.synth.grid import weighing
from shardwright.synth.memory.sparing import Sparing

EVEN = (0.5, 0.5)


def most(program: Program, graph: Graph, ratios: tuple[float, ...]) -> tuple[int, ...]:
    found = peaks_at_most(program, graph, ratios)
    assert found is not None
    return found.bytes


def test_all_of_a_stretch_is_there_throughout_and_what_it_touches_twice() -> None:
    graph = graph_of(lambda x, y: (x @ y) @ y, f32(10, 20), f32(20, 20))
    x, y = 800, 1600
    alone = Signature((R, R), (R,))
    local = Program((R, R), (Compute(0, alone), Compute(1, alone)), (R,))
    # Given, made; and once more: x, y, the first product; that again, y, the second.
    assert most(local, graph, (1.0,)) == (x + y + 2 * x + (x + y + x) + (x + y + x),)
    # On a card a product has a workspace.
    there = replace(graph, compiler="gpu", memo={})
    assert most(local, there, (1.0,))[0] - most(local, graph, (1.0,))[0] == 4 << 20
    # An exchange between them is a stretch of its own, and so is what is left; x @ y is not there any more.
    made = graph.equations[0].outputs[0].index
    cut = Signature((S0, R), (S0,))
    gather = Move("all_gather", made, S0, R, "ring")
    apart = Program((S0, R), (Compute(0, cut), gather, Compute(1, alone)), (R,))
    moments = [
        (x / 2 + y) + x / 2 + (x / 2 + y + x / 2),
        (x / 2 + y) + x / 2 + x + (x / 2 + x),
        (x / 2 + y) + x + x + (x + y + x),
    ]
    assert most(apart, graph, EVEN) == (int(max(moments)),) * 2
    # The device with more has more of what is cut.
    assert most(apart, graph, (0.8, 0.2))[0] > most(apart, graph, EVEN)[0] > most(apart, graph, (0.8, 0.2))[1]
    # Equal blocks are packed beside it.
    padded = Program(
        (S0, R), (Compute(0, cut), Move("all_gather", made, S0, R, "padded"), Compute(1, alone)), (R,)
    )
    moments[1] += x
    assert most(padded, graph, EVEN) == (int(max(moments)),) * 2


def test_what_is_handed_out_is_there_in_the_end() -> None:
    graph = graph_of(lambda x, w: (jnp.exp(x), jnp.sum(x, axis=0) @ w), f32(100, 100), f32(100, 1000))
    total = graph.equations[1].outputs[0].index
    add = Signature((S0,), (Partial("sum"),))
    steps: tuple[Instruction, ...] = (
        Compute(0, Signature((S0,), (S0,))),
        Compute(1, add),
        Move("all_reduce", total, Partial("sum"), R, "ring"),
        Compute(2, Signature((R, R), (R,))),
    )
    x, w, summed, out = 20_000, 400_000, 400, 4_000
    # Of the last stretch: x, w, exp(x), the sum and the product, of which the latter three are touched, too.
    expected = (x + w) + x + summed + out + (summed + w + out)
    assert most(Program((S0, R), steps, (S0, R)), graph, EVEN) == (expected,) * 2


def test_a_loop_is_left_to_the_model() -> None:
    graph = graph_of(lambda x: jax.lax.fori_loop(0, 3, lambda _, h: h + x, x), f32(4))
    assert peaks_at_most(Program((R,), (), (R,)), graph, (1.0,)) is None


def fleet(memory_bytes: int, nodes: tuple[int, ...] = (2, 2)) -> Fleet:
    kind = {
        "name": "k",
        "flops": "50 MFLOP/s",
        "memory_bandwidth": "100 MB/s",
        "memory": f"{memory_bytes} B",
    }
    near, far = {"bandwidth": "2 GB/s", "latency": "1 us"}, {"bandwidth": "100 MB/s", "latency": "30 us"}
    listed = [{"devices": {"type": kind, "count": n}, "link": near} for n in nodes]
    return Fleet.from_dict({"name": "mesh", "nodes": listed, "network": far})


def step(params: Any, moments: Any, x: jax.Array, y: jax.Array) -> Any:
    def loss_of(params: Any) -> jax.Array:
        h = x
        for up, down in params:
            scores = jax.nn.softmax(h @ h.T)
            h = h + scores @ (jnp.tanh(h @ up) @ down).reshape(h.shape)
        return jnp.mean((h - y) ** 2)

    loss, gradients = jax.value_and_grad(loss_of)(params)
    moments = jax.tree.map(lambda m, g: 0.9 * m + g, moments, gradients)
    return jax.tree.map(lambda p, m: p - 0.01 * m, params, moments), moments, loss


def arguments() -> tuple[Any, ...]:
    params = [(jnp.ones((16, 64)), jnp.ones((64, 16))) for _ in range(3)]
    return params, jax.tree.map(jnp.zeros_like, params), jnp.ones((32, 16)), jnp.ones((32, 16))


PINS: list[dict[str, Placement]] = [
    {},
    {"params/*": Shard(0), "moments/*": Shard(0)},
    {"params/*": Shard(1), "moments/*": Shard(1), "x": R},
    {"x": grid(Shard(0), Shard(0), (2, 2)), "y": Shard(1)},
    {"params/*": grid(R, Shard(0), (2, 2)), "x": Shard(0)},
]


@pytest.mark.parametrize("pins", PINS)
def test_the_model_never_says_more(pins: dict[str, Placement]) -> None:
    plan = synthesize(
        step, *arguments(), fleet=fleet(1 << 30), axes=2, devices="all", constraints=pins or None
    )
    graph, sparing = plan.step().graph, Sparing(plan.program, plan.step().graph)
    programs = [plan.program, *[sparing.again(count) for count in (0, len(sparing.gathers))]]
    for program in programs:
        for ratios in (plan.ratios, (0.4, 0.3, 0.2, 0.1)):
            pairs = zip(
                most(program, graph, ratios), peaks_by_device(program, graph, ratios).bytes, strict=True
            )
            assert all(bound >= told for bound, told in pairs)


def test_a_step_that_fits_by_far_is_planned_without_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    def planned(memory_bytes: int) -> Any:
        return synthesize(
            step, *arguments(), fleet=fleet(memory_bytes), axes=2, devices="all", recompute="off"
        )

    asked: list[Program] = []

    def told(program: Program, graph: Graph, ratios: Any) -> Any:
        asked.append(program)
        return peaks_by_device(program, graph, ratios)

    monkeypatch.setattr(weighing, "peaks_by_device", told)
    free = planned(1 << 30)
    graph = free.step().graph
    # So much that the bound is enough, but not that nothing need be bounded at all.
    enough = int(max(most(free.program, graph, free.ratios)) / 0.8) + 1
    assert enough < all_bytes(graph) + 5 * largest_bytes(graph) and 4 * enough > total_bytes(graph)
    asked.clear()
    ample = planned(enough)
    assert not asked
    assert ample.fits and ample.cost_s == free.cost_s and ample.program == free.program
    assert ample.memory_bytes == free.memory_bytes
    tight = planned(int(0.9 * enough))
    assert asked and tight.fits and tight.cost_s == free.cost_s


def test_what_has_ample_memory_is_looked_at_when_somebody_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[Program] = []

    def looked(program: Program, *others: Any) -> Any:
        looks.append(program)
        return peaks(program, *others)

    monkeypatch.setattr(assemble, "peaks", looked)
    plan = synthesize(step, *arguments(), fleet=fleet(1 << 30), recompute="off")
    assert plan.fits and not looks
    assert max(plan.memory_bytes) <= 1 << 30 and len(looks) == 1
