"""The order in which choices are eliminated, against one that counts everything anew."""

from __future__ import annotations

import itertools
import math
from unittest import mock

from hypothesis import given
from hypothesis import strategies as st

from shardwright.synth.search import order
from shardwright.synth.search.order import full_order


@given(st.data())
def test_orders_are_those_of_counting_fill_anew(data: st.DataObject) -> None:
    """What eliminating a choice would add is kept up to date; hubs, tied to more than four, are put off."""
    count = data.draw(st.integers(2, 12))
    sizes = data.draw(st.lists(st.integers(2, 5), min_size=count, max_size=count))
    pair = st.lists(st.integers(0, count - 1), min_size=2, max_size=4, unique=True)
    scopes = [tuple(sorted(each)) for each in data.draw(st.lists(pair, min_size=1, max_size=20))]
    tied: dict[int, set[int]] = {}
    for scope in scopes:
        for v in scope:
            tied.setdefault(v, set()).update(u for u in scope if u != v)

    def turn(v: int) -> tuple[float, int, int]:
        near = tied[v]
        if len(near) > 4:
            return float("inf"), len(near), v
        pairs = itertools.combinations(sorted(near), 2)
        fill = sum(sizes[a] * sizes[b] for a, b in pairs if b not in tied[a])
        gone = sum(sizes[a] for a in near) * sizes[v]
        return fill / (1 + gone) ** 0.5, math.prod(sizes[a] for a in (v, *near)), v

    wanted: list[int] = []
    while tied:
        _, _, v = min(map(turn, tied))
        wanted.append(v)
        for a in (near := tied.pop(v)):
            tied[a] = (tied[a] | near) - {a, v}
    with mock.patch.object(order, "_HUB", 4):
        assert full_order(sizes, scopes) == wanted
