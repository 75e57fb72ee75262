"""What all commands have in common: help, `--json`, `--quiet`, `--verbose`, completion, progress."""

import json
import os
import pty
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

import shardwright
from shardwright.cli import main
from shardwright.commands.lazy import LazyCommand

ROOT = Path(__file__).resolve().parent.parent
LAPTOP = str(ROOT / "examples/fleets/laptop.yaml")
STEP = """
import jax, jax.numpy as jnp, numpy as np

def step(w, x):
    return w - 0.1 * jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w)

def small():
    return step, (np.ones((64, 32), np.float32), np.ones((16, 64), np.float32))

def unknown():
    solve = jax.lax.linalg.tridiagonal_solve
    return lambda x: solve(x[0], x[1] + 8, x[2], x).sum(), (np.ones((8, 8), np.float32),)

def interrupted():
    raise KeyboardInterrupt
"""


def commands(group: click.Group, *path: str) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    """Every command with its words; those that are loaded late, loaded."""
    for name, command in group.commands.items():
        loaded = command.load() if isinstance(command, LazyCommand) else command
        yield (*path, name), loaded
        if isinstance(loaded, click.Group):
            yield from commands(loaded, *path, name)


EVERY = dict(commands(main))
LEAVES = {words: command for words, command in EVERY.items() if not isinstance(command, click.Group)}


@pytest.fixture
def step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    (tmp_path / "console_step.py").write_text(STEP)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield "console_step.py"
    sys.modules.pop("console_step", None)


def run(*arguments: str) -> "click.testing.Result":
    return CliRunner().invoke(main, arguments)


@pytest.mark.parametrize("name", main.commands)
def test_the_listing_says_what_the_command_says(name: str) -> None:
    listed = main.commands[name]
    assert isinstance(listed, LazyCommand), "commands are imported when they are used"
    first = (listed.load().help or "").split("\n\n")[0].replace("\n", " ")
    assert listed.short_help == first
    assert len(first) <= 90


@pytest.mark.parametrize("words", EVERY, ids=" ".join)
def test_every_command_has_help_and_the_common_options(words: tuple[str, ...]) -> None:
    result = run(*words, "--help")
    assert result.exit_code == 0, result.output
    options = {name for option in EVERY[words].params for name in option.opts}
    assert {"--quiet", "--verbose"} <= options
    assert words not in LEAVES or "--json" in options
    for option in EVERY[words].params:
        if isinstance(option, click.Option) and not isinstance(option.type, click.Choice):
            assert option.help, f"{option.opts} says nothing"


def test_help_waits_for_nothing_heavy() -> None:
    """The command's own imports, without those of the package: no JAX, no numpy, no tables."""
    script = f"""
import sys, types
package = types.ModuleType("shardwright")
package.__path__ = [{str(Path(shardwright.__file__).parent)!r}]
sys.modules["shardwright"] = package
from shardwright.cli import main
main(["--help"], prog_name="shardwright", standalone_mode=False)
heavy = {{"jax", "numpy", "scipy", "rich", "yaml", "jsonschema"}} & set(sys.modules)
sys.exit(", ".join(heavy) or 0)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "") and "Usage: shardwright" in done.stdout


def test_help_names_every_command_and_the_exit_codes() -> None:
    shown = " ".join(run("--help").stdout.split())
    assert all(f" {name} " in shown for name in main.commands)
    for code, meaning in (("0", "done"), ("1", "a check failed"), ("2", "bad input"), ("130", "interrupted")):
        assert f"{code} {meaning}" in shown


def test_quiet_leaves_out_warnings(step: str) -> None:
    arguments = ("plan", f"{step}:unknown", "--fleet", LAPTOP, "--json")
    loud = run(*arguments)
    assert loud.exit_code == 0 and "tridiagonal_solve" in loud.stderr
    for quiet in (run("-q", *arguments), run(*arguments, "--quiet")):
        assert (quiet.exit_code, quiet.stderr) == (0, "")
        assert json.loads(quiet.stdout)["program"] == json.loads(loud.stdout)["program"]


def test_verbose_tells_a_pipe_what_begins(step: str) -> None:
    result = run("plan", f"{step}:small", "--fleet", LAPTOP, "-v", "--json")
    assert result.exit_code == 0
    json.loads(result.stdout)
    lines = result.stderr.splitlines()
    assert lines[0].endswith("s] tracing the step")
    assert any(line.endswith("s] searching programs") for line in lines)


def test_verbose_shows_where_an_error_was_raised(step: str) -> None:
    result = run("--verbose", "plan", f"{step}:none", "--fleet", LAPTOP)
    assert result.exit_code == 2
    assert result.stderr.startswith("Traceback") and "in load_factory" in result.stderr
    assert result.stderr.splitlines()[-1].startswith(f"shardwright: {step}:none: ")


def test_quiet_and_verbose_exclude_each_other(step: str) -> None:
    for arguments in (("-q", "-v", "plan"), ("-q", "plan", f"{step}:small", "--fleet", LAPTOP, "-v")):
        result = run(*arguments)
        assert result.exit_code == 2 and "exclude each other" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ("--nothing", "No such option '--nothing'. See shardwright --help"),
        ("nothing", "No such command 'nothing'. See shardwright --help"),
        ("fleet nothing", "No such command 'nothing'. See shardwright fleet --help"),
        ("plan", "Missing argument 'FILE_OR_MODULE:FACTORY'. See shardwright plan --help"),
        ("plan a:b --axez 1", "No such option '--axez'. Did you mean '--axes'? See shardwright plan --help"),
        ("plan a:b --axes 3", "Invalid value for '--axes': '3' is not one of '1', '2', 'auto'. "
         "See shardwright plan --help"),
    ],
)  # fmt: skip
def test_usage_is_corrected_in_one_line(arguments: str, reason: str) -> None:
    result = run(*arguments.split())
    assert (result.exit_code, result.stdout, result.stderr) == (2, "", f"shardwright: {reason}\n")


def test_without_a_command_there_is_help() -> None:
    for arguments in ((), ("fleet",)):
        result = run(*arguments)
        assert (
            result.exit_code == 2 and "Usage: shardwright" in result.stderr and "Commands:" in result.stderr
        )


def test_interrupted_is_its_own_exit_code(step: str) -> None:
    result = run("plan", f"{step}:interrupted", "--fleet", LAPTOP)
    assert (result.exit_code, result.stdout) == (130, "")
    assert result.stderr == "shardwright: interrupted\n"


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion(shell: str) -> None:
    result = run("completion", shell)
    assert result.exit_code == 0 and "_SHARDWRIGHT_COMPLETE" in result.stdout
    as_json = json.loads(run("completion", shell, "--json").stdout)
    assert as_json == {"shell": shell, "script": result.stdout.removesuffix("\n")}


def test_commands_and_options_are_completed() -> None:
    def complete(*words: str) -> set[str]:
        environment = {"_SHARDWRIGHT_COMPLETE": "bash_complete", "COMP_CWORD": str(len(words) - 1)}
        environment["COMP_WORDS"] = " ".join(words)
        result = CliRunner().invoke(main, [], env=environment)
        return {line.partition(",")[2] for line in result.stdout.splitlines()}

    assert complete("shardwright", "c") == {"calibrate", "compare", "completion"}
    assert {"--fleet", "--json", "--quiet"} <= complete("shardwright", "plan", "--")
    assert complete("shardwright", "run", "--backend", "r") == {"reference"}


def test_a_terminal_sees_stages_and_a_pipe_only_results(step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Standard error is a terminal here, standard output a pipe."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "shardwright", "plan", f"{step}:small", "--fleet", LAPTOP, "--json"]
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=theirs) as process:
        os.close(theirs)
        shown = b""
        while True:
            try:
                part = os.read(ours, 4096)
            except OSError:  # the other end is closed
                break
            if not part:
                break
            shown += part
        assert process.stdout is not None
        printed = process.stdout.read()
    os.close(ours)
    assert process.returncode == 0, shown.decode()
    json.loads(printed)
    for stage in ("tracing the step", "searching programs"):
        assert stage in shown.decode()
