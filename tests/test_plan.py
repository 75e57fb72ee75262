"""Plans: their fields, their files, verification, and what they compute."""

import json
import math
import random
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import jsonschema
import numpy as np
import pytest
from jax.extend.core import Primitive

import shardwright
from shardwright import (
    Fleet,
    InputError,
    Plan,
    PlanError,
    ReplicatedWarning,
    ShardwrightError,
    execute,
    synthesize,
)
from shardwright.ir.program import Compute, Loop, Move
from shardwright.ir.trace import trace

Step = Callable[..., Any]
SCHEMA = json.loads((Path(shardwright.__file__).parent / "plan.schema.json").read_text())


def array(*shape: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def fleet(*mflops: float, bandwidth: str = "400 GB/s", latency: str = "100 ns") -> Fleet:
    """Devices so slow, on links so fast, that even tiny tensors are worth cutting."""
    devices = [
        {
            "type": {
                "name": f"slow-{speed:g}",
                "flops": f"{speed} MFLOP/s",
                "memory_bandwidth": f"{2 * speed} MB/s",
                "memory": "1 GB",
            }
        }
        for speed in mflops
    ]
    link = {"link": {"bandwidth": bandwidth, "latency": latency}} if len(mflops) > 1 else {}
    return Fleet.from_dict({"name": "slow", "nodes": [{"devices": devices, **link}]})


def mlp_loss(params: Any, x: Any, y: Any) -> Any:
    hidden = jnp.tanh(x @ params["w1"] + params["b1"])
    return jnp.mean((hidden @ params["w2"] - y) ** 2)


def mlp_step(params: Any, momentum: Any, x: Any, y: Any) -> Any:
    loss, gradients = jax.value_and_grad(mlp_loss)(params, x, y)
    momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, gradients)
    return jax.tree.map(lambda p, m: p - 0.1 * m, params, momentum), momentum, {"loss": loss}


def mlp(batch: int = 12, width: int = 16) -> tuple[Step, tuple[Any, ...]]:
    params = {"w1": array(8, width), "b1": array(width, seed=1), "w2": array(width, 4, seed=2)}
    momentum = jax.tree.map(np.zeros_like, params)
    return mlp_step, (params, momentum, array(batch, 8, seed=3), array(batch, 4, seed=4))


@pytest.fixture(scope="module")
def made() -> Plan:
    step, args = mlp()
    return synthesize(step, *args, fleet=fleet(30, 20, 10))


def assert_same(got: Any, wanted: Any, rtol: float = 1e-5) -> None:
    """Equal up to rounding, relative to the largest element of each leaf."""
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        assert a.dtype == b.dtype
        assert np.abs(np.asarray(a) - np.asarray(b)).max() <= rtol * np.abs(b).max()


# ---------------------------------------------------------------------------------------------------
# Fields


def test_fields_of_the_interface(made: Plan) -> None:
    assert 0 < made.bound_s <= made.cost_s
    compared_s = made.comparing_s / made.resync_every
    assert 0 < made.iteration_s <= made.cost_s * (1 + 1e-9) + compared_s
    assert made.gap == (made.cost_s - made.bound_s) / made.cost_s
    assert made.devices == tuple(device.name for device in made.fleet.devices)
    assert len(made.ratios) == 3
    assert math.isclose(sum(made.ratios), 1.0, abs_tol=1e-9)
    assert made.ratios[0] > made.ratios[1] > made.ratios[2] > 0
    stats = made.stats
    assert stats.equations > 20
    assert stats.choices > 5
    assert stats.expanded > 0
    assert stats.searches > 0
    assert min(stats.trace_s, stats.space_s, stats.search_s, stats.ratio_s) > 0
    assert stats.replicated == {}
    assert made.state == {"params": "output[0]", "momentum": "output[1]"}
    assert set(made.held) == {
        *(f"{name}['{leaf}']" for name in ("params", "momentum") for leaf in ("b1", "w1", "w2")), "x", "y",
    }  # fmt: skip
    assert any(placement.startswith("S") for placement in made.held.values())
    assert {type(i) for i in made.program.instructions} >= {Compute, Move}
    assert made.exchanges
    assert made.fits
    assert len(made.memory_bytes) == 3
    assert made.versions["jax"] == jax.__version__


def test_gap_of_a_plan_that_costs_nothing(made: Plan) -> None:
    assert replace(made, cost_s=2.0, bound_s=1.5).gap == 0.25
    assert replace(made, cost_s=0.0, bound_s=0.0).gap == 0.0


def test_the_printout_has_what_one_wants_to_know(made: Plan) -> None:
    text = str(made)
    for wanted in ("slow-30", "slow-10", "params -> output[0]", "gap", "S(0)", *made.devices):
        assert wanted in text
    for ratio in made.ratios:
        assert f"{ratio:.2%}" in text
    for exchange in made.exchanges:
        assert exchange.name.split(".")[0] in text
    assert max(map(len, text.splitlines())) <= 120


def test_the_printout_says_when_there_is_no_state() -> None:
    plan = synthesize(lambda x: x.sum(), array(4, 4), fleet=fleet(2, 1))
    assert plan.state == {}
    assert re.search(r"state\s+none found", str(plan))


def test_planning_runs_nothing_and_shapes_will_do(made: Plan) -> None:
    step, args = mlp()
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), args)
    planned = synthesize(step, *shapes, fleet=fleet(30, 20, 10))
    assert planned.program == made.program
    assert planned.ratios == made.ratios
    assert planned.fingerprint == made.fingerprint
    assert planned.verify(step, *args).ok


def test_progress_is_told() -> None:
    told: list[str] = []
    synthesize(jnp.sin, array(4), fleet=fleet(1, 2), tick=told.append)
    assert told[0] == "tracing the step"
    assert "searching programs" in told


def test_a_path_is_no_fleet() -> None:
    with pytest.raises(InputError, match=r"fleet: is a str\. Pass shardwright\.Fleet\.load"):
        synthesize(jnp.sin, array(4), fleet="fleet.yaml")  # type: ignore[arg-type]


# ---------------------------------------------------------------------------------------------------
# Files


def test_saving_loses_nothing(made: Plan, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    made.save(path)
    loaded = Plan.load(path)
    assert loaded == made
    assert loaded.traced is None
    assert str(loaded) == str(made)
    assert loaded.gap == made.gap
    assert loaded.to_dict() == made.to_dict()
    step, args = mlp()
    assert loaded.text(loaded.attach(step, *args)) == made.text()
    assert loaded.verify(step, *args).ok
    with pytest.raises(PlanError, match="was loaded without its step"):
        loaded.text()


def test_what_is_written_follows_the_schema(made: Plan) -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    jsonschema.validate(json.loads(json.dumps(made.to_dict(), allow_nan=False)), SCHEMA)
    later = {"search_gap", "axes", "pins", "used", "unused", "bucket_bytes", "resync_every", "messages"}
    later |= {"rewriting", "again_s", "host_s", "comparing_s"}
    assert set(SCHEMA["required"]) == set(made.to_dict()) - later
    assert set(SCHEMA["properties"]) == set(made.to_dict())


@pytest.mark.parametrize("override", [{"params": 0, 1: "[1]"}, {0: (0,)}, {}])
def test_a_state_override_is_saved(override: Any, tmp_path: Path) -> None:
    step, args = mlp()
    plan = synthesize(step, *args, fleet=fleet(2, 1), state=override)
    plan.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert loaded == plan
    assert loaded.attach(step, *args).state_names == plan.state
    inferred = replace(loaded, state_override=None)
    if plan.state == made_state(step, args):
        inferred.attach(step, *args)
    else:
        with pytest.raises(PlanError, match="another step"):
            inferred.attach(step, *args)


def made_state(step: Step, args: Sequence[Any]) -> Any:
    return trace(step, *args).state_names


def test_a_plan_with_regions_and_groups_is_saved(tmp_path: Path) -> None:
    step, args = STEPS["scan"]()
    plan = synthesize(step, *args, fleet=fleet(3, 2, 1))
    assert any(isinstance(i, Loop) for i in plan.program.instructions)
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan


def test_saving_overwrites_and_leaves_nothing_else(made: Plan, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text("old")
    made.save(str(path))
    assert Plan.load(path) == made
    assert [p.name for p in tmp_path.iterdir()] == ["plan.json"]


@pytest.mark.parametrize("failing", ["replace", "chmod"])
@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_failed_save_changes_nothing(
    made: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str, error: BaseException
) -> None:
    path = tmp_path / "plan.json"
    path.write_text("old")

    def fail(*_: Any) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(Path, failing, fail)
        with pytest.raises(PlanError if isinstance(error, OSError) else KeyboardInterrupt) as caught:
            made.save(path)
    if isinstance(error, OSError):
        assert "No space left on device" in str(caught.value)
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["plan.json"]


def test_saving_nowhere(made: Plan, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"missing/plan\.json: cannot be written: No such file or directory"):
        made.save(tmp_path / "missing" / "plan.json")
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(PlanError, match="cannot be written: Is a directory"):
        made.save(tmp_path)
    assert list(tmp_path.parent.glob(f".{tmp_path.name}*")) == []


FILES = {
    "empty": (b"", "is no JSON"),
    "no json": (b"plan: yes", "is no JSON"),
    "no text": (b"\xff\xfe\x00", "is no JSON"),
    "nested": (b"[" * 100_000, "is no JSON"),
    "a list": (b"[]", "format: is None, this version of Shardwright reads 1"),
    "another version": (b'{"format": 2}', "format: is 2, this version of Shardwright reads 1"),
    "only a version": (b'{"format": 1}', "top level: 'versions' is a required property"),
}


@pytest.mark.parametrize("name", FILES)
def test_files_that_are_no_plans(name: str, tmp_path: Path) -> None:
    data, reason = FILES[name]
    path = tmp_path / "plan.json"
    path.write_bytes(data)
    with pytest.raises(PlanError) as caught:
        Plan.load(path)
    assert str(path) in caught.value.place
    assert reason in str(caught.value)


def test_missing_files_and_folders(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="cannot be read: No such file"):
        Plan.load(tmp_path / "plan.json")
    with pytest.raises(PlanError, match="cannot be read: Is a directory"):
        Plan.load(tmp_path)


def test_truncated_files(made: Plan, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    text = json.dumps(made.to_dict())
    for end in (1, len(text) // 3, len(text) - 1):
        path.write_text(text[:end])
        with pytest.raises(PlanError, match="is no JSON"):
            Plan.load(path)


def changed(plan: Plan, *path: Any, to: Any) -> Any:
    """The plan's file with one entry replaced."""
    data = json.loads(json.dumps(plan.to_dict()))
    inner = data
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = to
    return data


CHANGES: list[tuple[tuple[Any, ...], Any, str]] = [
    (("ratios",), [0.5, 0.5], "ratios: there are 2 for 3 devices"),
    (("ratios",), [0.5, 0.5, 0.5], "ratios: add up to 1.5"),
    (("ratios",), [0.0, 0.0, 0.0], "ratios: add up to 0"),
    (("ratios", 0), -0.1, "ratios.0: -0.1 is less than the minimum"),
    (("ratios", 1), "half", "ratios.1: 'half' is not of type 'number'"),
    (("ratios",), {}, "ratios: {} is not of type 'array'"),
    (("memory_bytes",), [1], "memory_bytes: there are 1 for 3 devices"),
    (("memory_bytes", 0), 1.5, "memory_bytes.0: 1.5 is not of type 'integer'"),
    (("devices",), ["a", "b", "c"], "devices: are not the 3 of the fleet"),
    (("cost_s",), "1", "cost_s: '1' is not of type 'number'"),
    (("cost_s",), None, "cost_s: None is not of type 'number'"),
    (("fingerprint",), "abc", "fingerprint: 'abc' does not match"),
    (("fleet_fingerprint",), "0" * 64, "fleet_fingerprint: is that of another fleet"),
    (("fleet",), {}, "nodes"),
    (("fleet", "name"), "other", "fleet_fingerprint: is that of another fleet"),
    (("extra",), 1, "'extra' was unexpected"),
    (("stats", "extra"), 1, "stats: Additional properties are not allowed ('extra' was unexpected)"),
    (("state_override",), [[["a"], 1]], "state_override.0"),
    (("state_override",), [[0, None]], "state_override.0"),
    (("held", "x"), "S(0:0)", "held.x: 'S(0:0)' does not match"),
    (("program", "inputs", 0), "Q", "program.inputs.0: 'Q' does not match"),
    (("program", "instructions", 0), {}, "program.instructions.0"),
    (("program", "instructions", 0), {"move": "slice", "value": 0, "pre": "R", "post": "S(0)",
                                      "group": [0, 7]},
     "program: names device 7, the last one is 2"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "to", "reason"), CHANGES, ids=[".".join(map(str, c[0])) for c in CHANGES])
def test_files_changed_by_hand(made: Plan, path: tuple[Any, ...], to: Any, reason: str) -> None:
    with pytest.raises(ShardwrightError) as caught:
        Plan.from_dict(changed(made, *path, to=to))
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("constant", ["NaN", "Infinity", "-Infinity"])
def test_what_json_has_no_number_for(made: Plan, tmp_path: Path, constant: str) -> None:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(made.to_dict()).replace(f'"cost_s": {made.cost_s}', f'"cost_s": {constant}'))
    with pytest.raises(PlanError, match=f"{constant} is no number"):
        Plan.load(path)


def test_a_program_that_breaks_a_triple_is_not_run(made: Plan) -> None:
    """Anything a file may say of the program is found out before it runs."""
    step, args = mlp()
    instructions = made.to_dict()["program"]["instructions"]
    first_move = next(i for i, entry in enumerate(instructions) if "move" in entry)
    missing = changed(
        made, "program", "instructions", to=[e for i, e in enumerate(instructions) if i != first_move]
    )
    for data in (
        missing,
        changed(made, "program", "outputs", 0, to="P(sum)"),
        changed(made, "program", "inputs", 0, to="S(9)"),
        changed(made, "program", "inputs", to=[]),
        changed(made, "program", "instructions", 0, to={"compute": 999, "ins": [], "outs": []}),
        changed(made, "program", "instructions", 0, to={"move": "x", "value": 0, "pre": "R", "post": "R"}),
    ):
        loaded = Plan.from_dict(data)
        for use in (loaded.attach, loaded.verify, loaded.compile):
            with pytest.raises(PlanError, match="plan: instruction") as caught:
                use(step, *args) if use != loaded.compile else loaded.compile(step)(*args)
            assert "\n" not in str(caught.value)
            assert "plan again" in caught.value.remedy


def mutations(data: Any, random_: random.Random) -> Iterator[Any]:
    """The same data with one entry, anywhere, replaced, removed or repeated."""
    text = json.dumps(data)
    others = [
        None,
        -1,
        0,
        1,
        10**6,
        0.5,
        "",
        "R",
        "S(0)",
        "S(3:2)",
        "P(sum)",
        "P(max)",
        [],
        {},
        True,
        [0],
        [2, 1],
    ]
    while True:
        fresh = json.loads(text)
        spots: list[tuple[Any, Any]] = []

        def collect(node: Any, spots: list[tuple[Any, Any]] = spots) -> None:
            for key, value in node.items() if isinstance(node, dict) else enumerate(node):
                spots.append((node, key))
                if isinstance(value, (dict, list)):
                    collect(value)

        collect(fresh)
        node, key = random_.choice(spots)
        kind = random_.randrange(3)
        if kind == 0:
            node[key] = random_.choice(others)
        elif kind == 1 or not isinstance(node, list):
            del node[key]
        else:
            node.insert(key, json.loads(json.dumps(node[key])))
        yield fresh


@pytest.mark.parametrize(
    "name",
    ["mlp", "scan"],
)
def test_files_changed_anyhow_are_refused_in_one_line(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    step, args = mlp() if name == "mlp" else scan()
    plan = synthesize(step, *args, fleet=fleet(3, 2, 1))
    traced, real = plan.traced, shardwright.plan.trace
    monkeypatch.setattr(
        shardwright.plan, "trace", lambda *a, state: real(*a, state=state) if state is not None else traced
    )
    refused = 0
    for _, data in zip(range(150), mutations(plan.to_dict(), random.Random(0)), strict=False):
        try:
            Plan.from_dict(data).attach(step, *args)
        except ShardwrightError as error:
            assert "\n" not in str(error)  # noqa: PT017
            refused += 1
    assert refused > 75


# ---------------------------------------------------------------------------------------------------
# Another step, other shapes


def test_plans_know_their_step(made: Plan) -> None:
    step, args = mlp()

    def other(params: Any, momentum: Any, x: Any, y: Any) -> Any:
        return mlp_step(params, momentum, x * 2, y)

    _, wider = mlp(width=24)
    _, larger = mlp(batch=24)
    for another, arguments in ((other, args), (step, wider), (step, larger)):
        for use in (made.attach, made.verify, made.compile(another)):
            with pytest.raises(PlanError, match="was made for another step") as caught:
                use(*arguments) if use not in (made.attach, made.verify) else use(another, *arguments)
            assert f"jax {jax.__version__}" in caught.value.remedy


def test_later_calls_are_checked_too(made: Plan) -> None:
    step, args = mlp()
    compiled = made.compile(step)
    compiled(*args)
    _, larger = mlp(batch=24)
    with pytest.raises(InputError, match=r"x: is float32\[24,8\]"):
        compiled(*larger)
    with pytest.raises(InputError, match="have another structure"):
        compiled(*args[:3], [args[3]])


def test_shapes_cannot_be_run(made: Plan) -> None:
    step, args = mlp()
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), args)
    for use in (lambda: made.verify(step, *shapes), lambda: made.compile(step)(*shapes)):
        with pytest.raises(InputError, match="shapes without values"):
            use()


def test_there_is_no_such_backend(made: Plan) -> None:
    with pytest.raises(PlanError, match=r"'tpu' does not exist\. Choose from reference, mpi"):
        made.compile(mlp_step, backend="tpu")


# ---------------------------------------------------------------------------------------------------
# Verification and execution


@pytest.mark.parametrize("speeds", [(3, 1), (30, 20, 10), (8, 8, 1)], ids=str)
def test_verifies_on_unequal_devices(speeds: Sequence[float]) -> None:
    step, args = mlp()
    plan = synthesize(step, *args, fleet=fleet(*speeds))
    result = plan.verify(step, *args)
    assert result.ok
    assert result.max_rel_error <= 1e-5
    assert result.loss_rel_error <= 1e-5
    assert result.groups > 20
    assert str(result).startswith("verified")


def test_corruption_is_found(made: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: a primitive that computes something else on shards."""
    step, args = mlp()
    traced = made.attach(step, *args)
    planted = {**traced.primitives, "tanh": _Off(traced.primitives["tanh"])}
    broken = replace(traced, primitives=planted)
    monkeypatch.setattr(shardwright.plan, "trace", lambda *args, **kwargs: broken)
    result = made.verify(step, *args)
    assert not result.ok
    assert 1e-3 < result.max_rel_error < 1e-1
    assert str(result).startswith("MISMATCH")


class _Off:
    """A primitive that is right on whole arrays and wrong on shards."""

    def __init__(self, real: Any) -> None:
        self.real = real
        self.multiple_results = real.multiple_results

    def bind(self, *args: Any, **params: Any) -> Any:
        result = self.real.bind(*args, **params)
        return result if result.shape in ((12, 16),) else result * 1.01


@pytest.mark.parametrize("speeds", [(1,), (3, 1), (30, 20, 10)], ids=str)
def test_compiled_on_reference_equals_jit_in_a_loop(speeds: Sequence[float]) -> None:
    step, args = mlp()
    compiled = synthesize(step, *args, fleet=fleet(*speeds)).compile(step)
    single = jax.jit(step)
    params, momentum, x, y = args
    wanted = (params, momentum, None)
    got = wanted
    for number in range(3):
        batch = x + number, y - number
        got, wanted = compiled(got[0], got[1], *batch), single(wanted[0], wanted[1], *batch)
        assert_same(got, wanted)


def test_a_saved_plan_runs_in_another_process_s_place(made: Plan, tmp_path: Path) -> None:
    step, args = mlp()
    made.save(tmp_path / "plan.json")
    assert_same(Plan.load(tmp_path / "plan.json").compile(step)(*args), jax.jit(step)(*args))


def test_a_single_device() -> None:
    step, args = mlp()
    plan = synthesize(step, *args, fleet=fleet(1))
    assert plan.ratios == (1.0,)
    assert not [e for e in plan.exchanges if e.seconds > 0]
    assert plan.verify(step, *args).ok


@pytest.mark.parametrize("batch", [1, 2])
def test_a_batch_smaller_than_the_number_of_devices(batch: int) -> None:
    """No error: another axis is sharded, or some devices get nothing."""
    step, args = mlp(batch=batch, width=64)
    plan = synthesize(step, *args, fleet=fleet(30, 20, 10, 5, 3))
    assert any(p.startswith("S") for p in plan.held.values())
    assert plan.verify(step, *args).ok
    assert_same(plan.compile(step)(*args), jax.jit(step)(*args))


def test_fewer_elements_than_devices() -> None:
    def step(w: Any, x: Any) -> Any:
        return w - 0.1 * jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w)))(w), x.sum()

    args = (array(2, 2), array(2, 2, seed=1))
    plan = synthesize(step, *args, fleet=fleet(5, 4, 3, 2, 1))
    assert plan.verify(step, *args).ok


def test_a_device_that_is_not_worth_it_gets_nothing() -> None:
    """What it would have to compute of a small tensor takes it longer than the others need for all of it."""

    def step(w: Any, x: Any) -> Any:
        return w, x @ w

    args = (array(64, 64), array(6, 64, seed=1))
    plan = synthesize(step, *args, fleet=fleet(100, 90, 1), devices="all")
    assert plan.ratios[2] == 0
    assert plan.verify(step, *args).ok
    assert_same(plan.compile(step)(*args), jax.jit(step)(*args))
    assert "0.00%" in str(plan)


@pytest.mark.parametrize("seed", range(4))
def test_any_ratios_will_do(made: Plan, seed: int) -> None:
    """The program is right at every ratio; where a device has none, its shards are empty."""
    step, args = mlp()
    weights = np.random.default_rng(seed).exponential(size=3)
    weights[seed % 3] = 0
    weights[(seed + 1) % 3] *= seed > 1
    plan = replace(made, ratios=tuple(float(w) for w in weights / weights.sum()))
    assert plan.verify(step, *args).ok
    assert_same(plan.compile(step)(*args), jax.jit(step)(*args))


def test_python_scalars_and_numpy_float64_as_arguments() -> None:
    def step(w: Any, x: Any, rate: Any) -> Any:
        return w - rate * jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w)))(w), rate

    args = (array(8, 8).astype(np.float64), array(12, 8, seed=1), 0.5)
    plan = synthesize(step, *args, fleet=fleet(2, 1))
    assert plan.verify(step, *args).ok
    assert_same(plan.compile(step)(*args), jax.jit(step)(*args))


# ---------------------------------------------------------------------------------------------------
# Steps of other kinds


def dropout() -> tuple[Step, tuple[Any, ...]]:
    """State with a typed key that every step splits."""

    def step(w: Any, key: Any, x: Any) -> Any:
        key, use = jax.random.split(key)

        def loss_of(w: Any) -> Any:
            h = jnp.tanh(x @ w)
            return jnp.mean(jnp.where(jax.random.bernoulli(use, 0.5, h.shape), h / 0.5, 0.0) ** 2)

        loss, gradient = jax.value_and_grad(loss_of)(w)
        return w - 0.1 * gradient, key, loss

    return step, (array(8, 16), jax.random.key(7), array(12, 8, seed=1))


def dropout_raw() -> tuple[Step, tuple[Any, ...]]:
    step, (w, _, x) = dropout()
    return step, (w, jax.random.PRNGKey(7), x)


def scan() -> tuple[Step, tuple[Any, ...]]:
    def step(ws: Any, x: Any) -> Any:
        def loss_of(ws: Any) -> Any:
            h, _ = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, ws)
            return jnp.mean(h**2)

        loss, gradient = jax.value_and_grad(loss_of)(ws)
        return ws - 0.1 * gradient, loss

    return step, (0.3 * array(3, 16, 16), array(12, 16, seed=1))


def while_() -> tuple[Step, tuple[Any, ...]]:
    def step(w: Any, x: Any) -> Any:
        count, h = jax.lax.while_loop(
            lambda s: (jnp.sum(s[1] ** 2) > 1e-3) & (s[0] < 5),
            lambda s: (s[0] + 1, jnp.tanh(s[1] @ w)),
            (0, x),
        )
        return w * 0.9, h, count

    return step, (0.1 * array(16, 16), array(12, 16, seed=1))


def cond() -> tuple[Step, tuple[Any, ...]]:
    def step(w: Any, x: Any) -> Any:
        h = jax.lax.cond(
            jnp.sum(x) > 0, lambda a, b: jnp.tanh(a @ b), lambda a, b: (a * 2) @ jnp.cos(b), x, w
        )
        return w * 0.9, jnp.mean(h)

    return step, (array(16, 16), array(12, 16, seed=1))


STEPS: dict[str, Callable[[], tuple[Step, tuple[Any, ...]]]] = {
    "dropout": dropout,
    "dropout with a raw key": dropout_raw,
    "scan": scan,
    "while": while_,
    "cond": cond,
}


@pytest.mark.parametrize("name", STEPS)
def test_steps_of_all_kinds(name: str) -> None:
    step, args = STEPS[name]()
    plan = synthesize(step, *args, fleet=fleet(30, 20, 10))
    assert plan.exchanges
    result = plan.verify(step, *args)
    assert result.ok, result
    got, wanted = plan.compile(step)(*args), jax.jit(step)(*args)
    keys = jax.tree.map(lambda x: jnp.issubdtype(x.dtype, jax.dtypes.prng_key), (got, wanted))
    plain = jax.tree.map(lambda x, key: jax.random.key_data(x) if key else x, (got, wanted), keys)
    assert_same(*plain, rtol=1e-4)


def test_a_loop_is_said_to_be_priced_as_one_iteration() -> None:
    step, args = while_()
    assert any("while" in note for note in synthesize(step, *args, fleet=fleet(2, 1)).assumptions)


doubled = Primitive("double_of_my_own")
doubled.def_impl(lambda x: x * 2)
doubled.def_abstract_eval(lambda x: x)


def _lower() -> None:
    from jax.interpreters import mlir

    mlir.register_lowering(doubled, mlir.lower_fun(lambda x: x * 2, multiple_results=False))


_lower()

UNKNOWN: dict[str, Callable[[Any], Any]] = {
    "cholesky": lambda x: jnp.linalg.cholesky(x @ x.T + 40 * jnp.eye(16)),
    "fft": lambda x: jnp.fft.fft(x).real,
    "double_of_my_own": lambda x: doubled.bind(x),
    "pure_callback": lambda x: jax.pure_callback(np.tanh, jax.ShapeDtypeStruct(x.shape, x.dtype), x),
}


@pytest.mark.parametrize("primitive", UNKNOWN)
def test_unknown_primitives_run_replicated_visibly(primitive: str) -> None:
    unknown = UNKNOWN[primitive]

    def step(w: Any, x: Any) -> Any:
        y = unknown(jnp.tanh(x @ w))  # the line that is named
        return w * 0.9, jnp.mean(y @ w)

    args = (array(16, 16), array(16, 16, seed=1))
    with pytest.warns(ReplicatedWarning, match=primitive) as caught:
        plan = synthesize(step, *args, fleet=fleet(30, 20, 10))
    (warning,) = [w for w in caught if primitive in str(w.message)]
    assert Path(__file__).name in str(warning.message)
    assert warning.filename == __file__
    assert primitive in plan.stats.replicated
    assert primitive in str(plan)
    result = plan.verify(step, *args)
    assert result.ok, result


def test_unknown_primitives_are_found_in_regions() -> None:
    def step(x: Any) -> Any:
        return jax.lax.scan(lambda c, row: (c + doubled.bind(row), None), x[0], x)[0]

    with pytest.warns(ReplicatedWarning, match="double_of_my_own"):
        plan = synthesize(step, array(12, 16), fleet=fleet(2, 1))
    assert plan.verify(step, array(12, 16)).ok


def test_known_primitives_are_not_warned_of() -> None:
    step, args = mlp()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        synthesize(step, *args, fleet=fleet(2, 1))
    assert [str(each.message) for each in told if each.category is ReplicatedWarning] == []


def test_closed_over_arrays_are_held_whole() -> None:
    table = jnp.asarray(array(16, 16, seed=5))

    def step(x: Any) -> Any:
        return x + jnp.tanh(x @ table)

    plan = synthesize(step, array(12, 16), fleet=fleet(3, 2, 1))
    assert len(plan.program.inputs) == 1
    assert plan.verify(step, array(12, 16)).ok


def test_the_backend_is_told_who_shares_a_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hierarchical strategies run among the nodes of the plan's fleet, whatever machine they run on."""
    told: list[Any] = []

    def spy(traced: Any, program: Any, ratios: Any, seats: Any) -> Any:
        told.append(seats.wiring)
        return execute.BACKENDS["reference"](traced, program, ratios, seats)

    monkeypatch.setitem(execute.BACKENDS, "spy", spy)
    node = fleet(30, 20).to_dict()["nodes"][0]  # type: ignore[index]
    network = {"bandwidth": "400 GB/s", "latency": "100 ns"}
    step, args = mlp()
    two = Fleet.from_dict({"name": "two", "nodes": [{**node, "count": 2}], "network": network})
    plan = synthesize(step, *args, fleet=two, devices="all", axes=1)
    assert_same(plan.compile(step, backend="spy")(*args), step(*args))
    assert [wiring.groups(range(4)) for wiring in told] == [((0, 1), (2, 3))]
