"""From an optimal assignment to a program: right, round-tripping, and exactly as expensive as promised."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from synth_cases import FLEETS, STEPS, model, ratios, shape, space, traced

from shardwright.cost.bill import bill, seconds
from shardwright.ir.placement import Partial, Placement, R, Shard
from shardwright.ir.program import Compute, Loop, Move, Program, verify
from shardwright.ir.serialize import program_from_json, program_to_json
from shardwright.ir.text import format_program, parse_program
from shardwright.ir.trace import trace
from shardwright.ir.wires import wired, wires
from shardwright.synth.prices.tables import Prices
from shardwright.synth.programs.emit import emit
from shardwright.synth.programs.rounds import exchanges
from shardwright.synth.search.priced import solve
from shardwright.synth.space.pins import pin
from shardwright.synth.space.space import Space


def planned(step: str, name: str, shares: tuple[float, ...]) -> tuple[Program, float]:
    prices = Prices.at(model(name), shares)
    solution = solve(space(step), prices)
    return emit(space(step), solution.assignment, prices), solution.seconds


@pytest.mark.parametrize("step", STEPS)
@settings(max_examples=12)
@given(data=st.data(), name=st.sampled_from(sorted(FLEETS)))
def test_programs_are_right_and_cost_what_the_search_says(step: str, data: st.DataObject, name: str) -> None:
    graph, costs = traced(step).graph, model(name)
    shares = data.draw(ratios(len(costs.class_of)))
    program, promised = planned(step, name, shares)
    verify(program, graph)
    assert seconds(bill(program, graph, costs), costs, shares) == pytest.approx(promised, rel=1e-9)
    assert parse_program(format_program(program, graph)) == program
    assert program_from_json(json.loads(json.dumps(program_to_json(program)))) == program
    for out, inp in graph.state.items():
        assert program.outputs[out] == program.inputs[inp]
    for position, placement in enumerate(program.outputs):
        assert not isinstance(placement, Partial)
        if position not in graph.state and graph.outputs[position].type.rank == 0:
            assert placement == R


@pytest.mark.parametrize("step", STEPS)
def test_every_equation_runs_once_and_nothing_is_made_twice_or_for_nobody(step: str) -> None:
    graph = traced(step).graph
    program, _ = planned(step, "slow-links", (0.5, 0.3, 0.2))
    runs = [i.equation for i in program.instructions if not isinstance(i, Move)]
    assert sorted(runs) == list(range(len(graph.equations)))
    moves = [(i.value, i.post) for i in program.instructions if isinstance(i, Move)]
    assert len(moves) == len(set(moves))
    needed = {
        (atom.index, p)
        for atom, p in zip(graph.outputs, program.outputs, strict=True)
        if hasattr(atom, "index")
    }
    for instruction in program.instructions:
        if isinstance(instruction, Move):
            needed.add((instruction.value, instruction.pre))
            continue
        pairs = zip(graph.equations[instruction.equation].inputs, instruction.signature.ins, strict=True)
        needed.update((atom.index, p) for atom, p in pairs if hasattr(atom, "index"))
    assert set(moves) <= needed


def test_exchanges_that_can_share_a_round_do() -> None:
    """Local segments are maximal: what runs before an exchange could not have run in an earlier round."""
    graph = traced("normed").graph
    program, _ = planned("normed", "two", (0.5, 0.5))
    rounds = 0
    ready: dict[tuple[int, object], int] = {}
    previous = False
    for instruction in program.instructions:
        talks = exchanges(instruction)
        if previous and not talks:
            rounds += 1
        previous = talks
        if isinstance(instruction, Move):
            reads, made = [(instruction.value, instruction.pre)], [(instruction.value, instruction.post)]
        else:
            equation = graph.equations[instruction.equation]
            pairs = zip(equation.inputs, instruction.signature.ins, strict=True)
            reads = [(a.index, p) for a, p in pairs if hasattr(a, "index")]
            made = [(v.index, p) for v, p in zip(equation.outputs, instruction.signature.outs, strict=True)]
        assert rounds == max((ready.get(read, 0) for read in reads), default=0)
        ready.update(dict.fromkeys(made, rounds + talks))
    assert rounds > 0


def test_a_loop_is_paid_once_per_trip() -> None:
    graph, costs = traced("scanned").graph, model("three")
    shares = (0.5, 0.3, 0.2)
    program, promised = planned("scanned", "three", shares)
    loops = [i for i in program.instructions if isinstance(i, Loop)]
    assert [graph.equations[loop.equation].params["length"] for loop in loops] == [5, 5]
    inside = 0.0
    for loop in loops:
        (region,) = graph.equations[loop.equation].regions
        inside += 5 * seconds(bill(loop.bodies[0], region, costs), costs, shares)
    outside = Program(
        program.inputs, tuple(i for i in program.instructions if not isinstance(i, Loop)), program.outputs
    )
    assert inside + seconds(bill(outside, graph, costs), costs, shares) == pytest.approx(promised, rel=1e-9)
    assert inside > 0.3 * promised


def test_one_device_alone_talks_to_nobody() -> None:
    program, _ = planned("mlp", "slow-links", (1.0, 0.0, 0.0))
    assert not any(exchanges(instruction) for instruction in program.instructions)


def test_a_sum_that_one_class_reads_twice_is_added_up_once() -> None:
    """Both moments of adam read the gradient of a matrix that is used twice: one exchange, paid once."""

    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.mean((jnp.tanh(x @ w) @ w.T - x) ** 2)

    def step(w: jax.Array, first: jax.Array, second: jax.Array, x: jax.Array) -> tuple[jax.Array, ...]:
        gradient = jax.grad(loss)(w, x)
        first, second = 0.9 * first + 0.1 * gradient, 0.99 * second + 0.01 * gradient * gradient
        return w - 0.1 * first / (jnp.sqrt(second) + 1e-6), first, second

    graph = trace(step, *[shape(8, 16)] * 3, shape(64, 8)).graph
    added = (e.outputs[0] for e in graph.equations if e.primitive == "add_any")
    (joined,) = (value for value in added if value.type.shape == (8, 16))
    there, costs = Space(graph), model("slow-links")
    shares = (0.5, 0.25, 0.25)
    prices = Prices.at(costs, shares)
    outstanding = pin(there.root.choice[joined], lambda placement: placement == Partial("sum"))
    solution = solve(there, prices, extra=(outstanding,))
    program = emit(there, solution.assignment, prices)
    sums = [i for i in program.instructions if isinstance(i, Move) and i.value == joined.index]
    assert [move.pre for move in sums] == [Partial("sum")]
    assert seconds(bill(program, graph, costs), costs, shares) == pytest.approx(solution.seconds, rel=1e-9)


def perceptron(
    weights: tuple[jax.Array, ...], x: jax.Array, y: jax.Array
) -> tuple[tuple[jax.Array, ...], jax.Array]:
    """A step that reads its inputs `x` in several products, forwards and backwards."""

    def loss(weights: tuple[jax.Array, ...]) -> jax.Array:
        h = x
        for w in weights:
            h = jnp.tanh(h @ w)
        return jnp.mean((h - y) ** 2)

    value, gradients = jax.value_and_grad(loss)(weights)
    return tuple(w - 0.01 * g for w, g in zip(weights, gradients, strict=True)), value


@pytest.mark.parametrize("pinned", [None, R])
def test_an_argument_of_which_one_part_is_read_is_handed_in_as_that_part(pinned: Placement | None) -> None:
    rows = shape(4096, 64)
    graph = trace(perceptron, (shape(64, 64), shape(64, 64)), rows, rows).graph
    x, y = (graph.inputs[i] for i in (2, 3))
    whole, prices = Space(graph), Prices.at(model("slow-links"), (0.5, 0.3, 0.2))
    held_whole = [pin(whole.root.choice[x], lambda p: p == R)]
    assignment = solve(whole, prices, extra=held_whole).assignment
    program = emit(whole, assignment, prices, held_whole if pinned else ())
    verify(program, graph)
    cut = [
        i for i in program.instructions if isinstance(i, Move) and i.kind == "slice" and i.value == x.index
    ]
    assert program.inputs[graph.inputs.index(y)] == Shard(0)
    assert program.inputs[graph.inputs.index(x)] == (R if pinned else Shard(0))
    assert len(cut) == (1 if pinned else 0)
    costs = model("slow-links")
    cost_s = seconds(bill(program, graph, costs), costs, (0.5, 0.3, 0.2))
    assert cost_s == pytest.approx(solve(whole, prices).seconds, rel=1e-9)


def test_an_argument_that_is_also_read_whole_is_handed_in_whole() -> None:
    def step(w: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        return w - 0.1 * (x.T @ jnp.tanh(x @ w)), x

    graph = trace(step, shape(64, 64), shape(4096, 64)).graph
    everything, prices = Space(graph), Prices.at(model("slow-links"), (0.5, 0.3, 0.2))
    x = everything.root.choice[graph.inputs[1]]
    program = emit(everything, solve(everything, prices, extra=[pin(x, lambda p: p == R)]).assignment, prices)
    verify(program, graph)
    assert program.inputs[1] == program.outputs[1] == R


def chosen(w: jax.Array, x: jax.Array, labels: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A step whose gradient of what was looked up is scattered into zeros."""

    def loss(w: jax.Array) -> jax.Array:
        return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(x @ w), labels[:, None], axis=1))

    value, gradient = jax.value_and_grad(loss)(w)
    return w - 0.1 * gradient, value


def repeatedly(w: jax.Array, x: jax.Array, labels: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The same within a loop."""
    return jax.lax.scan(lambda w, _: chosen(w, x, labels), w, length=3)


@pytest.mark.parametrize("step", [chosen, repeatedly])
def test_zeros_of_which_one_part_is_read_are_made_as_that_part(step: Callable[..., Any]) -> None:
    labels = jax.ShapeDtypeStruct((4096,), np.int32)
    graph = trace(step, shape(64, 512), shape(4096, 64), labels).graph
    costs, shares = model("slow-links"), (0.5, 0.3, 0.2)
    whole, prices = Space(graph), Prices.at(costs, shares)
    frame = whole.root
    if step is repeatedly:
        ((frame,),) = frame.children.values()
    scatter = next(e for e in frame.graph.equations if e.primitive == "scatter-add")
    zeros = scatter.input_values[0]
    x = next(value for value in frame.graph.inputs if value.type.shape == (4096, 64))
    cut = [pin(frame.choice[value], lambda p: p == Shard(0)) for value in (x, scatter.outputs[0])]
    made_whole = pin(frame.choice[zeros], lambda p: p == R)
    least_s = solve(whole, prices, extra=cut).seconds
    assignment = solve(whole, prices, extra=[*cut, made_whole]).assignment
    program = emit(whole, assignment, prices)
    verify(program, graph)
    instructions = program.instructions
    if step is repeatedly:
        ((body,),) = (i.bodies for i in instructions if isinstance(i, Loop))
        instructions = body.instructions
    maker = next(e.index for e in frame.graph.equations if zeros in e.outputs)
    (made,) = (i for i in instructions if isinstance(i, Compute) and i.equation == maker)
    assert made.signature.outs == (Shard(0),)
    assert not [i for i in instructions if isinstance(i, Move) and i.value == zeros.index]
    told, anew = wires(program, graph), wired(program.instructions, graph)
    assert list(map(told.keys, told.reads)) == list(map(anew.keys, anew.reads))
    assert list(map(told.keys, told.makes)) == list(map(anew.keys, anew.makes))
    cost_s = seconds(bill(program, graph, costs), costs, shares)
    assert cost_s == pytest.approx(least_s, rel=1e-9)
