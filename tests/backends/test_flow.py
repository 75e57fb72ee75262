"""What instructions read, write and wait for: by numbers as by properties."""

from __future__ import annotations

import random
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from greedy import build
from steps import STEPS, starts

from shardwright import Fleet, synthesize
from shardwright.ir.flow import Flow, find, inputs, reads, writes
from shardwright.ir.graph import Graph
from shardwright.ir.program import Move, Program, Property
from shardwright.ir.trace import Traced, trace


def by_definition(program: Program, graph: Graph) -> list[tuple[object, ...]]:
    held: dict[int, list[Property]] = {}
    for prop in inputs(program, graph):
        held.setdefault(prop.value, []).append(prop)
    made_by: dict[Property, int] = {}
    found: list[tuple[object, ...]] = []
    for position, instruction in enumerate(program.instructions):
        needs = [find(want, held.get(want.value, ())) for want in reads(instruction, graph)]
        after = None if isinstance(instruction, Move) else graph.equations[instruction.equation].after
        first = [i for prop, i in made_by.items() if after is not None and prop.value == after.index]
        producers = {made_by[prop] for prop in needs if prop in made_by} | set(first[:1])
        gives = writes(instruction, graph)
        for prop in gives:
            held.setdefault(prop.value, []).append(prop)
            made_by[prop] = position
        found.append((tuple(dict.fromkeys(needs)), gives, producers))
    return found


def told(flow: Flow) -> list[tuple[object, ...]]:
    return list(zip(flow.needs, flow.gives, flow.producers, strict=True))


def traced(name: str) -> Traced:
    step, args = STEPS[name]()
    return trace(step, *args)


@pytest.mark.parametrize("name", STEPS)
def test_numbers_say_what_properties_do(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = traced(name).graph
    program = build(graph, starts(graph)["data"], random.Random(1))
    flow = Flow(program, graph)
    assert told(flow) == by_definition(program, graph)
    for numbers, props in zip((*flow.reads, *flow.makes), (*flow.needs, *flow.gives), strict=True):
        assert list(map(flow.number, props)) == list(numbers)

    # As with groups of devices, where each property is looked for among those that are there.
    def in_groups(self: Flow, found: object) -> None:
        self._number = {}
        self._in_groups()

    monkeypatch.setattr(Flow, "_among_all", in_groups)
    assert told(Flow(program, graph)) == told(flow)


def test_what_is_computed_again_waits_for_what_it_is_not_to_run_before() -> None:
    def step(params: Any, x: jax.Array) -> Any:
        def loss_of(params: Any) -> jax.Array:
            h = x
            for w in params:
                hidden = jnp.tanh(h @ w)
                h = h + jnp.sin(hidden * hidden) @ w.T
            return jnp.mean(h**2)

        return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss_of)(params))

    kind = {"name": "k", "flops": "3 GFLOP/s", "memory_bandwidth": "3 GB/s", "memory": "1 GB"}
    link = {"bandwidth": "1 GB/s", "latency": "10 us"}
    where = Fleet.from_dict({"name": "two", "nodes": [{"devices": {"type": kind, "count": 2}, "link": link}]})
    args = [jnp.full((16, 32), 0.1) for _ in range(3)], jnp.ones((64, 16))
    plan = synthesize(step, *args, fleet=where, recompute="all", devices="all")
    graph = plan.step().graph
    assert any(equation.after is not None for equation in graph.equations)
    flow = Flow(plan.program, graph)
    assert told(flow) == by_definition(plan.program, graph)
    # What reads something twice needs it once.
    assert any(
        len(reads(i, graph)) > len(needs)
        for i, needs in zip(plan.program.instructions, flow.needs, strict=True)
    )
