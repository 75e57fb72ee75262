"""What goes through memory, and what XLA keeps in registers."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cost_cases import CPU, S0, S1, SUM, f32, graph_of, model_of, only, price
from jax import lax

from shardwright.cost.grid.kernels import Ways
from shardwright.cost.lines import Kernel, kernel_lines
from shardwright.cost.traffic import Traffic, traffic
from shardwright.ir.donation import donating
from shardwright.ir.pairs import pairs
from shardwright.ir.placement import Placement, R
from shardwright.ir.registry import rule_of
from shardwright.ir.rules import Signature, signatures
from shardwright.ir.trace import trace


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


AT = np.array([[3]])


def looked_up(table: Any, at: Any) -> Any:
    """Rows of a table."""
    numbers = lax.GatherDimensionNumbers(offset_dims=(1,), collapsed_slice_dims=(0,), start_index_map=(0,))
    return lax.gather(table, at, numbers, (1, table.shape[1]), mode=lax.GatherScatterMode.CLIP)


def scattered(table: Any, at: Any, rows: Any) -> Any:
    """A table with rows added to its own."""
    numbers = lax.ScatterDimensionNumbers(
        update_window_dims=(1,), inserted_window_dims=(0,), scatter_dims_to_operand_dims=(0,)
    )
    return lax.scatter_add(table, at, rows.reshape(len(at), -1), numbers)


def put(operand: Any, row: Any, number: int) -> Any:
    return lax.dynamic_update_index_in_dim(operand, row, number, 0)


def test_rows_that_are_taken_or_written_go_through_memory_alone() -> None:
    def added(total: Any, row: Any) -> Any:
        return put(total, lax.dynamic_index_in_dim(total, row.argmax(), keepdims=False) + row, 3)

    total, row = f32(6, 8), f32(8)
    graph = graph_of(
        lambda total, rows: lax.scan(lambda c, x: (added(c, x), None), total, rows)[0], total, f32(5, 8)
    )
    (loop,) = graph.equations
    body = loop.regions[0]
    taken, written = only(body, "dynamic_slice"), only(body, "dynamic_update_slice")
    assert traffic(body)[taken].moved(taken).nbytes[0] == row.size * 4
    assert traffic(body)[written].in_place
    moved = traffic(body)[written].moved(written)
    assert sum(moved.under(R)) == sum(moved.under(S1)) == row.size * 4
    assert moved.under(S0)[-1] == total.size * 4

    # What the caller keeps is copied first; so is what somebody reads later.
    written_in_place = {
        "the caller's": lambda x, row: put(x, row, 3),
        "its own": lambda x, row: put(jnp.cumsum(x, 0), row, 3),
        "its own, at any place": lambda x, row: scattered(jnp.cumsum(x, 0), AT, row),
        "a constant": lambda x, row: put(np.ones((6, 8), np.float32), row, 3),
        "made on the way": lambda x, row: put(jnp.exp(x), row, 3),
        "read later": lambda x, row: (y := jnp.cumsum(x, 0), put(y, row, 3), jnp.sin(y))[1:],
        "scattered into, read later": lambda x, row: (
            y := jnp.cumsum(x, 0),
            scattered(y, AT, row),
            jnp.sin(y),
        )[1:],
        "handed out": lambda x, row: (y := jnp.cumsum(x, 0), put(y, row, 3)),
    }
    found = {
        name: any(t.in_place for _, t in through(step, total, row)) for name, step in written_in_place.items()
    }
    assert [name for name, in_place in found.items() if in_place] == ["its own", "its own, at any place"]
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


def test_rows_that_are_looked_up_move_as_many_bytes_as_xla_counts() -> None:
    table, at, rows = f32(500, 8), jax.ShapeDtypeStruct((7, 1), jnp.int32), f32(7, 8)
    # Of a body, which may write over what it is given.
    graph = graph_of(
        lambda t, at: lax.fori_loop(0, 5, lambda _, t: scattered(t, at, looked_up(t, at)), t), table, at
    )
    (body,) = (region for e in graph.equations for region in e.regions if len(region.equations) > 2)
    for primitive, function, args in (
        ("gather", looked_up, (table, at)),
        ("scatter-add", scattered, (table, at, rows)),
    ):
        equation = only(body, primitive)
        ours, xlas = traffic(body)[equation].moved(equation), jax.jit(function).lower(*args).cost_analysis()
        assert sum(ours.nbytes) == xlas["bytes accessed"]


#: What becomes of rows `g` that were scattered into zeros; `t` is a table, `put` scatters others into one.
Continued: TypeAlias = Callable[[Any, Any, Callable[[Any], Any]], Any]
ADDED: dict[str, tuple[Continued, str]] = {
    "to what is made for it": (lambda g, t, put: g + jnp.cumsum(t, 0), "into it"),
    "from the left": (lambda g, t, put: jnp.cumsum(t, 0) + g, "into it"),
    "to what loops make": (lambda g, t, put: jnp.sin(t) + g, "into it"),
    "to what is read later": (
        lambda g, t, put: (y := jnp.cumsum(t, 0), y + g, jnp.sin(y))[1:],
        "into a copy",
    ),
    "to the caller's": (lambda g, t, put: t + g, "into a copy"),
    "to what is scattered into zeros": (lambda g, t, put: put(jnp.zeros((500, 8))) + g, "into zeros"),
    "and read besides": (lambda g, t, put: (jnp.cumsum(t, 0) + g, jnp.cumsum(g, 0)), "into zeros"),
    "multiplied before": (lambda g, t, put: jnp.cumsum(t, 0) + 3 * g, "into zeros"),
    "handed out": (lambda g, t, put: (jnp.cumsum(t, 0) + g, g), "into zeros"),
    "to a number": (lambda g, t, put: g + 1, "into zeros"),
    "to nothing": (lambda g, t, put: g, "into zeros"),
}


@pytest.mark.parametrize("name", ADDED)
def test_what_is_scattered_into_zeros_is_scattered_into_what_it_is_added_to(name: str) -> None:
    continued, expected = ADDED[name]

    def step(table: Any, at: Any, rows: Any, others: Any) -> Any:
        zeros = jnp.zeros(table.shape)
        return continued(scattered(zeros, at, rows), table, lambda to: scattered(to, at, others))

    args = f32(500, 8), jax.ShapeDtypeStruct((7, 1), jnp.int32), f32(7, 8), f32(7, 8)
    graph = graph_of(step, *args)
    there, whole, some = traffic(graph), 4 * 500 * 8, 4 * 7 * 8
    moved = {e: there[e].moved(e).nbytes for e in graph.equations}
    (scatter,) = (e for e in graph.equations if graph.inputs[2] in e.inputs)
    zeros = [e for e in graph.equations if e.primitive == "broadcast_in_dim"]
    assert (moved[scatter][0], moved[scatter][-1]) == (some, some)
    assert sum(moved[e][-1] for e in zeros) == (whole if expected == "into zeros" else 0)
    if expected != "into zeros":
        (add,) = (e for e in graph.equations if scatter.outputs[0] in e.inputs)
        assert sorted(moved[add]) == ([0, 0, 0] if expected == "into it" else [0, whole, whole])
        # What it is added to lies in memory, whoever makes it.
        (to,) = (atom for atom in add.input_values if atom is not scatter.outputs[0])
        maker = [e for e in graph.equations if to in e.outputs and e.primitive != "scatter-add"]
        assert all(moved[e][-1] == whole for e in maker)
    # XLA fills a table with zeros only there.
    compiled = jax.jit(step).lower(*args).compile().as_text()
    filled = re.search(r"f32\[500,8\]\S* broadcast\(%constant", compiled) is not None
    assert filled == (expected == "into zeros"), compiled


def test_rows_that_are_looked_up_are_cut_as_the_result_is() -> None:
    table, at, row_s = f32(5000, 512), jax.ShapeDtypeStruct((1000, 1), jnp.int32), 4 * 512
    graph = graph_of(lambda t, at: scattered(jnp.cumsum(t, 0), at, looked_up(t, at)), table, at)
    there, model = traffic(graph), model_of(CPU, CPU)
    device = model.types[0]

    def rows(primitive: str, *ins: Placement, out: Placement) -> float:
        """Rows that each of two alike devices goes through."""
        equation = only(graph, primitive)
        cost = price(model, equation, Signature(ins, (out,)), there[equation])
        spent_s = float(cost.exact(np.array([0.5, 0.5]))) - device.launch_s
        return spent_s * device.bandwidth_byte_per_s / row_s

    near = partial(pytest.approx, rel=0.01)
    assert rows("gather", R, R, out=R) == near(2000)
    assert rows("gather", R, S0, out=S0) == near(1000)
    assert rows("gather", S1, R, out=S1) == near(1000)
    assert rows("gather", S0, R, out=SUM) == near(2000)  # each looks all of them up in its own
    assert rows("scatter-add", R, R, R, out=R) == near(3000)
    assert rows("scatter-add", SUM, S0, S0, out=SUM) == near(1500)
    assert rows("scatter-add", S1, R, S1, out=S1) == near(1500)


def test_rows_move_as_many_bytes_on_two_mesh_axes_as_on_one() -> None:
    table, at, rows = f32(24, 16), jax.ShapeDtypeStruct((6, 1), jnp.int32), f32(6, 16)

    def step(table: Any, at: Any, rows: Any) -> Any:
        taken = lax.dynamic_slice(jnp.cumsum(table, 0), (at[0, 0], 0), (4, 16))
        found = looked_up(jnp.cumsum(table, 1), at)
        sums = scattered(jnp.cumsum(found @ found.T, 0), at, rows[:, :6])
        return (
            taken.sum(),
            lax.dynamic_update_slice(jnp.cumsum(table, 0), taken @ rows.T @ rows, (2, 0)),
            sums,
        )

    graph = graph_of(step, table, at, rows)
    there = traffic(graph)
    compared = 0
    for primitive in ("dynamic_slice", "gather", "scatter-add", "dynamic_update_slice"):
        equation = only(graph, primitive)
        tensors, moved = (*equation.input_types, *equation.output_types), there[equation].moved(equation)
        whole = Signature((R,) * len(equation.inputs), (R,))
        for one in signatures(rule_of(equation), equation):
            (line,) = kernel_lines(equation, rule_of(equation), (one,), there[equation])
            assert isinstance(line, Kernel)
            held, cut = line.whole_bytes, line.split_bytes
            across, within = pairs((one,), (whole,), (2, 3)), pairs((whole,), (one,), (2, 3))
            for found, expected in ((across, [held, cut, 0, 0]), (within, [held, 0, cut, 0])):
                if found:  # a reduction is outstanding on both axes or on none
                    assert Ways.of(tensors, moved, found, product=False).nbytes.tolist() == [expected]
                    assert Ways.of(tensors, moved, list(found), product=False).nbytes.tolist() == [expected]
                    compared += bool(cut)
    assert compared > 12
