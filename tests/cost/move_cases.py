"""Exchanges, and fleets on which they are priced, that the tests of moves and topologies share."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from hypothesis import strategies as st

from shardwright.cost.device import DeviceType
from shardwright.cost.fleet import TRANSPORTS, Fleet, Link, Node
from shardwright.cost.model import CostModel
from shardwright.cost.moves import strategies
from shardwright.ir.collectives import registry
from shardwright.ir.placement import Partial, R, Shard

CPU = {"name": "cpu", "flops": "20 GFLOP/s", "memory_bandwidth": "10 GB/s", "memory": "4 GB"}
MOVES = [(kind, strategy) for kind, c in registry().items() if not c.local for strategy in c.strategies]
PLACEMENTS = {
    "all_gather": (Shard(0), R),
    "all_reduce": (Partial(), R),
    "reduce_scatter": (Partial(), Shard(0)),
    "all_to_all": (Shard(0), Shard(1)),
}

_bandwidths, _latencies = st.floats(1e6, 1e12), st.floats(1e-9, 1e-3)
_links = st.builds(Link, _bandwidths, _latencies)
_types = st.sampled_from(
    [
        DeviceType("cpu", 1e10, 1e10, 10**9),
        DeviceType("card", 1e13, 1e12, 10**10, sm_count=40),
        DeviceType("other card", 1e12, 1e11, 10**10, sm_count=20),
    ]
)


@st.composite
def _nodes(draw: st.DrawFn) -> Node:
    devices = tuple(draw(st.lists(_types, min_size=1, max_size=5)))
    given = tuple(draw(st.none() | _links) for _ in devices)
    uplink = draw(st.none() | _links)
    return Node("", devices, draw(_links), uplink, draw(st.integers(1, 4)), given if any(given) else ())


@st.composite
def fleets(draw: st.DrawFn) -> Fleet:
    """Unlike nodes of unlike devices on unlike links, by every transport; two devices at least."""
    nodes = draw(
        st.lists(_nodes(), min_size=1, max_size=4).filter(lambda n: sum(len(x.devices) for x in n) > 1)
    )
    nodes = [replace(node, name=f"n{i}") for i, node in enumerate(nodes)]
    over = draw(st.floats(1, 4))
    return Fleet("any", tuple(nodes), draw(_links), over, draw(st.sampled_from(TRANSPORTS)))


def price(fleet: Fleet, move: tuple[str, str], size: int, shares: np.ndarray) -> np.ndarray:
    """Seconds of every device at shares per device."""
    model = CostModel(fleet)
    cost = strategies()[move].price(model.topology, size, len(model.types))
    return cost.per_device(shares, model.class_of)


def shares_of(fleet: Fleet, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).dirichlet(np.full(len(fleet.devices), 0.3))


def even(count: int, link: dict[str, str], network: dict[str, str] | None = None, nodes: int = 1) -> Fleet:
    entry: dict[str, Any] = {"count": nodes, "devices": {"type": CPU, "count": count}, "link": link}
    rest = {} if network is None else {"network": network}
    return Fleet.from_dict({"name": "even", "nodes": [entry], **rest})
