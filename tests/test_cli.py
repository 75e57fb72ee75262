"""The command line: what it prints, what it writes, what it returns."""

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jsonschema
import pytest
from cli_cases import FLEET, STEP, shell
from click.testing import CliRunner, Result

import shardwright
from shardwright import Plan, api, profile_api
from shardwright.backends.verify import VerifyResult
from shardwright.cli import main

FIELDS = {"iteration_s", "cost_s", "bound_s", "gap", "ratios", "devices", "program", "stats"}
STATS = {"trace_s", "search_s", "ratio_s", "expanded", "equations", "choices", "replicated"}

Invoke = Callable[..., Result]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a step and a fleet, and the plan for both."""
    path = tmp_path_factory.mktemp("cli")
    (path / "cli_step.py").write_text(STEP)
    (path / "fleet.yaml").write_text(FLEET)
    done = shell(path, "plan", "cli_step.py:mlp", "--fleet", "fleet.yaml", "-o", "plan.json")
    assert done.returncode == 0, done.stderr
    assert done.stderr == "", "silent in a pipe"
    assert done.stdout == str(Plan.load(path / "plan.json")) + "\n"
    return path


@pytest.fixture
def invoke(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Invoke]:
    """The command in this process, run in the folder; what it imports is forgotten."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", list(sys.path))

    def run(*arguments: str) -> Result:
        result = CliRunner().invoke(main, arguments)
        assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
        return result

    yield run
    sys.modules.pop("cli_step", None)


# ---------------------------------------------------------------------------------------------------
# plan


def test_plan_prints_one_object(invoke: Invoke) -> None:
    result = invoke("plan", "cli_step.py:mlp", "--fleet", "fleet.yaml", "--json")
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout.count("\n") == 1
    printed = json.loads(result.stdout, parse_constant=pytest.fail)
    schema = Path(shardwright.__file__).parent / "plan.schema.json"
    jsonschema.validate(printed, json.loads(schema.read_text()))
    assert printed.keys() >= FIELDS
    assert printed["stats"].keys() >= STATS
    assert printed["devices"] == ["n0.d0", "n0.d1"]
    assert len(printed["ratios"]) == 2
    assert printed["ratios"][0] > printed["ratios"][1] > 0
    assert printed["gap"] == (printed["cost_s"] - printed["bound_s"]) / printed["cost_s"]
    assert printed["program"].keys() == {"inputs", "instructions", "outputs"}


def test_plan_writes_what_it_prints(invoke: Invoke, tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    result = invoke("plan", "cli_step.py:mlp", "--fleet", "fleet.yaml", "-o", str(path), "--json")
    assert result.exit_code == 0
    assert json.loads(path.read_text()) == json.loads(result.stdout)
    assert [p.name for p in tmp_path.iterdir()] == ["out.json"]


def test_plan_writes_its_timeline(invoke: Invoke, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    result = invoke("plan", "cli_step.py:mlp", "--fleet", "fleet.yaml", "--timeline", str(path), "--json")
    assert (result.exit_code, result.stderr) == (0, "")
    printed, written = json.loads(result.stdout), json.loads(path.read_text())
    ends = [e["ts"] + e["dur"] for e in written["traceEvents"] if e["ph"] == "X"]
    assert max(ends) * 1e-6 == pytest.approx(printed["iteration_s"])
    for spent in printed["spent"]:
        assert sum(spent.values()) == pytest.approx(printed["iteration_s"])
    assert [p.name for p in tmp_path.iterdir()] == ["trace.json"]


def test_a_timeline_that_cannot_be_written_is_found_before_planning(invoke: Invoke, tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none" / "trace.json"):
        result = invoke("plan", "cli_step.py:mlp", "--fleet", "fleet.yaml", "--timeline", str(path))
        assert result.exit_code == 2
        assert result.stderr.count("\n") == 1
        assert str(path) in result.stderr and "--timeline" in result.stderr


def test_plan_with_baselines_and_program(invoke: Invoke, folder: Path) -> None:
    plain = invoke("plan", "cli_step.py:mlp", "--fleet", "fleet.yaml").stdout
    result = invoke("plan", "cli_step.py:mlp", "--fleet", "fleet.yaml", "--baselines", "--program")
    assert result.exit_code == 0
    for wanted in (
        "shares",
        "exchanges per step",
        "time per step",
        "where inputs lie",
        "params -> output[0]",
    ):
        assert wanted in plain
        assert wanted in result.stdout
    assert "priced by the same model" not in plain
    assert re.search(r"this plan +\S+ \S+ +1\.00 ×", result.stdout)
    for name in ("even", "proportional"):
        (times,) = re.findall(rf"^.*{name}.* ([\d.]+) ×$", result.stdout, re.MULTILINE)
        assert float(times) >= 1
    assert "program {" in result.stdout
    assert "dot_general" in result.stdout


def test_a_module_will_do(invoke: Invoke, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(folder))
    result = invoke("plan", "cli_step:mlp", "--fleet", "fleet.yaml", "--json")
    assert result.exit_code == 0
    assert json.loads(result.stdout)["program"] == Plan.load("plan.json").to_dict()["program"]


def test_warnings_are_lines_on_stderr(invoke: Invoke) -> None:
    result = invoke("plan", "cli_step.py:unknown", "--fleet", "fleet.yaml", "--json")
    assert result.exit_code == 0
    assert re.fullmatch(r"warning: tridiagonal_solve runs replicated: .*cli_step\.py:\d+.*\n", result.stderr)
    assert json.loads(result.stdout)["stats"]["replicated"].keys() == {"tridiagonal_solve"}


def test_the_same_plan_under_any_hash_seed(folder: Path) -> None:
    done = shell(folder, "plan", "cli_step.py:mlp", "--fleet", "fleet.yaml", "--json", seed="1")
    assert (done.returncode, done.stderr) == (0, "")
    of_seed_0 = (folder / "plan.json").read_text()
    plans: list[Any] = [json.loads(text) for text in (of_seed_0, done.stdout)]
    for plan in plans:
        for name in [name for name in plan["stats"] if name.endswith("_s")]:
            del plan["stats"][name]
    assert plans[0] == plans[1]


# ---------------------------------------------------------------------------------------------------
# verify


def test_verify(invoke: Invoke) -> None:
    result = invoke("verify", "plan.json", "cli_step.py:mlp")
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout.startswith("verified: ")


def test_verify_prints_one_object(invoke: Invoke) -> None:
    result = invoke("verify", "plan.json", "cli_step.py:mlp", "--json")
    assert result.exit_code == 0
    printed = json.loads(result.stdout, parse_constant=pytest.fail)
    assert printed["ok"] is True
    assert printed["max_rel_error"] <= 1e-5
    assert printed["groups"] > 20


@pytest.mark.parametrize("options", [(), ("--json",)])
def test_a_mismatch_is_exit_code_1(
    invoke: Invoke, monkeypatch: pytest.MonkeyPatch, options: Sequence[str]
) -> None:
    found = VerifyResult(False, 0.5, 0.0, 0.25, "0.5 in dot_general at step.py:3", 7)
    monkeypatch.setattr(Plan, "verify", lambda *args: found)
    result = invoke("verify", "plan.json", "cli_step.py:mlp", *options)
    assert (result.exit_code, result.stderr) == (1, "")
    if options:
        assert json.loads(result.stdout)["ok"] is False
    else:
        assert result.stdout.startswith("MISMATCH: 7 comparisons")


# ---------------------------------------------------------------------------------------------------
# run


def single_losses(folder: Path, steps: int) -> list[float]:
    """The losses of plain jax.jit, state fed back."""
    module: dict[str, Any] = {}
    exec(compile(STEP, "cli_step.py", "exec"), module)
    step, (params, momentum, x, y) = module["mlp"]()
    losses: list[float] = []
    for _ in range(steps):
        params, momentum, loss = jax.jit(step)(params, momentum, x, y)
        losses.append(float(loss))
    return losses


def printed_losses(text: str) -> list[float]:
    lines = [re.fullmatch(r"step (\d+): output\[2\] (\S+) +\(.*\)", line) for line in text.splitlines()]
    assert all(lines), text
    assert [int(line[1]) for line in lines if line] == list(range(1, len(lines) + 1))
    return [float(line[2]) for line in lines if line]


@pytest.mark.parametrize("source", [("--fleet", "fleet.yaml"), ("--plan", "plan.json")])
def test_run_on_reference(invoke: Invoke, folder: Path, source: Sequence[str]) -> None:
    result = invoke("run", "cli_step.py:mlp", *source, "--steps", "3")
    assert (result.exit_code, result.stderr) == (0, "")
    losses = printed_losses(result.stdout)
    assert losses == pytest.approx(single_losses(folder, 3), rel=1e-5)
    assert losses[2] < losses[0]


def test_devices_are_left_out_unless_all_are_asked_for(invoke: Invoke, folder: Path, tmp_path: Path) -> None:
    far = tmp_path / "far.yaml"
    near, gone = FLEET, "network: {bandwidth: 1 kB/s, latency: 1 s}\n"
    far.write_text(near.replace("  - devices:", "  - count: 2\n    devices:") + gone)
    saved = tmp_path / "far.json"
    done = invoke("plan", "cli_step.py:mlp", "--fleet", str(far), "-o", str(saved))
    assert "uses            2 of 4 devices" in done.stdout and "left out" in done.stdout
    whole = json.loads(
        invoke("plan", "cli_step.py:mlp", "--fleet", str(far), "--all-devices", "--json").stdout
    )
    assert whole["used"] == [0, 1, 2, 3] and whole["unused"] == []
    assert whole["cost_s"] >= Plan.load(saved).cost_s * (1 - 1e-9), (
        "on two mesh axes nothing may cross the network"
    )


@pytest.mark.parametrize(
    "arguments",
    [("run", "--plan", "plan.json"), ("profile", "--plan", "plan.json"), ("profile",)],
    ids=" ".join,
)
def test_a_plan_that_is_made_takes_no_options_about_making_one(
    invoke: Invoke, arguments: Sequence[str]
) -> None:
    for option in (("--all-devices",), ("--axes", "1"), ("--time-limit", "5s"), ("--pin", "params/*=R")):
        done = invoke(arguments[0], "cli_step.py:mlp", *arguments[1:], *option)
        assert done.exit_code == 2
        assert f"{option[0]}: is about making a plan, and there is none to be made" in done.stderr


def test_baselines_run_and_profile_plan_as_plan_does(invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever can be asked of `plan` can be asked where a plan is made by the way."""
    asked: list[dict[str, Any]] = []

    def noted(*args: Any, **planning: Any) -> Plan:
        asked.append(planning)
        return made(*args, **planning)

    made = api.synthesize
    monkeypatch.setattr(api, "synthesize", noted)
    monkeypatch.setattr(profile_api, "synthesize", noted)
    options = ("--axes", "1", "--microbatches", "2", "--recompute", "off", "--pin", "params/w1=R")
    for command in ("baselines", "run", "profile"):
        assert invoke(command, "cli_step.py:mlp", "--fleet", "fleet.yaml", *options).exit_code == 0
        given = {name: asked[-1].get(name) for name in ("axes", "microbatches", "recompute", "constraints")}
        assert given == {"axes": 1, "microbatches": 2, "recompute": "off", "constraints": {"params/w1": "R"}}


@pytest.mark.parametrize(
    "arguments",
    [("plan", "--program"), ("baselines",), ("profile",), ("run", "--steps", "2")],
    ids=lambda arguments: arguments[0],
)
def test_what_users_code_prints_is_no_result(invoke: Invoke, arguments: Sequence[str]) -> None:
    """`--json` is one JSON object on standard output, and a loss that is no number is null there."""

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    command, *more = arguments
    done = invoke(command, "cli_step.py:talkative", "--fleet", "fleet.yaml", "--json", *more)
    assert done.exit_code == 0
    data = json.loads(done.stdout, parse_constant=refuse)
    assert "reading the data\n" in done.stderr and "tracing\n" in done.stderr
    if command == "run":
        assert [step["outputs"] for step in data["steps"]] == [{"output[1]": None}] * 2


def test_only_mpi_watches_for_numbers_that_are_not_finite(
    invoke: Invoke, capfd: pytest.CaptureFixture[str]
) -> None:
    done = invoke("run", "cli_step.py:mlp", "--plan", "plan.json", "--finite")
    assert done.exit_code == 2 and "option finite: is unknown to backend 'reference'" in done.stderr
    run = invoke("run", "cli_step.py:talkative", "--fleet", "fleet.yaml", "--backend", "mpi", "--finite")
    assert run.exit_code == 2 and "without the watch" in capfd.readouterr().err


def test_only_numbers_are_shown(invoke: Invoke) -> None:
    result = invoke("run", "cli_step.py:keyed", "--fleet", "fleet.yaml")
    assert result.exit_code == 0
    assert re.fullmatch(r"step 1: output\[1\] \S+  \(.*, compiling included\)\n", result.stdout)


def test_run_on_mpi_really(invoke: Invoke, folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    arguments = ["run", "cli_step.py:mlp", "--backend", "mpi", "--fleet", "fleet.yaml", "--steps", "3"]
    done = invoke(*arguments)
    of_ranks = capfd.readouterr()  # which write for themselves
    assert (done.exit_code, done.output, of_ranks.err) == (0, "", "")
    assert printed_losses(of_ranks.out) == pytest.approx(single_losses(folder, 3), rel=1e-5)


def test_a_rank_of_a_job_does_not_launch_another(folder: Path) -> None:
    """Under mpiexec the command is one rank; the first one plans, and prints."""
    from shardwright.backends.launch import find_mpiexec, rank_environment

    command = [find_mpiexec(), "-n", "2", sys.executable, "-m", "shardwright", "run", "cli_step.py:mlp"]
    done = subprocess.run(
        [*command, "--backend", "mpi", "--fleet", "fleet.yaml", "--steps", "2"],
        capture_output=True, text=True, check=False, cwd=folder, timeout=300, env=rank_environment(2),
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert printed_losses(done.stdout) == pytest.approx(single_losses(folder, 2), rel=1e-5)


def test_ranks_that_are_not_the_devices(folder: Path) -> None:
    """A plan for two devices on three ranks: one clear error, and the job ends."""
    from shardwright.backends.launch import find_mpiexec, rank_environment

    command = [find_mpiexec(), "-n", "3", sys.executable, "-m", "shardwright", "run", "cli_step.py:mlp"]
    done = subprocess.run(
        [*command, "--backend", "mpi", "--plan", "plan.json"],
        capture_output=True, text=True, check=False, cwd=folder, timeout=300, env=rank_environment(3),
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr.count("the plan is for 2 devices, but 3 ranks are running") == 1
    assert "Traceback" not in done.stderr


# ---------------------------------------------------------------------------------------------------
# The command itself


@pytest.mark.parametrize(
    "arguments", [("--help",), ("-h",), ("plan", "-h"), ("verify", "-h"), ("run", "--help")]
)
def test_help(invoke: Invoke, arguments: Sequence[str]) -> None:
    result = invoke(*arguments)
    assert result.exit_code == 0
    assert "Usage: " in result.stdout


def test_version(invoke: Invoke) -> None:
    result = invoke("--version")
    assert result.exit_code == 0
    assert re.search(r"\d+\.\d+", result.stdout)


def test_the_command_is_the_module(folder: Path) -> None:
    command = Path(sys.executable).parent / "shardwright"
    if not command.is_file():
        pytest.skip("the command is not installed beside this Python")
    done = subprocess.run([str(command), "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == shell(folder, "--version").stdout
