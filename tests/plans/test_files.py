"""Plan files: nothing is lost, and whatever is wrong with one is said in one line."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from plan_cases import STEPS, Step, fleet, mlp, scan

import shardwright.attach
from shardwright import (
    Plan,
    PlanError,
    ShardwrightError,
    synthesize,
)
from shardwright.ir.program import Loop
from shardwright.ir.trace import trace

SCHEMA = json.loads((Path(shardwright.__file__).parent / "plan.schema.json").read_text())


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
    later |= {"rewriting", "donate", "again_s", "host_s", "comparing_s", "arguments"}
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
    (("held", "x"), "S(7)", "plan: held: is not where the program has its inputs"),
    (("program", "inputs"), [], "plan: held: is not where the program has its inputs"),
    (("axes",), 2, "plan: axes: are 2, and those of the program are not"),
    (("fleet", "nodes"), [], "plan: fleet: nodes: is empty"),
    (("program", "inputs", 0), "Q", "program.inputs.0: 'Q' does not match"),
    (("program", "instructions", 0), {}, "program.instructions.0"),
    (("program", "instructions", 0), {"move": "slice", "value": 0, "pre": "R", "post": "S(0)",
                                      "group": [0, 7]},
     "program: names device 7, the last one is 2"),
    (("bound_s",), 1e9, "bound_s: is above cost_s"),
    (("gap",), 0.9, "gap: is not what cost_s and bound_s say"),
    (("program", "instructions", 0), {"move": "", "value": 0, "pre": "R", "post": "S(0)"},
     "program: there is no collective without a name"),
    (("fits",), False, "fits: is not what memory_bytes say"),
    (("messages", 0, "members", 0, "dtype"), "R", "messages.0: there is no dtype 'R'"),
    (("messages", 0, "members", 0, "shape"), [], "messages.0: %"),
    (("messages", 0, "members", 0, "shape", 0), 1e308, "is no shape"),
    (("messages", 0, "collective"), "shout", "messages.0"),
    (("messages", 0, "root"), 7, "messages.0"),
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


@pytest.mark.parametrize("number", ["1e999", "-1e999", "9" * 400, "9" * 5000])
@pytest.mark.parametrize("field", ["cost_s", "iteration_s"])
def test_numbers_beyond_all(made: Plan, tmp_path: Path, field: str, number: str) -> None:
    path = tmp_path / "plan.json"
    path.write_text(
        json.dumps(made.to_dict()).replace(f'"{field}": {getattr(made, field)}', f'"{field}": {number}')
    )
    with pytest.raises(PlanError, match="is too large a number") as caught:
        Plan.load(path)
    assert len(str(caught.value)) < 300


def test_a_program_that_breaks_a_triple_is_not_run(made: Plan) -> None:
    """Anything a file may say of the program is found out before it runs."""
    step, args = mlp()
    instructions = made.to_dict()["program"]["instructions"]
    first_move = next(i for i, entry in enumerate(instructions) if "move" in entry)
    strange = {"move": "x", "value": 0, "pre": "R", "post": "R"}
    missing = changed(
        made, "program", "instructions", to=[e for i, e in enumerate(instructions) if i != first_move]
    )
    for data in (
        missing,
        changed(made, "program", "outputs", 0, to="P(sum)"),
        changed(made, "program", "instructions", 0, to={"compute": 999, "ins": [], "outs": []}),
        changed(made, "program", "instructions", 0, to={**strange, "move": "slice"}),
    ):
        loaded = Plan.from_dict(data)
        for use in (loaded.attach, loaded.verify, loaded.compile):
            with pytest.raises(PlanError, match="plan: instruction") as caught:
                use(step, *args) if use != loaded.compile else loaded.compile(step)(*args)
            assert "\n" not in str(caught.value)
            assert "plan again" in caught.value.remedy
    with pytest.raises(PlanError, match="program: there is no collective x"):
        Plan.from_dict(changed(made, "program", "instructions", 0, to=strange))


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
    traced, real = plan.traced, shardwright.attach.trace
    monkeypatch.setattr(
        shardwright.attach, "trace", lambda *a, state: real(*a, state=state) if state is not None else traced
    )
    refused = 0
    for _, data in zip(range(150), mutations(plan.to_dict(), random.Random(0)), strict=False):
        try:
            Plan.from_dict(data).attach(step, *args)
        except ShardwrightError as error:
            assert "\n" not in str(error)  # noqa: PT017
            refused += 1
    assert refused > 75
