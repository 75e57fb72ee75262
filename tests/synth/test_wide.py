"""Equations of many tensors: the star of factors around a hub against the table that it stands for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grid_cases import FLEETS as MESHES
from synth_cases import STEPS, Step, model, normalised, sgd, shape
from test_search import as_milp

import shardwright
from shardwright.cost.grid.model import GridModel
from shardwright.cost.model import CostModel
from shardwright.ir.graph import Graph
from shardwright.ir.trace import trace
from shardwright.synth.grid.pricing import GridPriceList, grid_floors
from shardwright.synth.grid.solve import GridSolver
from shardwright.synth.prices.lists import PriceList
from shardwright.synth.prices.tables import Prices
from shardwright.synth.search.priced import bound, solve
from shardwright.synth.shares.labelled import LabelledSolver
from shardwright.synth.space import wide
from shardwright.synth.space.space import Space

Made = tuple[Step, tuple[Any, ...]]


def joined(count: int) -> Made:
    """As many products as asked for, side by side, as branches and embedding tables are joined."""

    def loss(params: Any, x: Any) -> Any:
        parts = [jax.nn.relu(x @ w) for w in params["w"]]
        return jnp.mean((jnp.concatenate(parts, 1) @ params["out"]) ** 2)

    widths = [8 + 8 * (k % 2) for k in range(count)]
    params = {"w": [shape(24, width) for width in widths], "out": shape(sum(widths), 6)}
    return sgd(loss), (params, shape(32, 24))


def unrolled(count: int) -> Made:
    """A recurrent net without a scan: one tensor stacks up what every step hands on."""

    def loss(params: Any, x: Any) -> Any:
        state, kept = jnp.zeros((16, 12)), list[Any]()
        for step in range(count):
            state = jnp.tanh(x[:, step] @ params["in"] + state @ params["on"])
            kept.append(state)
        return jnp.mean((jnp.stack(kept, 1) @ params["out"]) ** 2)

    params = {"in": shape(8, 12), "on": shape(12, 12), "out": shape(12, 4)}
    return sgd(loss), (params, shape(16, count, 8))


def taken_apart(count: int) -> Made:
    """A tensor split into heads, each with weights of its own."""

    def loss(params: Any, x: Any) -> Any:
        heads = jnp.split(x @ params["in"], count, -1)
        return jnp.mean(sum(jnp.tanh(h @ w) for h, w in zip(heads, params["heads"], strict=True)) ** 2)

    params = {"in": shape(8, 12 * count), "heads": [shape(12, 6)] * count}
    return sgd(loss), (params, shape(32, 8))


def sorted_together() -> Made:
    """Tensors that one sort puts in order, by the first."""

    def step(*tensors: Any) -> Any:
        first, *others = jax.lax.sort(tensors, dimension=0, num_keys=1)
        return [jnp.exp(first), *(x.sum(1) for x in others)]

    return step, (shape(12, 8),) * 3


MADE: dict[str, Callable[[], Made]] = {
    "joined": lambda: joined(3),
    "unrolled": lambda: unrolled(3),
    "taken apart": lambda: taken_apart(3),
    "sorted together": sorted_together,
    **STEPS,
}


def graph_of(made: Made) -> Graph:
    step, args = made
    return trace(step, *args).graph


def spaces(
    graph: Graph, monkeypatch: pytest.MonkeyPatch, nodes: tuple[int, ...] | None = None
) -> list[Space]:
    """The programs of a step with stars for all equations, and without any."""
    found: list[Space] = []
    for tensors in (0, 99):
        monkeypatch.setattr(wide, "_TENSORS", tensors)
        found.append(Space(graph, nodes))
    return found


def drawn(args: Any) -> Any:
    """Arguments with values."""
    chance = np.random.default_rng(0)
    return jax.tree.map(lambda a: jnp.asarray(chance.normal(size=a.shape), a.dtype), args)


def never() -> bool:
    return False


@pytest.mark.parametrize("fleet", ["three", "slow-links"])
@pytest.mark.parametrize("name", MADE)
def test_a_star_is_worth_what_its_table_is(name: str, fleet: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """At floors and at ratios; with labels it is a bound as well."""
    stars, tables = spaces(graph_of(MADE[name]()), monkeypatch)
    assert name in STEPS or len(stars.uses) > len(tables.uses), "something is a star"
    listed = PriceList(model(fleet))
    floors = [bound(space, Prices.floors(listed)) for space in (stars, tables)]
    assert floors[0] == pytest.approx(floors[1], rel=1e-9)
    ratios = normalised([1.0 + 0.7 * d for d in range(len(listed.model.class_of))])
    found = [solve(space, Prices.at(listed, ratios)) for space in (stars, tables)]
    assert found[0].seconds == pytest.approx(found[1].seconds, rel=1e-9)
    assert found[0].bound_s == found[0].seconds
    for largest in (None, (0.4, 0.5)):
        plain = bound(stars, Prices.floors(listed, largest))
        star, table = (
            LabelledSolver(space.uses, [choice.domain for choice in space.choices]).bound(
                listed, largest, never, np.inf
            )
            for space in (stars, tables)
        )
        assert plain * (1 - 1e-9) <= star <= table * (1 + 1e-9)
        if name in ("joined", "taken apart", "unrolled"):
            assert star == pytest.approx(table, rel=1e-9), "what is cut, the hub is cut, too"


@pytest.mark.parametrize("mesh", ["1 + 3", "2 + 3, one of them mixed"])
@pytest.mark.parametrize("name", ["joined", "taken apart", "sorted together"])
def test_so_it_is_on_two_axes(name: str, mesh: str, monkeypatch: pytest.MonkeyPatch) -> None:
    grid = GridModel(CostModel(MESHES[mesh]))
    floors = [
        GridSolver(space).solve(grid_floors(GridPriceList(grid))).seconds
        for space in spaces(graph_of(MADE[name]()), monkeypatch, grid.mesh.nodes)
    ]
    assert floors[0] == pytest.approx(floors[1], rel=5e-4), "the search on two axes ends within .05 %"


@pytest.mark.parametrize("count", [9, 24])
@pytest.mark.parametrize("make", [joined, unrolled, taken_apart])
def test_many_tensors_make_no_large_table(make: Callable[[int], Made], count: int) -> None:
    """The program is the best, as a mixed-integer program says of the same prices."""
    space, costs = Space(graph_of(make(count))), model("three")
    assert max(len(use.scope) for use in space.uses) <= 4
    prices = Prices.at(costs, (0.5, 0.3, 0.2))
    found = solve(space, prices)
    terms = [(use.scope, prices.table(use.factor)) for use in space.uses]
    sizes = [len(choice.domain) for choice in space.choices]
    assert found.seconds == found.bound_s
    assert found.seconds == pytest.approx(as_milp(sizes, terms), rel=1e-6)


@pytest.mark.parametrize("axes", [1, 2])
@pytest.mark.parametrize("make", [joined, unrolled, taken_apart])
def test_their_plans_do_what_the_step_does(make: Callable[[int], Made], axes: Literal[1, 2]) -> None:
    """On uneven nodes and a slow network, so that not all is cut alike; the search is exact."""
    step, args = make(7)
    plan = shardwright.synthesize(step, *args, fleet=MESHES["1 + 3"], axes=axes)
    assert plan.search_gap <= 5e-4
    assert plan.verify(step, *drawn(args)).ok


def test_what_has_no_rule_may_take_many_tensors() -> None:
    """It runs replicated, which a star says as well as a table."""

    def step(*tensors: Any) -> Any:
        outs = jax.pure_callback(lambda *xs: [2 * x for x in xs], tensors, *[jnp.tanh(x) for x in tensors])
        return [jnp.exp(x) for x in outs]

    args = [shape(16, 8 + k) for k in range(12)]
    with pytest.warns(UserWarning, match="pure_callback"):
        plan = shardwright.synthesize(step, *args, fleet=MESHES["1 + 3"], axes=1)
    assert max(len(use.scope) for use in Space(trace(step, *args).graph).uses) <= 4
    assert plan.search_gap == 0
    assert plan.verify(step, *drawn(args)).ok
