"""Where planning time goes: what a plan states covers all of it, whatever the clock says."""

from __future__ import annotations

import itertools
import time

import pytest
from plan_cases import fleet, mlp

from shardwright import synthesize


def test_the_three_times_are_the_time_of_synthesize(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that advances whenever it is read, time that no figure covered would show as ticks."""
    ticks = itertools.count()
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(ticks)))
    step, args = mlp()
    begun = time.perf_counter()
    stats = synthesize(step, *args, fleet=fleet(30, 20, 10)).stats
    whole = time.perf_counter() - begun
    together = stats.trace_s + stats.search_s + stats.ratio_s
    assert whole > 30
    # Readings at the seams: entering, and handing the trace over.
    assert whole - 6 <= together <= whole
