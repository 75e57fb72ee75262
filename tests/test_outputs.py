"""Where results go: files and what is none, standard output that is closed, full, or knows few characters."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from cli_cases import FLEET
from click.testing import CliRunner

from shardwright.cli import main
from shardwright.commands.lazy import LazyCommand
from shardwright.files import check_outputs, check_writable, write_whole
from shardwright.fleets.detect import detect
from shardwright.interrupts import heard
from shardwright.ir.errors import InputError, PlanError

STEP = """
import numpy as np

def step():
    return lambda x: (x * 2, x.sum()), (np.ones((4, 4), np.float32),)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "a_step.py").write_text(STEP)
    (tmp_path / "fleet.yaml").write_text(FLEET)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_what_is_no_file_is_written_into(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    check_writable(pipe)
    heard_there: list[str] = []
    reader = threading.Thread(target=lambda: heard_there.append(pipe.read_text()))
    reader.start()
    write_whole(pipe, "whole")
    reader.join(10)
    assert heard_there == ["whole"] and pipe.is_fifo()
    monkeypatch.setattr(os, "access", lambda *of: False)
    with pytest.raises(InputError, match="cannot be written"):
        check_writable(pipe)


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "there").write_text("before")
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "there")
    check_writable(link)
    write_whole(link, "after")
    assert link.is_symlink() and (tmp_path / "there").read_text() == "after"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "there"]


@pytest.mark.parametrize("name", ["x" * 300, "a\0b", "missing/file", "."])
def test_names_under_which_nothing_can_be_written(tmp_path: Path, name: str) -> None:
    with pytest.raises(InputError, match="-o"):
        check_writable(f"{tmp_path}/{name}")
    if name != "a\0b":
        with pytest.raises(PlanError, match="cannot be written"):
            write_whole(f"{tmp_path}/{name}", "")
    assert not list(tmp_path.iterdir())


def test_a_picture_is_refused_before_the_work(folder: Path) -> None:
    for command in (["profile", "a_step.py:nobody"], ["compare", "all_gather", "--fleet", "fleet.yaml"]):
        sweep = [] if command[0] == "profile" else ["--sweep", "1KiB:1MiB"]
        result = CliRunner().invoke(main, [*command, *sweep, "--plot", "missing/p.svg"])
        assert result.exit_code == 2
        assert "missing/p.svg: its folder cannot be written" in result.output
    assert not (folder / "missing").exists()


PLANNED = ("plan", "a_step.py:step", "--fleet", "fleet.yaml")
SAME = [
    ((*PLANNED, "-o", "x", "--report", "./x"), "./x: is where -o and --report would both write"),
    ((*PLANNED, "-o", "x", "--timeline", "to_x"), "to_x: is where -o and --timeline would both write"),
    ((*PLANNED, "--timeline", "x", "--report", "x"), "x: is where --timeline and --report would both write"),
    ((*PLANNED, "-o", "fleet.yaml"), "fleet.yaml: is given as --fleet, and -o would overwrite it"),
    ((*PLANNED, "--report", "linked"), "linked: is given as --fleet, and --report would overwrite it"),
    ((*PLANNED, "--timeline", "hard"), "hard: is given as --fleet, and --timeline would overwrite it"),
    ((*PLANNED, "-o", "a_step.py"), "a_step.py: is given as the step, and -o would overwrite it"),
    (("emit", "plan.json", "-o", "plan.json"), "plan.json: is given as PLAN.json, and -o would overwrite it"),
    (
        ("calibrate", "--fleet", "fleet.yaml", "-o", "fleet.yaml"),
        "fleet.yaml: is given as --fleet, and -o would overwrite it",
    ),
    (
        ("fleet", "detect", "--from", "hosts", "--hosts", "hosts", "--device", "T4", "-o", "hosts"),
        "hosts: is given as --hosts, and -o would overwrite it",
    ),
    (
        ("compare", "all_gather", "--fleet", "f.svg", "--sweep", "1KiB:1MiB", "--plot", "f.svg"),
        "f.svg: is given as --fleet, and --plot would overwrite it",
    ),
    (
        ("profile", "a_step.py:step", "--plan", "p.svg", "--plot", "p.svg"),
        "p.svg: is given as --plan, and --plot would overwrite it",
    ),
]


@pytest.mark.parametrize(("command", "said"), SAME)
def test_no_file_of_a_command_is_written_over(command: tuple[str, ...], said: str, folder: Path) -> None:
    for name in ("plan.json", "hosts", "f.svg", "p.svg"):
        (folder / name).write_text("n0\n" if name == "hosts" else FLEET)
    (folder / "to_x").symlink_to("x")
    (folder / "linked").symlink_to("fleet.yaml")
    (folder / "hard").hardlink_to("fleet.yaml")
    before = {path.name: path.read_text() for path in folder.iterdir() if path.is_file()}
    result = CliRunner().invoke(main, [*command])
    assert result.exit_code == 2 and said in result.output
    assert {path.name: path.read_text() for path in folder.iterdir() if path.is_file()} == before


def test_what_is_no_file_can_be_named_twice(tmp_path: Path) -> None:
    check_outputs({"-o": "/dev/null", "--report": "/dev/null"}, {"--fleet": "/dev/null"})
    check_outputs({"-o": tmp_path / "a", "--report": tmp_path / "b", "--timeline": None}, {"--fleet": "a\0b"})


def test_more_memory_than_there_can_be(folder: Path) -> None:
    arguments = ["plan", "a_step.py:step", "--fleet", "fleet.yaml", "--frontier", "1e300"]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 2 and "1e+300 is no part of a memory" in result.output


def test_a_host_file_that_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_bytes(b"\xff\xfe\x00n0")
    with pytest.raises(InputError, match="no text in UTF-8"):
        detect(source="hosts", host_file=str(tmp_path / "hosts"), device="T4")


def shown(
    folder: Path, redirected: str, before: str = "", **environment: str
) -> subprocess.CompletedProcess[bytes]:
    """`shardwright fleet show` in a shell, with its standard output somewhere else."""
    command = f'{before}"{sys.executable}" -m shardwright fleet show fleet.yaml {redirected}'
    return subprocess.run(
        ["sh", "-c", command], cwd=folder, env=os.environ | environment, capture_output=True, timeout=60
    )


def test_standard_output_that_is_closed_or_knows_few_characters(folder: Path) -> None:
    closed = shown(folder, ">&-")
    assert (closed.returncode, closed.stderr) == (0, b"")
    plain = shown(folder, "", PYTHONIOENCODING="koi8-r")
    assert plain.returncode == 0 and plain.stdout.startswith(b"slow: 1 ? ")


def test_standard_output_that_has_no_room(folder: Path) -> None:
    full = shown(folder, "> full.txt", before="ulimit -f 0; ")
    assert full.returncode == 2
    assert full.stderr == b"shardwright: standard output cannot be written: File too large\n"


def test_standard_output_that_nobody_reads_is_no_failed_check() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "wb") as ours:
        command = [sys.executable, "-m", "shardwright", "fleet", "catalogue"]
        done = subprocess.run(command, stdout=ours, stderr=subprocess.PIPE, check=False, timeout=60)
    assert (done.returncode, done.stderr) == (141, b"")


def test_an_interrupt_while_modules_are_imported(folder: Path) -> None:
    script = """
import runpy, signal, sys

# What runs in the background of a script ignores interrupts, and so does what it starts.
signal.signal(signal.SIGINT, signal.default_int_handler)

class Interrupted:
    def find_spec(self, name, path=None, target=None):
        if name == sys.argv[-1]:
            signal.raise_signal(signal.SIGINT)

sys.meta_path.insert(0, Interrupted())
runpy.run_module("shardwright", run_name="__main__")
"""
    for module in ("click", "shardwright.commands.fleet"):
        command = [sys.executable, "-c", script, "fleet", "show", module]
        ended = subprocess.run(command, cwd=folder, capture_output=True, timeout=60)
        assert (ended.returncode, ended.stderr) == (130, b"shardwright: interrupted\n")


def test_who_ignores_interrupts_goes_on_to() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with heard():
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
            os.kill(os.getpid(), signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.fixture
def _listening() -> Iterator[None]:
    """Interrupts are heard, also where the tests run in the background of a script, which ignores them."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("_listening")
def test_an_interrupt_that_something_swallows_comes_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardwright.interrupts._AGAIN_S", 0.05)
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGALRM)
    swallowed: list[str] = []

    def interrupted() -> None:
        with heard():
            try:
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(10)
            except KeyboardInterrupt:
                swallowed.append("the first")
            time.sleep(10)

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert swallowed == ["the first"]
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGALRM)) == before
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


@pytest.mark.usefixtures("_listening")
def test_an_interrupt_waits_for_modules_to_be_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As extension modules do, which crash or say that they cannot be initialized."""
    (tmp_path / "fragile_command.py").write_text(
        "import click, signal\n"
        "try:\n"
        "    signal.raise_signal(signal.SIGINT)\n"
        "except KeyboardInterrupt as error:\n"
        "    raise ImportError('cannot be initialized') from error\n"
        "command = click.Command('fragile')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        LazyCommand("fragile", "fragile_command:command", "").load()
    assert signal.getsignal(signal.SIGINT) is before
    assert LazyCommand("fragile", "fragile_command:command", "").load().name == "fragile"
