"""Ratios that small steps are tried at within memory."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from shardwright.synth.memory.dealt import filled

AMOUNTS = st.lists(
    st.tuples(st.floats(0.0, 10.0).map(lambda x: round(x, 3)), st.floats(0.1, 10.0)), min_size=1, max_size=5
)


@given(AMOUNTS)
def test_what_a_device_has_no_room_for_goes_to_the_others_by_their_speed(
    amounts: list[tuple[float, float]],
) -> None:
    speeds, room = np.array(amounts).T
    if not speeds.sum():
        return
    speeds, room = speeds / speeds.sum(), room / room.sum()
    found = np.array([speeds, *filled(tuple(speeds), tuple(room))])
    np.testing.assert_allclose(found.sum(axis=1), 1)
    assert (found >= 0).all()
    fullest = (found / room).max(axis=1)
    assert (fullest[1:] <= fullest[:-1] * (1 + 1e-9)).all(), "from step to step no device is fuller"
    for shares, level in zip(found, fullest, strict=True):
        free = (shares < level * room * (1 - 1e-6)) & (speeds > 0)
        taken = shares[free] / speeds[free]
        np.testing.assert_allclose(taken, taken.max(initial=0.0), rtol=1e-6)


def test_memory_alone_decides_in_the_end() -> None:
    speeds, room = (5 / 9, 3 / 9, 1 / 9), (0.2, 0.3, 0.5)
    shares = filled(speeds, room)
    np.testing.assert_allclose(shares[-1], room, rtol=0.05)
    # In between the second device, too, has more than its speed alone would give it.
    assert max(share[1] for share in filled(speeds, (1 / 3,) * 3)) > 0.42
