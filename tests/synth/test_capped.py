"""Shares within budgets: what is full keeps what it has room for, the rest is shared as is liked."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from shardwright.synth.grid.capped import capped

COUNT = st.shared(st.integers(2, 8))


def several(least: int, most: int) -> st.SearchStrategy[list[int]]:
    return COUNT.flatmap(lambda n: st.lists(st.integers(least, most), min_size=n, max_size=n))


@given(
    liked=several(0, 9),
    fitting=several(0, 9),
    fixed=several(0, 50),
    rate=several(1, 100),
    spare=st.floats(0.0, 1.0),
)
def test_devices_get_what_they_like_or_what_fits(
    liked: list[int], fitting: list[int], fixed: list[int], rate: list[int], spare: float
) -> None:
    """Memory is linear in the share here: `fixed` bytes and `rate` more for all of it."""
    liked[0] += not any(liked)
    fitting[-1] += not any(fitting)
    x, y = (np.array(parts) / sum(parts) for parts in (liked, fitting))
    base, more = np.array(fixed, dtype=float), np.array(rate, dtype=float)
    needs, has = base + more * x, base + more * y
    budgets = has + spare * np.abs(needs - has)
    found = np.array(capped(x.tolist(), y.tolist(), needs.tolist(), has.tolist(), budgets))
    assert abs(found.sum() - 1) < 1e-9 and (found >= 0).all()
    used = base + more * found
    assert (used <= budgets + 1e-6).all()
    # Those that are not full have shares as they like them, one as well as another.
    full = used >= budgets - 1e-6
    ratio = found[~full & (x > 0)] / x[~full & (x > 0)]
    if x[~full].sum() > 0:
        assert np.allclose(ratio, ratio[:1]) and (ratio >= 1 - 1e-9).all()


def test_what_fits_stays_as_it_is_liked() -> None:
    assert np.allclose(capped([0.7, 0.3], [0.5, 0.5], [70, 30], [50, 50], [80, 80]), [0.7, 0.3])


def test_what_is_full_gives_the_rest_to_others() -> None:
    found = capped([0.6, 0.2, 0.2], [0.4, 0.3, 0.3], [60, 20, 20], [40, 30, 30], [50, 50, 50])
    assert np.allclose(found, [0.5, 0.25, 0.25])
    alike = capped([0.4, 0.4, 0.2], [0.3, 0.3, 0.4], [42, 40, 20], [30, 30, 40], [36, 36, 50])
    assert alike[0] == alike[1]


def test_who_likes_nothing_takes_what_others_have_no_room_for() -> None:
    found = capped([1.0, 0.0, 0.0], [0.5, 0.25, 0.25], [100, 0, 0], [50, 25, 25], [60, 60, 60])
    assert np.allclose(found, [0.6, 0.2, 0.2])
