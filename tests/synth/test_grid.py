"""Programs on two mesh axes: prices, ratios, search and plans, on nodes of unequal size."""

from __future__ import annotations

from functools import cache
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_search import as_milp

import shardwright
from shardwright.cost.bill import bill
from shardwright.cost.fleet import Fleet
from shardwright.cost.grid.floor import Ranges, level, products_of_largest
from shardwright.cost.grid.model import GridModel, Settled
from shardwright.cost.grid.prices import (
    GridCut,
    GridShares,
    Mesh,
    features,
    tangent_in_devices,
    tangent_in_nodes,
)
from shardwright.cost.model import CostModel
from shardwright.ir.errors import InputError
from shardwright.ir.graph import Graph
from shardwright.ir.placement import Grid, Shard, region
from shardwright.ir.program import nodes_of, verify
from shardwright.ir.trace import trace
from shardwright.ir.wires import wired, wires
from shardwright.synth.grid.alternate import GridSearch
from shardwright.synth.grid.parts import on_nodes
from shardwright.synth.grid.pricing import GridPriceList, grid_floors, grid_prices
from shardwright.synth.grid.ratios import GridBill, per_class
from shardwright.synth.grid.solve import GridSolver
from shardwright.synth.programs.emit import emit
from shardwright.synth.space.space import Space
from shardwright.synth.timer import Timer


def fleet(*nodes: tuple[tuple[int, int], ...], network: str = "1 Gbit/s") -> Fleet:
    """Nodes of (GFLOP/s, how many) devices with a fast link each, on a slow network."""

    def kind(speed: int) -> dict[str, str]:
        memory = f"{speed / 4} GB/s"
        return {
            "name": f"cpu-{speed}",
            "flops": f"{speed} GFLOP/s",
            "memory_bandwidth": memory,
            "memory": "2 GB",
        }

    entries: list[dict[str, Any]] = []
    for node in nodes:
        entry: dict[str, Any] = {"devices": [{"type": kind(speed), "count": count} for speed, count in node]}
        if sum(count for _, count in node) > 1:
            entry["link"] = {"bandwidth": "20 GB/s", "latency": "5 us"}
        entries.append(entry)
    link = {"bandwidth": network, "latency": "30 us"}
    return Fleet.from_dict({"name": "mesh", "nodes": entries, "network": link})


FLEETS = {
    "1 + 3": fleet(((40, 1),), ((20, 3),)),
    "2 + 3, one of them mixed": fleet(((40, 2),), ((20, 2), (10, 1))),
    "2 + 2": fleet(((40, 2),), ((40, 2),)),
}


def train_step(params: Any, batch: Any) -> Any:
    x, y = batch

    def loss_of(params: Any) -> Any:
        hidden = jax.nn.relu(x @ params["w1"])
        return jnp.mean((hidden @ params["w2"] - y) ** 2)

    loss, gradients = jax.value_and_grad(loss_of)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), loss


def arguments(batch: int = 48, wide: int = 64) -> tuple[Any, Any]:
    keys = jax.random.split(jax.random.key(0), 4)
    params = {"w1": jax.random.normal(keys[0], (24, wide)), "w2": jax.random.normal(keys[1], (wide, 12))}
    return params, (jax.random.normal(keys[2], (batch, 24)), jax.random.normal(keys[3], (batch, 12)))


@cache
def graph() -> Graph:
    return trace(train_step, *jax.eval_shape(arguments)).graph


@cache
def listed(name: str) -> tuple[Space, GridSolver, GridPriceList]:
    """The space on a fleet, with a price list that has all of its lines."""
    model = GridModel(CostModel(FLEETS[name]))
    space = Space(graph(), model.mesh.nodes)
    solver, prices = GridSolver(space), GridPriceList(model)
    grid_floors(prices).tables(solver.factors)
    return space, solver, prices


@st.composite
def shares(draw: st.DrawFn, name: str) -> tuple[float, ...]:
    parts = draw(
        st.lists(st.integers(0, 9), min_size=len(FLEETS[name].devices), max_size=len(FLEETS[name].devices))
    )
    parts[0] += not any(parts)
    return tuple(part / sum(parts) for part in parts)


@pytest.mark.parametrize("name", FLEETS)
@settings(max_examples=15)
@given(data=st.data())
def test_floors_are_below_every_price(name: str, data: st.DataObject) -> None:
    _, _, prices = listed(name)
    exact = grid_prices(prices, data.draw(shares(name))).seconds
    floors = grid_floors(prices).seconds
    assert len(floors) > 500
    assert (floors <= exact * (1 + 1e-9) + 1e-12).all()


@settings(max_examples=300)
@given(
    terms=st.lists(st.sampled_from((0.0, 0.1, 0.5, 1.0, 4.0)), min_size=8, max_size=8),
    falling=st.sampled_from(((), (2,), (3,), (2, 3))),
    units=st.lists(st.integers(0, 6), min_size=2, max_size=5).filter(any),
    share=st.floats(0.0, 1.0),
)
def test_products_count_at_the_largest_device_where_that_is_certain(
    terms: list[float], falling: tuple[int, ...], units: list[int], share: float
) -> None:
    """One node of alike devices, whatever it has and however its devices share that."""
    signed = np.array([-t if feature in falling else t for feature, t in enumerate(terms)])
    q = np.array(units) / sum(units)
    slowest = float((signed @ features(np.full(len(q), share), q)).max())
    one, slope, of_q, of_both = signed[:4]
    least = 1 / len(q)
    more, steeper = products_of_largest(signed[None, :, None], np.array([[least]]))
    floor = one + slope * share + (of_q + of_both * share) * least + more[0, 0] + steeper[0, 0] * share
    assert floor <= slowest + 1e-12


@pytest.mark.parametrize("name", list(FLEETS)[:2])
@settings(max_examples=15)
@given(data=st.data())
def test_every_price_is_above_the_floors_of_some_range(name: str, data: st.DataObject) -> None:
    """Ranges halved and halved again still cover all shares."""
    _, _, prices = listed(name)
    mesh = prices.grid.mesh
    ratios = data.draw(shares(name))
    exact = grid_prices(prices, ratios).seconds
    units = data.draw(st.sampled_from([0, 12, 24, 48, 64]))
    ranges = [Ranges(units=units, dealt=(0, units))]
    for _ in range(3):
        at = data.draw(st.floats(0.1, 0.9))
        ranges = [half for each in ranges for half in each.halves(at, (1, len(mesh.nodes)))]
    # What was cut at some share has to be looked at on one side of it only.
    ranges = [each for each in ranges if each.low <= each.high and each.dealt[0] <= each.dealt[1]]
    assert any((grid_floors(prices, each).seconds <= exact * (1 + 1e-9) + 1e-12).all() for each in ranges)


THREE_KINDS = fleet(((40, 2),), ((20, 1),), ((10, 3),))


@settings(max_examples=25)
@given(data=st.data())
def test_ranges_of_the_shares_of_every_kind_cover_all_shares(data: st.DataObject) -> None:
    grid = GridModel(CostModel(THREE_KINDS))
    prices = GridPriceList(grid)
    GridSolver(Space(graph(), grid.mesh.nodes)).solve(grid_floors(prices))
    kinds = len(grid.mesh.kind_counts)
    parts = data.draw(st.lists(st.floats(0.02, 1.0), min_size=kinds, max_size=kinds))
    of_nodes = np.array(parts) / sum(parts)
    ratios = grid.mesh.ratios(of_nodes, grid.mesh.even()[1])
    exact = grid_prices(prices, ratios).seconds
    ranges = [Ranges()]
    for _ in range(4):
        kind, part = data.draw(st.integers(0, kinds - 1)), data.draw(st.floats(0.1, 0.9))
        halves: list[Ranges] = []
        for each in ranges:
            low, high = each.of_kinds(kinds)[kind]
            halves += each.cut(kind, low + part * (high - low), kinds)
        ranges = halves

    def within(each: Ranges) -> bool:
        ends = each.of_kinds(kinds)
        return all(
            low - 1e-9 <= share <= high + 1e-9 for (low, high), share in zip(ends, of_nodes, strict=True)
        )

    mine = [each for each in ranges if within(each)]
    assert mine
    for each in mine:
        floors = grid_floors(prices, each).seconds
        assert (floors <= exact * (1 + 1e-6) + 1e-12).all()
    # Cutting says more of what is left.
    least = grid_floors(prices).seconds
    assert all((grid_floors(prices, each).seconds >= least * (1 - 1e-9) - 1e-15).all() for each in ranges)


def test_a_wide_certificate_is_raised_by_ranges_of_every_kind_and_stays_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    where = fleet(((40, 2),), ((20, 2),), ((10, 3),), network="10 Gbit/s")
    step = trace(train_step, *jax.eval_shape(lambda: arguments(960, 256))).graph
    monkeypatch.setattr("shardwright.synth.grid.ranges._MOST_PIECES", 0)
    listed = GridPriceList(GridModel(CostModel(where)))
    search = GridSearch(step, Space(step, listed.grid.mesh.nodes), listed, Timer())
    plan = search.plan()
    raised = search.sharpened(plan.cost_s)
    assert plan.bound_s * (1 + 5e-3) < raised <= plan.cost_s * (1 + 1e-9)
    solver, random = GridSolver(Space(step, listed.grid.mesh.nodes)), np.random.default_rng(0)
    for _ in range(20):
        parts = random.dirichlet(np.ones(3))
        ratios = listed.grid.mesh.ratios(parts, listed.grid.mesh.even()[1])
        assert raised <= solver.solve(grid_prices(listed, ratios)).bound_s * (1 + 1e-9)


@pytest.mark.parametrize("counts", [(3,), (2, 3), (1, 2, 2)])
def test_water_levels_are_the_least_that_any_shares_cost(counts: tuple[int, ...]) -> None:
    """Nodes of one kind have everything, two kinds a level in closed form, more a search for it."""
    random = np.random.default_rng(len(counts))
    kinds, steps = len(counts), 60
    constant = random.exponential(size=(40, kinds, 3))
    slope = random.normal(size=constant.shape) * random.integers(0, 2, size=constant.shape)
    dealt = [each for each in product(range(steps + 1), repeat=kinds) if sum(each) == steps]
    for low, high in ((0.0, 1.0), (0.2, 0.7))[:kinds]:
        within = np.array(Ranges(low, high).of_kinds(kinds))
        shares = np.array(dealt) / steps
        shares = shares[((shares >= within[:, 0] - 1e-9) & (shares <= within[:, 1] + 1e-9)).all(axis=1)]
        at = constant[:, None] + slope[:, None] * (shares / counts)[None, :, :, None]
        least = at.max(axis=(2, 3)).min(axis=1)
        found = level(constant, slope, np.array(counts), within)
        step = np.abs(slope).max(axis=(1, 2)) * 2 / steps
        assert (found <= least + 1e-9).all() and (found >= least - step).all()


@pytest.mark.parametrize("name", FLEETS)
@settings(max_examples=10)
@given(data=st.data())
def test_tangents_touch_where_they_are_taken(name: str, data: st.DataObject) -> None:
    _, _, prices = listed(name)
    mesh = prices.grid.mesh
    r, q = per_class(data.draw(shares(name)), mesh)
    stack = prices.stack()
    there = np.einsum("kfrc,fc->krc", stack.terms, _features(r, q))
    for tangent, at in ((tangent_in_nodes, r), (tangent_in_devices, q)):
        constant, slope = tangent(stack, r, q)
        assert np.allclose(constant + slope * at, there, rtol=1e-9, atol=1e-15)


def _features(r: Any, q: Any) -> Any:
    rq = r * q
    return np.stack([r**0, r, q, rq, r - r * r, q - q * q, rq - rq * rq, rq * (1 - q)])


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


def test_auto_is_the_better_of_one_axis_and_two() -> None:
    slow, step = fleet(((40, 2),), ((40, 2),), network="100 Mbit/s"), arguments(480, 640)
    options: tuple[Any, ...] = (1, 2, "auto")
    plans = [shardwright.synthesize(train_step, *step, fleet=slow, axes=axes) for axes in options]
    assert [plan.axes for plan in plans[:2]] == [1, 2]
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


@pytest.mark.parametrize("name", FLEETS)
def test_no_floor_is_below_nothing(name: str) -> None:
    """A conversion that earned something would be made for ever."""
    _, _, prices = listed(name)
    assert grid_floors(prices).seconds.min() >= 0.0
