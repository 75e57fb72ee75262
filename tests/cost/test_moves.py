"""Prices of exchanges: complete, equal to closed forms, monotone, and bounded by what links carry."""

from __future__ import annotations

from dataclasses import replace
from math import ceil, log2
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from move_cases import CPU, MOVES, PLACEMENTS, even, fleets, price, shares_of

from shardwright.cost.fleet import Fleet, Link
from shardwright.cost.model import CostModel
from shardwright.cost.moves import strategies
from shardwright.cost.topology import ASSUMED_HOST_LINK, Pace, Topology
from shardwright.ir.graph import TensorType
from shardwright.ir.placement import Partial, R, Shard

#: Of properties that are checked for every strategy.
few = settings(max_examples=25)


def test_the_register_holds_what_programs_may_name() -> None:
    assert set(strategies()) == set(MOVES)
    assert all((s.kind, s.name) == key for key, s in strategies().items())


@few
@pytest.mark.parametrize("move", MOVES, ids=".".join)
@given(fleet=fleets(), size=st.integers(0, 10**9), seed=st.integers(0, 2**32))
def test_prices_are_bounded_and_grow_with_bytes(
    move: tuple[str, str], fleet: Fleet, size: int, seed: int
) -> None:
    model, shares = CostModel(fleet), shares_of(fleet, seed)
    small, large = (price(fleet, move, n, shares) for n in (size, 2 * size + 1))
    assert (small >= 0).all()
    assert large.max() >= small.max() * (1 - 1e-12)
    cost = strategies()[move].price(model.topology, size, len(model.types))
    constant, linear = cost.minorant()
    at = model.class_of
    below = (constant[:, at] + linear[:, at] * shares).max(axis=0)
    assert (below <= small * (1 + 1e-12) + 1e-15).all()
    assert 0 <= cost.floor(model.counts) <= small.max() * (1 + 1e-9) + 1e-15


@few
@pytest.mark.parametrize("move", MOVES, ids=".".join)
@given(
    fleet=fleets(),
    size=st.integers(0, 10**8),
    seed=st.integers(0, 2**32),
    slower=st.floats(1, 100),
    later=st.floats(1, 100),
    where=st.sampled_from(["link", "uplink", "network", "host_links", "oversubscription", "rails"]),
)
def test_slower_links_never_cost_less(
    move: tuple[str, str], fleet: Fleet, size: int, seed: int, slower: float, later: float, where: str
) -> None:
    def worse(link: Link | None) -> Link | None:
        return link and Link(link.bandwidth_byte_per_s / slower, link.latency_s * later)

    number = seed % len(fleet.nodes)
    node = fleet.nodes[number]
    if where == "network":
        other = replace(fleet, network=worse(fleet.network))
    elif where == "oversubscription":
        other = replace(fleet, oversubscription=fleet.oversubscription * slower)
    else:
        changed = {
            "link": replace(node, link=worse(node.link)),
            "uplink": replace(node, uplink=worse(node.uplink or fleet.network)),
            "rails": replace(node, rails=1),
            "host_links": replace(
                node, host_links=tuple(worse(link or ASSUMED_HOST_LINK) for _, link in node.equipped)
            ),
        }[where]
        # A type without multiprocessors has no host link: none must appear by changing it.
        if where == "host_links" and any(kind.sm_count is None and not link for kind, link in node.equipped):
            return
        other = replace(fleet, nodes=(*fleet.nodes[:number], changed, *fleet.nodes[number + 1 :]))
    shares = shares_of(fleet, seed)
    assert price(other, move, size, shares).max() >= price(fleet, move, size, shares).max() * (1 - 1e-9)


@pytest.mark.parametrize("devices", [2, 3, 4, 7, 64])
def test_closed_forms_at_even_shares(devices: int) -> None:
    m, a, g, size = devices, 3e-6, 1 / 2e9, 12_345_678
    topology = Topology.of(even(m, {"bandwidth": "2 GB/s", "latency": "3 us"}))
    rounds, levels = ceil(log2(m)), m.bit_length() - 1
    fold = 0 if m == 1 << levels else 2 * (a + size * g)
    step = a + size * g / m
    wanted = {
        ("all_gather", "padded"): (m - 1) * step,
        ("all_gather", "exact"): (m - 1) * step,
        ("all_gather", "grouped"): m * rounds * a + size * g,
        ("reduce_scatter", "padded"): (m - 1) * step,
        ("reduce_scatter", "exact"): (m - 1) * step,
        ("reduce_scatter", "grouped"): m * rounds * a + size * g,
        ("all_reduce", "ring"): 2 * (m - 1) * step,
        ("all_reduce", "rs_ag"): fold + 2 * levels * a + 2 * (1 - 0.5**levels) * size * g,
        ("all_reduce", "tree"): fold + levels * (a + size * g),
        ("all_to_all", "exact"): (m - 1) * a + size / m * (1 - 1 / m) * g,
        ("broadcast", "tree"): rounds * (a + size * g),
        ("broadcast", "scatter_ag"): (rounds + m - 1) * a + 2 * (m - 1) / m * size * g,
        ("send", "direct"): a + size * g,
    }
    assert {*wanted} == {move for move in MOVES if move[1] != "hierarchical"}
    shares = np.full(m, 1 / m)
    for move, seconds in wanted.items():
        entry = strategies()[move]
        assert entry.price(topology, size, 1).exact(shares[:1]) == pytest.approx(seconds, rel=1e-12), move
        # On links of one speed the busiest one sets the pace, once latencies are taken off. (The pipelined
        # broadcasts of `grouped` are priced as if every owner received, too; folding sends one tensor each
        # way, one after the other.)
        moving = seconds - entry.price(topology, 0, 1).exact(shares[:1])
        if move[1] == "grouped":
            moving *= (m - 1) / m
        if move in (("all_reduce", "tree"), ("all_reduce", "rs_ag")) and fold:
            moving -= size * g
        assert entry.link_bytes(topology, size, shares) * g == pytest.approx(moving, rel=1e-9), move


@few
@pytest.mark.parametrize("move", MOVES, ids=".".join)
@given(fleet=fleets(), size=st.integers(1, 10**9), seed=st.integers(0, 2**32))
def test_no_price_is_below_what_the_links_take(
    move: tuple[str, str], fleet: Fleet, size: int, seed: int
) -> None:
    """The busiest link is no faster than the fastest one, all rails of it."""
    topology, shares = Topology.of(fleet), shares_of(fleet, seed)
    carried = strategies()[move].link_bytes(topology, size, shares)
    assert carried >= 0
    links = [link for node in fleet.nodes for link in (node.link, node.uplink)] + [fleet.network]
    widest = max(node.rails for node in fleet.nodes)
    fastest = widest * max(link.bandwidth_byte_per_s for link in links if link)
    assert price(fleet, move, size, shares).max() >= carried / fastest * (1 - 1e-9)


def by_hand(fleet: Fleet, kind: str, size: int, shares: np.ndarray) -> float:
    """A hierarchical all-gather or reduce-scatter with every node's true share; transport without staging."""
    topology = Topology.of(fleet)
    totals = topology.per_node(shares)
    rooted, fixed = [], []
    for node in fleet.nodes:
        count, pace = len(node.devices), Pace.of(node.link)
        hops = ceil(log2(count))
        chain = (hops + count - 1) * pace.latency_s + 2 * (count - 1) / count * size * pace.s_per_byte
        rooted.append(min(hops * pace.seconds(size), chain) if count > 1 else 0.0)
        fixed.append((count - 1) * pace.latency_s if count > 1 else 0.0)
    narrow = fleet.oversubscription
    across = Pace.slowest(Pace.of(node.uplink or fleet.network, narrow) for node in fleet.nodes)
    paths = [
        fixed[n]
        + (size * totals[n] * Pace.of(node.link).s_per_byte if len(node.devices) > 1 else 0.0)
        + (len(fleet.nodes) - 1) * across.latency_s
        + size * (1 - totals[n]) * across.s_per_byte
        for n, node in enumerate(fleet.nodes)
    ]
    return max(paths) + max(rooted)


@given(fleet=fleets(), size=st.integers(0, 10**9), seed=st.integers(0, 2**32))
def test_hierarchical_is_exact_where_a_node_shares_evenly_and_never_below(
    fleet: Fleet, size: int, seed: int
) -> None:
    fleet = replace(fleet, transport="nccl")
    topology = Topology.of(fleet)
    shares = shares_of(fleet, seed)
    evened = (topology.per_node(shares) / [len(node.devices) for node in fleet.nodes])[topology.node_of]
    for kind in ("all_gather", "reduce_scatter"):
        move = (kind, "hierarchical")
        assert price(fleet, move, size, shares).max() >= by_hand(fleet, kind, size, shares) * (1 - 1e-9)
        assert price(fleet, move, size, evened).max() == pytest.approx(by_hand(fleet, kind, size, evened))


@given(fleet=fleets(), size=st.integers(0, 10**9), seed=st.integers(0, 2**32), order=st.randoms())
def test_rings_cost_the_same_in_whatever_order_the_nodes_stand(
    fleet: Fleet, size: int, seed: int, order: Any
) -> None:
    """A ring that goes node by node crosses each uplink once in each direction: no order is better."""
    nodes = list(fleet.nodes)
    order.shuffle(nodes)
    other = replace(fleet, nodes=tuple(nodes))
    shares = shares_of(fleet, seed)
    by_node = {id(node): iter([]) for node in fleet.nodes}
    first = 0
    for node in fleet.nodes:
        by_node[id(node)] = iter(shares[first : first + len(node.devices)])
        first += len(node.devices)
    moved = np.array([x for node in nodes for x in by_node[id(node)]])
    for move in MOVES:
        if move[1] not in ("tree", "rs_ag"):  # these pair devices by their numbers
            wanted = price(fleet, move, size, shares).max()
            assert price(other, move, size, moved).max() == pytest.approx(wanted), move


def test_uneven_shares() -> None:
    topology, size = Topology.of(even(4, {"bandwidth": "1 GB/s", "latency": "1 ns"})), 10**9
    shares = np.array([0.7, 0.1, 0.1, 0.1])
    at = np.zeros(4, dtype=np.int64)
    of = {move: s.price(topology, size, 1).per_device(shares, at).max() for move, s in strategies().items()}
    near = {"abs": 1e-6}
    # Padded blocks are as large as the largest; an exact ring sends what the smallest owner lacks.
    assert of["all_gather", "padded"] == pytest.approx(3 * 0.7, **near)
    assert of["all_gather", "exact"] == pytest.approx(1 - 0.1, **near)
    assert of["all_gather", "grouped"] == pytest.approx(1.0, **near)
    assert of["all_to_all", "exact"] == pytest.approx(0.7 * 0.3, **near)
    assert of["all_reduce", "ring"] == pytest.approx(2 * 3 / 4, **near)
    carried = {move: s.link_bytes(topology, size, shares) for move, s in strategies().items()}
    assert carried["all_gather", "padded"] == pytest.approx(2.1e9)
    assert carried["all_gather", "exact"] == pytest.approx(0.9e9)
    assert carried["all_to_all", "exact"] == pytest.approx(0.21e9)


def test_one_device_pays_nothing() -> None:
    model = CostModel(Fleet.from_dict({"name": "one", "nodes": [{"devices": {"type": CPU}}]}))
    tensor = TensorType((1024, 1024), "float32")
    for kind, strategy in MOVES:
        pre, post = PLACEMENTS.get(kind, (R, R))
        assert model.move(kind, strategy, tensor, pre, post).exact(np.ones(1)) == 0.0


def test_local_moves_are_free() -> None:
    model = CostModel(even(2, {"bandwidth": "1 GB/s", "latency": "1 ms"}))
    tensor = TensorType((1024, 1024), "float32")
    assert model.move("slice", "", tensor, R, Shard(0)).exact(np.full(1, 0.5)) == 0.0
    assert model.move("own", "", tensor, R, Partial()).exact(np.full(1, 0.5)) == 0.0
    assert model.move("all_gather", "padded", tensor, Shard(0), R).exact(np.full(1, 0.5)) > 1e-3


def test_what_makes_no_sense_is_never_planned() -> None:
    """Leaders need several nodes, and a node of several devices."""
    inside, across = (
        {"bandwidth": "1 GB/s", "latency": "1 us"},
        {"bandwidth": "1 Gbit/s", "latency": "9 us"},
    )
    fleets = [even(4, inside), even(1, inside, across, nodes=4), even(2, inside, across, nodes=2)]
    tensor = TensorType((1024, 1024), "float32")
    for fleet, sensible in zip(fleets, (False, False, True), strict=True):
        model = CostModel(fleet)
        for kind in ("all_gather", "all_reduce", "reduce_scatter"):
            cost = model.move(kind, "hierarchical", tensor, *PLACEMENTS[kind])
            assert np.isfinite(cost.exact(np.full(1, 0.25))) == sensible
            assert np.isfinite(cost.floor(model.counts)) == sensible
