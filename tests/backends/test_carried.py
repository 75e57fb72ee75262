"""What a loop of the host carries, and donated state, stays in one place: what memory that takes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from greedy import build
from steps import nested, summed

from shardwright.backends.mpi.donated import given_away
from shardwright.backends.schedule.acts import Order
from shardwright.cost.memory.liveness import footprint
from shardwright.ir import carried
from shardwright.ir.carried import (
    carried_in_place,
    carries,
    handed_over,
    in_place,
    olds,
    read_by,
    stacked,
    written_over,
)
from shardwright.ir.donation import donating, taken_over
from shardwright.ir.graph import Equation, Graph, Value
from shardwright.ir.placement import R, Shard
from shardwright.ir.program import Move, Program, Property
from shardwright.ir.segments import Back, Exchange, LoopStep, Schedule, Segment, schedule
from shardwright.ir.trace import trace
from shardwright.memory import walk
from shardwright.memory.device_memory import device_memory

WIDTH = 2048
RATIOS = (0.5, 0.5)


@pytest.fixture(scope="module")
def summing() -> tuple[Program, Graph]:
    """A loop that is run by the host, since it reduces and scatters what it adds up."""
    step, args = summed(WIDTH)
    graph = trace(step, *args).graph
    return build(graph, [R, Shard(1), Shard(0)]), graph


def in_its_place(loop: LoopStep, equation: Equation) -> frozenset[int]:
    taken = [olds(written_over(body, equation, number)) for number, body in enumerate(loop.bodies)]
    return carried_in_place(loop.bodies, equation, taken)


def the_loop(planned: Schedule) -> LoopStep:
    (loop,) = (step for step in planned.steps if isinstance(step, LoopStep))
    return loop


def test_what_is_read_as_the_last_is_written_over(summing: tuple[Program, Graph]) -> None:
    planned = schedule(*summing)
    loop = the_loop(planned)
    equation, (body,) = planned.graph.equations[loop.loop.equation], loop.bodies
    over = written_over(body, equation, 0)
    taken = {old for pairs in over.values() for old in pairs.values()}
    for step, pairs in over.items():
        for new, old in pairs.items():
            assert new in step.gives and old in step.needs and new.placement == old.placement
            later = body.steps[body.steps.index(step) + 1 :]
            assert all(old not in each.needs for each in later)
    # Not what is carried once more as it was, nor what is handed on twice, nor a number that is reduced.
    names = ["late", "alone", "one", "other", "moved", "size", "twice", "twice again", "late before"]
    kept = in_place(body, equation, 0, taken)
    mine = zip(names, carries(equation, 0), strict=True)
    assert [name for name, carry in mine if carry.operand in kept] == ["alone", "one", "other", "moved"]
    # Of these only one begins with what nobody else has: the others with one tensor, and with an argument.
    begun = [read_by(loop, planned.graph)[carry.operand] for carry in carries(equation, 0)]
    assert handed_over(planned, loop, kept) == {begun[names.index("alone")]}
    # What an exchange has made anew meanwhile lies in memory of its own.
    before = planned.steps.index(loop)
    (alone,) = handed_over(planned, loop, kept)
    anew = Exchange(0, Move("all_gather", 0, R, R, "exact"), (Property(0, R),), (alone,))
    again = replace(planned, steps=(*planned.steps[:before], anew, loop))
    assert handed_over(again, loop, kept) == frozenset()
    # The means, of which every iteration makes one.
    assert [planned.types[prop.value].shape for prop in stacked(loop, planned.graph)] == [(4,)]


def test_memory_counts_it_once(summing: tuple[Program, Graph], monkeypatch: pytest.MonkeyPatch) -> None:
    program, graph = summing

    def while_it_runs() -> int:
        (moment,) = (m for m in device_memory(program, graph, RATIOS, 0).moments if m.what == "loop")
        return moment.nbytes

    once = while_it_runs()
    monkeypatch.setattr(walk, "written_over", lambda *args: {})
    monkeypatch.setattr(carried, "written_over", lambda *args: {})
    one = 6 * WIDTH * 4 // 2
    # At its fullest, three were made beside what was carried in, and one is there as the loop began.
    assert while_it_runs() == pytest.approx(once + 4 * one, rel=1e-3)


def test_the_model_of_memory_counts_it_once(summing: tuple[Program, Graph]) -> None:
    program, graph = summing
    found = footprint(program, graph).peak(np.array(RATIOS))
    peak = device_memory(program, graph, RATIOS, 0).peak_bytes
    assert found[0] == pytest.approx(peak, rel=0.1)


@pytest.mark.parametrize("start", [Shard(1), Shard(2)])
def test_a_loop_within_carries_it_on_in_its_place(start: Shard, monkeypatch: pytest.MonkeyPatch) -> None:
    step, args = nested(WIDTH // 4)
    graph = trace(step, *args).graph
    program = build(graph, [start, R])
    planned = schedule(program, graph)
    loop = the_loop(planned)
    equation, (body,) = planned.graph.equations[loop.loop.equation], loop.bodies
    (inner,) = (one for one in body.steps if isinstance(one, LoopStep))
    (pair,) = written_over(body, equation, 0)[inner].items()
    assert [prop.placement for prop in pair] == [start, start]
    assert in_its_place(loop, equation) == {len(equation.inputs) - 2}

    def peak() -> int:
        return device_memory(program, graph, RATIOS, 0).peak_bytes

    found = footprint(program, graph).peak(np.array(RATIOS))
    once = peak()
    assert found[0] == pytest.approx(once, rel=0.1)
    monkeypatch.setattr(walk, "written_over", lambda *args: {})
    monkeypatch.setattr(carried, "written_over", lambda *args: {})
    assert peak() > once + graph.inputs[0].type.nbytes // 2


def test_what_another_loop_within_reads_too_is_not_written_over() -> None:
    """It may hand out what came in."""
    step, args = nested(8)

    def twice(w: jax.Array, x: jax.Array) -> Any:
        def piece(sums: jax.Array, rows: jax.Array) -> tuple[jax.Array, jax.Array]:
            first, _ = step(sums, rows[None])
            second, _ = step(sums, 2 * rows[None])
            return first + second, jnp.mean(rows)

        return jax.lax.scan(piece, w, x)

    graph = trace(twice, *args, state={}).graph
    planned = schedule(build(graph, [Shard(2), R]), graph)
    loop = the_loop(planned)
    equation, (body,) = planned.graph.equations[loop.loop.equation], loop.bodies
    assert not [one for one in written_over(body, equation, 0) if isinstance(one, LoopStep)]
    assert in_its_place(loop, equation) == frozenset()


def test_what_is_handed_out_is_not_written_over(summing: tuple[Program, Graph]) -> None:
    planned = schedule(*summing)
    loop = the_loop(planned)
    (body,) = loop.bodies
    equation = planned.graph.equations[loop.loop.equation]
    handed_out = {
        Property(atom.index, at)
        for atom, at in zip(body.graph.outputs, body.program.outputs, strict=True)
        if isinstance(atom, Value)
    }
    over = written_over(body, equation, 0)
    assert not handed_out.intersection(old for pairs in over.values() for old in pairs.values())


@pytest.mark.parametrize("stays", [False, True])
def test_what_a_reload_found_on_the_device_keeps_its_memory(
    summing: tuple[Program, Graph], stays: bool
) -> None:
    """It is the same array under another name, which may be read later."""
    program, graph = summing
    old, again, new = (Property(value.index, R) for value in graph.inputs)
    back = Back(0, (), (old,), (again,), frozenset([old] * stays))
    last = Segment(1, (), (old,), (new,), (old,))
    order = Order(program, graph, (back, last), schedule(program, graph).types, ())
    assert given_away(order, {old}, 0, 2) == ({} if stays else {last: {old}})


def test_state_of_which_something_is_made_early_is_taken_over_in_the_model_of_memory_too() -> None:
    """Written first, it is computed where it is read: by the segment that takes that state's memory."""

    def early(w: Any, moments: Any, x: Any) -> Any:
        decayed = [0.9 * m for m in moments]
        gradient = x.T @ jnp.tanh(x @ w)
        return w - 0.1 * gradient, [m + gradient for m in decayed]

    square = jnp.ones((256, 256))
    graph = donating(trace(early, square, [square] * 8, jnp.ones((8, 256))), True).graph
    program = build(graph, [Shard(1)] * 9 + [Shard(0)])
    # Of padded exchanges the model counts buffers where shares are even, too.
    exact = [replace(i, strategy="exact") if isinstance(i, Move) else i for i in program.instructions]
    program = replace(program, instructions=tuple(exact))
    taken = {old.value for over in taken_over(schedule(program, graph)).values() for old in over.values()}
    assert taken == {value.index for value in graph.inputs[:9]}
    found = footprint(program, graph).peak(np.array(RATIOS))
    assert found[0] == pytest.approx(device_memory(program, graph, RATIOS, 0).peak_bytes, rel=0.02)
