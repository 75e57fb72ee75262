"""Ranks that are killed, stopped, hang or raise take the job down, with one message; nothing stays behind."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import jax.numpy as jnp
import numpy as np
import pytest
from greedy import build
from steps import starts

from shardwright.backends.faults import NonFiniteError, Watch, agree, start_watcher, timeout_of
from shardwright.backends.faults_watch import Rank, lost, missing, verdict
from shardwright.backends.launch import find_mpiexec, rank_environment
from shardwright.backends.mpi.executable import MpiExecutable
from shardwright.backends.run_options import RunOptions
from shardwright.ir.errors import InputError, PlanError
from shardwright.ir.trace import trace

HERE = Path(__file__).parent
SEGMENT = r"in the segment from instruction \d+: "


def alive(pid: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("raises", rf"rank 1 {SEGMENT}.*: ValueError: no more"),
        ("killed", rf"rank 1 was last seen ({SEGMENT}|at|compiling|outside).*it was killed"),
        ("stopped", r"rank 1 .*: has not been heard of for 1.5 s: it was stopped"),
        ("hangs", rf"rank 1 {SEGMENT}.*: hangs: it has not moved for 1.5 s while rank 0 waits at"),
        ("leaves", r"rank 1 has finished while rank 0 waits at instruction"),
        pytest.param("no data", r"rank 1: ValueError: no data", marks=pytest.mark.full),
        pytest.param(
            "no batch",
            r"rank 1 has finished while rank 0 waits before the first step",
            marks=pytest.mark.full,
        ),
    ],
)
def test_a_fault_ends_the_job_with_one_message(fault: str, said: str) -> None:
    done = subprocess.run(
        [find_mpiexec(), "-n", "2", sys.executable, str(HERE / "faulty.py"), fault],
        capture_output=True, text=True, timeout=100, env=rank_environment(2), check=False,
    )  # fmt: skip
    assert done.returncode != 0, done
    assert "survived" not in done.stdout
    assert re.search(said, done.stderr), done.stderr
    start = re.compile(r"(shardwright: )?(rank \d|all ranks)")
    ours = [line for line in done.stderr.splitlines() if start.match(line)]
    assert len(ours) == 1, ours
    pids = [int(pid) for pid in re.findall(r"pid (\d+)", done.stdout)]
    assert len(pids) == 2
    until = time.monotonic() + 10
    while any(map(alive, pids)) and time.monotonic() < until:
        time.sleep(0.05)
    assert not any(map(alive, pids))
    while watchers_of(pids) and time.monotonic() < until:
        time.sleep(0.05)
    assert not watchers_of(pids)


def watchers_of(pids: list[int]) -> set[int]:
    """Processes that watch a job and were started soon after these."""
    return {pid for pid in watchers() if min(pids) < pid < min(pids) + 2000}


def watchers() -> set[int]:
    """Processes that watch a job."""
    found: set[int] = set()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if b"faults_watch.py" in (folder / "cmdline").read_bytes():
                found.add(int(folder.name))
        except OSError:
            continue
    return found


def known(number: int, *, where: str = "at instruction 3", phase: str = "step", **told: Any) -> Rank:
    """A rank as the watcher knows it at second 100, quiet for 9 of the 8 that its step allows."""
    found = Rank(cast(Any, None), 100.0)
    found.rank, found.pid, found.where, found.phase = number, number, where, phase
    found.still_s, found.timeout_s = 9.0, 8.0
    for name, value in told.items():
        setattr(found, name, value)
    return found


@pytest.mark.parametrize(
    ("ranks", "said"),
    [
        ((known(0, waiting=True), known(1, where="there")), "rank 1 there: hangs: .* for 8 s while rank 0"),
        ((known(0, waiting=True), known(1, still_s=1.0)), "^$"),
        ((known(0, waiting=True, timeout_s=60.0), known(1)), "^$"),
        ((known(0, waiting=True, timeout_s=0.0), known(1)), "^$"),
        ((known(0, waiting=True), known(1, phase="patient")), "^$"),
        ((known(0, waiting=True), known(1, waiting=True)), "all ranks have waited"),
        ((known(0, waiting=True, phase="meeting"), known(1, phase="outside")), "^$"),
        ((known(0, waiting=True, phase="meeting"), known(1, left=True)), "rank 1 has finished"),
        ((known(0, heard=91.0), known(1)), "rank 0 .* has not been heard of for 8 s"),
        ((known(0, heard=91.0, timeout_s=0.0), known(1)), "^$"),
        ((known(0, heard=91.0, phase="outside"), known(1, waiting=True, phase="meeting")), "^$"),
        ((known(0, heard=91.0, phase="outside"), known(1, waiting=True)), "rank 0 .* has not been heard of"),
        ((known(0, closed_at=99.2), known(1, closed_at=99.1)), "rank 1 was last seen at instruction 3"),
        ((known(0, timeout_s=0.0, closed_at=99.2), known(1)), "rank 0 was last seen"),
    ],
)
def test_what_is_wrong_with_a_job(ranks: tuple[Rank, Rank], said: str) -> None:
    assert re.search(said, verdict(list(ranks), 100.0))


@pytest.mark.parametrize(
    ("ranks", "gone"),
    [
        ((known(0, closed_at=99.2), known(1, closed_at=99.1)), 1),
        # The launcher ended rank 0 for a machine of which nothing is heard any more.
        ((known(0, closed_at=99.0), known(1, heard=97.0, host="far")), 1),
        ((known(0, closed_at=99.0), known(1, heard=97.0, host="here")), 0),
        ((known(0, closed_at=99.0), known(1, heard=98.5, host="far")), 0),
        ((known(0), known(1, heard=91.0, host="far")), 1),
        ((known(0), known(1, heard=91.0, host="here")), None),
        ((known(0), known(1)), None),
    ],
)
def test_which_rank_a_job_has_to_do_without(ranks: tuple[Rank, Rank], gone: int | None) -> None:
    found = lost(list(ranks), 100.0, "here")
    assert (None if found is None else found.rank) == gone


@pytest.mark.parametrize("noted", ["", "0 status 2\n"])
def test_word_is_left_of_a_rank_whose_machine_is_gone(
    noted: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "lost"
    if noted:
        path.write_text(noted)
    monkeypatch.setenv("SHARDWRIGHT_LOST", str(path))
    _, port, token = start_watcher(2, "secret")
    with socket.create_connection(("127.0.0.1", port), timeout=20) as near:
        far = socket.create_connection(("127.0.0.1", port), timeout=20)
        for rank, connection in enumerate((near, far)):
            hello = {"token": token, "rank": rank, "host": "elsewhere", "pid": 0}
            step = {"where": "there", "phase": "step", "waiting": False, "still_s": 0.0, "timeout_s": 60.0}
            connection.sendall("".join(json.dumps(told) + "\n" for told in (hello, step)).encode())
        time.sleep(0.5)
        far.close()
        assert near.recv(1), "it is told that the job is over"
    assert path.read_text() == (noted or "1 silence\n"), "the first word counts"


def test_a_rank_that_connects_when_another_has_finished_is_watched_all_the_same() -> None:
    """The first may be done before the second gets to run: nobody may take that for the end of the job."""
    _, port, token = start_watcher(2, "secret")

    def say(connection: socket.socket, **told: Any) -> None:
        connection.sendall(json.dumps(told).encode() + b"\n")

    with socket.create_connection(("127.0.0.1", port)) as first:
        say(first, token=token, rank=1, host="elsewhere", pid=0)
        say(first, bye=True)
    time.sleep(1.0)  # the watcher looks ten times a second
    with socket.create_connection(("127.0.0.1", port), timeout=20) as second:
        say(second, token=token, rank=0, host="elsewhere", pid=0)
        say(second, where="here", phase="meeting", waiting=True, still_s=2.0, timeout_s=1.0)
        assert second.recv(1), "it is told that nobody will come"


@pytest.mark.parametrize(
    ("ranks", "said"),
    [
        ([], "^$"),
        (
            [known(0, phase="outside"), known(2, phase="meeting")],
            r"^ranks 1, 3: not heard of for 30 s, while rank 0",
        ),
        ([known(n, phase="outside") for n in (0, 1, 3)], r"^rank 2: not heard of .*`python -m mpi4py`"),
        ([known(n, phase="outside") for n in range(4)], "^$"),
        ([known(0, phase="outside"), known(1, phase="step")], "^$"),
        ([known(0, phase="outside"), known(1, phase="outside", left=True)], "^$"),
    ],
)
def test_ranks_that_have_not_come_are_named(ranks: list[Rank], said: str) -> None:
    assert re.search(said, missing(ranks, 4))


def test_a_job_that_waits_for_a_rank_says_so_once_and_goes_on() -> None:
    listening = socket.create_server(("127.0.0.1", 0))
    hasty = (
        "import sys; from shardwright.backends import faults_watch; faults_watch.CONNECT_S = 0.5; "
        "sys.exit(faults_watch.main(int(sys.argv[1]), 'secret', 2))"
    )
    command = [sys.executable, "-c", hasty, str(listening.fileno())]
    with (
        listening,
        subprocess.Popen(
            command, pass_fds=[listening.fileno()], stderr=subprocess.PIPE, text=True
        ) as watcher,
        socket.create_connection(listening.getsockname()) as rank,
    ):
        assert watcher.stderr is not None
        rank.sendall(b'{"token": "secret", "rank": 0, "host": "elsewhere", "pid": 0}\n')
        assert watcher.stderr.readline().startswith(
            "shardwright: rank 1: not heard of for 0.5 s, while rank 0"
        )
        time.sleep(0.5)  # some more of its turns
        rank.sendall(b'{"bye": true}\n')
        assert watcher.stderr.read() == "" and watcher.wait() == 0


@dataclass
class Lane:
    waiting: bool


def test_a_rank_waits_where_the_step_that_runs_does() -> None:
    """A process may train by one step and evaluate by another, with exchanges and patience of its own."""
    watch, training, evaluating = Watch(), Lane(waiting=False), Lane(waiting=True)
    with watch.stepping(training, 8.0):
        assert not watch.waiting
    try:
        with watch.stepping(evaluating, 60.0):
            assert watch.waiting and watch.timeout_s == 60.0
            raise KeyError
    except KeyError:
        pass
    assert not watch.waiting and watch.here() == "outside of the step"


def test_the_timeout_can_be_set() -> None:
    assert timeout_of(None, {"SHARDWRIGHT_TIMEOUT_S": "30"}) == 30
    assert timeout_of(0, {"SHARDWRIGHT_TIMEOUT_S": "30"}) == 0
    assert timeout_of(None, {}) <= 10
    with pytest.raises(PlanError, match="SHARDWRIGHT_TIMEOUT_S: is 'soon'"):
        timeout_of(None, {"SHARDWRIGHT_TIMEOUT_S": "soon"})


class Everyone:
    """A communicator on which the others say what they are told to."""

    size = 2

    def __init__(self, other: dict[str, str]) -> None:
        self.other = other

    def allgather(self, mine: dict[str, str]) -> list[dict[str, str]]:
        return [mine, self.other]


def test_ranks_that_differ_are_told_apart_before_the_first_step() -> None:
    same = {"plan (hash)": "ab", "version of JAX": "1"}
    agree(Everyone(same), same)
    with pytest.raises(PlanError, match=r"rank 1: has another plan \(hash\) than rank 0: cd, not ab"):
        agree(Everyone(same | {"plan (hash)": "cd"}), same)


def step(w: Any, x: Any) -> Any:
    return w - jnp.log(x).sum(axis=0)


def alone(**options: Any) -> tuple[MpiExecutable, list[Any]]:
    args = [np.ones(4, np.float32), np.ones((8, 4), np.float32)]
    traced = trace(step, *args)
    program = build(traced.graph, starts(traced.graph)["data"], None)
    from mpi4py import MPI

    return MpiExecutable(traced, program, (1.0,), MPI.COMM_SELF, options=RunOptions(**options)), args


def test_the_watch_for_numbers_names_argument_or_instruction() -> None:
    run, (w, x) = alone(finite=True)
    run(w, x)
    with pytest.raises(NonFiniteError, match=r"argument w: has 4 of 4 elements"):
        run(np.full_like(w, np.nan), x)
    with pytest.raises(NonFiniteError, match=r"%\d+: has \d of 4 elements") as caught:
        run(w, -x)
    assert "in the segment from instruction" in caught.value.__notes__[0]
    unwatched, _ = alone()
    assert np.isnan(unwatched(w, -x)[0].gather()).all()


def test_donated_state_is_gone_and_says_so() -> None:
    run, (w, x) = alone(donate=True)
    (first,) = run(w, x)
    (second,) = run(first, x)
    assert first.local.is_deleted() and not second.local.is_deleted()
    assert np.array_equal(w, np.ones(4, np.float32))
    with pytest.raises(InputError, match=r"w: was passed to an earlier step, .* donate=False"):
        run(first, x)
    for read in (first.gather, partial(float, first), partial(np.asarray, first)):
        with pytest.raises(InputError, match=r"was passed to a step .* Use what that step returned"):
            read()
    kept, _ = alone()
    with pytest.raises(InputError, match=r"w: was passed to an earlier step, .* donate=False"):
        kept(first.local, x)
    (first,) = kept(w, x)
    assert np.array_equal(kept(first, x)[0].gather(), kept(first, x)[0].gather())
