"""Pins, time limits, and the fields they add to a plan."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from click.testing import CliRunner

import shardwright
from shardwright import Fleet, InputError, Plan, Replicate, Shard, baselines, frontier, profile, synthesize
from shardwright.cli import main
from shardwright.commands.options import parse_pins, parse_time_limit
from shardwright.constraints import _by_pattern, conflict, path_of, resolve
from shardwright.cost.model import CostModel
from shardwright.ir.trace import trace
from shardwright.synth.space.space import Space


def draw(*shape: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def train_step(params: Any, moments: Any, x: Any, y: Any) -> Any:
    def loss_of(p: Any) -> Any:
        return jnp.mean((jnp.tanh(x @ p["a"]["kernel"]) @ p["b"]["kernel"] - y) ** 2)

    loss, gradients = jax.value_and_grad(loss_of)(params)
    moments = [
        jax.tree.map(lambda m, g: 0.9 * m + g, moments[0], gradients),
        jax.tree.map(lambda m, g: 0.9 * m + g * g, moments[1], gradients),
    ]
    step = jax.tree.map(lambda p, m, v: p - m / jnp.sqrt(v + 1), params, *moments)
    return step, moments, loss


def arguments() -> tuple[Any, ...]:
    params = {"a": {"kernel": draw(8, 16)}, "b": {"kernel": draw(16, 7)}}
    zeros = jax.tree.map(np.zeros_like, params)
    return params, [zeros, zeros], draw(12, 8, seed=1), draw(12, 7, seed=2)


ARGS = arguments()
FLEET = Fleet.from_dict(
    {
        "name": "slow",
        "nodes": [
            {
                "devices": [
                    {
                        "type": {
                            "name": f"slow-{speed}",
                            "flops": f"{speed} MFLOP/s",
                            "memory_bandwidth": f"{2 * speed} MB/s",
                            "memory": "1 GB",
                        }
                    }
                    for speed in (3, 1)
                ],
                "link": {"bandwidth": "400 GB/s", "latency": "100 ns"},
            }
        ],
    }
)


def planned(**options: Any) -> Plan:
    return synthesize(train_step, *ARGS, fleet=FLEET, **options)


def fails(**options: Any) -> str:
    with pytest.raises(InputError) as caught:
        planned(**options)
    return str(caught.value)


# ---------------------------------------------------------------------------------------------------
# Pins


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("params/*/kernel", {"params['a']['kernel']", "params['b']['kernel']"}),
        ("params['a']['kernel']", {"params['a']['kernel']"}),
        ("params['*']['kernel']", {"params['a']['kernel']", "params['b']['kernel']"}),
        ("*/b/*", {"params['b']['kernel']", "moments[0]['b']['kernel']", "moments[1]['b']['kernel']"}),
        ("moments/1/*", {"moments[1]['a']['kernel']", "moments[1]['b']['kernel']"}),
        ("x", {"x"}),
    ],
)
def test_patterns_name_arguments(pattern: str, names: set[str]) -> None:
    graph = trace(train_step, *ARGS).graph
    (pin,) = resolve({pattern: "R"}, graph, Space(graph))
    assert {graph.input_names[graph.inputs.index(value)] for value in pin.values} == names


def test_paths_of_names() -> None:
    assert path_of("opt_state[1][0].mu['blocks'][0]['out']") == "opt_state/1/0/mu/blocks/0/out"
    assert path_of("state.inner['mlp/~/linear.1']") == "state/inner/mlp/~/linear.1"
    assert path_of("params/v1.5/[ab]*") == "params/v1.5/[ab]*"


@pytest.mark.parametrize("placement", [Shard(1), Replicate(), "S(1)", "R"])
def test_a_pinned_argument_lies_where_it_should(placement: Any) -> None:
    free = planned()
    plan = planned(constraints={"params/*/kernel": placement})
    for layer in "ab":
        assert plan.held[f"params['{layer}']['kernel']"] == str(placement)
    (pin,) = plan.pins
    assert (pin.name, pin.placement) == ("params/*/kernel", str(placement))
    assert plan.cost_s >= free.cost_s * (1 - 1e-9)
    assert 0 <= pin.price_s <= plan.cost_s - free.bound_s + 1e-12
    result = plan.verify(train_step, *ARGS)
    assert result.ok, result


def test_the_price_of_a_pin_that_hurts() -> None:
    """Whole parameters, whole moments and whole data leave nothing to share but what is summed."""
    free = planned()
    plan = planned(constraints={"x": "R", "params/*": "R", "moments/*": "R"})
    prices = {pin.name: pin.price_s for pin in plan.pins}
    assert list(prices) == ["x", "params/*", "moments/*"]
    assert plan.cost_s > free.cost_s
    assert prices["x"] == 0, "a whole argument is cut for nothing"
    assert max(prices.values()) > 0
    text = str(plan)
    assert "its price" in text and "params/*" in text
    assert "its price" not in str(free)


def test_a_function_may_fix_placements() -> None:
    def by_size(name: str, tensor: Any) -> Any:
        return Shard(0) if name.startswith("params") and tensor.size > 112 else None

    plan = planned(constraints=by_size)
    assert plan.held["params['a']['kernel']"] == "S(0)"
    assert [pin.name for pin in plan.pins] == ["by_size -> S(0)"]


def test_pins_that_cannot_be() -> None:
    said = fails(constraints={"params/*/kernal": Shard(0)})
    assert "matches no argument" in said and "Near matches: params/b/kernel, params/a/kernel" in said
    said = fails(constraints={"labels": "R"})
    assert said.endswith(". There are params/…, moments/…, x, y")
    said = fails(constraints={"params/a/kernel": Shard(2)})
    assert "params['a']['kernel'] of shape (8, 16) cannot be cut as S(2)" in said
    assert said.endswith("Dimensions that can be cut: 0, 1")
    assert "cannot be cut as S(0:3)" in fails(constraints={"params/a/kernel": Shard(0, 3)})
    assert "no part of a sum" in fails(constraints={"x": "P(sum)"})
    assert "'Q' is no placement" in fails(constraints={"x": "Q"})
    assert "7 is no placement" in fails(constraints={"x": 7})


def test_a_dimension_that_cannot_be_cut_at_all() -> None:
    with pytest.raises(InputError, match="It can only be whole: 'R'"):
        synthesize(lambda x, s: x * s, draw(4), np.float32(2), fleet=FLEET, constraints={"s": Shard(0)})


def test_contradicting_pins_are_named() -> None:
    said = fails(constraints={"y": "R", "params/*": "S(0)", "x": "R", "*/a/kernel": "S(1)"})
    assert said.startswith("pins: params/* = S(0) and */a/kernel = S(1) contradict each other")
    assert "params['a']['kernel'] is given both" in said
    assert "x" not in said.split(" contradict")[0].split()


def test_arguments_that_share_one_placement() -> None:
    """Four tensors that are only ever added up are one class."""

    def step(a: Any, b: Any, c: Any) -> Any:
        return jnp.sin(a) * b - c

    shape = draw(8, 8)
    pins = {"a": Shard(0), "b": Shard(1), "c": Shard(0)}
    with pytest.raises(InputError, match="a and b are computed together, in one placement"):
        synthesize(step, shape, shape, shape, fleet=FLEET, constraints=pins)


def test_the_smallest_conflicting_set_is_found_by_search() -> None:
    """What only the search could tell: here a pin that no program keeps to beside two that all do."""
    graph = trace(train_step, *ARGS).graph
    space = Space(graph)
    pins = resolve({"x": "R", "params/a/kernel": Shard(0), "y": "R"}, graph, space)
    cut = resolve({"params/a/*": Shard(1)}, graph, space)
    error = conflict((pins[0], pins[1], *cut, pins[2]), graph, space, CostModel(FLEET))
    assert error.reason.startswith("params/a/kernel = S(0) and params/a/* = S(1) contradict")


@pytest.mark.parametrize(
    ("wanted", "names", "said"),
    [
        ("x", ["a/0/w", "a/0/b", "a/1", "a/2"], "There are a/0/…, a/1, a/2"),
        ("b/1", ["a/0/w", "a/0/b", "a/1"], "Near matches: a/1; there are a/0/…, a/1"),
        ("a/3", ["a/0/w", "a/0/b", "a/1", "a/2"], "Near matches: a/2, a/1, a/0/w"),
        ("data", ["arg0/w", "arg1", "arg2"], "There are arg0/…, arg1, arg2"),
        ("*/w", ["arg0/x/v"], "There are arg0/x/…"),
        ("?", [f"arg{i}" for i in range(9)], "There are arg0, arg1, arg2, arg3, arg4, arg5, …"),
    ],
)
def test_near_matches_name_the_arguments_where_a_pattern_begins_as_none(
    wanted: str, names: list[str], said: str
) -> None:
    with pytest.raises(InputError) as caught:
        _by_pattern(wanted, "R", dict.fromkeys(names, cast(Any, None)))
    assert caught.value.remedy == said


# ---------------------------------------------------------------------------------------------------
# Time limits


def test_without_time_the_best_baseline_is_the_plan() -> None:
    plan = planned(time_limit_s=0)
    best = baselines(train_step, *ARGS, fleet=FLEET)
    assert plan.cost_s == min(b.cost_s for b in best if b.fits)
    assert plan.stats.searches == 0
    assert 0 < plan.bound_s <= planned().cost_s <= plan.cost_s
    assert plan.gap > 0 == plan.search_gap  # on the device that it is for all programs are one
    assert any("only baselines were made" in note and note.endswith(" alone") for note in plan.assumptions)
    assert len(plan.used) == 1 and plan.unused
    assert plan.verify(train_step, *ARGS).ok


def test_without_time_all_devices_that_were_asked_for_are_used() -> None:
    plan = planned(time_limit_s=0, devices="all")
    best = baselines(train_step, *ARGS, fleet=FLEET)
    assert plan.cost_s == min(b.cost_s for b in best if b.fits and len(b.devices) == 2)
    assert plan.stats.searches == 0 and plan.gap == plan.search_gap > 0
    assert plan.verify(train_step, *ARGS).ok


def test_with_little_time_one_search_is_made() -> None:
    plan = planned(time_limit_s=1e-9)
    assert plan.stats.searches == 1
    assert any("the time limit ended the search" in note for note in plan.assumptions)
    assert not any("time limit" in note for note in planned(time_limit_s=1e6).assumptions)


@pytest.mark.parametrize("limit", [-1, float("nan")])
def test_limits_that_are_none(limit: float) -> None:
    assert fails(time_limit_s=limit).startswith("time limit: is ")


@pytest.mark.parametrize("limit", ["5", True, (1,)])
def test_limits_that_are_no_numbers(limit: Any) -> None:
    assert fails(time_limit_s=limit).startswith(f"time limit: is {limit!r}")


def test_pins_that_are_none() -> None:
    for pins in (3, "x=R", {3: "R"}, lambda name: None, max):
        assert fails(constraints=pins).startswith("constraints: ")


def test_axes_and_state_that_are_none() -> None:
    assert fails(axes=True).startswith("axes: is True")
    assert fails(axes=2.0).startswith("axes: is 2.0")
    assert fails(state=3).startswith("state: is 3")


def test_donate_and_tick_that_are_none() -> None:
    assert fails(donate="yes") == "donate: is 'yes'. Pass True or False"
    assert fails(donate=1).startswith("donate: is 1.")
    with pytest.raises(InputError, match="donate: is 'yes'"):
        planned().compile(train_step, donate="yes")  # type: ignore[arg-type]
    assert fails(tick=None) == "tick: is None. Pass a function of one text, or leave it out"
    with pytest.raises(InputError, match="tick: is None"):
        baselines(train_step, *ARGS, fleet=FLEET, tick=None)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="tick: is None"):
        profile(train_step, *ARGS, tick=None)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="tick: is None"):
        frontier(train_step, *ARGS, fleet=FLEET, tick=None)  # type: ignore[arg-type]


def test_no_time_and_pins() -> None:
    assert "no time to look for a program that keeps to the pins" in fails(
        time_limit_s=0, constraints={"x": "R"}
    )


# ---------------------------------------------------------------------------------------------------
# Files and the command line


def test_new_fields_are_saved_and_old_files_still_load(tmp_path: Path) -> None:
    plan = replace(planned(constraints={"x": "R"}), search_gap=0.25)
    plan.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert loaded == plan and loaded.pins == plan.pins and loaded.search_gap == 0.25
    data = json.loads((tmp_path / "plan.json").read_text())
    assert data["axes"] == 1
    for name in ("axes", "search_gap", "pins"):
        del data[name]
    old = Plan.from_dict(data)
    assert (old.axes, old.search_gap, old.pins) == (1, 0.0, ())


def test_options_are_read() -> None:
    assert parse_pins(()) is None
    assert parse_pins(["params/*=S(0)", "x=R"]) == {"params/*": "S(0)", "x": "R"}
    for wrong in (["x"], ["=R"], ["x=R", "x=S(0)"]):
        with pytest.raises(InputError, match="--pin"):
            parse_pins(wrong)
    assert [parse_time_limit(text) for text in (None, "0", "0s", "0.0 ms", "10s", "500 ms")] == [
        None, 0, 0, 0, 10, 0.5,
    ]  # fmt: skip
    for wrong_limit in ("10", "-1s", "soon"):
        with pytest.raises(InputError, match="--time-limit"):
            parse_time_limit(wrong_limit)


@pytest.fixture
def invoke(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """The command, in a folder with a step and a fleet."""
    (tmp_path / "fleet.json").write_text(json.dumps(FLEET.to_dict()))
    (tmp_path / "pinned_step.py").write_text(
        f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "from test_pins import train_step, arguments\n"
        "def small(): return train_step, arguments()\n"
    )
    monkeypatch.chdir(tmp_path)

    def run(command: str, *options: str) -> Any:
        return CliRunner().invoke(main, [command, "pinned_step.py:small", "--fleet", "fleet.json", *options])

    return run


def test_plan_with_pins_and_a_limit(invoke: Callable[..., Any]) -> None:
    result = invoke("plan", "--pin", "params/*=S(1)", "--pin", "x=R", "--json")
    assert result.exit_code == 0, result.output
    printed = json.loads(result.stdout)
    assert printed["held"]["params['a']['kernel']"] == "S(1)"
    assert [pin["name"] for pin in printed["pins"]] == ["params/*", "x"]
    assert printed.keys() >= {"bound_s", "gap", "search_gap", "axes"}
    result = invoke("plan", "--time-limit", "0", "--json")
    assert json.loads(result.stdout)["stats"]["searches"] == 0
    result = invoke("plan", "--pin", "params/z=R")
    assert result.exit_code == 2 and result.stderr.startswith("shardwright: pin 'params/z': matches no")


def test_the_table_of_baselines(invoke: Callable[..., Any]) -> None:
    result = invoke("baselines")
    assert result.exit_code == 0, result.output
    for wanted in (
        "this plan",
        "ZeRO-3",
        "tensor parallelism",
        "slow-1 alone",
        "left out: expert parallelism",
    ):
        assert wanted in result.stdout
    printed = json.loads(invoke("baselines", "--json").stdout)
    names = [entry["name"] for entry in printed["baselines"]]
    assert "fully sharded" in names and printed["left_out"].keys() == {"expert parallelism", "node n0 alone"}
    for entry in printed["baselines"]:
        assert entry["relative"] == entry["cost_s"] / printed["plan"]["cost_s"]
        assert len(entry["memory_bytes"]) == len(entry["ratios"]) == 2
        assert entry["program"]["instructions"]
    assert shardwright.Shard(0) == Shard(0)


def two_nodes() -> Fleet:
    node = {"devices": [{"type": "T4", "count": 2}], "link": {"bandwidth": "12 GB/s", "latency": "10 us"}}
    network = {"bandwidth": "1 Gbit/s", "latency": "30 us"}
    return Fleet.from_dict({"name": "mesh", "nodes": [node, node], "network": network})


def test_a_pin_of_its_own_for_each_mesh_axis() -> None:
    mesh, pins = two_nodes(), {"params/a/kernel": "R/S(1)", "x": "S(0)/R"}
    plan = synthesize(train_step, *ARGS, fleet=mesh, constraints=pins, devices="all")
    assert plan.axes == 2 and plan.held["params['a']['kernel']"] == "R/S(1)" and plan.held["x"] == "S(0)/R"
    assert all(each.price_s >= 0 for each in plan.pins) and plan.pins[0].price_s > 0
    assert Plan.from_dict(plan.to_dict()).pins == plan.pins
    assert plan.verify(train_step, *ARGS).ok
    with pytest.raises(InputError, match=r"R/S\(1\) is over two mesh axes, and one is to be planned on"):
        synthesize(train_step, *ARGS, fleet=mesh, constraints=pins, axes=1)
    with pytest.raises(InputError, match=r"cannot be cut as R/S\(2\)"):
        synthesize(train_step, *ARGS, fleet=mesh, constraints={"x": "R/S(2)"})
    pins = {"params/a/kernel": "R/S(1)", "params/*": "S(0)/R"}
    with pytest.raises(InputError, match=r"params/a/kernel is given both|contradict each other"):
        synthesize(train_step, *ARGS, fleet=mesh, constraints=pins)


def test_pins_that_two_mesh_axes_cannot_keep_leave_the_plan_on_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*args: Any, **options: Any) -> None:
        raise shardwright.PlanError(place="pins", reason="no program keeps them", remedy="Leave one out")

    monkeypatch.setattr("shardwright.one_step.GridChoosing.below", refused)
    mesh = two_nodes()
    pins = {"params/a/kernel": Replicate()}
    assert synthesize(train_step, *ARGS, fleet=mesh, constraints=pins).axes == 1
    with pytest.raises(InputError, match="no program keeps to all of them"):
        synthesize(train_step, *ARGS, fleet=mesh, constraints=pins, axes=2)
