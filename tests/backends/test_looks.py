"""Programs of one step that are looked at one after another: what is worked out once is what each takes."""

from __future__ import annotations

import random

import pytest
from greedy import build, several
from steps import STEPS, starts

from shardwright.ir.graph import Graph
from shardwright.ir.program import Program
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
