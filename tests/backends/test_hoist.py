"""Rearrangements that change places with an all-reduce."""

import jax
import jax.numpy as jnp
import pytest
from greedy import build
from steps import STEPS, array, starts

from shardwright.backends.hoist import hoisted
from shardwright.ir.graph import Graph
from shardwright.ir.placement import R, Shard
from shardwright.ir.program import Compute, Move, Program, verify
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


def transposed_gradient() -> tuple[Graph, Program]:
    """A gradient that is reduced first and transposed then."""

    def step(w: jax.Array, x: jax.Array) -> jax.Array:
        return w - jnp.transpose(x.T @ x)

    graph = trace(step, array(4, 4), array(8, 4)).graph
    program = build(graph, [R, Shard(0)])
    return graph, program


def test_a_gradient_is_transposed_before_it_is_reduced() -> None:
    graph, program = transposed_gradient()
    assert order(graph, program) == "reduced, transposed"
    assert order(graph, hoisted(program, graph)[0]) == "transposed, reduced"


def order(graph: Graph, program: Program) -> str:
    """Where the all-reduce stands, and the transposition behind the product."""
    words: list[str] = []
    for instruction in program.instructions:
        if isinstance(instruction, Move) and instruction.kind == "all_reduce":
            words.append("reduced")
        elif isinstance(instruction, Compute) and instruction.equation == last_transpose(graph):
            words.append("transposed")
    return ", ".join(words)


def last_transpose(graph: Graph) -> int:
    return max(i for i, equation in enumerate(graph.equations) if equation.primitive == "transpose")
