"""Less in memory at a time: the order of a program's instructions, and gathers done again."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from baseline_cases import arguments, draw, slow, trained

from shardwright.backends.verify import verify_program
from shardwright.cost.bill import bill, seconds
from shardwright.cost.memory.liveness import peak_bytes
from shardwright.cost.model import CostModel
from shardwright.ir.program import Instruction, Move, Program, verify
from shardwright.ir.trace import trace
from shardwright.memory.device_memory import peaks
from shardwright.synth.baselines import Workshop
from shardwright.synth.memory.sparing import Sparing
from shardwright.synth.space.space import Space

LAYERS = 4


def loss_of(p: Any, x: Any) -> Any:
    for w in p:
        x = jnp.tanh(x @ w)
    return jnp.mean(x**2)


def gathered_first(program: Program) -> Program:
    """As `emit` has it: every gather once, all in front."""
    gathers: dict[Instruction, None] = {}
    rest: list[Instruction] = []
    for instruction in program.instructions:
        if isinstance(instruction, Move) and instruction.kind == "all_gather":
            gathers[instruction] = None
        else:
            rest.append(instruction)
    return replace(program, instructions=(*gathers, *rest))


def test_what_is_gathered_in_turn_and_again_takes_less_memory_and_computes_the_same() -> None:
    step = trained(loss_of)
    args = arguments([0.1 * draw(32, 32, seed=n) for n in range(LAYERS)], draw(6, 32, seed=9))
    traced = trace(step, *args)
    graph, model = traced.graph, CostModel(slow(30, 20, 10))
    baseline = next(b for b in Workshop(graph, Space(graph), model).all() if b.name == "ZeRO-3")
    ratios = baseline.ratios
    first = gathered_first(baseline.program)
    verify(first, graph)
    sparing = Sparing(first, graph)
    assert sparing.possible
    # The first layer's weights are read by the forward part alone: nobody asks for the gradient of its input.
    assert len(sparing.gathers) == LAYERS - 1
    programs = [first, *(sparing.again(count) for count in range(LAYERS))]
    by_model = [max(peak_bytes(program, graph, ratios)) for program in programs]
    as_run = [max(peaks(program, graph, ratios)) for program in programs]
    costs = [seconds(bill(program, graph, model), model, ratios) for program in programs]
    moves = [sum(isinstance(i, Move) for i in program.instructions) for program in programs]
    for found in (by_model, as_run):
        # Between forward and backward part all weights are there, unless they are gathered again.
        assert found == sorted(found, reverse=True)
        assert found[-1] < found[1]
    assert costs[0] == pytest.approx(costs[1], rel=1e-12)
    assert costs[1] < costs[2] < costs[3] < costs[4]
    assert moves == [moves[0], *(moves[0] + count for count in range(LAYERS))]
    for program in (programs[1], programs[-1]):
        assert verify_program(traced, program, ratios, jax.tree.leaves(args)).ok
    assert not Sparing(programs[-1], graph).possible
