"""Faults: a rank that raises, is killed or hangs ends the job soon, with one message that says what happened.

Rank 0 starts a small process that outlives the ranks (`faults_watch.py`); a thread of every rank tells it,
five times a second, where the rank is. A rank whose connection breaks was killed; one that falls silent was
stopped; one that stands still while others wait for it hangs. Without that process the survivors would wait
forever, or the launcher would end them before anybody could say at which instruction.

It begins where a step is made for ranks (`look_after_job`), before the first step: a rank that fails while it
reads its data is missed by the others just as well.
"""

from __future__ import annotations

import atexit
import json
import os
import secrets
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Generator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import numpy as np

from shardwright.backends.launch import under_mpi
from shardwright.backends.layout import to_numpy
from shardwright.ir.errors import PlanError, ShardwrightError

#: Seconds that a rank may stand still while others wait for it; SHARDWRIGHT_TIMEOUT_S in its place, 0:
#: forever.
TIMEOUT_S = 8.0
BEAT_S = 0.2
CONNECT_S = 2.0
#: How long other ranks than the first hold back what they have to say of their end.
FIRST_SPEAKS_S = 1.0


class NonFiniteError(ShardwrightError):
    """A value is infinite or not a number."""


class Where(Protocol):
    """Something that knows its steps in words."""

    def describe(self, position: int) -> str: ...


class Waits(Protocol):
    """Something that knows whether it waits for other ranks."""

    waiting: bool


def timeout_of(given_s: float | None = None, environment: Mapping[str, str] = os.environ) -> float:
    """Seconds that a rank may stand still: those given, SHARDWRIGHT_TIMEOUT_S, or `TIMEOUT_S`; 0: forever.

    Raises:
        PlanError: SHARDWRIGHT_TIMEOUT_S is no number.
    """
    if given_s is not None:
        return given_s
    text = environment.get("SHARDWRIGHT_TIMEOUT_S", "")
    try:
        return float(text) if text else TIMEOUT_S
    except ValueError:
        raise PlanError(
            place="SHARDWRIGHT_TIMEOUT_S", reason=f"is {text!r}", remedy="Set it to a number of seconds"
        ) from None


class Watch:
    """What this rank tells of itself.

    Attributes:
        at: the script that runs and the position of its step.
        phase: "outside" the step, "meeting" the other ranks before the first step, "compiling", in a "step",
            or "patient": nobody minds how long it takes.
        lane: the exchanges of the step that runs.
        timeout_s: how long that step lets a rank stand still while others wait for it; 0: forever.
    """

    def __init__(self) -> None:
        self.at: tuple[Where, int] | None = None
        self.phase = "outside"
        self.lane: Waits | None = None
        self.timeout_s = 0.0
        self._started = False
        self._socket: socket.socket | None = None
        self._lock = threading.Lock()

    def compiling(self, where: Any, first: int) -> None:
        """A segment is being compiled, which may take its time."""
        self.at = where, next(i for i, step in enumerate(where.order.steps) if step.first == first)

    @contextmanager
    def during(self, phase: str) -> Generator[None]:
        """In a phase, until it ends."""
        before, self.phase = self.phase, phase
        try:
            yield
        finally:
            self.phase = before

    def stepping(self, lane: Waits, timeout_s: float) -> AbstractContextManager[None]:
        """In a step, whose exchanges are these: a process may run several steps in turn."""
        self.lane, self.timeout_s = lane, timeout_s
        return self.during("step")

    def here(self) -> str:
        """Where this rank is, in words."""
        if self.phase == "meeting":
            return "before the first step with such arguments, where ranks compare what they run"
        at = self.at
        if at is None or self.phase in ("outside", "patient"):
            return "outside of the step"
        text = at[0].describe(at[1])
        return f"compiling {text}" if self.phase == "compiling" else text

    @property
    def waiting(self) -> bool:
        """Whether this rank waits for others."""
        return self.phase == "meeting" or (
            self.phase == "step" and self.lane is not None and self.lane.waiting
        )

    def start(self, comm: Any, timeout_s: float) -> None:
        """Begin to watch; a collective call the first time. A rank that cannot be watched is not."""
        if comm.size == 1 or self._started:
            return
        self._started = True
        token = secrets.token_hex(8)
        address: tuple[list[str], int, str] | None = None
        if comm.rank == 0:
            address = start_watcher(comm.size, token)
        hosts, port, token = comm.bcast(address)
        self.timeout_s = timeout_s
        self._socket = _connect(hosts, port)
        if self._socket is not None:
            hello = {"token": token, "rank": comm.rank, "host": _machine(), "pid": os.getpid()}
            self._send(hello)
            threading.Thread(target=self._beat, daemon=True, name="shardwright-watch").start()
            threading.Thread(target=self._listen, daemon=True, name="shardwright-listen").start()
            atexit.register(self._send, {"bye": True})

    def failed(self) -> None:
        """This rank has said itself what is wrong: nobody else need."""
        self._send({"failed": True})

    def _send(self, message: Mapping[str, Any]) -> None:
        if self._socket is None:
            return
        try:
            with self._lock:
                self._socket.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            pass  # the watcher is gone: the job is ending

    def _beat(self) -> None:
        last, since = (self.at, self.phase), time.monotonic()
        while True:
            at, now = (self.at, self.phase), time.monotonic()
            if at[0] is not last[0] or at[1] != last[1]:
                last, since = at, now
            self._send(
                {
                    "where": self.here(),
                    "phase": self.phase,
                    "waiting": self.waiting,
                    "still_s": now - since,
                    "timeout_s": self.timeout_s,
                }
            )
            time.sleep(BEAT_S)

    def _listen(self) -> None:
        """Whatever the watcher says, it is over."""
        assert self._socket is not None
        try:
            told = self._socket.recv(1)
        except OSError:
            return
        if told:
            os._exit(1)


def _machine() -> str:
    """This machine, as far as process ids go."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + os.readlink("/proc/self/ns/pid")
    except OSError:
        return socket.gethostname()


def start_watcher(ranks: int, token: str) -> tuple[list[str], int, str]:
    """Start the process; where it listens."""
    listening = socket.create_server(("", 0), backlog=ranks)
    port: int = listening.getsockname()[1]
    script = str(Path(__file__).with_name("faults_watch.py"))
    command = [sys.executable, "-S", "-E", script, str(listening.fileno()), token, str(ranks)]
    process = subprocess.Popen(
        command, pass_fds=[listening.fileno()], stdin=subprocess.DEVNULL, start_new_session=True
    )
    # It ends when all ranks have left, later than this process: nobody waits for it.
    process.returncode = 0
    listening.close()
    return _addresses(), port, token


def _addresses() -> list[str]:
    """Addresses of this machine, those that others may reach last."""
    found = ["127.0.0.1"]
    for _, name in socket.if_nameindex():
        try:
            import fcntl
            import struct

            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
                packed = fcntl.ioctl(probe.fileno(), 0x8915, struct.pack("256s", name.encode()[:15]))
            found.append(socket.inet_ntoa(packed[20:24]))
        except (OSError, ImportError):
            continue
    return [*dict.fromkeys(found), socket.gethostname()]


def _connect(hosts: list[str], port: int) -> socket.socket | None:
    for host in hosts:
        try:
            connected = socket.create_connection((host, port), timeout=CONNECT_S)
        except OSError:
            continue
        connected.settimeout(None)
        return connected
    return None


#: This process's: a process is one rank, whatever it runs.
_WATCH = Watch()


@contextmanager
def patient() -> Generator[None]:
    """While this lasts, the rank may take its time outside of the step: to write a file, to evaluate."""
    with _WATCH.during("patient"):
        yield


def take_down(comm: Any, error: BaseException) -> None:
    """One message that names rank, instruction and cause; then the job ends.

    What is wrong with a plan, every rank finds at once: the first one says so before the others would.
    """
    if comm.rank:
        with patient():
            time.sleep(FIRST_SPEAKS_S)
    where = "; ".join(getattr(error, "__notes__", []))
    message = f"rank {comm.rank}{' ' + where if where else ''}: {type(error).__name__}: {error}"
    if not isinstance(error, (ShardwrightError, SystemExit, KeyboardInterrupt)):
        message += "\n" + "".join(traceback.format_exception(error)).rstrip()
    _WATCH.failed()
    sys.stderr.write(message + "\n")
    sys.stderr.flush()
    time.sleep(0.2)  # launchers pass on what is written, but not always what they have not read when all ends
    code = 2 if isinstance(error, ShardwrightError) else 1
    comm.Abort(code)
    os._exit(code)  # Abort may come back before the launcher has ended this process


def look_after(comm: Any, timeout_s: float) -> Watch:
    """From now on the ranks of `comm` end together; a collective call the first time.

    Args:
        comm: a communicator.
        timeout_s: how long a rank may stand still while others wait for it, until a step says otherwise.
    """
    if comm.size > 1:
        _take_down_on_errors(comm)
    _WATCH.start(comm, timeout_s)
    return _WATCH


def look_after_job(timeout_s: float | None = None) -> None:
    """`look_after` for the MPI job that this process is a rank of; nothing outside of one.

    Called where a step is made for ranks, so that none is waited for that fails before its first step.
    """
    if under_mpi():
        from shardwright.backends.mpi.link import mpi

        look_after(mpi().COMM_WORLD, timeout_of(timeout_s))


def _take_down_on_errors(comm: Any) -> None:
    """An error that nobody catches ends the whole job, not this rank alone."""

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        take_down(comm, error)

    sys.excepthook = hook


def agree(comm: Any, facts: Mapping[str, str]) -> None:
    """Check that all ranks run the same.

    Args:
        comm: a communicator; all its ranks call this.
        facts: what must be equal, by name.

    Raises:
        PlanError: on every rank, naming what differs on which.
    """
    with _WATCH.during("meeting"):
        everyone: list[Mapping[str, str]] = comm.allgather(dict(facts))
    for name in facts:
        told = [mine.get(name, "nothing") for mine in everyone]
        if len(set(told)) > 1:
            other = next(rank for rank, text in enumerate(told) if text != told[0])
            raise PlanError(
                place=f"rank {other}",
                reason=f"has another {name} than rank 0: {told[other]}, not {told[0]}",
                remedy="Start every rank with the same code, plan and packages",
            )


def check_finite(value: Any, name: str) -> None:
    """Raises NonFiniteError where a local array has an element that is infinite or not a number."""
    dtype = getattr(value, "dtype", None)
    if dtype is None or str(dtype).startswith("key<"):
        return
    array = to_numpy(value)
    if array.dtype.kind in "biu" or str(array.dtype).startswith(("int", "uint")):
        return
    bad = int(array.size - np.count_nonzero(np.isfinite(array)))
    if bad:
        raise NonFiniteError(
            place=name,
            reason=f"has {bad} of {array.size} elements that are infinite or no numbers",
            remedy="Look at what the instruction named here reads, or run without the watch",
        )
