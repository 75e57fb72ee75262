"""Programs on two mesh axes: prices, ratios, search and plans, on nodes of unequal size."""

from __future__ import annotations

from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grid_cases import FLEETS, arguments, fleet, graph, listed, shares, train_step
from hypothesis import given, settings
from hypothesis import strategies as st
from test_search import as_milp

import shardwright
from shardwright import one_step
from shardwright.cost.bill import bill
from shardwright.cost.grid.model import GridModel
from shardwright.cost.grid.prices import (
    GridCut,
    GridShares,
    Mesh,
)
from shardwright.cost.grid.settled import Settled
from shardwright.cost.model import CostModel
from shardwright.ir.errors import InputError
from shardwright.ir.placement import Grid, Shard, region
from shardwright.ir.program import nodes_of, verify
from shardwright.ir.trace import trace
from shardwright.ir.wires import wired, wires
from shardwright.planning import Planner
from shardwright.request import Request
from shardwright.synth.grid.choice import GridChoosing
from shardwright.synth.grid.parts import on_nodes
from shardwright.synth.grid.pricing import GridPriceList, grid_floors, grid_prices
from shardwright.synth.grid.ratios import GridBill
from shardwright.synth.grid.solve import GridSolver
from shardwright.synth.programs.emit import emit
from shardwright.synth.space.space import Space
from shardwright.synth.timer import Timer

AXES: tuple[Literal[1, 2, "auto"], ...] = (1, 2, "auto")


@pytest.mark.parametrize("name", FLEETS)
def test_the_search_agrees_with_highs(name: str) -> None:
    space, solver, prices = listed(name)
    mesh = prices.grid.mesh
    at = grid_prices(prices, mesh.ratios(*mesh.even()))
    found = solver.solve(at)
    assert found.bound_s == pytest.approx(found.seconds, rel=1e-9)
    tables = dict(zip(solver.factors, at.tables(solver.factors), strict=True))
    terms = [(use.scope, tables[use.factor]) for use in space.uses]
    sizes = [len(choice.domain) for choice in space.choices]
    assert found.seconds == pytest.approx(as_milp(sizes, terms), rel=1e-6)


@pytest.mark.parametrize("name", FLEETS)
@settings(max_examples=4)
@given(data=st.data())
def test_programs_cost_what_the_search_says(name: str, data: st.DataObject) -> None:
    space, solver, prices = listed(name)
    ratios = data.draw(shares(name))
    at = grid_prices(prices, ratios)
    found = solver.solve(at)
    program = emit(space, found.assignment, at)
    verify(program, graph())
    paid = sum(
        item.weight * float(item.cost.constant.max())
        for item in bill(program, graph(), Settled(prices.grid, ratios))
    )
    # Where two users convert one tensor alike, the program pays once.
    assert paid <= found.seconds * (1 + 1e-9)
    assert paid >= 0.8 * found.seconds
    floor = solver.solve(grid_floors(prices))
    assert floor.bound_s <= found.seconds * (1 + 1e-9)


def scanned_step(params: Any, batch: Any) -> Any:
    x, y = batch

    def layer(hidden: Any, weights: Any) -> tuple[Any, None]:
        return jnp.tanh(hidden @ weights), None

    def loss_of(weights: Any) -> Any:
        hidden, _ = jax.lax.scan(layer, x, weights)
        return jnp.mean((hidden - y) ** 2)

    loss, gradient = jax.value_and_grad(loss_of)(params)
    return params - 0.1 * gradient, loss


@pytest.mark.parametrize("looped", [False, True])
@pytest.mark.parametrize("name", FLEETS)
def test_spaces_on_other_nodes_have_the_same_prices_and_programs(name: str, *, looped: bool) -> None:
    """What parts of a fleet are searched by the space of the whole for."""
    model = GridModel(CostModel(FLEETS[name]))
    mine = model.mesh.nodes
    x = jax.ShapeDtypeStruct((48, 24), "float32")
    weights = jax.ShapeDtypeStruct((3, 24, 24), "float32")
    step = trace(scanned_step, weights, (x, x)).graph if looped else graph()
    made: list[Any] = []
    for nodes in (mine, (4, 4, 4)):
        space, prices = Space(step, nodes), grid_floors(GridPriceList(model))
        solver = GridSolver(space)
        solution = solver.solve(prices)
        program = on_nodes(emit(space, solution.assignment, prices), step, mine)
        verify(program, step)
        made.append((prices.tables(solver.factors), solution, program))
    (tables, solution, program), (others, other, same) = made
    assert all(np.array_equal(a, b) for a, b in zip(tables, others, strict=True))
    assert other.assignment == solution.assignment and same == program
    known, fresh = wires(same, step), wired(same.instructions, step)
    assert list(map(known.keys, known.makes)) == list(map(fresh.keys, fresh.makes))
    assert list(map(known.keys, known.reads)) == list(map(fresh.keys, fresh.reads))


@pytest.mark.parametrize("name", FLEETS)
def test_plans_are_right_and_no_dearer_than_on_one_axis(name: str, tmp_path: Any) -> None:
    args = arguments()
    one = shardwright.synthesize(train_step, *args, fleet=FLEETS[name], axes=1, devices="all")
    two = shardwright.synthesize(train_step, *args, fleet=FLEETS[name], axes=2, devices="all")
    assert (one.axes, two.axes) == (1, 2)
    assert two.bound_s <= two.cost_s <= one.cost_s * 1.02
    assert nodes_of(two.program) == tuple(len(node.devices) for node in FLEETS[name].nodes)
    assert two.verify(train_step, *args).ok
    two.save(tmp_path / "plan.json")
    again = shardwright.Plan.load(tmp_path / "plan.json")
    assert again.program == two.program and again.axes == 2
    out, loss = again.compile(train_step, backend="reference")(*args)
    expected, expected_loss = train_step(*args)
    assert jnp.allclose(loss, expected_loss, rtol=1e-5)
    assert all(
        jnp.allclose(a, b, rtol=1e-4, atol=1e-5) for a, b in zip(out.values(), expected.values(), strict=True)
    )


def test_a_slow_network_keeps_exchanges_in_the_nodes() -> None:
    """With a network a thousand times slower than the links, a plan for two nodes uses both axes."""
    slow = fleet(((40, 2),), ((40, 2),), network="100 Mbit/s")
    plan = shardwright.synthesize(train_step, *arguments(480, 640), fleet=slow, axes=2)
    assert any(isinstance(p, Grid) for p in plan.program.inputs)


@pytest.mark.parametrize(("axes", "reason"), [(3, "is 3"), ("two", "is 'two'"), (0, "is 0")])
def test_there_are_no_such_axes(axes: Any, reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        shardwright.synthesize(train_step, *arguments(), fleet=FLEETS["1 + 3"], axes=axes)


def test_pins_are_kept_on_both_axes_and_priced() -> None:
    where, step = FLEETS["2 + 2"], arguments()
    pinned = shardwright.synthesize(
        train_step, *step, fleet=where, axes=2, constraints={"params/w1": "S(0)", "params/w2": "R"}
    )
    free = shardwright.synthesize(train_step, *step, fleet=where, axes=2)
    assert (pinned.held["params['w1']"], pinned.held["params['w2']"]) == ("S(0)/S(0)", "R")
    assert pinned.cost_s >= free.cost_s * (1 - 1e-9)
    assert len(pinned.pins) == 2 and max(pin.price_s for pin in pinned.pins) > 0


@pytest.mark.parametrize(
    ("network", "step", "saved"),
    [("100 Mbit/s", arguments(480, 640), False), ("5 Gbit/s", arguments(4_800, 64), True)],
    ids=["a node alone", "two axes are a little cheaper"],
)
def test_auto_is_the_better_of_one_axis_and_two(network: str, step: tuple[Any, ...], saved: bool) -> None:
    slow = fleet(((40, 2),), ((40, 2),), network=network)
    options: tuple[Any, ...] = (1, 2, "auto")
    plans = [shardwright.synthesize(train_step, *step, fleet=slow, axes=axes) for axes in options]
    assert [plan.axes for plan in plans[:2]] == [1, 2]
    assert (0.95 < plans[1].cost_s / plans[0].cost_s < 0.99) == saved
    assert plans[2].cost_s == pytest.approx(min(plan.cost_s for plan in plans), rel=1e-9)
    assert plans[2].bound_s <= min(plan.bound_s for plan in plans[:2]) * (1 + 1e-9)
    assert any("two" in said for said in plans[2].assumptions)


def test_two_axes_are_not_planned_where_their_bound_rules_them_out() -> None:
    """On a quick network arithmetic alone is nearly what one axis costs."""
    quick = fleet(((40, 2),), ((40, 2),), network="400 Gbit/s")
    step = arguments(48_000)
    plan = shardwright.synthesize(train_step, *step, fleet=quick)
    one = shardwright.synthesize(train_step, *step, fleet=quick, axes=1)
    two = shardwright.synthesize(train_step, *step, fleet=quick, axes=2)
    assert (plan.axes, plan.cost_s) == (1, one.cost_s) and plan.stats.searches == one.stats.searches
    assert one.cost_s * 0.95 <= plan.bound_s <= min(one.bound_s, two.cost_s) and plan.gap <= 0.05
    assert any("no program was worth" in said for said in plan.assumptions)


def test_a_slow_node_is_left_out_on_two_axes() -> None:
    where = fleet(((40, 2),), ((40, 2),), ((1, 2),), network="100 Mbit/s")
    plan = shardwright.synthesize(train_step, *arguments(480, 640), fleet=where, axes=2)
    whole = shardwright.synthesize(train_step, *arguments(480, 640), fleet=where, axes=2, devices="all")
    assert plan.axes == 2 and plan.used == (0, 1, 2, 3) and plan.unused
    assert plan.bound_s <= plan.cost_s < whole.cost_s and plan.ratios[4:] == (0.0, 0.0)
    assert plan.verify(train_step, *arguments(480, 640)).ok


def test_parts_of_the_fleet_are_on_two_axes_too_where_the_number_of_axes_is_left_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of a small step; of others the plan says that they were not."""
    where, step = fleet(((40, 2),), ((40, 2),), ((1, 2),), network="100 Mbit/s"), arguments(480, 640)
    one, two, either = (shardwright.synthesize(train_step, *step, fleet=where, axes=a) for a in AXES)
    assert either.cost_s == pytest.approx(min(one.cost_s, two.cost_s), rel=1e-9)
    assert either.bound_s <= min(one.bound_s, two.bound_s) * (1 + 1e-9)
    assert not any("axes=2 tries" in said for said in either.assumptions)
    monkeypatch.setattr(one_step, "SMALL", 0)
    large = shardwright.synthesize(train_step, *step, fleet=where)
    assert any("axes=2 tries" in said for said in large.assumptions) and large.cost_s >= either.cost_s


def test_baselines_on_two_axes_are_programs_of_that_space_and_no_cheaper_than_the_plan() -> None:
    where, step = FLEETS["2 + 2"], arguments()
    plan = shardwright.synthesize(train_step, *step, fleet=where, axes=2)
    found = shardwright.baselines(train_step, *step, fleet=where, axes=2, plan=plan)
    names = {baseline.name for baseline in found}
    assert {"data parallelism over all devices", "tensor parallelism in nodes, data across"} <= names
    for baseline in found:
        assert baseline.relative is not None and baseline.relative >= 1 - 1e-9
        assert nodes_of(baseline.program) in ((2, 2), None)
    assert names.isdisjoint(found.left_out)


def test_a_bound_close_enough_leaves_nothing_further_open_at_the_ratios_of_the_plan() -> None:
    planner = Planner(Request(FLEETS["2 + 2"], devices="all", axes=2), Timer())
    plan = planner.plan(trace(train_step, *jax.eval_shape(arguments)))
    assert plan is not None and plan.axes == 2
    # As if the search at the plan's ratios had been given up.
    found = planner.certified(plan.but(search_gap=0.5, bound_s=0.95 * plan.cost_s))
    assert found.search_gap == found.gap <= 0.05 * (1 + 1e-9)


@pytest.mark.parametrize("axes", [2, "auto"])
def test_a_bound_that_is_not_close_enough_is_raised_on_one_axis_and_on_two(
    axes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    settled: list[float] = []
    monkeypatch.setattr(GridChoosing, "settle", lambda self, cost_s, fitting: settled.append(cost_s))
    planner = Planner(Request(FLEETS["2 + 2"], axes=axes), Timer())
    plan = planner.plan(trace(train_step, *jax.eval_shape(arguments)))
    assert plan is not None and plan.gap < 0.05
    found = planner.certified(plan.but(bound_s=0.93 * plan.cost_s))
    assert found.bound_s >= plan.bound_s * (1 - 1e-9) and settled == [plan.cost_s]


def test_one_node_has_one_axis() -> None:
    single = fleet(((40, 2), (20, 1)))
    assert shardwright.synthesize(train_step, *arguments(), fleet=single, axes=2).axes == 1


@pytest.mark.parametrize("name", FLEETS)
def test_ratios_do_not_make_a_program_dearer(name: str) -> None:
    _, _, prices = listed(name)
    mesh = prices.grid.mesh
    even = mesh.ratios(*mesh.even())
    stack, cuts = prices.stack(), prices.cuts
    rng = np.random.default_rng(1)
    lines = rng.choice(len(cuts), 40, replace=False)
    whole = GridBill(stack.take(lines), [cuts[k] for k in lines], rng.random(40).tolist(), mesh)
    best = whole.best_ratios(even)
    assert sum(best) == pytest.approx(1.0)
    assert whole.seconds(best) <= whole.seconds(even) * (1 + 1e-12)


def test_shares_of_nested_cuts_are_those_of_the_shards() -> None:
    """What a device is priced for is what it holds: node first, then its part of what the node has."""
    mesh = Mesh.of(CostModel(FLEETS["1 + 3"]))
    ratios = (0.4, 0.3, 0.1, 0.2)
    r, q = GridShares(ratios, mesh).shares(GridCut(7, 7, nested=True))
    placement = Grid(Shard(0), Shard(0), (1, 3))
    held = [region((7,), placement, device, ratios)[0][1] for device in range(4)]
    assert np.allclose(r * q * 7, held)


def test_without_time_for_two_axes_a_plan_says_so() -> None:
    limited: dict[str, Any] = {"devices": "all", "time_limit_s": 1e-9}
    hurried = shardwright.synthesize(train_step, *arguments(), fleet=FLEETS["1 + 3"], **limited)
    assert hurried.axes == 1
    assert 0 < hurried.bound_s < hurried.cost_s
    (note,) = [note for note in hurried.assumptions if "two mesh axes" in note]
    assert note.endswith("no program was searched for: the time limit came first")
