"""Cutting programs into steps: what they need and give, and when buffers go."""

import random
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from greedy import build
from steps import STEPS, array, starts

from shardwright.backends.schedule.acts import Order, Repeat
from shardwright.backends.schedule.order import arrange
from shardwright.ir.flow import inputs, is_local, outputs
from shardwright.ir.graph import Graph
from shardwright.ir.placement import R, Shard
from shardwright.ir.program import Compute, Loop, Move, Program, Property
from shardwright.ir.rewrites.rewriting import Rewriting, rewritten
from shardwright.ir.segments import Exchange, LoopStep, Schedule, Segment, schedule
from shardwright.ir.trace import trace
from shardwright.synth.stretches import stretches


def programmed(name: str, start: str, seed: int | None, again: Any = None) -> tuple[Program, Graph]:
    """A program between random placements; `again`: what layers keep that are computed again."""
    step, args = STEPS[name]()
    traced = trace(step, *args)
    if again is not None:
        every = tuple(replace(each, keep=again) for each in stretches(traced.graph))
        traced = rewritten(traced, Rewriting(every))
    graph = traced.graph
    return build(graph, starts(graph)[start], None if seed is None else random.Random(seed)), graph


def made(*how: Any) -> Schedule:
    return schedule(*programmed(*how))


@pytest.mark.parametrize("again", [None, "products", "nothing"])
@pytest.mark.parametrize("seed", [None, 0, 1])
@pytest.mark.parametrize("start", ["data", "last"])
@pytest.mark.parametrize("name", STEPS)
def test_steps_find_what_they_need_and_nothing_stays_too_long(
    name: str, start: str, seed: int | None, again: Any
) -> None:
    program, graph = programmed(name, start, seed, again)
    walk(schedule(program, graph))
    for bucket_bytes in (None, 1 << 20):
        in_order(arrange(program, graph, bucket_bytes))


def in_order(order: Order) -> None:
    """Everything is there when a rank reads it."""
    held = set(inputs(order.program, order.graph))
    for act in order.steps:
        assert held >= set(act.needs)
        held = (held | set(act.gives)) - set(act.drops)
        if isinstance(act, Repeat):
            for body in act.bodies:
                in_order(body)
    assert held >= set(outputs(order.program, order.graph))


def walk(cut: Schedule) -> None:
    held = set(inputs(cut.program, cut.graph))
    kept = set(outputs(cut.program, cut.graph))
    for position, step in enumerate(cut.steps):
        later = set(kept)  # what is read before it is computed anew
        for after in reversed(cut.steps[position + 1 :]):
            later = (later - set(after.gives)) | set(after.needs)
        assert held >= set(step.needs)
        held |= set(step.gives)
        held -= set(step.drops)
        if isinstance(step, Segment):
            assert set(step.gives) <= later
        assert set(step.drops) == (set(step.needs) | set(step.gives)) - later
        if isinstance(step, LoopStep):
            for body in step.bodies:
                walk(body)
    assert held >= kept


def test_segments_are_maximal_and_have_every_instruction() -> None:
    cut = made("mlp", "data", 0)
    flat = [i for s in cut.steps for i in (s.instructions if isinstance(s, Segment) else (s_of(s),))]
    assert set(flat) == set(cut.program.instructions)
    exchanges = [i for i in cut.program.instructions if not is_local(i)]
    assert [i for i in flat if not is_local(i)] == exchanges
    assert not any(
        isinstance(a, Segment) and isinstance(b, Segment)
        for a, b in zip(cut.steps, cut.steps[1:], strict=False)
    )


@pytest.mark.parametrize("name", STEPS)
def test_late_instructions_hand_on_less(name: str) -> None:
    step, args = STEPS[name]()
    graph = trace(step, *args).graph
    program = build(graph, starts(graph)["data"])

    def handed_on(cut: Schedule) -> int:
        given = [prop for s in cut.steps if isinstance(s, Segment) for prop in s.gives]
        return sum(cut.types[prop.value].nbytes for prop in given)

    assert handed_on(schedule(program, graph)) <= handed_on(schedule(program, graph, early=True))


def test_what_an_update_needs_besides_its_gradient_is_computed_with_it() -> None:
    def step(w: jax.Array, m: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        m = 0.9 * m + jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w)))(w)
        return w - 0.1 * m, m

    graph = trace(step, array(4, 4), array(4, 4), array(8, 4)).graph
    program = build(graph, [R, R, Shard(0)])
    first, *_ = schedule(program, graph).steps
    written, *_ = schedule(program, graph, early=True).steps
    assert isinstance(first, Segment)
    assert isinstance(written, Segment)
    assert (len(first.gives), len(written.gives)) == (1, 2)


def test_what_is_cheap_is_computed_again_unless_it_is_in_memory() -> None:
    def step(w: jax.Array, x: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
        h = x @ w
        squares = h * h  # only added up: the segment behind the sum makes them of h, which it reads
        doubled = h + h  # multiplied by: in memory
        return squares * jnp.sum(squares) + h, doubled * jnp.sum(doubled @ v)

    graph = trace(step, array(4, 4), array(8, 4), array(4, 4), state={}).graph
    cut = schedule(build(graph, [R, Shard(0), R]), graph)
    segments = [s for s in cut.steps if isinstance(s, Segment)]
    inside = [i for s in segments for i in s.instructions if isinstance(i, Compute)]
    assert len(inside) == len(graph.equations) + 1
    again = {i.equation for i in inside if inside.count(i) > 1}
    (squares,) = (e for e in again if graph.equations[e].primitive == "mul")
    assert len(set(graph.equations[squares].inputs)) == 1
    assert len(segments[0].gives) == 2  # h and the sum


def s_of(step: Exchange | LoopStep) -> Move | Loop:
    return step.move if isinstance(step, Exchange) else step.loop


def test_loops_without_exchanges_stay_in_segments() -> None:
    def step(x: jax.Array, ws: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda h, w: (h @ w, None), x, ws)[0]

    graph = trace(step, array(4, 3), array(2, 3, 3), state={}).graph
    program = build(graph, [Shard(0), R])
    fused, inspected = schedule(program, graph).steps, schedule(program, graph, inspect=True).steps
    assert isinstance(fused[0], Segment)
    assert isinstance(fused[0].instructions[0], Loop)
    assert isinstance(inspected[0], LoopStep)


def test_inspection_hands_on_every_value() -> None:
    step, args = STEPS["mlp"]()
    graph = trace(step, *args).graph
    program: Program = build(graph, starts(graph)["data"])
    given = {prop for s in schedule(program, graph, inspect=True).steps for prop in s.gives}
    for instruction in program.instructions:
        if isinstance(instruction, Compute):
            value = graph.equations[instruction.equation].outputs[0]
            assert Property(value.index, instruction.signature.outs[0]) in given
    assert len(jax.tree.leaves(args)) == len(graph.inputs)
