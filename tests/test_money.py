"""`objective="cost"`: the part of a fleet on which a step costs the least money, by brute force."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from click.testing import CliRunner

from shardwright import Fleet, profile, synthesize
from shardwright.cli import main
from shardwright.cost.subfleet import subfleet
from shardwright.money import hourly, parts
from shardwright.plan import Plan
from shardwright.synth.parts import candidates

ROOT = Path(__file__).parents[1]
SPEED = {"quick": 50, "slow": 20}
ARGS = tuple(jax.ShapeDtypeStruct(sizes, "float32") for sizes in ((64, 64), (256, 64)))
FLEETS = {
    "spot and on demand in one node": ((("quick", 2.0), ("slow", 1.0), ("quick", 5.0)),),
    "equal nodes at two prices": ((("quick", 5.0),), (("quick", 2.0),)),
    "the dear one is slow": ((("quick", 3.0), ("slow", 4.0)), (("slow", 1.5),)),
    "as they come": ((("slow", 1.0),), (("slow", 1.0),), (("quick", 2.6),)),
}


def step(weight: Any, x: Any) -> Any:
    loss, gradient = jax.value_and_grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(weight)
    return weight - 0.1 * gradient, loss


def fleet(nodes: tuple[tuple[tuple[str, float], ...], ...], memory: str = "1 GB") -> Fleet:
    def device(name: str, price: float) -> dict[str, Any]:
        rates = {"flops": f"{SPEED[name]} MFLOP/s", "memory_bandwidth": f"{2 * SPEED[name]} MB/s"}
        return {"type": {"name": name, "memory": memory, **rates}, "price_per_hour": price}

    link = {"bandwidth": "400 GB/s", "latency": "100 ns"}
    made = [{"devices": [device(*each) for each in node], "link": link} for node in nodes]
    return Fleet.from_dict({"name": "priced", "nodes": made, "network": {**link, "latency": "30 us"}})


def money(plan: Plan) -> float:
    return plan.iteration_s * hourly(plan.fleet, plan.used)


@pytest.mark.parametrize("name", FLEETS)
def test_no_devices_cost_less(name: str) -> None:
    where = fleet(FLEETS[name])
    plan = synthesize(step, *ARGS, fleet=where, objective="cost", axes=1)
    everyone = range(len(where.devices))
    for count in range(1, len(everyone) + 1):
        for some in itertools.combinations(everyone, count):
            other = synthesize(step, *ARGS, fleet=subfleet(where, some, "some"), devices="all", axes=1)
            assert money(plan) <= money(other) * (1 + 1e-9)


def test_without_time_to_search_nodes_and_kinds_alone_are_compared_all_the_same() -> None:
    where = fleet(((("quick", 2.0), ("slow", 9.0)), (("slow", 9.0),), (("quick", 1.0),)))
    plan = synthesize(step, *ARGS, fleet=where, objective="cost", time_limit_s=0, axes=1)
    alone = synthesize(step, *ARGS, fleet=subfleet(where, (3,), "one"), axes=1)
    assert plan.used == (3,) and money(plan) == pytest.approx(money(alone))
    chosen, untried = plan.assumptions[-2:]
    assert "cost least, of those looked at" in chosen and "were not looked at" in untried


def test_where_nothing_fits_it_is_what_lacks_least_and_not_what_is_cheap() -> None:
    where = fleet(((("quick", 1.0), ("slow", 5.0)),), memory="10 kB")
    options: dict[str, Any] = {"axes": 1, "recompute": "off", "microbatches": 1}
    plan, all_of_it = (
        synthesize(step, *ARGS, fleet=where, **asked, **options)
        for asked in ({"objective": "cost"}, {"devices": "all"})
    )
    assert not plan.fits and not all_of_it.fits
    assert max(plan.memory_bytes) <= max(all_of_it.memory_bytes)
    assert any("on them the step lacks least memory" in note for note in plan.assumptions)


@pytest.mark.parametrize("name", FLEETS)
def test_the_order_of_devices_does_not_matter(name: str) -> None:
    there, back = (
        synthesize(step, *ARGS, fleet=fleet(nodes), objective="cost", axes=1)
        for nodes in (FLEETS[name], tuple(node[::-1] for node in FLEETS[name][::-1]))
    )
    assert money(there) == pytest.approx(money(back), rel=1e-9)


@pytest.mark.parametrize("name", FLEETS)
def test_of_equal_parts_the_cheapest_is_considered(name: str) -> None:
    where = fleet(FLEETS[name])
    considered = parts(where)
    assert len(considered[0]) == len(where.devices)
    kinds = [sorted(repr(node.kind) for node in subfleet(where, some, "x").nodes) for some in considered]
    assert len({tuple(kind) for kind in kinds}) == len(kinds)


def test_many_prices_take_no_part_from_those_that_are_considered_anyway() -> None:
    nodes = [(("quick", 2 + n / 10),) for n in range(5)] + [(("slow", 1 + n / 10),) for n in range(5)]
    where = fleet(tuple(nodes))

    def kinds(members: tuple[int, ...]) -> tuple[int, int]:
        return sum(d < 5 for d in members), sum(d >= 5 for d in members)

    assert {kinds(some) for some in candidates(where)} <= {kinds(some) for some in parts(where)}
    (quick,) = [some for some in parts(where) if kinds(some) == (1, 0)]
    assert quick == (0,)


def test_memory_is_that_of_the_fleet_where_only_its_cards_are_paid_for(tmp_path: Path) -> None:
    """Whose compiler lays memory out follows from the fleet, of which a plan file has all."""
    rates = {"flops": "50 MFLOP/s", "memory_bandwidth": "100 MB/s", "memory": "1 GB"}
    processor = {"type": {"name": "processor", **rates}, "price_per_hour": 9.0}
    card = {"type": {"name": "card", "sms": 20, **rates}, "price_per_hour": 1.0}
    link = {"bandwidth": "1 GB/s", "latency": "1 us"}
    mixed = {"name": "mixed", "nodes": [{"devices": [processor, card], "link": link}]}
    plan = synthesize(step, *ARGS, fleet=Fleet.from_dict(mixed), objective="cost", axes=1)
    assert plan.used_devices == ("n0.d1",)
    assert any("CPU compiler" in note for note in plan.assumptions)
    plan.save(tmp_path / "plan.json")
    (found,) = profile(step, *ARGS, plan=Plan.load(tmp_path / "plan.json")).devices
    assert found.memory.peak_bytes == plan.memory_bytes[1]


def test_prices_survive_a_fleet_file() -> None:
    """Devices are equal whatever they cost, and yet are no entry with others at another price."""
    for nodes in FLEETS.values():
        where = fleet(nodes)
        again = Fleet.from_dict(where.to_dict())
        assert [d.type.price_per_hour for d in again.devices] == [
            d.type.price_per_hour for d in where.devices
        ]
        assert again == where


def test_alike_nodes_are_used_in_the_order_of_their_prices() -> None:
    """Where one of them is as quick as both, also for the fastest steps."""
    nodes = fleet(FLEETS["equal nodes at two prices"]).to_dict()
    nodes["network"] = {"bandwidth": "1 kB/s", "latency": "1 s"}
    plan = synthesize(step, *ARGS, fleet=Fleet.from_dict(nodes), axes=1)
    assert plan.used_devices == ("n1.d0",)


def shown_of(*arguments: str) -> str:
    result = CliRunner().invoke(main, ["fleet", "show", *arguments])
    assert result.exit_code == 0
    return result.stdout


def test_prices_are_shown_where_there_are_any(tmp_path: Path) -> None:
    devices = "{type: T4, count: 3, price_per_hour: 0.35}, {type: T4, price_per_hour: 0.5}, {type: P4%s}"
    link = "{bandwidth: 12 GB/s, latency: 10 us}"
    path = tmp_path / "priced.yaml"

    def written(more: str) -> str:
        path.write_text(f"name: priced\nnodes: [{{devices: [{devices % more}], link: {link}}}]")
        return str(path)

    shown = shown_of(written(""))
    assert "per hour" in shown and "0.35 or 0.5" in shown and "price per hour" not in shown
    shown = shown_of(written(", price_per_hour: 0.1"))
    assert "price per hour  1.65\n" in shown
    data = json.loads(shown_of(str(path), "--json"))
    assert data["price_per_hour"] == pytest.approx(1.65)
    assert [each["prices_per_hour"] for each in data["types"]] == [[0.35, 0.5], [0.1]]
    assert "per hour" not in shown_of(str(ROOT / "examples/fleets/hap_testbed.yaml"))
