"""A link on which every strategy was measured is, to every price, a link of what was measured."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
from grid_cases import listed
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.cost.device import DeviceType
from shardwright.cost.fleet import Fleet, Link, Node
from shardwright.cost.grid.model import GridModel
from shardwright.cost.grid.prices import features
from shardwright.cost.model import CostModel
from shardwright.cost.moves import strategies
from shardwright.cost.strategy_links import SizeRange, StrategyLink
from shardwright.ir.collectives import between
from shardwright.ir.placement import Placement

KINDS = DeviceType("a", 4e10, 9e9, 2 * 10**9), DeviceType("b", 2e10, 5e9, 2 * 10**9)
NBYTES = (40, 3_000, 70_000_000)


def measured_as(found: Link | None, said: float) -> Link | None:
    """A link that says something else of itself, but not of any strategy."""
    if found is None:
        return None
    ranges = (
        SizeRange(1024.0, found.latency_s, found.bandwidth_byte_per_s),
        SizeRange(None, found.latency_s, found.bandwidth_byte_per_s),
    )
    every = tuple(StrategyLink(f"{kind}.{name}", ranges) for kind, name in strategies())
    return Link(said, 1e-9, every)


links = st.builds(Link, st.sampled_from([1e7, 2e7, 1e9]), st.sampled_from([1e-6, 5e-5]))


@st.composite
def fleets(draw: st.DrawFn) -> tuple[Fleet, Fleet]:
    """A fleet, and the same where some links have to be measured to be known."""
    plain: list[Node] = []
    seen: list[Node] = []
    for n in range(draw(st.integers(2, 3))):
        devices = tuple(draw(st.lists(st.sampled_from(KINDS), min_size=1, max_size=3)))
        node = Node(
            f"n{n}",
            devices,
            draw(links) if len(devices) > 1 else None,
            draw(st.none() | links),
            draw(st.integers(1, 3)),
        )
        plain.append(node)
        if draw(st.booleans()):
            node = replace(node, link=measured_as(node.link, draw(st.sampled_from([1e3, 1e12]))))
        if draw(st.booleans()):
            node = replace(node, uplink=measured_as(node.uplink, draw(st.sampled_from([1e3, 1e12]))))
        seen.append(node)
    network = draw(links)
    narrow = draw(st.sampled_from([1.0, 2.0]))
    unknown = measured_as(network, 1e3) if draw(st.booleans()) else network
    return Fleet("plain", tuple(plain), network, narrow), Fleet("seen", tuple(seen), unknown, narrow)


def moves(nodes: Fleet) -> Iterator[tuple[str, str, Placement, Placement]]:
    """Every move between placements of a tensor on two axes, by every strategy that makes sense."""
    space, _, _ = listed("2 + 2")
    model = GridModel(CostModel(nodes))
    placements = max((c.domain.routes.placements for c in space.choices), key=len)
    for pre, post in itertools.permutations(placements, 2):
        collective = between(pre, post)
        if collective is not None:
            for strategy in model.strategies(collective.kind, pre, post):
                yield collective.kind, strategy, pre, post


@settings(max_examples=15, deadline=None)
@given(both=fleets())
def test_what_was_measured_is_what_counts(both: tuple[Fleet, Fleet]) -> None:
    plain, seen = (CostModel(fleet) for fleet in both)
    grids = GridModel(plain), GridModel(seen)
    known = list(moves(both[0]))
    assert known == list(moves(both[1]))
    assert len(known) > 20
    for kind, strategy, pre, post in known:
        one, two = (grid.moves(kind, strategy, NBYTES, pre, post) for grid in grids)
        # Classes differ where links say of themselves what nobody finds: compare by device.
        assert np.allclose(one[..., plain.class_of], two[..., seen.class_of], rtol=1e-12, atol=0)
    for kind, strategy in strategies():
        first, second = (model.exchanges(kind, strategy, NBYTES) for model in (plain, seen))
        for device, (mine, other) in enumerate(zip(plain.class_of, seen.class_of, strict=True)):
            for part in ("constant", "linear"):
                here, there = getattr(first, part)[..., mine], getattr(second, part)[..., other]
                assert np.array_equal(here.max(axis=1), there.max(axis=1)), f"device {device}"


def test_nodes_that_differ_in_rails_alone() -> None:
    """They are of one class to exchanges between leaders, which use one rail, and of two to all others."""
    node = Node("n0", (KINDS[0],) * 2, Link(1e9, 1e-6))

    def rails(*counts: int) -> Fleet:
        nodes = tuple(replace(node, name=f"n{n}", rails=count) for n, count in enumerate(counts))
        return Fleet("rails", nodes, Link(1e7, 5e-5))

    models = [GridModel(CostModel(rails(*counts))) for counts in ((2, 2), (2, 1), (1, 1))]
    even = features(np.array(0.5), np.array(0.5))
    between_leaders = quicker = 0
    for kind, strategy, pre, post in moves(rails(2, 1)):
        two, mixed, one = (
            np.einsum("tfrc, f -> trc", m.moves(kind, strategy, NBYTES, pre, post), even).max(axis=(1, 2))
            for m in models
        )
        assert (two <= mixed * (1 + 1e-12)).all()
        assert (mixed <= one * (1 + 1e-12)).all()
        between_leaders += bool((two == one).all())
        quicker += bool((two < one).any())
    assert between_leaders
    assert quicker
