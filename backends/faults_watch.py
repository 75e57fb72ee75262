"""`python faults_watch.py FD TOKEN RANKS`: watches the ranks of a job, from outside of them.

Started by rank 0 and by path, like `pin.py`: nothing but the standard library is at hand. It listens on the
socket FD; every rank connects, says who it is, and then where it is. When one is killed, stopped or hangs,
one message goes to stderr and all ranks are ended. It leaves when the last rank has.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
import sys
import time
from pathlib import Path

#: Seconds that ranks have to connect, and to leave once they were told.
CONNECT_S = 30.0
LEAVE_S = 0.5
#: Seconds, some beats of every rank, after which silence says something beside a rank that was killed.
QUIET_S = 1.0


class Rank:
    """What is known of one."""

    def __init__(self, connection: socket.socket, now: float) -> None:
        self.connection = connection
        self.rank, self.host, self.pid = -1, "", 0
        self.where, self.phase, self.waiting = "before the first step", "outside", False
        self.still_s = self.timeout_s = 0.0
        self.heard = now
        self.left = self.failed = False
        #: When its connection broke.
        self.closed_at: float | None = None
        self.rest = b""

    @property
    def closed(self) -> bool:
        return self.closed_at is not None

    @property
    def gone(self) -> bool:
        return self.left or self.closed


def machine() -> str:
    """As `faults.py` names it."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + os.readlink("/proc/self/ns/pid")
    except OSError:
        return socket.gethostname()


def killed(ranks: list[Rank]) -> Rank | None:
    """The rank that something killed, None if none was."""
    # Launchers kill the others at once: the first is the one that something else has killed.
    gone = [one for one in ranks if one.closed and not one.left]
    return min(gone, key=lambda one: one.closed_at or 0.0, default=None)


def silent(ranks: list[Rank], now: float) -> Rank | None:
    """A rank that has not been heard of for too long."""
    in_step = any(one.waiting and one.phase != "meeting" and not one.gone for one in ranks)
    for one in ranks:
        # Outside of a step something may keep Python busy, such as a large file, until somebody waits for it.
        at_work = one.phase in ("outside", "patient") and not in_step
        if not (one.gone or at_work) and one.timeout_s and now - one.heard > one.timeout_s:
            return one
    return None


def lost(ranks: list[Rank], now: float, here: str) -> Rank | None:
    """The rank that the job has to do without from now on, None if none is known.

    Of a machine that went down nobody closes the connections, and the launcher may have ended the others
    before the silence is long. On this machine who is silent is stopped, and nobody knows for how long.
    """
    first, far = killed(ranks), [one for one in ranks if one.host != here and not one.gone]
    if first is None:
        one = silent(ranks, now)
        return one if one in far else None
    since = first.closed_at or now
    quiet = [one for one in far if since - one.heard > QUIET_S]
    return min(quiet, key=lambda one: one.heard, default=first)


def note(one: Rank) -> None:
    """Leave word of a rank that is gone, unless who watches over it has: see `watch.py` of the package."""
    path = os.environ.get("SHARDWRIGHT_LOST")
    if path:
        try:
            with open(path, "x", encoding="utf-8") as file:
                file.write(f"{one.rank} silence\n")
        except OSError:
            pass  # it is there, or its folder is gone with who would read it


def verdict(ranks: list[Rank], now: float) -> str:
    """What is wrong with the job, "" if nothing is."""
    if (one := killed(ranks)) is not None:
        return (
            f"rank {one.rank} was last seen {one.where}; it was killed, or left without a word "
            f"(process {one.pid})"
        )
    if (one := silent(ranks, now)) is not None:
        return (
            f"rank {one.rank} {one.where}: has not been heard of for {one.timeout_s:g} s: it was "
            f"stopped, or something keeps it from running Python (process {one.pid})"
        )
    waiting = [one for one in ranks if not one.gone and one.waiting and 0 < one.timeout_s < one.still_s]
    if not waiting:
        return ""
    first = waiting[0]
    others = [one for one in ranks if one is not first]
    awaits = f"while rank {first.rank} waits {first.where}"
    # Before the first step ranks may load and build as long as they like, as long as they are there.
    if first.phase != "meeting" and any(
        one.phase in ("compiling", "patient") and not one.gone for one in others
    ):
        return ""
    for one in others:
        if one.left:
            return f"rank {one.rank} has finished {awaits}"
    if first.phase == "meeting":
        return ""
    for one in others:
        if not one.waiting and one.still_s > first.timeout_s:
            return (
                f"rank {one.rank} {one.where}: hangs: it has not moved for {first.timeout_s:g} s {awaits} "
                f"(process {one.pid}; SHARDWRIGHT_TIMEOUT_S allows more)"
            )
    if len(waiting) == len(ranks):
        lines = "; ".join(f"rank {one.rank} {one.where}" for one in waiting)
        return f"all ranks have waited for one another for {first.timeout_s:g} s: {lines}"
    return ""


def missing(ranks: list[Rank], count: int) -> str:
    """What to say of ranks, of so many, that have not connected while the others are before their first step.

    Such a rank may be reading its data. One that raised waits for the others as its MPI ends, and looks the
    same from here: nothing is ended.
    """
    late = sorted(set(range(count)) - {one.rank for one in ranks})
    begun = any(one.phase not in ("outside", "meeting") for one in ranks)
    if not late or not ranks or begun or any(one.gone for one in ranks):
        return ""
    named = f"rank{'s' if late[1:] else ''} {', '.join(map(str, late))}"
    return (
        f"{named}: not heard of for {CONNECT_S:g} s, while rank {ranks[0].rank} is in `compile` or "
        "`parallelize`: at work before that, failed there, or waiting for one that is (under `python -m "
        "mpi4py` a rank that fails ends the job)"
    )


def hear(one: Rank, data: bytes, token: str, now: float) -> None:
    """Take in what a rank says."""
    *lines, one.rest = (one.rest + data).split(b"\n")
    for line in lines:
        told = json.loads(line)
        one.heard = now
        if "token" in told:
            if told["token"] != token:
                one.left = True
                return
            one.rank, one.host, one.pid = told["rank"], told["host"], told["pid"]
        elif "bye" in told:
            one.left = True
        elif "failed" in told:
            one.failed = True
        elif one.rank >= 0:
            one.where, one.phase = told["where"], told["phase"]
            one.waiting, one.still_s = told["waiting"], told["still_s"]
            one.timeout_s = told["timeout_s"]


def end(ranks: list[Rank]) -> None:
    """End every rank: ask, then kill those of this machine."""
    for one in ranks:
        if not one.closed:
            try:
                one.connection.send(b"x")
            except OSError:
                one.closed_at = time.monotonic()
    time.sleep(LEAVE_S)
    here = machine()
    for one in ranks:
        if not one.closed and one.host == here:
            try:
                os.kill(one.pid, signal.SIGKILL)
            except OSError:
                continue


def main(fd: int, token: str, count: int) -> int:
    """Watch until all ranks, so many, are gone; 1 if they had to be ended."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # whoever interrupts the job interrupts the ranks
    selector = selectors.DefaultSelector()
    listening = socket.socket(fileno=fd)
    selector.register(listening, selectors.EVENT_READ)
    ranks: list[Rank] = []
    begun = time.monotonic()
    late = False
    while True:
        for key, _ in selector.select(0.1):
            now = time.monotonic()
            if key.fileobj is listening:
                connection, _ = listening.accept()
                ranks.append(Rank(connection, now))
                selector.register(connection, selectors.EVENT_READ, ranks[-1])
                continue
            one: Rank = key.data
            try:
                data = one.connection.recv(1 << 16)
            except OSError:
                data = b""
            if data:
                hear(one, data, token, now)
            else:
                one.closed_at = time.monotonic()
                selector.unregister(one.connection)
        now = time.monotonic()
        known = [one for one in ranks if one.rank >= 0]
        if any(one.failed for one in known):
            time.sleep(LEAVE_S)  # it speaks for itself, and takes the others with it
            end(known)
            return 1
        if problem := verdict(known, now):
            sys.stderr.write(f"shardwright: {problem}\n")
            sys.stderr.flush()
            gone = lost(known, now, machine())
            if killed(known):
                time.sleep(LEAVE_S)  # who started that one notes how it ended, before the launcher ends it
            if gone is not None:
                note(gone)
            end(known)
            return 1
        if now - begun > CONNECT_S and not late:
            late = True
            if notice := missing(known, count):
                sys.stderr.write(f"shardwright: {notice}\n")
                sys.stderr.flush()
        # One may have finished before another connects.
        complete = len(known) >= count or late
        if complete and all(one.gone for one in known):
            return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2], int(sys.argv[3])))
