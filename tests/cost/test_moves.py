"""Prices of exchanges: complete, and equal to the closed forms where shares are even."""

from __future__ import annotations

from math import ceil, log2

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright.cost.fleet import Fleet
from shardwright.cost.model import CostModel
from shardwright.cost.moves import Ring, prices
from shardwright.ir.collectives import registry
from shardwright.ir.graph import TensorType
from shardwright.ir.placement import Partial, R, Shard

CPU = {"name": "cpu", "flops": "20 GFLOP/s", "memory_bandwidth": "10 GB/s", "memory": "4 GB"}
MOVES = [(kind, strategy) for kind, c in registry().items() if not c.local for strategy in c.strategies]


def test_every_strategy_of_every_exchange_has_a_price_and_nothing_else_has() -> None:
    assert set(prices()) == set(MOVES)


@pytest.mark.parametrize(("kind", "strategy"), MOVES)
@given(
    devices=st.integers(2, 64),
    latency=st.floats(0, 1e-3),
    rate=st.floats(1e6, 1e12),
    own=st.floats(0.01, 1.0),
    size=st.integers(0, 10**9),
    seed=st.integers(0, 2**32),
)
def test_prices_are_not_negative_and_grow_with_bytes(
    kind: str, strategy: str, devices: int, latency: float, rate: float, own: float, size: int, seed: int
) -> None:
    ring = Ring(devices, latency, rate, rate * own)
    shares = np.random.default_rng(seed).dirichlet(np.full(devices, 0.3))
    small, large = (
        prices()[kind, strategy](ring, n, 1).per_device(shares, np.zeros(devices, dtype=np.int64))
        for n in (size, 2 * size + 1)
    )
    assert (small >= 0).all()
    assert (large >= small - 1e-12).all()
    assert prices()[kind, strategy](ring, size, 1).floor(np.array([devices])) >= 0


@pytest.mark.parametrize("devices", [2, 3, 4, 7, 64])
def test_closed_forms_at_even_shares(devices: int) -> None:
    m, a, w, own, size = devices, 3e-6, 2e9, 5e8, 12_345_678
    ring = Ring(m, a, w, own)
    even = np.full(1, 1.0 / m)
    rounds = ceil(log2(m))
    step = a + size / (m * w)
    wanted = {
        ("all_gather", "padded"): (m - 1) * step,
        ("all_gather", "exact"): (m - 1) * step,
        ("all_gather", "grouped"): m * rounds * a + size / w,
        ("reduce_scatter", "padded"): (m - 1) * step,
        ("reduce_scatter", "exact"): (m - 1) * step,
        ("all_reduce", "ring"): 2 * (m - 1) * step,
        ("all_reduce", "tree"): 2 * rounds * (a + size / w),
        ("all_to_all", "exact"): (m - 1) * a + size / m * (1 - 1 / m) / own,
        ("broadcast", "tree"): rounds * (a + size / w),
        ("send", "direct"): a + size / w,
    }
    assert set(wanted) == set(prices())
    for move, seconds in wanted.items():
        assert prices()[move](ring, size, 1).exact(even) == pytest.approx(seconds, rel=1e-12), move


def test_uneven_shares() -> None:
    ring, size = Ring(4, 0.0, 1e9, 1e9), 10**9
    shares = np.array([0.7, 0.1, 0.1, 0.1])
    of = {move: price(ring, size, 4).exact(shares) for move, price in prices().items()}
    # Padded blocks are as large as the largest; an exact ring sends what the smallest owner lacks.
    assert of["all_gather", "padded"] == pytest.approx(3 * 0.7)
    assert of["all_gather", "exact"] == pytest.approx(1 - 0.1)
    assert of["all_gather", "grouped"] == pytest.approx(1.0)
    assert of["all_to_all", "exact"] == pytest.approx(0.7 * 0.3)
    assert of["all_reduce", "ring"] == pytest.approx(2 * 3 / 4)


def test_one_device_pays_nothing() -> None:
    model = CostModel(
        Fleet.from_dict({"name": "one", "nodes": [{"count": 1, "devices": {"type": CPU, "count": 1}}]})
    )
    tensor = TensorType((1024, 1024), "float32")
    placements = {
        "all_gather": (Shard(0), R),
        "all_reduce": (Partial(), R),
        "reduce_scatter": (Partial(), Shard(0)),
    }
    for kind, strategy in MOVES:
        pre, post = placements.get(kind, (Shard(0), Shard(1)))
        assert model.move(kind, strategy, tensor, pre, post).exact(np.ones(1)) == 0.0


def test_local_moves_are_free() -> None:
    link = {"bandwidth": "1 GB/s", "latency": "1 ms"}
    model = CostModel(
        Fleet.from_dict(
            {"name": "two", "nodes": [{"count": 1, "devices": {"type": CPU, "count": 2}, "link": link}]}
        )
    )
    tensor = TensorType((1024, 1024), "float32")
    assert model.move("slice", "", tensor, R, Shard(0)).exact(np.full(1, 0.5)) == 0.0
    assert model.move("own", "", tensor, R, Partial()).exact(np.full(1, 0.5)) == 0.0
    assert model.move("all_gather", "padded", tensor, Shard(0), R).exact(np.full(1, 0.5)) > 1e-3


def test_the_ring_is_as_slow_as_its_slowest_link() -> None:
    inside, across = (
        {"bandwidth": "16 GB/s", "latency": "10 us"},
        {"bandwidth": "8 Gbit/s", "latency": "30 us"},
    )
    nodes = [{"count": 2, "devices": {"type": CPU, "count": 4}, "link": inside}]
    two = Ring.of(Fleet.from_dict({"name": "two", "nodes": nodes, "network": across}))
    assert two == Ring(8, 30e-6, 1e9, 0.25e9)  # 8 Gbit/s are 1 GB/s, which four devices share
    one = Ring.of(Fleet.from_dict({"name": "one", "nodes": [{**nodes[0], "count": 1}]}))
    assert one == Ring(4, 10e-6, 16e9, 16e9)
