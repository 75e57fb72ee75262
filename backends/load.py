"""What else a machine is doing: processor time by /proc/stat, on Linux."""

from __future__ import annotations

import os
import resource
import time
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Usage:
    """Seconds of processor time since some moment: of the whole machine, of other guests, of this process."""

    at_s: float
    busy_s: float
    stolen_s: float
    own_s: float

    @staticmethod
    def now() -> Usage | None:
        """The counters now; None where the system has none."""
        try:
            line = Path("/proc/stat").read_text().split("\n", 1)[0].split()
        except OSError:
            return None
        ticks = [int(field) for field in line[1:9]]
        user, nice, system, _, _, irq, softirq, stolen = (tick / os.sysconf("SC_CLK_TCK") for tick in ticks)
        own = sum(
            used.ru_utime + used.ru_stime
            for used in (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
        )
        return Usage(time.monotonic(), user + nice + system + irq + softirq, stolen, own)


def others(before: Usage, after: Usage, own_s: float, cores: int) -> float:
    """Part of the cores that was used by neither us nor nobody: by other processes and other guests.

    Args:
        before: the machine's counters at first.
        after: and at last.
        own_s: what our processes used in between.
        cores: of the machine.
    """
    elapsed = max(after.at_s - before.at_s, 1e-9)
    busy = after.busy_s - before.busy_s + after.stolen_s - before.stolen_s
    return max(0.0, busy - own_s) / (elapsed * cores)


def load_now(seconds: float = 0.5) -> float | None:
    """Part of this machine's cores in use over the next `seconds`, this process excluded."""
    before = Usage.now()
    time.sleep(seconds)
    after = Usage.now()
    if before is None or after is None:
        return None
    return others(before, after, after.own_s - before.own_s, os.cpu_count() or 1)
