"""Rearrangements that change places with an all-reduce."""

import jax
import jax.numpy as jnp
import pytest
from greedy import build
from steps import STEPS, array, starts

from shardwright.ir.hoist import hoisted
from shardwright.ir.placement import Partial, R, Shard
from shardwright.ir.program import Compute, Move, Program, verify
from shardwright.ir.rules import Signature
from shardwright.ir.trace import trace


@pytest.mark.parametrize("start", ["data", "last"])
@pytest.mark.parametrize("name", STEPS)
def test_what_is_hoisted_is_a_program_with_the_same_exchanges(name: str, start: str) -> None:
    step, args = STEPS[name]()
    graph = trace(step, *args).graph
    program = build(graph, starts(graph)[start])
    found, stood = hoisted(program, graph)
    verify(found, graph)
    assert kinds(found) == kinds(program)
    assert found.outputs == program.outputs
    assert sorted(stood) == list(range(len(program.instructions)))
    for now, before in enumerate(stood):
        assert type(found.instructions[now]) is type(program.instructions[before])


def kinds(program: Program) -> list[tuple[str, str]]:
    return [(i.kind, i.strategy) for i in program.all_instructions() if isinstance(i, Move)]


def test_a_gradient_is_transposed_before_it_is_reduced() -> None:
    def step(w: jax.Array, x: jax.Array) -> jax.Array:
        return w - jnp.transpose(x.T @ x)

    graph = trace(step, array(4, 4), array(8, 4)).graph
    assert [e.primitive for e in graph.equations] == ["transpose", "dot_general", "transpose", "sub"]
    summed = Partial("sum")
    product = graph.equations[1].outputs[0].index
    program = Program(
        (R, Shard(0)),
        (
            Compute(0, Signature((Shard(0),), (Shard(1),))),
            Compute(1, Signature((Shard(1), Shard(0)), (summed,))),
            Move("all_reduce", product, summed, R, "ring"),
            Compute(2, Signature((R,), (R,))),
            Compute(3, Signature((R, R), (R,))),
        ),
        (R,),
    )
    verify(program, graph)
    found, stood = hoisted(program, graph)
    verify(found, graph)
    assert found.instructions[2] == Compute(2, Signature((summed,), (summed,)))
    transposed = graph.equations[2].outputs[0].index
    assert found.instructions[3] == Move("all_reduce", transposed, summed, R, "ring")
    assert stood == (0, 1, 3, 2, 4)
