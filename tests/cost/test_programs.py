"""What goes through memory; bill, timeline and memory of programs written by hand."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cost_cases import CPU, S0, S1, SLOW, SUM, f32, graph_of, model_of

from shardwright.cost.bill import Cut, bill, seconds
from shardwright.cost.memory.liveness import footprint, peak_bytes
from shardwright.cost.timeline import timeline
from shardwright.ir.graph import Graph
from shardwright.ir.placement import R
from shardwright.ir.program import Compute, Loop, Move, Program, verify
from shardwright.ir.rules import Signature
from shardwright.ir.trace import trace
from shardwright.memory.device_memory import peaks

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
