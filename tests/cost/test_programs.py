"""What goes through memory; bill, timeline and memory of programs written by hand."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cost_cases import CPU, S0, S1, SLOW, SUM, f32, graph_of, model_of, only, price

from shardwright.cost.bill import Cut, bill, seconds
from shardwright.cost.memory.liveness import footprint, peak_bytes
from shardwright.cost.timeline import timeline
from shardwright.cost.traffic import Traffic, traffic
from shardwright.ir.donation import donating
from shardwright.ir.graph import Graph
from shardwright.ir.placement import Placement, R
from shardwright.ir.program import Compute, Loop, Move, Program, verify
from shardwright.ir.rules import Signature
from shardwright.ir.trace import trace
from shardwright.memory.device_memory import peaks

# ---------------------------------------------------------------------------------------------------
# Traffic


def through(function: Any, *args: Any) -> list[tuple[str, Traffic]]:
    graph = graph_of(function, *args)
    found = traffic(graph)
    return [(e.primitive, found[e]) for e in graph.equations]


def test_an_elementwise_chain_moves_its_ends_only() -> None:
    assert through(lambda x: jnp.sin(jnp.exp(jnp.tanh(x))), f32(8)) == [
        ("tanh", Traffic((True,), (False,))),
        ("exp", Traffic((False,), (False,))),
        ("sin", Traffic((False,), (True,))),
    ]


def test_a_reduction_reads_registers_and_writes() -> None:
    assert through(lambda x: jnp.sum(jnp.exp(x)), f32(8)) == [
        ("exp", Traffic((True,), (False,))),
        ("reduce_sum", Traffic((False,), (True,))),
    ]


def test_a_contraction_needs_its_operands_in_memory() -> None:
    assert through(lambda x, y: jnp.exp(x) @ y, f32(8, 4), f32(4, 8)) == [
        ("exp", Traffic((True,), (True,))),
        ("dot_general", Traffic((True, True), (True,))),
    ]


def test_loops_of_one_fusion_read_a_tensor_once() -> None:
    steps = through(lambda x: (jnp.sin(x), jnp.cos(x)), f32(8))
    assert [t.ins for _, t in steps] == [(True,), (False,)]
    assert [t.outs for _, t in steps] == [(True,), (True,)]  # both are handed out


def test_a_transpose_that_contractions_read_is_folded() -> None:
    assert through(lambda x, y: x.T @ y, f32(4, 8), f32(4, 8))[0] == (
        "transpose",
        Traffic((False,), (False,)),
    )
    read_otherwise = through(lambda x, y: (x.T @ y, jnp.sin(x.T)), f32(4, 8), f32(4, 8))
    assert dict(read_otherwise)["transpose"] != Traffic((False,), (False,))


def test_a_reshape_is_where_its_operand_is() -> None:
    # A chain through a reshape stays in registers; a reshape of an input is in memory as the input is.
    inside = dict(through(lambda x: jnp.sin(jnp.exp(x).reshape(2, 4)), f32(8)))
    assert inside["exp"].outs == inside["reshape"].outs == inside["sin"].ins == (False,)
    outside = dict(through(lambda x: jnp.sin(x.reshape(2, 4)), f32(8)))
    assert outside["reshape"].outs == outside["sin"].ins == (True,)


def put(operand: Any, row: Any, number: int) -> Any:
    return jax.lax.dynamic_update_index_in_dim(operand, row, number, 0)


def test_rows_that_are_taken_or_written_go_through_memory_alone() -> None:
    def added(total: Any, row: Any) -> Any:
        return put(total, jax.lax.dynamic_index_in_dim(total, row.argmax(), keepdims=False) + row, 3)

    total, row = f32(6, 8), f32(8)
    graph = graph_of(
        lambda total, rows: jax.lax.scan(lambda c, x: (added(c, x), None), total, rows)[0], total, f32(5, 8)
    )
    (loop,) = graph.equations
    body = loop.regions[0]
    taken, written = only(body, "dynamic_slice"), only(body, "dynamic_update_slice")
    assert traffic(body)[taken].nbytes(taken)[0] == row.size * 4
    moved = traffic(body)[written]
    assert moved.in_place and sum(moved.nbytes(written)) == row.size * 4
    assert moved.nbytes(written, rows=False)[-1] == total.size * 4

    # What the caller keeps is copied first; so is what somebody reads later.
    written_in_place = {
        "the caller's": lambda x, row: put(x, row, 3),
        "its own": lambda x, row: put(jnp.cumsum(x, 0), row, 3),
        "a constant": lambda x, row: put(np.ones((6, 8), np.float32), row, 3),
        "made on the way": lambda x, row: put(jnp.exp(x), row, 3),
        "read later": lambda x, row: (y := jnp.cumsum(x, 0), put(y, row, 3), jnp.sin(y))[1:],
        "handed out": lambda x, row: (y := jnp.cumsum(x, 0), put(y, row, 3)),
    }
    found = {
        name: dict(through(step, total, row))["dynamic_update_slice"].in_place
        for name, step in written_in_place.items()
    }
    assert [name for name, in_place in found.items() if in_place] == ["its own"]
    # Of a donated step that is its state; what it is given beside that stays the caller's.
    step = trace(lambda s, x, row: (put(s, row, 3), put(x, row, 3).sum()), total, total, row)
    graph = donating(step, True).graph
    assert graph.state == {0: 0}
    both = [traffic(graph)[e].in_place for e in graph.equations if e.primitive == "dynamic_update_slice"]
    assert both == [True, False]


def test_where_devices_share_the_rows_each_goes_through_all_of_its_own() -> None:
    graph = graph_of(lambda x, row: put(jnp.cumsum(x, 0), row, 3), f32(64, 1024), f32(1024))
    written = only(graph, "dynamic_update_slice")
    moved, model = traffic(graph)[written], model_of(CPU, CPU)
    starts, device = (R,) * (len(written.inputs) - 2), model.types[0]

    def memory_s(at: Placement, update: Placement) -> float:
        cost = price(model, written, Signature((at, update, *starts), (at,)), moved)
        return float(cost.exact(np.array([0.5, 0.5]))) - device.launch_s

    row_s = 1024 * 4 / device.bandwidth_byte_per_s
    assert memory_s(R, R) == pytest.approx(row_s)
    assert memory_s(S1, S1) == pytest.approx(row_s / 2)
    # It reads half of them, and writes them.
    assert memory_s(S0, R) == pytest.approx(2 * 64 / 2 * row_s, rel=0.1)


# ---------------------------------------------------------------------------------------------------
# Bill and timeline of programs written by hand


def two_products() -> tuple[Graph, Program]:
    """A column-parallel product, a row-parallel one, and the all-reduce between it and the end."""
    graph = graph_of(lambda x, a, b: (x @ a) @ b, f32(32, 64), f32(64, 128), f32(128, 16))
    x, a, b = graph.inputs
    first, second = graph.equations
    (y,), (z,) = first.outputs, second.outputs
    program = Program(
        (R, S1, S0),
        (
            Compute(0, Signature((R, S1), (S1,))),
            Compute(1, Signature((S1, S0), (SUM,))),
            Move("all_reduce", z.index, SUM, R, "ring"),
        ),
        (R,),
    )
    assert (x.index, a.index, b.index) == (0, 1, 2) and y.type.shape == (32, 128)
    verify(program, graph)
    return graph, program


def test_the_bill_adds_the_slowest_device_of_every_instruction() -> None:
    graph, program = two_products()
    model = model_of(CPU, SLOW)
    items = bill(program, graph, model)
    assert [(item.label, item.cut, item.exchange) for item in items] == [
        ("dot_general", Cut(128, 1), False),
        ("dot_general", Cut(128, 1), False),
        ("all_reduce.ring", None, True),
    ]
    ratios = (0.75, 0.25)

    def slowest(flop: float, whole: float, split: float) -> float:
        times = [
            launch + max(share * flop / rate, (whole + share * split) / width)
            for share, rate, width, launch in zip(ratios, (20e9, 5e9), (10e9, 2e9), (2e-6, 8e-6), strict=True)
        ]
        return max(times)

    wanted = slowest(2 * 32 * 64 * 128, 4 * 32 * 64, 4 * (64 * 128 + 32 * 128))
    wanted += slowest(2 * 32 * 128 * 16, 4 * 32 * 16, 4 * (32 * 128 + 128 * 16))
    wanted += 2 * (1e-6 + 4 * 32 * 16 / 2 / 1e9)
    assert seconds(items, model, ratios) == pytest.approx(wanted, rel=1e-12)


def test_the_timeline_adds_up_before_it_waits() -> None:
    graph, program = two_products()
    model = model_of(CPU, SLOW)
    items = bill(program, graph, model)
    ratios = (0.9, 0.1)
    per_device = [item.weight * item.cost.per_device(np.array(ratios), model.class_of) for item in items]
    laid_out = timeline(items, model, ratios)
    assert laid_out.compute_s == pytest.approx(
        per_device[0] + per_device[1], rel=0.05
    )  # rounded to whole units
    assert laid_out.exchange_s == pytest.approx(per_device[2].max())
    assert laid_out.iteration_s == pytest.approx(max(laid_out.compute_s) + laid_out.exchange_s)
    assert laid_out.iteration_s <= seconds(items, model, ratios) + 1e-15


# ---------------------------------------------------------------------------------------------------
# Memory


def test_footprint_of_two_products() -> None:
    graph, program = two_products()
    # Inputs all along; y while both products run; z twice (Partial and reduced) at the end, y freed.
    inputs_whole, inputs_shared = 4 * 32 * 64, 4 * (64 * 128 + 128 * 16)
    y, z = 4 * 32 * 128, 4 * 32 * 16
    for share in (0.0, 0.5, 1.0):
        moments = [
            inputs_whole + share * (inputs_shared + y),
            inputs_whole + share * (inputs_shared + y) + z,
            inputs_whole + share * inputs_shared + 2 * z,
        ]
        assert footprint(program, graph).peak(np.array([share])) == pytest.approx([max(moments)])
    assert peak_bytes(program, graph, (1.0, 0.0)) == (
        inputs_whole + inputs_shared + y + z,
        inputs_whole + 2 * z,
    )


def test_the_old_state_stays_beside_the_new() -> None:
    def step(w: Any, x: Any) -> Any:
        return w - x

    args = (f32(100), f32(100))
    programs = {
        "state": trace(step, *args).graph,
        "no state": trace(step, *args, state={}).graph,
    }
    program = Program((S0, S0), (Compute(0, Signature((S0, S0), (S0,))),), (S0,))
    peaks = {name: peak_bytes(program, graph, (0.5, 0.5)) for name, graph in programs.items()}
    # Two arguments and a result: the old state is there until the new one is whole.
    assert peaks == {"state": (600, 600), "no state": (600, 600)}


def test_registers_take_no_memory_and_renaming_takes_none_either() -> None:
    chain = graph_of(lambda x: jnp.sin(jnp.exp(x)), f32(100))
    steps = tuple(Compute(e.index, Signature((R,), (R,))) for e in chain.equations)
    assert peak_bytes(Program((R,), steps, (R,)), chain, (1.0,)) == (800,)
    # x @ w, a reshape of it, and a product with the reshaped: the reshape is the first product.
    renamed = graph_of(lambda x, w, v: (x @ w).reshape(5, 40) @ v, f32(10, 10), f32(10, 20), f32(40, 3))
    steps = tuple(Compute(e.index, Signature((R,) * len(e.inputs), (R,))) for e in renamed.equations)
    assert [e.primitive for e in renamed.equations] == ["dot_general", "reshape", "dot_general"]
    assert peak_bytes(Program((R, R, R), steps, (R,)), renamed, (1.0,)) == (4 * (100 + 200 + 120 + 200 + 15),)


@pytest.mark.parametrize(
    ("step", "kept"),
    [
        (lambda m, x, w: 0.9 * m + x @ w, False),
        (lambda m, x, w: (m @ m) + x @ w, True),  # a product stays where it is
    ],
)
def test_what_is_made_of_arguments_for_a_later_stretch_is_made_there(step: Any, kept: bool) -> None:
    graph = graph_of(step, *(f32(64, 64),) * 3)
    _, x, w = graph.inputs
    product = next(e for e in graph.equations if e.input_values == (x, w))
    (y,) = product.outputs
    # All that needs no gradient comes first, as rounds have it; then the gradient and its all-reduce.
    after = [e for e in graph.equations if y in e.input_values]
    first = [e for e in graph.equations if e is not product and e not in after]

    def whole(some: Any) -> list[Compute]:
        return [Compute(e.index, Signature((R,) * len(e.inputs), (R,))) for e in some]

    reduced = (
        Compute(product.index, Signature((S1, S0), (SUM,))),
        Move("all_reduce", y.index, SUM, R, "ring"),
    )
    program = Program((R, S1, S0), (*whole(first), *reduced, *whole(after)), (R,))
    verify(program, graph)
    one = 4 * 64 * 64
    # One whole argument and two halves; the gradient before and after it is added up, or it and the result.
    assert peak_bytes(program, graph, (0.5, 0.5)) == ((4 + kept) * one,) * 2
    assert peaks(program, graph, (0.5, 0.5)) == ((4 + kept) * one,) * 2


def test_constants_are_held_by_every_device_all_along() -> None:
    table = np.ones((50, 4), np.float32)
    graph = graph_of(lambda x: x @ table, f32(8, 50))
    program = Program((S0,), (Compute(0, Signature((S0, R), (S0,))),), (S0,))
    verify(program, graph)
    assert peak_bytes(program, graph, (0.5, 0.5)) == (800 + (1600 + 128) // 2,) * 2


def test_a_loop_adds_its_bodys_peak_to_what_it_stacks_up() -> None:
    def body(carry: Any, x: Any) -> tuple[Any, Any]:
        h = (carry @ x) @ x
        return h, h

    graph = graph_of(lambda c, xs: jax.lax.scan(body, c, xs), f32(8, 8), f32(5, 8, 8))
    (loop,) = graph.equations
    (region,) = loop.regions
    inside = tuple(Compute(e.index, Signature((R, R), (R,))) for e in region.equations)
    assert [e.primitive for e in region.equations] == ["dot_general", "dot_general"]
    signature = Signature((R, R), (R, R))
    program = Program((R, R), (Loop(loop.index, signature, (Program((R, R), inside, (R, R)),)),), (R, R))
    verify(program, graph)
    unit = 4 * 8 * 8
    # The body has two slices, and one product; the other goes where results are stacked up.
    operands, stacked, carried, body_peak = 6 * unit, 5 * unit, unit, 3 * unit
    assert peak_bytes(program, graph, (1.0,)) == (operands + stacked + carried + body_peak,)
