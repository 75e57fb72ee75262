"""What links make of a fleet: rings, rounds, uplinks, what is staged through hosts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from move_cases import CPU, even, fleets, price, shares_of

from shardwright.cost.fleet import Fleet
from shardwright.cost.model import CostModel
from shardwright.cost.topology import Pace, Topology
from shardwright.ir.graph import TensorType
from shardwright.ir.placement import Partial, R, Shard


def lab(**more: Any) -> Fleet:
    inside, across = (
        {"bandwidth": "16 GB/s", "latency": "10 us"},
        {"bandwidth": "8 Gbit/s", "latency": "30 us"},
    )
    nodes = [{"count": 2, "devices": {"type": CPU, "count": 4}, "link": inside, **more.pop("node", {})}]
    return Fleet.from_dict({"name": "two", "nodes": nodes, "network": across, **more})


def test_the_ring_is_as_slow_as_its_slowest_link() -> None:
    two = Topology.of(lab())  # 8 Gbit/s are 1 GB/s, which the four devices of a node share
    assert (two.devices, two.nodes, two.ring, two.across) == (8, 2, Pace(30e-6, 1e-9), Pace(30e-6, 1e-9))
    assert two.outward.tolist() == [1e-9]
    # Partners at distance 1 and 2 are in the same node; at distance 4 all four devices cross.
    assert [r.pace for r in two.rounds] == [Pace(10e-6, 1 / 16e9)] * 2 + [Pace(30e-6, 4e-9)]
    assert [r.crossing for r in two.rounds] == [0, 0, 4]
    one = Topology.of(even(4, {"bandwidth": "16 GB/s", "latency": "10 us"}))
    assert (one.ring, one.across, one.outward.tolist()) == (Pace(10e-6, 1 / 16e9), Pace(), [0.0])


def test_uplinks_rails_and_oversubscription() -> None:
    slow = {"bandwidth": "4 Gbit/s", "latency": "40 us"}
    assert Topology.of(lab(node={"uplink": slow})).ring == Pace(40e-6, 2e-9)
    railed = Topology.of(lab(node={"rails": 2}))
    assert railed.ring == Topology.of(lab()).ring  # one stream uses one rail
    assert railed.outward.tolist() == [0.5e-9]
    assert railed.rounds[2].pace == Pace(30e-6, 2e-9)
    assert Topology.of(lab(node={"rails": 8})).outward.tolist() == [0.25e-9]  # four devices use four of eight
    narrow = Topology.of(lab(oversubscription=3))
    assert narrow.ring == Pace(30e-6, 3e-9) and narrow.pair == Pace(30e-6, 1e-9)


def test_folding_of_what_is_no_power_of_two() -> None:
    topology = Topology.of(even(7, {"bandwidth": "1 GB/s", "latency": "10 us"}))
    assert len(topology.rounds) == 2 and topology.fold is not None
    assert Topology.of(even(8, {"bandwidth": "1 GB/s", "latency": "10 us"})).fold is None


def test_staging_through_the_host() -> None:
    card = {**CPU, "name": "card", "sms": 40}
    link = {"bandwidth": "100 GB/s", "latency": "1 us"}

    def fleet(transport: str, **more: Any) -> Fleet:
        node = {"devices": {"type": card, "count": 2}, "link": link, **more}
        return Fleet.from_dict({"name": "cards", "transport": transport, "nodes": [node]})

    size, half = 10**9, np.full(1, 0.5)
    staged, direct = CostModel(fleet("host-mpi")), CostModel(fleet("cuda-mpi"))
    assert staged.topology.host == (Pace(10e-6, 1 / 12e9),)
    assert direct.topology.host == (Pace(),)
    tensor = TensorType((size // 4,), "float32")
    # Two copies of whole tensors, and between hosts no faster than a copy.
    wanted = 2 * (10e-6 + size / 12e9) + 2 * (1e-6 + size / 2 / 12e9)
    assert staged.move("all_reduce", "ring", tensor, Partial(), R).exact(half) == pytest.approx(wanted)
    wanted = (10e-6 + size / 2 / 12e9) + (10e-6 + size / 12e9) + 1e-6 + size / 2 / 12e9
    assert staged.move("all_gather", "exact", tensor, Shard(0), R).exact(half) == pytest.approx(wanted)
    wanted = 2 * (1e-6 + size / 2 / 100e9)
    assert direct.move("all_reduce", "ring", tensor, Partial(), R).exact(half) == pytest.approx(wanted)
    assert any("host link of card is assumed as 12 GB/s, 10 us" in a for a in staged.assumptions)
    assert any("no backend here runs cuda-mpi" in a for a in direct.assumptions)
    told = CostModel(fleet("host-mpi", host_link={"bandwidth": "24 GB/s", "latency": "5 us"}))
    assert told.topology.host == (Pace(5e-6, 1 / 24e9),)
    assert not any("host link" in a or "no backend" in a for a in told.assumptions)
    # A device whose memory is the host's copies nothing.
    assert CostModel(even(2, link)).topology.host == (Pace(),)


def test_leaders_have_the_fastest_host_link() -> None:
    slow, fast = ({"bandwidth": f"{x} GB/s", "latency": "5 us"} for x in (3, 20))
    card = {**CPU, "name": "card", "sms": 40}
    devices = [{"type": card, "count": 2, "host_link": slow}, {"type": card, "host_link": fast}]
    fleet = lab(node={"devices": devices})
    assert [len(c.members) for c in fleet.classes] == [4, 2]
    wiring = Topology.of(fleet).wiring
    assert (wiring.node_of, wiring.leaders) == ((0, 0, 0, 1, 1, 1), (2, 5))
    assert wiring.groups(range(6)) == ((0, 1, 2), (3, 4, 5))
    assert [wiring.leader(range(6), group) for group in wiring.groups(range(6))] == [2, 5]
    assert wiring.groups((0, 1, 5)) == ((0, 1), (2,))
    assert [wiring.leader((0, 1, 5), group) for group in ((0, 1), (2,))] == [0, 2]


@given(fleet=fleets(), size=st.integers(1, 10**9), seed=st.integers(0, 2**32))
def test_what_leaves_a_node_is_exact_at_even_nodes_and_never_below(
    fleet: Fleet, size: int, seed: int
) -> None:
    fleet = replace(fleet, transport="nccl")
    topology = Topology.of(fleet)
    sizes = np.array([len(node.devices) for node in fleet.nodes])
    narrow = fleet.oversubscription if len(fleet.nodes) > 1 else 0.0
    outward = [
        Pace.of(node.uplink or fleet.network, narrow).s_per_byte / min(node.rails, count)
        for node, count in zip(fleet.nodes, sizes, strict=True)
    ]
    inside = [Pace.of(node.link).s_per_byte if len(node.devices) > 1 else 0.0 for node in fleet.nodes]
    latency = (topology.devices - 1) * topology.ring.latency_s

    def by_hand(shares: np.ndarray) -> float:
        nodes = topology.per_node(shares)
        own = np.array(inside)[topology.node_of] * shares * (1 - shares)
        return latency + size * max((nodes * (1 - nodes) * outward).max(), own.max())

    shares, move = shares_of(fleet, seed), ("all_to_all", "exact")
    assert price(fleet, move, size, shares).max() >= by_hand(shares) * (1 - 1e-9)
    even = (1 / len(sizes) / sizes)[topology.node_of]
    assert price(fleet, move, size, even).max() == pytest.approx(by_hand(even))
