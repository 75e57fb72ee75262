"""The garbage collector while plans are made, and what is left of earlier ones."""

from __future__ import annotations

import gc
import weakref

import pytest

from shardwright import pause
from shardwright.pause import collector_paused


class Ring:
    """Garbage that the collector alone finds."""

    def __init__(self) -> None:
        self.own = self


def garbage() -> weakref.ref[Ring]:
    return weakref.ref(Ring())


@pytest.mark.parametrize(("many", "found"), [(100, True), (10**9, False)])
def test_what_earlier_plans_left_is_looked_for_once_it_is_much(
    many: int, found: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    gc.collect()
    monkeypatch.setattr(pause, "_MANY", many)
    with collector_paused():
        assert not gc.isenabled()
        left = garbage()
        kept = [[each] for each in range(1000)]
    assert gc.isenabled() and left() is not None and len(kept) == 1000
    with collector_paused():
        assert (left() is None) == found


def test_what_the_collector_looked_through_itself_is_not_looked_through_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pause, "_MANY", 100)
    with collector_paused():
        kept = [[each] for each in range(1000)]
    gc.collect()
    before = gc.get_stats()[-1]["collections"]
    with collector_paused():
        assert gc.get_stats()[-1]["collections"] == before and kept


def test_a_collector_that_rests_anyway_is_left_alone() -> None:
    gc.disable()
    try:
        with collector_paused():
            assert not gc.isenabled()
        assert not gc.isenabled()
    finally:
        gc.enable()
