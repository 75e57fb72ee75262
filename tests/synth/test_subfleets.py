"""Which devices take part: what is considered, that bounds are bounds, and that the best part is chosen."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardwright import Fleet, InputError, Plan, PlanError, baselines, synthesize
from shardwright.cost.model import CostModel
from shardwright.cost.subfleet import subfleet
from shardwright.ir.graph import Graph
from shardwright.ir.trace import trace
from shardwright.synth import subfleets
from shardwright.synth.alternate import synthesize as search
from shardwright.synth.memory.rent import too_small
from shardwright.synth.part import Part
from shardwright.synth.parts import MOST_PARTS, Members, candidates
from shardwright.synth.prices.tables import Prices
from shardwright.synth.search.priced import SpaceSolver
from shardwright.synth.space.space import Space
from shardwright.synth.subfleets import Choosing
from shardwright.synth.timer import Timer
from shardwright.synth.unsearched import arithmetic_s

FAST = {"bandwidth": "400 GB/s", "latency": "100 ns"}
SLOW = {"bandwidth": "10 kB/s", "latency": "10 ms"}


def node(*mflops: float, count: int = 1, memory: str = "1 GB", **keys: Any) -> dict[str, Any]:
    """Nodes of devices so slow that even tiny tensors are worth cutting."""
    devices = [
        {
            "type": {
                "name": f"slow-{speed:g}",
                "flops": f"{speed} MFLOP/s",
                "memory_bandwidth": f"{2 * speed} MB/s",
                "memory": memory,
            }
        }
        for speed in mflops
    ]
    return {"count": count, "devices": devices, "link": FAST, **keys}


def fleet(*nodes: dict[str, Any], network: dict[str, str] = SLOW) -> Fleet:
    return Fleet.from_dict({"name": "parts", "nodes": list(nodes), "network": network})


#: Differentiated alike by all versions of JAX, so that memory that is short is short with all of them.
tanh = jax.custom_jvp(jnp.tanh)


@tanh.defjvp
def _(primals: Any, tangents: Any) -> Any:
    y = jnp.tanh(primals[0])
    return y, (tangents[0] + tangents[0] * y) * (1 - y)


def step(params: Any, x: Any, y: Any) -> Any:
    def loss_of(p: Any) -> Any:
        return jnp.mean((tanh(x @ p["in"]) @ p["out"] - y) ** 2)

    loss, gradients = jax.value_and_grad(loss_of)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), loss


def arguments() -> tuple[Any, ...]:
    draw = np.random.default_rng(0).normal
    shapes = {"in": (8, 32), "out": (32, 4)}
    params = {name: draw(size=shape).astype(np.float32) for name, shape in shapes.items()}
    return params, draw(size=(12, 8)).astype(np.float32), draw(size=(12, 4)).astype(np.float32)


@cache
def problem() -> tuple[Graph, Space]:
    graph = trace(step, *arguments()).graph
    return graph, Space(graph)


FLEETS: dict[str, Callable[[], Fleet]] = {
    "two kinds of nodes": lambda: fleet(node(5, 5), node(1, 1, 1, count=2)),
    "quick network": lambda: fleet(node(5, 5), node(1, 1, 1, count=2), network=FAST),
    "mixed nodes": lambda: fleet(node(5, 1, count=2)),
    "one box": lambda: fleet(node(50, 20, 1)),
}


def test_parts_are_whole_nodes_and_classes_and_count_once() -> None:
    testbed = Fleet.load("examples/fleets/hap_testbed.yaml")
    found = candidates(testbed)
    sizes = [(sum(d < 16 for d in part), sum(d >= 16 for d in part)) for part in found]
    assert sizes[0] == (16, 48)
    assert sorted(sizes) == sorted((v, p) for v in (0, 8, 16) for p in (0, 8, 48) if v + p)
    assert all(part == tuple(sorted(set(part))) for part in found)
    mixed = candidates(FLEETS["mixed nodes"]())
    assert mixed == ((0, 1, 2, 3), (0, 1), (0, 2), (1, 3))
    assert len(candidates(FLEETS["one box"]())) == 7
    five = candidates(fleet(node(1, 20, 5, 10, 50)))
    assert Counter(map(len, five)) == {5: 1, 1: 5, 4: 5, 3: 10, 2: MOST_PARTS - 21}
    assert five[6:8] == ((1, 4), (1, 3, 4))  # the fastest
    # What was a part is one when a device of a fifth class joins its node.
    assert (1, 2) in candidates(fleet(node(1), node(9, 5, 7), node(2), node(4)))
    many = fleet(*(node(speed, speed + 0.5, count=2) for speed in range(1, 9)))
    assert len(candidates(many)) == MOST_PARTS and candidates(many) == candidates(many)
    assert candidates(many)[0] == tuple(range(32))


def test_parts_keep_what_joins_them() -> None:
    links: dict[str, Any] = {"uplink": {"bandwidth": "1 GB/s", "latency": "1 us"}, "rails": 2}
    data = fleet(node(5, 5, host_link=FAST, **links), node(1, 1, count=2)).to_dict()
    whole = Fleet.from_dict({**data, "oversubscription": 2, "transport": "nccl"})
    part = subfleet(whole, range(4), "part")
    assert [n.kind for n in part.nodes] == [n.kind for n in whole.nodes[:2]]
    assert (part.oversubscription, part.transport, part.network) == (2, "nccl", whole.network)
    alone = subfleet(whole, [1], "alone")
    assert alone.nodes[0].host_links == whole.nodes[0].host_links[1:] and alone.transport == "nccl"
    assert Fleet.from_dict(part.to_dict()) == part and Fleet.from_dict(alone.to_dict()) == alone


@pytest.mark.parametrize("devices", range(1, 10))
def test_stages_are_as_few_as_have_no_more_layers_each(devices: int) -> None:
    alike = fleet(node(*[2] * devices))
    for layers in range(1, 30):

        def most(stages: int, layers: int = layers) -> int:
            return -(-layers // stages)

        fewest = min(count for count in range(1, devices + 1) if most(count) == most(devices))
        wanted = [tuple(range(fewest))] if fewest < min(devices, layers) else []
        assert list(candidates(alike, [layers])) == [tuple(range(devices)), *wanted]


def test_nodes_are_stages_too_if_they_are_alike() -> None:
    three, layers = fleet(node(2, 2), node(2, 2), node(2, 2)), {10, 4}
    whole, *others = candidates(three)
    assert candidates(three, layers) == (whole, (0, 1, 2, 3), (0, 1, 2, 3, 4), *others)
    unlike = fleet(node(2, 2), node(2, 2), node(2, 9))
    assert candidates(unlike, layers) == candidates(unlike)


@pytest.mark.parametrize("where", FLEETS)
def test_the_best_part_is_chosen_and_the_bounds_are_bounds(where: str) -> None:
    graph, space = problem()
    whole = FLEETS[where]()
    solver = SpaceSolver(space)
    costs: dict[tuple[int, ...], float] = {}
    for members in candidates(whole):
        part = whole if len(members) == len(whole.devices) else subfleet(whole, members, "part")
        floors = Prices.floors(CostModel(part))
        found = search(graph, space, CostModel(part), Timer())
        assert 0 < arithmetic_s(space, floors) <= solver.bound(floors) * (1 + 1e-9)
        assert solver.bound(floors) <= found.cost_s * (1 + 1e-9)
        costs[members] = found.cost_s
    chosen = Choosing(graph, space, whole, Timer()).below(math.inf)
    assert chosen is not None
    assert chosen.found.cost_s == pytest.approx(min(costs.values()), rel=1e-9)
    assert costs[chosen.members] == pytest.approx(chosen.found.cost_s, rel=1e-9)
    assert chosen.found.bound_s <= chosen.found.cost_s
    unused = [d for some, _ in chosen.unused(whole) for d in some]
    assert sorted((*chosen.members, *unused)) == list(range(len(whole.devices)))


@pytest.mark.parametrize("network", [SLOW, FAST, {"bandwidth": "2 MB/s", "latency": "100 us"}])
def test_parts_that_share_a_bound_are_not_lost(
    network: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    graph, space = problem()
    whole = fleet(node(5, 5, count=3), node(1, 1, 1, count=2), network=network)
    found: list[tuple[float, float]] = []
    for together in (0, 100):
        monkeypatch.setattr("shardwright.synth.bounding._TOGETHER", together)
        choosing = Choosing(graph, space, whole, Timer())
        shared = [part for part in choosing._parts if part.joined]  # pyright: ignore[reportPrivateUsage]
        assert bool(shared) == (together == 0)
        chosen = choosing.below(math.inf)
        assert chosen is not None
        found.append((chosen.found.cost_s, chosen.found.bound_s))
    assert found[0] == pytest.approx(found[1], rel=1e-9)


@pytest.mark.parametrize(("network", "alone"), [(SLOW, False), (FAST, True)])
def test_the_whole_fleet_has_prices_of_its_own_where_it_may_come_before_a_node(
    network: dict[str, str], alone: bool
) -> None:
    graph, space = problem()
    whole, *others = Choosing(
        graph, space, fleet(node(5, 5, count=3), node(1, 1, 1, count=2), network=network), Timer()
    ).parts
    assert isinstance(whole, Part)
    least_s = min(part.bound_s for part in others if len(part.members) < 4)
    assert (whole.joined is None) is alone
    assert (whole.bound_s < least_s) is alone


def test_a_slow_network_leaves_nodes_out_and_a_quick_one_does_not() -> None:
    args = arguments()
    plan = synthesize(step, *args, fleet=FLEETS["two kinds of nodes"](), axes=1)
    assert plan.used == (0, 1) and plan.used_devices == ("n0.d0", "n0.d1")
    assert plan.ratios[2:] == (0.0,) * 6 and plan.memory_bytes[2:] == (0,) * 6
    assert sum(plan.used_ratios) == pytest.approx(1) and plan.timeline().iteration_s == plan.iteration_s
    (left,) = plan.unused
    assert left.devices[0] == "n1.d0" and len(left.devices) == 6
    assert "that uses them costs" in left.why
    assert "uses            2 of 8 devices" in str(plan) and left.why in str(plan)
    assert plan.verify(step, *args).ok
    got, wanted = plan.compile(step)(*args), step(*args)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    quick = synthesize(step, *args, fleet=FLEETS["quick network"](), axes=1)
    assert len(quick.used) == 8 and quick.unused == ()


def test_every_device_takes_part_on_request() -> None:
    args, where = arguments(), FLEETS["two kinds of nodes"]()
    whole = synthesize(step, *args, fleet=where, axes=1, devices="all")
    assert len(whole.used) == 8 and whole.unused == () and whole.part == where
    part = synthesize(step, *args, fleet=where, axes=1)
    assert part.cost_s < whole.cost_s and part.bound_s <= part.cost_s
    some: Any = "some"
    with pytest.raises(InputError, match="devices: is 'some'"):
        synthesize(step, *args, fleet=where, axes=1, devices=some)
    pinned = synthesize(step, *args, fleet=where, axes=1, constraints={"params/in": "S(1)"})
    assert pinned.used == (0, 1) and len(pinned.pins) == 1


def test_with_a_time_limit_there_is_a_plan_for_the_whole_fleet_first() -> None:
    args, where = arguments(), FLEETS["two kinds of nodes"]()
    first = Choosing(*problem(), where, Timer(limit_s=1e-9)).below(math.inf)
    assert first is not None and len(first.members) == 8
    hurried = synthesize(step, *args, fleet=where, axes=1, time_limit_s=1e-9)
    assert any("before all parts of the fleet" in note for note in hurried.assumptions)
    best = synthesize(step, *args, fleet=where, axes=1)
    assert hurried.bound_s <= best.cost_s
    unsearched = synthesize(step, *args, fleet=where, axes=1, time_limit_s=0)
    (said,) = [note for note in unsearched.assumptions if "only baselines were made" in note]
    assert said.endswith(" is node n0 alone") and unsearched.used == (0, 1)
    best_baseline = baselines(step, *args, fleet=where, axes=1).best_fitting()
    assert best_baseline is not None and unsearched.cost_s == pytest.approx(best_baseline.cost_s, rel=1e-9)
    assert unsearched.bound_s <= best.cost_s <= unsearched.cost_s < first.found.cost_s
    # The search had no time for the node, on which a baseline is cheaper than what it found.
    assert hurried.used == (0, 1) and hurried.cost_s == unsearched.cost_s and hurried.stats.searches > 0
    assert any("before it found anything as good, and this is" in note for note in hurried.assumptions)
    same = synthesize(step, *args, fleet=where, axes=1, time_limit_s=0, devices="all")
    assert len(same.used) == 8 and same.cost_s > unsearched.cost_s
    assert synthesize(step, *args, fleet=where, axes=1, time_limit_s=1000).used == best.used


def test_without_time_a_node_without_room_is_left_for_one_that_has_some() -> None:
    """Neither its best program nor any recipe on it fits."""
    keys: dict[str, Any] = {"axes": 1, "time_limit_s": 0, "recompute": "off", "microbatches": 1}
    args, roomy = arguments(), FLEETS["two kinds of nodes"]()
    best = synthesize(step, *args, fleet=roomy, **keys)
    assert best.used == (0, 1)
    small = fleet(node(5, 5, memory=f"{max(best.memory_bytes) * 4 // 5} B"), node(1, 1, 1, count=2))
    plan = synthesize(step, *args, fleet=small, **keys)
    assert plan.fits and plan.used == (2, 3, 4) and plan.cost_s > best.cost_s


def test_a_part_that_does_not_fit_is_no_choice() -> None:
    args = arguments()
    roomy = synthesize(step, *args, fleet=fleet(node(5, 5), node(1, 1, 1, count=2)), axes=1)
    small = fleet(node(5, 5, memory=f"{max(roomy.memory_bytes) // 4} B"), node(1, 1, 1, count=2))
    plan = synthesize(step, *args, fleet=small, axes=1)
    assert plan.fits and not set(plan.used) <= {0, 1}


def test_a_device_that_the_one_program_there_is_does_not_fit_bounds_nothing() -> None:
    args, keys = arguments(), {"axes": 1, "recompute": "off", "microbatches": 1}
    roomy = synthesize(step, *args, fleet=fleet(node(50), node(5)), **keys)
    (alone,) = roomy.used
    short = roomy.memory_bytes[alone] - 1
    assert not too_small(problem()[0], [short]), "no bound on what must live says so"
    plan = synthesize(step, *args, fleet=fleet(node(50, memory=f"{short} B"), node(5)), **keys)
    assert plan.fits and plan.used != (alone,) and plan.cost_s > roomy.cost_s * 1.01
    assert plan.bound_s > roomy.cost_s * 1.01


def test_files_say_which_devices_are_used() -> None:
    plan = synthesize(step, *arguments(), fleet=FLEETS["two kinds of nodes"](), axes=1)
    data = json.loads(json.dumps(plan.to_dict()))
    assert Plan.from_dict(data) == plan
    with pytest.raises(PlanError, match="used: are no devices of 8"):
        Plan.from_dict({**data, "used": [0, 8]})
    with pytest.raises(PlanError, match="ratios: give a share to a device that is not used"):
        Plan.from_dict({**data, "used": [0]})
    whole = synthesize(step, *arguments(), fleet=FLEETS["two kinds of nodes"](), axes=1, devices="all")
    old = {k: v for k, v in whole.to_dict().items() if k not in ("used", "unused")}
    assert Plan.from_dict(json.loads(json.dumps(old))) == whole


@pytest.mark.parametrize(("memory", "known"), [("1 GB", False), ("1.7 kB", True)])
def test_even_ratios_are_priced_with_the_floors_where_nodes_have_no_room(memory: str, known: bool) -> None:
    """The whole fleet is planned first then, and its search asks for them."""
    graph, space = problem()
    on = fleet(node(5, 5, memory=memory), node(1, 1, memory=memory), network=FAST)
    choosing = Choosing(graph, space, on, Timer())
    whole, even = choosing.parts[0], (0.25,) * 4
    assert isinstance(whole, Part)
    room = whole.model.types[0].memory_bytes
    assert too_small(graph, [room] * 2) is known and not too_small(graph, [room] * 4)
    assert list(whole.known) == ([even] if known else [])
    assert choosing.below(math.inf) is not None
    if known:
        assert whole.free is not None and whole.free.turns.search(even)[1] is whole.known[even]


def test_what_was_searched_for_in_vain_is_not_searched_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    choosing = Choosing(*problem(), fleet(node(5, 1, memory="4 kB")), Timer())
    found = choosing.below(math.inf)
    assert found is not None and found.found.memory.peak(np.array(found.found.ratios)).max() > 4000
    tried: list[Part] = []
    monkeypatch.setattr(Choosing, "_plan", lambda self, part, *args, **how: tried.append(part))
    again = choosing.below(math.inf)
    assert again is not None and again.found.cost_s == found.found.cost_s and not tried


def test_what_does_not_fit_is_not_sought_on_fewer_devices_with_no_more_memory_each(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole, quick, slow = (0, 1, 2, 3), (0, 1), (2, 3)

    def planned(rival_s: float = math.inf, large: str = "2.8 kB", *, room: bool = False) -> set[Members]:
        """Parts planned where nothing fits, or does for less than the rival."""
        on = fleet(node(5, 5, memory=large), node(1, 1, memory="2.8 kB"), network=FAST)
        look = None if room else lambda program, ratios: (1 << 20,) * len(ratios)
        choosing = Choosing(*problem(), on, Timer(), look=look)
        found = choosing.below(rival_s)
        assert (found is None) == (rival_s < math.inf)
        return {part.members for part in choosing.parts if isinstance(part, Part) and part.found is not None}

    def sought() -> list[set[Members]]:
        return [planned(), planned(large="3 kB"), planned(4e-3, room=True)]

    assert sought() == [{whole, quick, slow}, {whole, quick, slow}, {whole, quick}]  # small steps are
    monkeypatch.setattr(subfleets, "SMALL", 0)
    assert sought() == [{whole}, {whole, quick}, {whole}]
    # Where the others may be quicker memory aside, they are tried beside a rival.
    monkeypatch.setattr(Part, "free_s", property(lambda part: math.inf))
    assert planned(4e-3, room=True) == {whole, quick}
