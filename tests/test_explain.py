"""Two plans side by side, and why a plan is as it is."""

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from shardwright import InputError, Plan, synthesize
from shardwright.alternatives import Bench, Priced, _wins
from shardwright.cli import main
from shardwright.cost.bill import Tally, bill
from shardwright.cost.fleet import Fleet, Link
from shardwright.cost.model import CostModel
from shardwright.elastic import without
from shardwright.explain import explain
from shardwright.ir.placement import parse_placement
from shardwright.ir.program import verify
from shardwright.plans.diff import COMPUTING, diff
from shardwright.plans.parts import PinPrice
from shardwright.reports.units import duration

ROOT = Path(__file__).resolve().parent.parent
STEP = """
import jax, jax.numpy as jnp

def step(params, x, y):
    def loss_of(params):
        return jnp.mean((jax.nn.relu(x @ params["up"]) @ params["down"] - y) ** 2)
    loss, gradients = jax.value_and_grad(loss_of)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), loss

def shape(*sizes):
    return jax.ShapeDtypeStruct(sizes, "float32")

def small():
    return step, ({"up": shape(256, 1024), "down": shape(1024, 256)}, shape(512, 256), shape(512, 256))
"""
MODULE: dict[str, Any] = {}
exec(compile(STEP, "explain_step.py", "exec"), MODULE)


def make(fleet: Fleet, **options: Any) -> Plan:
    step, args = MODULE["small"]()
    return synthesize(step, *args, fleet=fleet, **options)


@pytest.fixture(scope="module")
def fleet() -> Fleet:
    return Fleet.load(ROOT / "examples/fleets/laptop.yaml")


@pytest.fixture(scope="module")
def plan(fleet: Fleet) -> Plan:
    return make(fleet)


@pytest.fixture(scope="module")
def folder(plan: Plan, fleet: Fleet, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("explain")
    (path / "explain_step.py").write_text(STEP)
    plan.save(path / "a.json")
    make(fleet, constraints={"params/up": "R"}).save(path / "b.json")
    return path


@pytest.fixture
def invoke(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", list(sys.path))

    def run(*arguments: str) -> Result:
        return CliRunner().invoke(main, arguments)

    yield run
    sys.modules.pop("explain_step", None)


# ---------------------------------------------------------------------------------------------------
# diff


def test_a_plan_does_not_differ_from_itself(plan: Plan) -> None:
    found = diff(plan, plan)
    assert found.same and found.change_s == 0 and not found.moved and not found.held
    assert list(found.why()) == ["Both run the same program with the same shares."]


def test_parts_add_up_to_the_change(folder: Path) -> None:
    a, b = Plan.load(folder / "a.json"), Plan.load(folder / "b.json")
    found = diff(a, b)
    assert sum(part.a_s for part in found.parts) == pytest.approx(a.cost_s)
    assert sum(part.b_s for part in found.parts) == pytest.approx(b.cost_s)
    assert sum(part.change_s for part in found.parts) == pytest.approx(b.cost_s - a.cost_s)
    changes = [abs(part.change_s) for part in found.parts]
    assert changes == sorted(changes, reverse=True)
    assert COMPUTING in [part.name for part in found.parts]


def test_the_pin_is_seen_and_its_price(folder: Path) -> None:
    a, b = Plan.load(folder / "a.json"), Plan.load(folder / "b.json")
    found = diff(a, b)
    assert ("params", "S(1)", "R") in [(m.argument, m.before, m.after) for m in found.moved]
    said = " ".join(found.why())
    assert f"{(b.cost_s - a.cost_s) / a.cost_s:.1%} dearer" in said
    assert "The pin params/up = R alone makes it" in said
    assert f"{(b.cost_s - a.cost_s) / b.cost_s:.1%} cheaper" in " ".join(diff(b, a).why())


def test_other_steps_fleets_versions_and_devices_are_named(plan: Plan, fleet: Fleet) -> None:
    faster = replace(fleet, nodes=tuple(replace(n, link=Link(1e12, 1e-9)) for n in fleet.nodes))
    versions = {**plan.versions, "jax": "9.9"}
    other = replace(plan, fleet=faster, fingerprint="0" * 64, versions=versions, fits=False)
    other = replace(other, cost_s=3 * plan.cost_s, used=(0,))
    said = " ".join(diff(plan, other).why())
    for wanted in (
        "two different steps",
        "other numbers",
        "jax",
        "9.9",
        "3 times as much",
        "1 device, not 4",
    ):
        assert wanted in said
    assert "does not fit into memory" in said


def test_diff_prints_tables_and_json(invoke: Any) -> None:
    shown = invoke("diff", "a.json", "b.json")
    assert (shown.exit_code, shown.stderr) == (0, "")
    for wanted in ("what the cost is made of", "inputs that lie differently", "computing", "such as"):
        assert wanted in shown.stdout
    data = json.loads(invoke("diff", "a.json", "b.json", "--json").stdout)
    assert data["same"] is False and data["same_step"] and data["same_fleet"]
    assert data["change_s"] == data["cost_s"]["b"] - data["cost_s"]["a"] > 0
    assert sum(part["change_s"] for part in data["parts"]) == pytest.approx(data["change_s"])
    assert data["moved"] and data["why"]
    missing = invoke("diff", "a.json", "none.json")
    assert missing.exit_code == 2 and missing.stderr.startswith("shardwright: none.json: cannot be read")


# ---------------------------------------------------------------------------------------------------
# explain


def test_alternatives_are_the_best_programs_under_a_pin(plan: Plan, fleet: Fleet) -> None:
    """The next best is what planning with that pin finds at these shares."""
    assert plan.traced is not None
    bench = Bench(plan, plan.traced)
    found = bench.alternatives("params['up']")
    assert plan.held["params['up']"] == "S(1)"
    assert {each.placement for each in found} == {"R", "S(0)"}
    costs = [each.priced.cost_s for each in found]
    assert costs == sorted(costs) and min(costs) >= bench.current.cost_s * (1 - 1e-9)
    assert bench.current.cost_s == pytest.approx(plan.cost_s)
    model = CostModel(fleet)
    for each in found:
        value = plan.traced.graph.inputs[plan.traced.graph.input_names.index("params['up']")]
        program = bench._best(value, parse_placement(each.placement))
        assert program is not None
        verify(program, plan.traced.graph)
        position = plan.traced.graph.inputs.index(value)
        assert str(program.inputs[position]) == each.placement
        items = bill(program, plan.traced.graph, model)
        assert Tally(items, model).seconds(plan.ratios) == pytest.approx(each.priced.cost_s)


def test_what_would_let_it_win_does(plan: Plan, fleet: Fleet) -> None:
    """Links that much faster or slower turn the order of the two programs, and not before."""
    assert plan.traced is not None
    bench, graph = Bench(plan, plan.traced), plan.traced.graph
    checked = 0
    for name in ("params['up']", "params['down']", "x", "y"):
        for each in bench.alternatives(name):
            now, other = bench.current, each.priced
            compute_s, exchange_s = other.compute_s - now.compute_s, other.exchange_s - now.exchange_s
            if compute_s * exchange_s >= 0:
                assert "no change of speeds" in each.wins or "costs the same" in each.wins
                continue
            faster = -exchange_s / compute_s
            assert f"links {faster if faster > 1 else 1 / faster:.3g} times as" in each.wins
            value = graph.inputs[graph.input_names.index(name)]
            program = bench._best(value, parse_placement(each.placement))
            assert program is not None
            for factor in (0.95, 1.05):
                speed = faster * factor
                link = fleet.nodes[0].link
                assert link is not None
                link = Link(link.bandwidth_byte_per_s * speed, link.latency_s / speed)
                model = CostModel(replace(fleet, nodes=(replace(fleet.nodes[0], link=link),)))
                costs = [
                    Tally(bill(p, graph, model), model).seconds(plan.ratios) for p in (program, plan.program)
                ]
                wins = costs[0] < costs[1]
                assert wins == ((factor > 1) == (compute_s < 0))
            checked += 1
    assert checked


def test_memory_can_let_it_win() -> None:
    now, less = Priced(1.0, 0.25, (1000, 900), True), Priced(1.5, 0.5, (500, 900), True)
    assert _wins(now, less, ["a", "b"]).endswith("; or less than 1000 B of memory on a, where it needs 500 B")
    tight = Priced(0.75, 0.25, (1000, 2000), False)
    assert _wins(now, tight, ["a", "b"]) == "it is cheaper; it does not fit into memory as it is"
    assert _wins(now, now, ["a", "b"]) == "nothing: it costs the same"


def test_a_tensor(plan: Plan) -> None:
    found = explain(plan, "params/up", plan.traced)
    assert found.kind == "tensor" and found.sentences[0] == "params['up']: S(1), cut along dimension 1."
    assert "the next best is" in found.sentences[1]
    both = explain(plan, "params/*", plan.traced)
    assert {each.tensor for each in both.alternatives} == {"params['up']", "params['down']"}
    alone = explain(plan, "params/up")
    assert not alone.alternatives and "--step" in alone.sentences[-1]
    pinned = replace(plan, pins=(PinPrice("params/*", "S(1)", 0.0),))
    assert "It is pinned to S(1) by params/*." in explain(pinned, "params/up").sentences


def test_on_two_axes_too_an_alternative_is_what_a_pin_would_give() -> None:
    """Devices are alike, so that pins are priced at the same shares."""
    kind = {"name": "slow", "flops": "50 GFLOP/s", "memory_bandwidth": "50 GB/s", "memory": "8 GB"}
    near, far = {"bandwidth": "100 GB/s", "latency": "1 us"}, {"bandwidth": "1 GB/s", "latency": "30 us"}
    node = {"count": 2, "devices": {"type": kind, "count": 2}, "link": near}
    fleet = Fleet.from_dict({"name": "pairs", "nodes": [node], "network": far})
    plan = make(fleet, axes=2, devices="all")
    found = explain(plan, "params/up", plan.traced)
    assert plan.axes == 2 and found.alternatives
    for each in found.alternatives:
        pinned = make(fleet, axes=2, devices="all", constraints={"params/up": each.placement})
        assert each.priced.cost_s == pytest.approx(pinned.cost_s, rel=1e-3) and each.change_s > -1e-12
    said = " ".join(explain(plan, plan.devices[0], plan.traced).sentences)
    assert "one point more costs" in said and "Without it the best plan of the others costs" in said


def whole_weights(name: str, tensor: Any) -> str | None:
    return "R" if name.startswith("params") else None


@pytest.mark.parametrize("constraints", [{"params/*": "R"}, whole_weights])
def test_what_is_priced_keeps_to_the_pins(fleet: Fleet, constraints: Any) -> None:
    """Whoever gave them: a plan file has the arguments that a function chose, too."""
    made = make(fleet, constraints=constraints, axes=1, devices="all")
    loaded = Plan.from_dict(json.loads(json.dumps(made.to_dict())))
    assert loaded.pins == made.pins and made.pins[0].price_s > 0
    assert made.pins[0].arguments == ("params['down']", "params['up']")
    bench = Bench(loaded, made.step())
    graph = bench.traced.graph
    inputs = dict(zip(graph.input_names, graph.inputs, strict=True))
    for name, pinned in (("x", ["params['down']", "params['up']"]), ("params['up']", ["params['down']"])):
        found = bench.alternatives(name)
        # Another place of what is pinned may save what the pin costs, another one of the rest nothing.
        assert found and (name != "x" or min(each.change_s for each in found) > -1e-12)
        for each in found:
            program = bench._best(inputs[name], parse_placement(each.placement))
            assert program is not None
            held = dict(zip(graph.input_names, map(str, program.inputs), strict=True))
            assert held[name] == each.placement and {held[other] for other in pinned} == {"R"}
    left = make(without(fleet, ["n0.d3"]), constraints=constraints, axes=1, devices="all")
    said = explain(loaded, "n0.d3", made.step()).sentences[-1]
    assert f"Without it the best plan of the others costs {duration(left.cost_s)}, " in said


def test_without_a_device_pins_may_be_impossible() -> None:
    """Two devices of two nodes are one mesh axis, on which nothing lies in two placements."""
    kind = {"name": "slow", "flops": "50 GFLOP/s", "memory_bandwidth": "50 GB/s", "memory": "8 GB"}
    near, far = {"bandwidth": "100 GB/s", "latency": "1 us"}, {"bandwidth": "1 GB/s", "latency": "30 us"}
    nodes = [{"devices": {"type": kind, "count": count}, "link": near} for count in (2, 1)]
    fleet = Fleet.from_dict({"name": "three", "nodes": nodes, "network": far})
    plan = make(fleet, axes=2, devices="all", constraints={"params/up": "R/S(1)"})
    assert explain(plan, "n0.d0", plan.traced).sentences[-1] == (
        "Without it no program of the others keeps to the pins."
    )


def test_a_layer(plan: Plan) -> None:
    found = explain(plan, "up", plan.traced)
    assert found.kind == "layer" and found.alternatives
    assert "all parameters cut along dimension 1" in found.sentences[0]


def test_a_device(plan: Plan) -> None:
    found = explain(plan, "n0.d3", plan.traced)
    assert found.kind == "device"
    said = " ".join(found.sentences)
    assert "12.50% of everything that is cut" in said and "sets the pace" in said
    assert "one point more" in said and "Without it the best plan of the others costs" in said
    assert "--step" in explain(plan, "n0.d3").sentences[-1]


def test_moving_a_share_is_priced_right(plan: Plan, fleet: Fleet) -> None:
    """A point more for n0.d0, by hand."""
    assert plan.traced is not None
    model = CostModel(fleet)
    items = bill(plan.program, plan.traced.graph, model)
    ratios = (0.51, 0.25 * 0.98, 0.125 * 0.98, 0.125 * 0.98)
    change_us = (Tally(items, model).seconds(ratios) - plan.cost_s) * 1e6
    (said,) = [s for s in explain(plan, "n0.d0", plan.traced).sentences if "one point more" in s]
    assert change_us > 0 and f"one point more costs {change_us:.3g} µs" in said


def test_the_plan(plan: Plan) -> None:
    said = " ".join(explain(plan, "", plan.traced).sentences)
    assert f"{plan.gap:.1%}" in said and plan.exchanges[0].name in said and "up, down" in said


def test_where_nothing_can_be_otherwise(fleet: Fleet) -> None:
    step, args = MODULE["small"]()
    one = Fleet.from_dict({"name": "one", "nodes": [{"devices": {"type": "T4"}}]})
    alone = synthesize(step, *args, fleet=one)
    assert "every placement is the same" in explain(alone, "params/up", alone.traced).sentences[-1]
    scaled = synthesize(lambda x, y: (x * y).sum(), 2.0, args[1], fleet=fleet, devices="all")
    names = list(scaled.held)
    assert "it cannot be cut" in explain(scaled, names[0], scaled.traced).sentences[-1]


def test_what_is_not_there(plan: Plan) -> None:
    with pytest.raises(InputError, match=r"is no device, argument or layer.*params\['up'\].*--step"):
        explain(plan, "params['upp']")
    with pytest.raises(InputError, match="is no device"):
        explain(plan, "n0.d9", plan.traced)


def test_explain_prints_and_answers_json(invoke: Any) -> None:
    shown = invoke("explain", "a.json", "params/up", "--step", "explain_step.py:small")
    assert (shown.exit_code, shown.stderr) == (0, "")
    assert "alternatives" in shown.stdout and "wins with" in shown.stdout
    data = json.loads(invoke("explain", "a.json", "n0.d0", "--json").stdout)
    assert data["kind"] == "device" and data["subject"] == "n0.d0" and data["sentences"]
    priced = json.loads(invoke("explain", "a.json", "up", "--step", "explain_step.py:small", "--json").stdout)
    assert priced["kind"] == "layer"
    for each in priced["alternatives"]:
        assert each["cost_s"] == pytest.approx(each["compute_s"] + each["exchange_s"])
    wrong = invoke("explain", "a.json", "nothing")
    assert wrong.exit_code == 2 and "Near matches" in wrong.stderr
