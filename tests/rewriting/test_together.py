"""Where what is computed again begins a stretch of its own, told while instructions come."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
from rewriting_cases import fleet, layered

from shardwright import synthesize
from shardwright.ir.graph import Graph
from shardwright.ir.host import leaving, reloads, uses_host
from shardwright.ir.program import Instruction, Move
from shardwright.ir.repeated import Together, begins_again


def number(instruction: Instruction, graph: Graph) -> int:
    """Of the stretch that is computed again."""
    if isinstance(instruction, Move):
        return 0
    equation = graph.equations[instruction.equation]
    return 0 if equation.after is None else equation.copy


def leaves(instruction: Instruction, graph: Graph) -> int:
    return 0 if isinstance(instruction, Move) else leaving(graph).get(instruction.equation, 0)


def begins(instruction: Instruction, graph: Graph, pending: Sequence[Instruction]) -> bool:
    again = number(instruction, graph)
    if not again and not uses_host(graph):
        return False
    if not pending:
        return again > 0
    if reloads(pending[0], graph) != reloads(instruction, graph):
        return True
    if mine := leaves(instruction, graph):
        return any(leaves(other, graph) not in (0, mine) for other in pending)
    return again > 0 and all(number(other, graph) != again for other in pending)


@pytest.mark.parametrize(("again", "offload"), [("all", "off"), ("off", "all"), ("all", "all")])
def test_a_stretch_ends_where_something_is_computed_again_or_comes_back(again: Any, offload: Any) -> None:
    step, args = layered(scan=False, layers=4)
    where = fleet(host="4 GB/s")
    plan = synthesize(step, *args, fleet=where, recompute=again, offload=offload, devices="all")
    graph, program = plan.step().graph, plan.program
    rng, seen = random.Random(0), set[bool]()
    for _ in range(400):
        start = rng.randrange(len(program.instructions) - 1)
        pending = list(program.instructions[start : start + rng.randrange(12)])
        together = Together(graph)
        for each in pending:
            together.add(each)
        for _ in range(10):
            instruction = rng.choice(program.instructions)
            expected = begins(instruction, graph, pending)
            seen.add(expected)
            assert together.end_before(instruction) == expected
            assert begins_again(instruction, graph, pending) == expected
        assert together.any == bool(pending)
        together.clear()
        assert together.end_before(instruction) == begins(instruction, graph, [])
    assert seen == {False, True}
