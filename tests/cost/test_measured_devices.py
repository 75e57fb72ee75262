"""What only measured devices have: rates of classes of operations, and what segments leave to others."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from shardwright.cost.bill import Cut, Item, Passed, bill
from shardwright.cost.device import DeviceType
from shardwright.cost.fleet import Fleet, Link, Node
from shardwright.cost.model import CostModel
from shardwright.cost.op_classes import OP_CLASSES, op_class
from shardwright.cost.share_cost import ShareCost
from shardwright.cost.timeline import predict, timeline
from shardwright.cost.traffic import traffic
from shardwright.ir.placement import R
from shardwright.ir.program import Compute, Program
from shardwright.ir.rules import Signature
from shardwright.ir.trace import trace

X = jax.ShapeDtypeStruct((64, 64), "float32")


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda x: jnp.einsum("mk,kn->mn", x, x), "product"),
        (lambda x: jnp.einsum("mk,nk->mn", x, x), "product"),
        (lambda x: jnp.einsum("km,kn->mn", x, x), "transposed_product"),
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


@pytest.mark.parametrize("resume_s", [0.0, 1e-4])
def test_what_a_segment_leaves_to_another_goes_through_memory(resume_s: float) -> None:
    """Written once, read once by each later segment; not between kernels of one segment."""
    kind = DeviceType("x", 1e9, 1e9, 10**9, measured=True, resume_s=resume_s)
    model = CostModel(Fleet("two", (Node("n0", (kind, kind), Link(1e9, 1e-5)),), None))
    kernel, exchange = ShareCost.fixed([1e-3]), ShareCost.fixed([1e-4])

    def item(reads: tuple[int, ...], writes: int, *, cut: tuple[int, int] | None = None) -> Item:
        passed = (Passed(writes, 10**6, cut),)
        return Item("kernel", kernel, 1.0, None, False, reads, (writes,), passed=passed)

    def stop(reads: tuple[int, ...]) -> Item:
        return Item("exchange", exchange, 1.0, None, True, reads, (99,))

    def extra(*items: Item) -> float:
        plain = [Item(i.label, i.cost, 1.0, None, i.exchange, i.reads, i.writes) for i in items]
        found = (
            timeline(items, model, (0.5, 0.5)).iteration_s - timeline(plain, model, (0.5, 0.5)).iteration_s
        )
        both = predict(items, model, (0.5, 0.5)).iteration_s - predict(plain, model, (0.5, 0.5)).iteration_s
        assert found == pytest.approx(both, abs=1e-12)
        return found

    once = 1e-3 if resume_s else 0.0
    assert extra(item((), 1), item((1,), 2), stop((98,))) == pytest.approx(0.0)
    assert extra(item((), 1), stop((98,)), item((1,), 2), item((1,), 3)) == pytest.approx(2 * once)
    assert extra(item((), 1), stop((1,))) == pytest.approx(once)
    halves = extra(item((), 1, cut=Cut(2, 1)), stop((98,)), item((1,), 2))
    assert halves == pytest.approx(once)


def test_a_bill_says_what_its_kernels_hand_on() -> None:
    graph = trace(lambda x: (x + 1) * 2, X, state={}).graph

    whole = [Signature((R,) * len(e.inputs), (R,)) for e in graph.equations]
    program = Program((R,), tuple(Compute(i, s) for i, s in enumerate(whole)), (R,))
    kind = DeviceType("x", 1e9, 1e9, 10**9, measured=True)
    items = bill(program, graph, CostModel(Fleet("one", (Node("n0", (kind,), None),), None)))
    assert [len(item.passed) for item in items] == [1, 0]
    assert items[0].passed[0].nbytes == 64 * 64 * 4
