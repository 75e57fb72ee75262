"""Memory on two mesh axes: what a budget leaves is found, fits as it will run, and is bounded."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import grid_cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_search import as_milp

from shardwright import Fleet, Plan, one_step, synthesize
from shardwright.cost.grid.model import GridModel
from shardwright.cost.grid.prices import Mesh
from shardwright.cost.memory.liveness import Peaks, peaks_by_device
from shardwright.cost.model import CostModel
from shardwright.cost.share_cost import Floats
from shardwright.ir.graph import Graph
from shardwright.ir.placement import Shard, grid, parse_placement, region
from shardwright.ir.program import Program, verify
from shardwright.memory.device_memory import Looking, device_memory, peaks
from shardwright.synth.grid.alternate import GridSearch
from shardwright.synth.grid.candidate import GridCandidate
from shardwright.synth.grid.choice import GridChoosing
from shardwright.synth.grid.memory import GridRenting
from shardwright.synth.grid.pricing import GridPriceList, grid_floors
from shardwright.synth.grid.rent import least_portions, portions
from shardwright.synth.grid.solve import GridSolver
from shardwright.synth.grid.weighing import Weighing
from shardwright.synth.memory.sparing import Sparing
from shardwright.synth.programs.judge import Judge
from shardwright.synth.space.space import Space
from shardwright.synth.timer import Timer


def fleet(
    memory_bytes: float,
    nodes: tuple[int, ...] = (2, 2),
    speeds: tuple[int, ...] | None = None,
    network: str = "100 MB/s",
) -> Fleet:
    """Nodes of so many devices of so many MFLOP/s, 50 by default, all with as much memory."""
    listed = [
        {
            "devices": {
                "type": {
                    "name": f"k{speed}",
                    "flops": f"{speed} MFLOP/s",
                    "memory_bandwidth": f"{2 * speed} MB/s",
                    "memory": f"{int(memory_bytes)} B",
                },
                "count": count,
            },
            "link": {"bandwidth": "2 GB/s", "latency": "1 us"},
        }
        for count, speed in zip(nodes, speeds or (50,) * len(nodes), strict=True)
    ]
    far = {"bandwidth": network, "latency": "30 us"}
    return Fleet.from_dict({"name": "mesh", "nodes": listed, "network": far})


def train_step(params: Any, moments: Any, x: jax.Array, y: jax.Array) -> Any:
    def loss_of(params: Any) -> jax.Array:
        def layer(h: jax.Array, p: Any) -> tuple[jax.Array, None]:
            return h + jnp.tanh(h @ p["up"]) @ p["down"], None

        return jnp.mean((jax.lax.scan(layer, x, params)[0] - y) ** 2)

    loss, gradients = jax.value_and_grad(loss_of)(params)
    moments = jax.tree.map(lambda m, g: 0.9 * m + g, moments, gradients)
    return jax.tree.map(lambda p, m: p - 0.01 * m, params, moments), moments, loss


def arguments() -> tuple[Any, ...]:
    keys = jax.random.split(jax.random.key(0), 4)
    params = {
        "up": 0.1 * jax.random.normal(keys[0], (3, 16, 64)),
        "down": 0.1 * jax.random.normal(keys[1], (3, 64, 16)),
    }
    zeros = jax.tree.map(jnp.zeros_like, params)
    return params, zeros, jax.random.normal(keys[2], (32, 16)), jax.random.normal(keys[3], (32, 16))


def planned(memory_bytes: float, where: Fleet | None = None) -> Plan:
    return synthesize(
        train_step,
        *arguments(),
        fleet=where or fleet(memory_bytes),
        axes=2,
        devices="all",
        recompute="off",
        microbatches=1,
    )


def test_less_memory_is_kept_to_and_never_makes_a_plan_cheaper() -> None:
    free = planned(1 << 30)
    peak, costs = max(free.memory_bytes), [free.cost_s]
    for part in (0.9, 0.84):
        plan = planned(part * peak)
        assert plan.fits and max(plan.memory_bytes) <= part * peak
        assert plan.cost_s >= costs[-1] * (1 - 1e-9) and plan.bound_s <= plan.cost_s
        assert plan.bound_s >= free.bound_s * (1 - 1e-9)
        costs.append(plan.cost_s)
    assert costs[-1] > free.cost_s and plan.axes == 2
    assert plan.verify(train_step, *arguments()).ok


def unrolled(params: Any, moments: Any, x: jax.Array, y: jax.Array) -> Any:
    def loss_of(params: Any) -> jax.Array:
        h = x
        for k in range(3):
            h = h + jnp.tanh(h @ params["up"][k]) @ params["down"][k]
        return jnp.mean((h - y) ** 2)

    loss, gradients = jax.value_and_grad(loss_of)(params)
    moments = jax.tree.map(lambda m, g: 0.9 * m + g, moments, gradients)
    return jax.tree.map(lambda p, m: p - 0.01 * m, params, moments), moments, loss


def test_gathers_done_again_give_the_same_program() -> None:
    given = jax.tree.map(lambda p: list(p) if p.ndim == 3 else p, arguments())
    pins = {"params/*": Shard(0), "moments/*": Shard(0)}
    plan = synthesize(unrolled, *given, fleet=fleet(1 << 30), axes=2, devices="all", constraints=pins)
    graph = plan.step().graph
    sparing = Sparing(plan.program, graph)
    assert sparing.possible and sparing.gathers
    in_order = [sparing.again(count) for count in (0, len(sparing.gathers))]
    most = [max(peaks_by_device(program, graph, plan.ratios).bytes) for program in (plan.program, *in_order)]
    assert most[0] >= most[1] >= most[2]
    for program in in_order:
        verify(program, graph)
        assert replace(plan, program=program).verify(unrolled, *given).ok


@pytest.mark.parametrize(
    ("nodes", "ratios"), [((2, 2), (0.25,) * 4), ((2, 2, 2), (0.1, 0.2, 0.1, 0.2, 0.2, 0.2))]
)
def test_devices_that_are_looked_at_once_hold_the_same(
    nodes: tuple[int, ...], ratios: tuple[float, ...]
) -> None:
    """30 rows over two nodes of two devices are 8 and 7 in each."""
    params, moments, x, y = jax.tree.map(lambda p: list(p) if p.ndim == 3 else p[:30], arguments())
    pins = {"params/*": Shard(0), "x": grid(Shard(0), Shard(0), nodes)}
    where = fleet(1 << 30, nodes)
    plan = synthesize(unrolled, params, moments, x, y, fleet=where, axes=2, devices="all", constraints=pins)
    graph = plan.step().graph
    each = [device_memory(plan.program, graph, ratios, d).peak_bytes for d in range(len(ratios))]
    assert list(peaks(plan.program, graph, ratios)) == each
    assert len(set(each)) > 1


def test_what_fits_though_it_was_searched_roughly_is_searched_again(monkeypatch: pytest.MonkeyPatch) -> None:
    well = planned(1 << 30)
    asked: list[bool] = []
    bound = GridSearch.bound

    def noted(self: GridSearch, *args: Any, roughly: bool = False) -> float:
        asked.append(roughly)
        return bound(self, *args, roughly=roughly)

    monkeypatch.setattr(GridSearch, "bound", noted)
    monkeypatch.setattr("shardwright.synth.grid.choice._CROWDED", 0.0)
    again = planned(1 << 30)
    assert asked[0] and not all(asked)
    assert again.cost_s == pytest.approx(well.cost_s, rel=1e-9)
    assert (
        again.bound_s == pytest.approx(well.bound_s, rel=1e-9) and again.search_gap <= well.search_gap + 1e-9
    )


def test_where_memory_is_scarce_the_order_that_takes_least_is_weighed_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    candidate, weighed, met = Weighing.candidate, Weighing.weighed, list[bool]()
    times: list[Program] = []

    def noted(self: Weighing, *args: Any, in_turn: bool = False, likely: bool = False) -> GridCandidate:
        as_it_is = candidate(self, *args)
        times.clear()
        found = candidate(self, *args, in_turn=in_turn, likely=likely)
        met.append(in_turn)
        if in_turn:
            assert times == [found.program] != [as_it_is.program]
            assert found.cost_s == pytest.approx(as_it_is.cost_s) and found.over <= as_it_is.over
            # It is known to be in that order.
            assert self.in_turn(found) is found and times == [found.program]
        return found

    def counted(self: Weighing, *args: Any, **likely: bool) -> GridCandidate:
        times.append(args[2])
        return weighed(self, *args, **likely)

    monkeypatch.setattr(Weighing, "candidate", noted)
    monkeypatch.setattr(Weighing, "weighed", counted)
    monkeypatch.setattr("shardwright.synth.grid.choice._CROWDED", 0.0)
    planned(1 << 30)
    assert met[0] and not all(met)


def test_what_is_likely_to_fit_is_looked_at_before_the_model_is_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    candidate, modelled = Weighing.candidate, list[Program]()
    met: list[bool] = []

    def noted(self: Weighing, *args: Any, in_turn: bool = False, likely: bool = False) -> GridCandidate:
        modelled.clear()
        seen = candidate(self, *args, in_turn=in_turn, likely=True)
        asked = bool(modelled)
        told = candidate(self, *args, in_turn=in_turn)
        as_it_runs = peaks(seen.program, self.graph, seen.ratios)
        fits = max(as_it_runs) <= min(self.limits.nbytes)
        assert asked != fits and seen.memory == (Peaks(as_it_runs, seen=True) if fits else told.memory)
        met.append(fits)
        return told

    def asked(program: Program, *args: Any) -> Peaks:
        modelled.append(program)
        return peaks_by_device(program, *args)

    peak = max(planned(1 << 30).memory_bytes)
    monkeypatch.setattr(Weighing, "candidate", noted)
    monkeypatch.setattr("shardwright.synth.grid.weighing.peaks_by_device", asked)
    monkeypatch.setattr("shardwright.synth.grid.weighing._HARDLY_AMPLE", 0.0)
    planned(0.9 * peak)
    assert any(met) and not all(met)


def test_what_cannot_fit_is_said() -> None:
    plan = planned(20_000)
    assert not plan.fits and any("no program found fits" in note for note in plan.assumptions)


def test_the_memory_that_the_best_plan_takes_is_enough_for_it() -> None:
    """The model takes it for half as large again: it is looked at before it is changed to need less."""

    def step(params: Any, x: jax.Array, y: jax.Array) -> Any:
        def loss_of(params: Any) -> jax.Array:
            h = x
            for layer in params:
                h = h + jnp.sin(jnp.tanh(h @ layer["up"]) ** 2) @ layer["down"]
            return jnp.mean((h - y) ** 2)

        loss, gradients = jax.value_and_grad(loss_of)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), loss

    def nodes(memory: str) -> Fleet:
        kinds = [
            {
                "name": f"c{speed}",
                "flops": f"{speed} GFLOP/s",
                "memory_bandwidth": f"{speed / 4} GB/s",
                "memory": memory,
            }
            for speed in (40, 20)
        ]
        near = {"bandwidth": "4 GB/s", "latency": "5 us"}
        listed = [{"devices": {"type": kind, "count": 2}, "link": near} for kind in kinds]
        network = {"bandwidth": "1 GB/s", "latency": "20 us"}
        return Fleet.from_dict({"name": "nodes", "nodes": listed, "network": network})

    layer = {"up": jnp.ones((32, 128)), "down": jnp.ones((128, 32))}
    args = [layer, layer], jnp.ones((64, 32)), jnp.ones((64, 32))
    free = synthesize(step, *args, fleet=nodes("2 GB"), axes=2)
    again = synthesize(step, *args, fleet=nodes(f"{max(free.memory_bytes)} B"), axes=2)
    assert again.fits and again.cost_s <= free.cost_s * (1 + 1e-9)


@pytest.mark.parametrize("nodes", [(2, 2), (1, 3)])
def test_portions_are_what_devices_hold(nodes: tuple[int, ...]) -> None:
    inventory = fleet(1 << 30, nodes) if min(nodes) > 1 else uneven(nodes)
    mesh, devices = Mesh.of(CostModel(inventory)), sum(nodes)
    ratios = tuple(np.arange(1, devices + 1) / sum(range(1, devices + 1)))
    at, least = portions(mesh, ratios, 0), least_portions(mesh)
    texts = ("R", "S(0)")
    for across in texts:
        for within in texts:
            a, w = parse_placement(across), parse_placement(within)
            placement = grid(a, w, nodes)  # pyright: ignore[reportArgumentType]
            shape = (40_000_000,)
            held = [region(shape, placement, d, ratios)[0][1] / shape[0] for d in range(devices)]
            assert at(placement) == pytest.approx((sum(held), held[0]), abs=1e-5)
            assert least(placement)[0] <= sum(held) + 1e-6 and least(placement)[1] <= held[0] + 1e-6


def uneven(nodes: tuple[int, ...]) -> Fleet:
    kind = {"name": "k", "flops": "50 MFLOP/s", "memory_bandwidth": "100 MB/s", "memory": "1 GB"}
    link = {"bandwidth": "2 GB/s", "latency": "1 us"}
    listed = [{"devices": {"type": kind, "count": n}, **({"link": link} if n > 1 else {})} for n in nodes]
    return Fleet.from_dict({"name": "mesh", "nodes": listed, "network": link})


def within(memory_bytes: float, nodes: tuple[int, ...]) -> tuple[GridRenting, GridPriceList]:
    """What finds programs of the step that grids share, within so much memory per device."""
    inventory = fleet(memory_bytes, nodes)
    listed = GridPriceList(GridModel(CostModel(inventory)))
    judge, timer = Judge(grid_cases.graph(), listed.model), Timer()
    space = Space(grid_cases.graph(), nodes)
    return GridRenting(Weighing(grid_cases.graph(), space, listed.grid, judge, timer)), listed


@pytest.mark.parametrize(
    ("nodes", "budgets"), [((2, 2), (12_000, 10_000, 9_000)), ((3, 2, 3), (8_000, 6_000, 5_000))]
)
def test_the_bound_of_what_fits_is_below_the_best_whose_inputs_do(
    nodes: tuple[int, ...], budgets: tuple[int, ...]
) -> None:
    """As HiGHS finds it, of the programs whose inputs at least have room, at the least shares there are."""
    raised = 0
    for memory_bytes in budgets:
        renting, listed = within(memory_bytes, nodes)
        space, portion = renting.space, least_portions(listed.grid.mesh)
        solver, floors = GridSolver(space), grid_floors(listed)
        ideal = solver.solve(floors)
        tables = dict(zip(solver.factors, floors.tables(solver.factors), strict=True))
        sizes = [len(choice.domain) for choice in space.choices]
        starts = np.concatenate([[0], np.cumsum(sizes)])
        room: list[tuple[Floats, float]] = []
        some = ideal.assignment
        for number, rates in enumerate(((1.0, 0.0), (0.0, 1.0))):
            weights = np.zeros(sum(sizes))
            held = renting.rents.seconds(portion, *rates, kept=False)
            for use in renting.rents.uses:
                weights[starts[use.scope[0]] : starts[use.scope[0] + 1]] += held[use.factor]
            # What is held whatever the program counts, too.
            more = renting.rents.excess(some, portion, renting.limits.nbytes)[number]
            room.append((weights, float(weights[starts[:-1] + some].sum() - more)))
        terms = [(use.scope, tables[use.factor]) for use in space.uses]
        best_s = as_milp(sizes, terms, room)
        bound_s = renting.bound(floors, ideal, ideal.bound_s, 10 * best_s)
        assert ideal.bound_s <= bound_s <= best_s * (1 + 1e-9)
        # It says something: more than a third of what may be said.
        raised += bound_s > ideal.bound_s + (best_s - ideal.bound_s) / 3 > ideal.bound_s
    assert raised


@pytest.mark.parametrize("part", [0.85, 0.75])
def test_shares_lie_between_those_that_are_liked_and_those_of_memory(part: float) -> None:
    """Of devices with as much memory, those that compute four times as fast have what they have room for."""

    def plan_for(memory_bytes: float) -> Plan:
        return planned(memory_bytes, fleet(memory_bytes, speeds=(400, 100), network="1 GB/s"))

    free = plan_for(1 << 30)
    most = part * max(free.memory_bytes)
    plan = plan_for(most)
    assert plan.fits and max(plan.memory_bytes) <= most
    fast, slow = plan.ratios[0], plan.ratios[-1]
    assert 0.25 + 0.02 < fast < free.ratios[0] - 0.01 and plan.ratios == (fast, fast, slow, slow)
    # The slower devices compute for as long as the step takes: at even shares more than twice as long.
    assert free.cost_s < plan.cost_s < 1.7 * free.cost_s
    assert plan.verify(train_step, *arguments()).ok


def test_a_rival_does_not_end_the_search_for_what_fits() -> None:
    """The first program that fits is the one under the highest rent, which is far dearer than the best."""
    free = planned(1 << 30)
    memory_bytes = 0.95 * max(free.memory_bytes)
    traced = free.step()
    listed = GridPriceList(GridModel(CostModel(fleet(memory_bytes))))
    costs: list[float] = []
    for rival_s in (np.inf, None):
        space = Space(traced.graph, (2, 2))
        search = GridSearch(traced.graph, space, listed, Timer(), look=Looking(traced.graph))
        found = search.plan(1.01 * costs[0] if rival_s is None else rival_s)
        costs.append(found.cost_s)
    assert costs[1] == pytest.approx(costs[0], rel=1e-9) and costs[0] > free.cost_s


def test_a_large_step_is_planned_on_parts_of_the_fleet_once_it_is_changed_to_fit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    parts: dict[int, int] = {}

    class Noted(GridChoosing):
        def __init__(self, graph: Graph, where: Fleet, timer: Timer, members: Any, *rest: Any) -> None:
            parts[len(graph.equations)] = len(members)
            super().__init__(graph, where, timer, members, *rest)

    monkeypatch.setattr(one_step, "GridChoosing", Noted)
    monkeypatch.setattr(one_step, "SMALL", 0)
    given = jax.tree.map(lambda p: list(p) if p.ndim == 3 else p, arguments())
    shape: Any = {"nodes": (2, 2, 2), "speeds": (400, 400, 100)}
    synthesize(unrolled, *given, fleet=fleet(60_000, **shape))
    as_it_is, *changed = parts.values()
    assert as_it_is == 1 and changed and min(changed) > 1
