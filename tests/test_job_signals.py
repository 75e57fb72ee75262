"""A job ends with the process that started it, however that is told to end, and leaves nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator
from pathlib import Path

import pytest

from shardwright.backends import launch

RANK = """
import os, sys, time
from pathlib import Path
Path(sys.argv[1], f"{os.getpid()}.tmp").write_text("")
Path(sys.argv[1], f"{os.getpid()}.tmp").rename(Path(sys.argv[1], f"{os.getpid()}.rank"))
time.sleep(600)
"""
#: Who runs tests in the background may have had them ignore Ctrl-C.
HEARD = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
LAUNCH = "launch(2, ['-S', 'rank.py', 'ranks'])"
STARTERS = {
    "launch": f"from shardwright.backends.launch import launch; {LAUNCH}",
    "elastic": (
        "from pathlib import Path; from shardwright.elastic import _run; "
        "_run(2, ['-S', 'rank.py', 'ranks'], Path('lost'))"
    ),
    "another thread": (
        "import threading; from shardwright.backends.launch import launch; "
        f"thread = threading.Thread(target=lambda: {LAUNCH}, daemon=True); thread.start(); thread.join()"
    ),
}


def until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + 120
    while not true():
        assert time.monotonic() < end, "nothing has happened for two minutes"
        time.sleep(0.02)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.fixture
def started(tmp_path: Path) -> Generator[Callable[[str], subprocess.Popen[bytes]]]:
    """Starts ranks from a process that has a temporary folder, and waits until both are there."""
    (tmp_path / "ranks").mkdir()
    (tmp_path / "temporary").mkdir()
    (tmp_path / "rank.py").write_text(RANK)
    processes: list[subprocess.Popen[bytes]] = []

    def start(starter: str) -> subprocess.Popen[bytes]:
        body = f"{HEARD}\nimport tempfile\nwith tempfile.TemporaryDirectory():\n    {STARTERS[starter]}"
        process = subprocess.Popen(
            [sys.executable, "-c", body], cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            env={**os.environ, "TMPDIR": str(tmp_path / "temporary")}, start_new_session=True,
        )  # fmt: skip
        until(lambda: len(list((tmp_path / "ranks").glob("*.rank"))) == 2 or process.poll() is not None)
        processes.append(process)
        return process

    yield start
    for pid in (int(path.stem) for path in (tmp_path / "ranks").glob("*.rank")):
        if alive(pid):
            os.kill(pid, signal.SIGKILL)  # the launcher follows
    for process in processes:
        process.kill()
        process.wait()


@pytest.mark.parametrize("starter", ["launch", "elastic"])
@pytest.mark.parametrize(
    ("number", "status"),
    [(signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGINT, -signal.SIGINT)],
)
def test_a_job_ends_with_who_started_it(
    starter: str,
    number: int,
    status: int,
    started: Callable[[str], subprocess.Popen[bytes]],
    tmp_path: Path,
) -> None:
    process = started(starter)
    process.send_signal(number)
    if number == signal.SIGTERM:
        time.sleep(0.1)  # the job may have ended by now
        process.send_signal(number)  # as `timeout` does: to the process, and to its group
    assert process.wait(120) == status
    assert not list((tmp_path / "temporary").glob("tmp*"))
    ranks = [int(path.stem) for path in (tmp_path / "ranks").glob("*.rank")]
    assert len(ranks) == 2
    until(lambda: not any(map(alive, ranks)))


def test_a_job_that_another_thread_started_changes_no_signals(
    started: Callable[[str], subprocess.Popen[bytes]],
) -> None:
    process = started("another thread")
    process.terminate()
    assert process.wait(120) == -signal.SIGTERM


def test_what_ended_a_job_is_raised_even_if_its_launcher_does_not_listen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(launch, "END_S", 0.1)
    deaf = "from signal import *; signal(SIGTERM, SIG_IGN); print(flush=True); import time; time.sleep(600)"
    started: list[subprocess.Popen[str]] = []

    def interrupted() -> None:
        with launch.job([sys.executable, "-S", "-c", deaf], 1, stdout=subprocess.PIPE, text=True) as process:
            started.append(process)
            assert process.stdout is not None
            process.stdout.readline()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert started[0].wait(120) == -signal.SIGKILL
