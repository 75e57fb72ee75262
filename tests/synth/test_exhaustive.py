"""The search against its naive twin: what fusion and holdings of two placements lose.

The space is fused, and a tensor is held in two placements at most. Both restrict it; that neither loses
anything on straight-line steps is what is tested here, and where they do lose is pinned down below.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import jax.numpy as jnp
import pytest
from exhaustive import cheapest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from synth_cases import fleet, model, ratios, shape

from shardwright.cost.bill import bill, seconds
from shardwright.cost.model import CostModel
from shardwright.ir.graph import Graph, TensorType
from shardwright.ir.placement import R, Shard
from shardwright.ir.program import Move, verify
from shardwright.ir.trace import trace
from shardwright.synth.prices.tables import Prices
from shardwright.synth.programs.emit import emit
from shardwright.synth.search.priced import solve
from shardwright.synth.space.conversions import Domains, Holding
from shardwright.synth.space.space import Space

GRAPHS: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "two products": (lambda x, a, b: (x @ a) @ b, (shape(96, 48), shape(48, 64), shape(64, 32))),
    "perceptron": (
        lambda x, a, b: jnp.tanh(x @ a) @ b,
        (shape(96, 48), shape(48, 64), shape(64, 32)),
    ),
    "chain": (lambda x, a: lax.exp(lax.neg(lax.tanh(x @ a))).sum(), (shape(64, 48), shape(48, 64))),
    "softmax": (
        lambda x: (lambda e: e / lax.broadcast_in_dim(e.sum(1), e.shape, (0,)))(lax.exp(x)),
        (shape(256, 128),),
    ),
    "centred": (
        lambda x: x - lax.broadcast_in_dim(lax.reduce_max(x, (1,)), x.shape, (0,)),
        (shape(256, 128),),
    ),
    "used twice": (lambda x, a, b: (x @ a, x.T @ b), (shape(64, 96), shape(96, 32), shape(64, 80))),
    "made and used twice": (
        lambda x, a, b, c: (lambda y: (y @ b, c @ y))(lax.tanh(x @ a)),
        (shape(64, 96), shape(96, 64), shape(64, 32), shape(80, 64)),
    ),
    "gradient": (
        lambda x, w: (lambda y: (y, x.T @ y))(x @ w),
        (shape(256, 32), shape(32, 48)),
    ),
    "descent": (lambda w, x: w - 0.1 * (x.T @ lax.tanh(x @ w)), (shape(32, 48), shape(256, 32))),
    "momentum": (
        lambda w, m, g: (w - (0.9 * m + g), 0.9 * m + g),
        (shape(64, 64), shape(64, 64), shape(64, 64)),
    ),
    "residual": (lambda x, a: (lambda y: y + lax.tanh(y) @ a)(x @ a), (shape(96, 64), shape(64, 64))),
    "lookup": (lambda t, i: (t[i] ** 2).sum(), (shape(128, 64), shape(32, dtype=jnp.int32))),
    "transposed": (lambda x: lax.cumsum(lax.transpose(x, (1, 0)), 0) * 2.0, (shape(128, 64),)),
}

FLEETS = {
    "two": lambda: model("two"),
    "slow links": lambda: CostModel(fleet((4, 2), bandwidth="2 GB/s", latency="20 us")),
    "far": lambda: CostModel(fleet((4, 1), bandwidth="20 MB/s", latency="1 ms")),
    "three": lambda: CostModel(fleet((4, 2, 1), bandwidth="5 GB/s", latency="2 us")),
}


@cache
def fleet_of(name: str) -> CostModel:
    return FLEETS[name]()


@cache
def case(name: str) -> tuple[Graph, Space]:
    function, args = GRAPHS[name]
    graph = trace(function, *args).graph
    return graph, Space(graph)


@pytest.mark.parametrize("name", GRAPHS)
@settings(max_examples=5)
@given(data=st.data(), on=st.sampled_from(sorted(FLEETS)))
def test_nothing_is_lost(name: str, data: st.DataObject, on: str) -> None:
    (graph, space), costs = case(name), fleet_of(on)
    at = data.draw(ratios(len(costs.class_of)))
    prices = Prices.at(costs, at)
    solution = solve(space, prices)
    program = emit(space, solution.assignment, prices)
    verify(program, graph)
    paid = seconds(bill(program, graph, costs), costs, at)
    assert paid == pytest.approx(solution.seconds, rel=1e-9)
    assert paid == pytest.approx(cheapest(graph, space, prices), rel=1e-9)


def test_the_graphs_are_small_and_different() -> None:
    sizes = {name: len(case(name)[0].equations) for name in GRAPHS}
    assert max(sizes.values()) <= 7 and min(sizes.values()) >= 2
    primitives = {e.primitive for name in GRAPHS for e in case(name)[0].equations}
    assert {
        "dot_general",
        "reduce_sum",
        "reduce_max",
        "gather",
        "broadcast_in_dim",
        "transpose",
    } <= primitives
    assert any(graph.state for graph, _ in map(case, GRAPHS))


# ---------------------------------------------------------------------------------------------------
# What is lost


def fanned_out(x: Any) -> Any:
    """A fused chain whose values are all used elsewhere: the first along rows, the others along columns."""
    a = lax.tanh(lax.cumsum(x, 1))
    b = lax.exp(a)
    c = lax.sin(b)
    return lax.cumsum(a, 1), lax.cumsum(b, 0), lax.cumsum(c, 0)


def test_known_loss_a_chain_that_should_change_placement_in_its_middle() -> None:
    """Unfused, one all-to-all between the first and the second step of the chain; fused, the whole chain
    is in one placement, and two of its values are exchanged at its border."""
    costs = CostModel(fleet((2, 2), bandwidth="5 GB/s", latency="1 us"))
    graph = trace(fanned_out, shape(256, 256)).graph
    space, prices = Space(graph), Prices.at(costs, (0.5, 0.5))
    solution = solve(space, prices)
    program = emit(space, solution.assignment, prices)
    paid = seconds(bill(program, graph, costs), costs, (0.5, 0.5))
    all_to_all = prices.step(graph.inputs[0].type, Shard(0), Shard(1))
    moves = [i.kind for i in program.instructions if isinstance(i, Move)]
    assert moves == ["all_to_all"] * 2
    assert paid == pytest.approx(solution.seconds, rel=1e-12)
    assert paid - cheapest(graph, space, prices) == pytest.approx(all_to_all, rel=1e-9)


def test_known_loss_a_third_placement_is_paid_by_every_user_but_moved_once() -> None:
    """A value is held in two placements at most; a third is promised anew to each of its users. What is
    emitted moves it once, so the program is cheaper than the search had said."""
    costs = CostModel(fleet((2, 2, 2), bandwidth="5 GB/s", latency="1 us"))
    prices, cube = Prices.at(costs, (1 / 3, 1 / 3, 1 / 3)), TensorType((24, 24, 24), "float32")
    domain = Domains().multiple(cube, (1, 1, 1), ())
    assert max(len(holding.all) for holding in domain.holdings) == 2
    held = domain.holdings.index(Holding(Shard(0), Shard(1)))
    all_to_all = prices.distance(domain.routes, Shard(0), Shard(2))
    assert 0 < all_to_all < prices.distance(domain.routes, Shard(0), R)
    # Two users in the third placement are promised two exchanges; held as well, it would be one.
    use = prices.use(domain)[held, domain.routes.index[Shard(2)]]
    assert 2 * use == pytest.approx(2 * all_to_all)
