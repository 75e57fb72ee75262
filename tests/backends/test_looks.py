"""Programs of one step that are looked at one after another: what is worked out once is what each takes."""

from __future__ import annotations

import random
from dataclasses import replace

import jax.numpy as jnp
import pytest
from greedy import build, several
from steps import STEPS, starts

from shardwright.ir.graph import Graph
from shardwright.ir.placement import R, Shard
from shardwright.ir.program import Compute, Move, Program, verify
from shardwright.ir.rules import Signature
from shardwright.ir.trace import trace
from shardwright.memory import scratch
from shardwright.memory.device_memory import Looking, peaks

RATIOS = ((0.5, 0.3, 0.2), (0.2, 0.3, 0.5), (0.5, 0.0, 0.5), (0.4, 0.3, 0.3))


def forget(graph: Graph) -> Graph:
    """The graph, of which nothing is remembered."""
    graph.memo.clear()
    for equation in graph.equations:
        for region in equation.regions:
            forget(region)
    return graph


@pytest.mark.parametrize("name", ["mlp", "scanned", "controlled"])
def test_looks_one_after_another_say_what_each_says_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    step, args = STEPS[name]()
    graph = trace(step, *args).graph
    programs: list[Program] = []
    for seed in range(2):
        for start in starts(graph).values():
            chance = random.Random(seed)
            programs += [build(graph, start, chance), several(build(graph, start, chance), graph, 3, chance)]
    cases = [(program, ratios) for program in programs for ratios in RATIOS]
    random.Random(0).shuffle(cases)
    worked_out = 0

    def counted(graph: Graph) -> int:
        nonlocal worked_out
        worked_out += 1
        return of(graph)

    of = scratch.scratch_bytes
    monkeypatch.setattr(scratch, "scratch_bytes", counted)
    look = Looking(graph)
    together = [look(program, ratios) for program, ratios in cases]
    once, worked_out = worked_out, 0
    alone = [peaks(program, forget(graph), ratios) for program, ratios in cases]
    assert together == alone
    assert len(set(alone)) > len(cases) / 2
    assert 0 < once < worked_out


def test_devices_that_have_no_part_in_something_are_told_apart() -> None:
    """Two of three cut what all hold, whose parts need not be as large."""
    graph = trace(lambda x: jnp.cos(jnp.cumsum(x, 0)), jnp.ones((6, 4)), state={}).graph
    summed = graph.equations[0].outputs[0].index
    whole, gathered = Signature((R,), (R,)), Move("all_gather", 0, Shard(0), R, "padded")
    cut = Move("slice", summed, R, Shard(0), "", (0, 1))
    again = Move("all_gather", summed, Shard(0), R, "padded", (0, 1))
    program = Program((Shard(0),), (gathered, Compute(0, whole), cut, again, Compute(1, whole)), (R,))
    verify(program, graph)
    look = Looking(graph)
    for ratios in RATIOS:
        # The first few programs of a step are looked at one by one.
        every = [look(replace(program), ratios) for _ in range(5)]
        assert every == [peaks(program, forget(graph), ratios)] * 5
