"""What only measured devices have: rates of classes of operations, and what segments leave to others."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from shardwright.cost.bill import Item, bill, bill_as_run
from shardwright.cost.device import DeviceType
from shardwright.cost.fleet import Fleet, Link, Node
from shardwright.cost.model import CostModel
from shardwright.cost.op_classes import OP_CLASSES, op_class
from shardwright.cost.timeline import timed_bill
from shardwright.cost.traffic import traffic
from shardwright.ir.placement import Partial, R, Shard
from shardwright.ir.program import Compute, Move, Program, verify
from shardwright.ir.rules import Signature
from shardwright.ir.trace import trace

X = jax.ShapeDtypeStruct((64, 64), "float32")


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda x: jnp.einsum("mk,kn->mn", x, x), "product"),
        (lambda x: jnp.einsum("mk,nk->mn", x, x), "product"),
        (lambda x: jnp.einsum("bm,bn->bmn", x, x), "batched_product"),
        (lambda x: jnp.exp(x), "transcendental"),
        (lambda x: jnp.sum(x, axis=1), "reduction"),
        (lambda x: jnp.sum(x), "total"),
        (lambda x: x + 1, "other"),
    ],
)
def test_equations_have_a_class_and_its_rate(function: Callable[[Any], Any], expected: str) -> None:
    equations = trace(function, X, state={}).graph.equations
    (equation,) = [e for e in equations if op_class(e) != "other" or expected == "other"]
    assert op_class(equation) == expected and expected in OP_CLASSES

    def seconds(efficiencies: tuple[tuple[str, float], ...]) -> float:
        kind = DeviceType("x", 1e9, 1e30, 1, launch_s=0.0, measured=True, class_efficiencies=efficiencies)
        graph = trace(function, X, state={}).graph
        whole = Signature((R,) * len(equation.inputs), (R,) * len(equation.outputs))
        model = CostModel(Fleet("one", (Node("n0", (kind,), None),), None))
        return model.kernel(equation, whole, traffic(graph)[graph.equations[equation.index]]).exact(
            model.counts * 1.0
        )

    others = tuple((name, 0.5) for name in OP_CLASSES if name != expected)
    assert seconds(((expected, 0.25),)) == pytest.approx(4 * seconds(()))
    assert seconds(others) == pytest.approx(seconds(()))


def normalised(x: jax.Array) -> jax.Array:
    raised = jnp.exp(x)
    return raised / jnp.sum(raised)


def doubled(x: jax.Array) -> jax.Array:
    twice = x * 2
    return twice / jnp.sum(twice)


#: Reads and writes of the whole tensor, and of the sum, by kernels of the steps as they run.
IN_MEMORY = [
    (normalised, "exp", [(2, 0), (1, 1), (2, 1)]),
    (doubled, "mul", [(1, 0), (0, 1), (1, 0), (1, 1)]),  # computed again rather than read
]


@pytest.mark.parametrize("resume_s", [0.0, 1e-4])
@pytest.mark.parametrize(("step", "first", "moved"), IN_MEMORY)
def test_what_a_segment_leaves_to_another_goes_through_memory(
    step: Callable[[jax.Array], jax.Array], first: str, moved: list[tuple[int, int]], resume_s: float
) -> None:
    """Between kernels of one segment, a tensor stays in registers; across an exchange it does not."""
    kind = DeviceType("x", 1e30, 1e9, 10**9, launch_s=0.0, measured=True, resume_s=resume_s)
    model = CostModel(Fleet("two", (Node("n0", (kind, kind), Link(1e9, 1e-5)),), None))
    graph = trace(step, X, state={}).graph
    assert [e.primitive for e in graph.equations] == [first, "reduce_sum", "div"]
    cut, part = Shard(0), Partial("sum")
    program = Program(
        (cut,),
        (
            Compute(0, Signature((cut,) if first == "exp" else (cut, R), (cut,))),
            Compute(1, Signature((cut,), (part,))),
            Move("all_reduce", graph.equations[1].outputs[0].index, part, R, "ring"),
            Compute(2, Signature((cut, R), (cut,))),
        ),
        (cut,),
    )
    verify(program, graph)

    def kernels_s(items: Sequence[Item]) -> list[float]:
        return [item.seconds(model, (0.5, 0.5)) for item in items if not item.exchange]

    written = bill(program, graph, model)
    once_s, one_s = 64 * 64 * 4 / 2 / 1e9, 4e-9
    assert kernels_s(written) == pytest.approx([once_s, one_s, once_s + one_s])
    items = timed_bill(program, graph, model, model, written)
    if not resume_s:
        assert items is written
    else:
        assert kernels_s(items) == pytest.approx([all_ * once_s + sum_ * one_s for all_, sum_ in moved])


def test_cheap_work_is_priced_where_it_is_done() -> None:
    """What only a later segment reads is computed there, in registers."""

    def step(x: jax.Array) -> jax.Array:
        doubled = x * 2
        return doubled / jnp.max(x)

    graph = trace(step, X, state={}).graph
    assert [e.primitive for e in graph.equations] == ["mul", "reduce_max", "div"]
    cut, part = Shard(0), Partial("max")
    program = Program(
        (cut,),
        (
            Compute(0, Signature((cut, R), (cut,))),
            Compute(1, Signature((cut,), (part,))),
            Move("all_reduce", graph.equations[1].outputs[0].index, part, R, "ring"),
            Compute(2, Signature((cut, R), (cut,))),
        ),
        (cut,),
    )
    verify(program, graph)
    kind = DeviceType("x", 1e9, 1e9, 10**9, measured=True, resume_s=1e-4)
    model = CostModel(Fleet("two", (Node("n0", (kind, kind), Link(1e9, 1e-5)),), None))
    labels = [item.label for item in bill_as_run(program, graph, model)]
    assert labels == ["reduce_max", "all_reduce.ring", "mul", "div"]
