"""Bad input: one line on stderr that names place, reason and remedy, exit code 2, nothing half-written.

What may be wrong inside a fleet file is in test_fleet.py; here only that the command passes it on.
"""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cli_cases import FLEET
from click.testing import CliRunner

from shardwright import Plan
from shardwright.cli import main

STEP = """
import jax, jax.numpy as jnp, numpy as np
from jax.experimental import io_callback

X = np.ones((4, 4), np.float32)
number = 3

def step(x):
    return x * 2, x.sum()

def good():
    return step, (X,)

def other():
    return lambda x: (x * 3, x.sum()), (X,)

def larger():
    return step, (np.ones((8, 4), np.float32),)

def listed():
    return step, [X]

def raising():
    raise RuntimeError("no data\\nat all")

def exiting():
    raise SystemExit(0)

def nothing():
    return None

def three():
    return step, (X,), 3

def swapped():
    return (X,), step

def bare():
    return step, X

def needs(size):
    return step, (X,)

def text():
    return step, ({"name": "adam"},)

def objects():
    return step, (np.array([object()]),)

def words():
    return step, (np.array(["a"]),)

def shapes():
    return step, (jax.ShapeDtypeStruct((4, 4), jnp.float32),)

def prints():
    def step(x):
        jax.debug.print("{}", x)  # printed
        return x
    return step, (X,)

def scans():
    def body(c, row):
        io_callback(lambda r: None, None, row, ordered=True)  # ordered
        return c + row, None
    return lambda x: jax.lax.scan(body, x[0], x)[0], (X,)

def fails():
    def step(x):
        raise LookupError("no such layer")  # fails
    return step, (X,)

def mismatched():
    return lambda x: x @ jnp.ones((3, 3)), (X,)

def wants_two():
    return lambda x, y: x, (X,)
"""
FILES = {
    "bad_step.py": STEP,
    "raises_on_import.py": "import json\nraise ValueError('no')\n",
    "exits_on_import.py": "raise SystemExit(0)\n",
    "no_python.py": "def factory(:\n",
    "imports_nothing.py": "import a_module_that_does_not_exist\n",
    "fleet.yaml": FLEET,
    "unknown.yaml": FLEET.replace(
        "{name: slow-3, flops: 3 MFLOP/s, memory_bandwidth: 6 MB/s, memory: 1 GB}", "V100-23GB"
    ),
    "zero.yaml": FLEET.replace("3 MFLOP/s", "0 MFLOP/s"),
    "nan.yaml": FLEET.replace("400 GB/s", ".nan"),
    "unit.yaml": FLEET.replace("400 GB/s", "400 parsec"),
    "no_yaml.yaml": "name: [",
    "bomb.yaml": "a: &a [x]\nb: [*a, *a]\n",
    "tag.yaml": "!!python/object/apply:os.system ['true']\n",
    "empty.yaml": "",
    "future.json": '{"format": 2}',
    "half.json": '{"format": 1, "versions": {',
    "list.json": "[]",
}


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with every bad file, and one good plan."""
    path = tmp_path_factory.mktemp("bad")
    for name, text in FILES.items():
        (path / name).write_text(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(path)
        patch.setattr(sys, "path", list(sys.path))
        result = CliRunner().invoke(
            main, ["plan", "bad_step.py:good", "--fleet", "fleet.yaml", "-o", "plan.json"]
        )
    sys.modules.pop("bad_step", None)
    assert result.exit_code == 0, result.output
    return path


@pytest.fixture
def folder(prepared: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder as working directory, whose content must be the same afterwards."""
    monkeypatch.chdir(prepared)
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = {path: path.read_bytes() for path in prepared.iterdir() if path.is_file()}
    modules = set(sys.modules)
    yield prepared
    assert {path: path.read_bytes() for path in prepared.iterdir() if path.is_file()} == before
    for name in set(sys.modules) - modules:
        if getattr(sys.modules[name], "__file__", None) and str(prepared) in str(sys.modules[name].__file__):
            del sys.modules[name]


def refused(*arguments: str) -> str:
    """The one line on stderr of a command that is refused."""
    result = CliRunner().invoke(main, arguments)
    assert isinstance(result.exception, SystemExit), result.exception
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1, result.stderr
    line = result.stderr.rstrip()
    assert line.startswith("shardwright: ")
    assert "Traceback" not in line
    return line.removeprefix("shardwright: ")


PLAN = ("--fleet", "fleet.yaml", "-o", "never.json")

FACTORIES = {
    "bad_step.py": "is not of the form FILE_OR_MODULE:FACTORY",
    ":good": "is not of the form FILE_OR_MODULE:FACTORY",
    "bad_step.py:": "is not of the form FILE_OR_MODULE:FACTORY",
    "missing.py:good": "missing.py: is no file. Name a Python file",
    "folder/:good": "folder/: is no file",
    "fleet.yaml:good": "fleet.yaml: is no Python file. Name the one that has the factory",
    "no_such_module:good": "no_such_module: there is no module 'no_such_module'",
    "os.no_such_module:good": "there is no module 'os.no_such_module'",
    "imports_nothing.py:f": "imports_nothing.py: there is no module 'a_module_that_does_not_exist'",
    "raises_on_import.py:f": "raised ValueError on import: no (raises_on_import.py:2)",
    "exits_on_import.py:f": "raised SystemExit on import",
    "no_python.py:f": "raised SyntaxError on import: invalid syntax (no_python.py, line 1)",
    "bad_step.py:missing": "bad_step.py has no function 'missing'. It has ",
    "bad_step.py:number": "bad_step.py has no function 'number'",
    "bad_step.py:raising": "raised RuntimeError: no data (bad_step.py:",
    "bad_step.py:exiting": "raised SystemExit: 0 (bad_step.py:",
    "bad_step.py:needs": "raised TypeError: needs() missing 1 required positional argument",
    "bad_step.py:nothing": "returned a NoneType. Return (train_step, args)",
    "bad_step.py:three": "returned a tuple of 3. Return (train_step, args)",
    "bad_step.py:swapped": "returned a tuple of tuple and function. Return (train_step, args)",
    "bad_step.py:bare": "returned a tuple of function and ndarray. Return (train_step, args)",
    "bad_step.py:text": "x['name']: a str is no array or number",
    "bad_step.py:objects": "x: dtype object is no number type",
    "bad_step.py:words": "x: dtype <U1 is no number type",
}


@pytest.mark.parametrize("target", FACTORIES)
def test_factories(folder: Path, target: str) -> None:
    assert FACTORIES[target] in refused("plan", target, *PLAN)


def test_an_empty_list_and_a_list_of_arguments_will_do(folder: Path) -> None:
    result = CliRunner().invoke(main, ["plan", "bad_step.py:listed", "--fleet", "fleet.yaml"])
    assert result.exit_code == 0


def line_of(marker: str) -> int:
    (line,) = [i for i, text in enumerate(STEP.splitlines(), 1) if text.endswith(f"# {marker}")]
    return line


@pytest.mark.parametrize(
    ("factory", "reason", "marker"),
    [
        ("prints", "debug_print at ", "printed"),
        ("scans", "io_callback at ", "ordered"),
        ("fails", "it raised LookupError: no such layer (", "fails"),
    ],
)
def test_steps_that_cannot_be_planned_name_their_line(
    folder: Path, factory: str, reason: str, marker: str
) -> None:
    line = refused("plan", f"bad_step.py:{factory}", *PLAN)
    assert reason in line
    assert f"bad_step.py:{line_of(marker)}" in line


@pytest.mark.parametrize("factory", ["mismatched", "wants_two"])
def test_steps_that_cannot_be_traced(folder: Path, factory: str) -> None:
    assert "tracing the training step: it raised TypeError" in refused(
        "plan", f"bad_step.py:{factory}", *PLAN
    )


FLEETS = {
    "missing.yaml": "missing.yaml",
    ".": "Is a directory",
    "unknown.yaml": "V100-32GB",
    "zero.yaml": "flops",
    "nan.yaml": "bandwidth",
    "unit.yaml": "parsec",
    "no_yaml.yaml": "no_yaml.yaml",
    "bomb.yaml": "bomb.yaml",
    "tag.yaml": "tag.yaml",
    "empty.yaml": "empty.yaml",
}


@pytest.mark.parametrize("name", FLEETS)
def test_fleets(folder: Path, name: str) -> None:
    assert FLEETS[name] in refused("plan", "bad_step.py:good", "--fleet", name, "-o", "never.json")


PLANS = {
    ("missing.json", "good"): "missing.json: cannot be read: No such file or directory",
    (".", "good"): "cannot be read: Is a directory",
    ("half.json", "good"): "half.json: is no JSON",
    ("list.json", "good"): "list.json: format: is None",
    ("future.json", "good"): "future.json: format: is 2, this version of Shardwright reads 1",
    ("bad_step.py", "good"): "bad_step.py: is no JSON",
    ("plan.json", "other"): "was made for another step",
    ("plan.json", "larger"): ", it was planned for float32[",
    ("plan.json", "missing"): "has no function 'missing'",
    (
        "plan.json",
        "shapes",
    ): "returns shapes without values (jax.ShapeDtypeStruct), which can be planned but not run",
}


@pytest.mark.parametrize(("plan", "factory"), PLANS)
def test_plans(folder: Path, plan: str, factory: str) -> None:
    assert PLANS[plan, factory] in refused("verify", plan, f"bad_step.py:{factory}")
    assert PLANS[plan, factory] in refused("run", f"bad_step.py:{factory}", "--plan", plan)


def test_a_plan_for_another_fleet(folder: Path) -> None:
    """The fleet inside the file was exchanged: its fingerprint tells."""
    data = Plan.load("plan.json").to_dict()
    import json

    data["fleet"]["nodes"][0]["link"]["bandwidth"] = "1 GB/s"
    Path("sub").mkdir(exist_ok=True)
    Path("sub/plan.json").write_text(json.dumps(data))
    assert "is that of another fleet" in refused("verify", "sub/plan.json", "bad_step.py:good")


def test_shapes_cannot_be_run(folder: Path) -> None:
    for backend in ("reference", "mpi"):
        line = refused("run", "bad_step.py:shapes", "--fleet", "fleet.yaml", "--backend", backend)
        assert line.endswith("which can be planned but not run. Use a factory that returns concrete arrays")


def test_mpiexec_is_missing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", str(folder / "python"))
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setattr(
        "shardwright.api.synthesize", lambda *args, **kwargs: pytest.fail("it was planned first")
    )
    line = refused("run", "bad_step.py:good", "--fleet", "fleet.yaml", "--backend", "mpi")
    assert line == "backend mpi: mpiexec is not installed. pip install 'shardwright[mpi]'"


@pytest.mark.parametrize(
    ("output", "reason"),
    [
        ("missing/plan.json", "its folder cannot be written"),
        (".", "is a folder"),
        ("fleet.yaml/p", "its folder cannot"),
    ],
)
def test_outputs_that_cannot_be_written_are_found_out_before_planning(
    folder: Path, monkeypatch: pytest.MonkeyPatch, output: str, reason: str
) -> None:
    monkeypatch.setattr(
        "shardwright.api.synthesize", lambda *args, **kwargs: pytest.fail("it was planned first")
    )
    line = refused("plan", "bad_step.py:good", "--fleet", "fleet.yaml", "-o", output)
    assert line.startswith(f"{output}: {reason}")


def test_a_disk_that_is_full(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    line = refused("plan", "bad_step.py:good", *PLAN)
    assert line == "never.json: cannot be written: No space left on device. Choose another path"


def test_run_needs_a_fleet_or_a_plan(folder: Path) -> None:
    assert refused("run", "bad_step.py:good") == "run: needs a fleet or a plan. Pass --fleet or --plan"
    both = refused("run", "bad_step.py:good", "--fleet", "fleet.yaml", "--plan", "plan.json")
    assert both == "run: has --fleet and --plan. Pass one of them"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("plan", "bad_step.py:good", "--fleet", ""), "'': cannot be read"),
        (("plan", "bad_step.py:good", "--fleet", "fleet.yaml", "-o", ""), "'': is no file's name. Name a"),
        (("explain", ""), "'': cannot be read"),
        (("verify", "plan.json", ""), "'': is not of the form"),
    ],
)
def test_paths_that_are_empty_are_seen(folder: Path, arguments: tuple[str, ...], said: str) -> None:
    assert refused(*arguments).startswith(said)


MISUSED = "bad_step.py:good"
USAGE = [
    ("plan", "", "Missing argument 'FILE_OR_MODULE:FACTORY'."),
    ("plan", MISUSED, "Missing option '--fleet'."),
    ("plan", f"{MISUSED} --fleet", "Option '--fleet' requires an argument."),
    ("plan", f"{MISUSED} --fleet fleet.yaml --colour", "No such option '--colour'."),
    ("plan", f"{MISUSED} more --fleet fleet.yaml", "Got unexpected extra argument (more)."),
    ("verify", "plan.json", "Missing argument 'FILE_OR_MODULE:FACTORY'."),
    ("run", "", "Missing argument 'FILE_OR_MODULE:FACTORY'."),
    ("run", f"{MISUSED} --fleet fleet.yaml --backend nccl", "Invalid value for '--backend': 'nccl' is not"),
    ("run", f"{MISUSED} --fleet fleet.yaml --steps 0", "Invalid value for '--steps': 0 is not in the range"),
    ("run", f"{MISUSED} --fleet fleet.yaml --steps many", "Invalid value for '--steps': 'many' is not"),
]


@pytest.mark.parametrize(("command", "arguments", "said"), USAGE)
def test_usage(folder: Path, command: str, arguments: str, said: str) -> None:
    """Whoever finds the error: the parser of the options knows no command."""
    line = refused(command, *arguments.split())
    assert line.startswith(said) and line.endswith(f" See shardwright {command} --help")


def test_in_a_process_of_its_own(folder: Path) -> None:
    """As people meet it: exit code 2, one line, no traceback of anybody."""
    for arguments in (
        ("plan", "bad_step.py:raising", *PLAN),
        ("run", "bad_step.py:prints", "--fleet", "fleet.yaml", "--backend", "mpi"),
    ):
        done = subprocess.run(
            [sys.executable, "-m", "shardwright", *arguments],
            capture_output=True, text=True, check=False, env=dict(os.environ),
        )  # fmt: skip
        assert done.returncode == 2
        assert done.stdout == ""
        assert done.stderr.startswith("shardwright: ")
        assert done.stderr.count("\n") == 1


def test_an_error_of_ours_is_not_hidden(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only bad input is one line: a bug keeps its traceback."""
    bug: Callable[..., None] = lambda *args, **kwargs: 1 // 0  # type: ignore[assignment, return-value]  # noqa: E731
    monkeypatch.setattr("shardwright.api.synthesize", bug)
    result = CliRunner().invoke(main, ["plan", "bad_step.py:good", "--fleet", "fleet.yaml"])
    assert isinstance(result.exception, ZeroDivisionError)
