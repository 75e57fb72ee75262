"""Starting the ranks of an MPI job from a plain process."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

from shardwright.ir.errors import InputError

#: Set by the launchers of MPICH, Open MPI and PMIx for every rank.
RANK_VARIABLES = ("PMI_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK")

#: What they say of how many ranks there are.
SIZE_VARIABLES = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE")

#: Seconds that a launcher has to end its ranks, before it is killed.
END_S = 10.0

#: Some who send a signal, as `timeout`, send it twice: to a process and to its group. The second is expected
#: within so many seconds.
_TWICE_S = 0.5

_KEEP_MEMORY = {
    "MALLOC_MMAP_THRESHOLD_": str(1 << 34),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 34),
    "MALLOC_TOP_PAD_": str(1 << 26),
    # Arenas other than the first cannot keep what is larger than 32 MiB.
    "MALLOC_ARENA_MAX": "1",
}

#: In what pieces UCX, MPICH's transport, writes to TCP connections and reads from them; by default 8 and
#: 64 KiB. A rank that computes looks for messages every millisecond (`transport.py`): at 1 Gbit/s, 120 KiB.
TCP_PIECES = {"UCX_TCP_TX_SEG_SIZE": "256k", "UCX_TCP_RX_SEG_SIZE": "256k"}


def tcp_pieces(environment: Mapping[str, str] = os.environ) -> Mapping[str, str]:
    """`TCP_PIECES`, where neither is set: what is read at once must be no smaller than what is written."""
    return {} if any(name in environment for name in TCP_PIECES) else TCP_PIECES


def under_mpi(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether this process is one of an MPI job's ranks."""
    return any(name in environment for name in RANK_VARIABLES)


def launched(environment: Mapping[str, str] = os.environ) -> int | None:
    """How many ranks the launcher says that it started; None where it does not say."""
    sizes = (environment.get(name, "") for name in SIZE_VARIABLES)
    return next((int(size) for size in sizes if size.isdigit()), None)


def world_size() -> int:
    """How many ranks the MPI job has that this process is one of."""
    from mpi4py import MPI

    return MPI.COMM_WORLD.Get_size()


def find_mpiexec() -> str:
    """Path of mpiexec: the one installed beside this Python first, then the one on PATH.

    Raises:
        InputError: there is none.
    """
    beside = Path(sys.executable).parent / "mpiexec"
    found = str(beside) if beside.is_file() else shutil.which("mpiexec")
    if found is None:
        raise InputError(
            place="backend mpi", reason="mpiexec is not installed", remedy="pip install 'shardwright[mpi]'"
        )
    return found


def rank_environment(ranks: int, environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The environment of the ranks: where cores are shared out, each gets its part of the threads.

    And glibc is told to keep the memory it has: returning large buffers to the system at the end of every
    segment and faulting them in again costs more than most kernels (on a virtual machine: writing 4 MiB took
    3.7 ms in place of 0.4 ms, a cumulative sum of 40 MiB 85 in place of 51 ms). Messages over TCP travel in
    `TCP_PIECES`. What the user has set holds.
    """
    result = {**_KEEP_MEMORY, **tcp_pieces(environment), **environment}
    threads = max(1, len(os.sched_getaffinity(0)) // ranks)
    result["OMP_NUM_THREADS"] = str(threads)
    if threads == 1:
        result["XLA_FLAGS"] = f"{result.get('XLA_FLAGS', '')} --xla_cpu_multi_thread_eigen=false".strip()
    return result


def rank_command(ranks: int, arguments: Sequence[str]) -> list[str]:
    """The command that runs `python arguments…` as `ranks` ranks, each on its part of the cores.

    Raises:
        InputError: mpiexec is not installed.
    """
    pinned = [sys.executable, "-S", str(Path(__file__).with_name("pin.py")), str(ranks)]
    return [find_mpiexec(), "-n", str(ranks), *pinned, sys.executable, *arguments]


@contextmanager
def job(command: Sequence[str], ranks: int, **options: Any) -> Generator[subprocess.Popen[Any]]:
    """A job that outlives neither the block nor this process, where that can be helped.

    SIGTERM and SIGHUP, where nothing else is done about them, are passed on to the launcher, which takes its
    ranks along; once it has left, `SystemExit` is raised with the status that shells give them. Whatever the
    block raises ends the job, too.

    Args:
        command: of `rank_command`.
        ranks: how many it starts.
        options: of `subprocess.Popen`.
    """
    told: list[int] = []
    process: subprocess.Popen[Any] | None = None

    def pass_on(number: int, frame: FrameType | None) -> None:
        # Nothing is raised here: callbacks may swallow it, and some senders signal twice, see `_TWICE_S`.
        told.append(number)
        if process is not None:
            process.send_signal(number)

    mine = threading.current_thread() is threading.main_thread()
    usual = [n for n in (signal.SIGTERM, signal.SIGHUP) if mine and signal.getsignal(n) is signal.SIG_DFL]
    for number in usual:
        signal.signal(number, pass_on)
    try:
        with subprocess.Popen(command, env=rank_environment(ranks), **options) as process:
            for number in told:  # before there was a process
                process.send_signal(number)
            try:
                yield process
                process.wait()
            except BaseException:
                process.terminate()
                with suppress(subprocess.TimeoutExpired):
                    process.wait(END_S)
                process.kill()  # unless it has ended
                raise
    finally:
        if len(told) == 1:
            time.sleep(_TWICE_S)  # the second would end this process before it has put its things away
        for number in usual:
            signal.signal(number, signal.SIG_DFL)
        if told:
            raise SystemExit(128 + told[0])


def launch(ranks: int, arguments: Sequence[str]) -> int:
    """Run `python arguments…` as `ranks` ranks and wait for them.

    Args:
        ranks: how many.
        arguments: of the Python interpreter that runs this process, e.g. `["-m", "shardwright", "run", …]`.

    Returns:
        The job's exit status.

    Raises:
        InputError: mpiexec is not installed.
        SystemExit: SIGTERM or SIGHUP ended the job, and is to end this process.
    """
    with job(rank_command(ranks, arguments), ranks) as process:
        return process.wait()
