"""Ratios on two mesh axes: the best there are where costs are linear, also in nodes that wait for others."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from grid_cases import arguments, fleet, train_step
from hypothesis import given, settings
from hypothesis import strategies as st

import shardwright
from shardwright.cost.fleet import Fleet
from shardwright.cost.grid.prices import FEATURES, ONE, RQ, GridCut, GridStack, Mesh, R
from shardwright.cost.model import CostModel
from shardwright.synth.grid.ratios import GridBill

MIXED = {
    "two mixed nodes": fleet(((40, 1), (10, 1)), ((20, 1), (10, 1))),
    "one of them larger": fleet(((40, 1), (10, 2)), ((20, 2),)),
    "three kinds": fleet(((40, 1), (20, 1)), ((10, 2),), ((40, 1), (20, 2))),
}


@pytest.mark.parametrize("name", MIXED)
@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), start=st.booleans())
def test_nothing_is_better_where_costs_are_linear(name: str, seed: int, *, start: bool) -> None:
    """Of costs that grow with a node's share and with a device's alone, no shares make less."""
    mesh, rng = Mesh.of(CostModel(MIXED[name])), np.random.default_rng(seed)
    terms = np.zeros((6, FEATURES, 2, len(mesh.kind_of)))
    terms[:, RQ] = rng.random(terms[:, RQ].shape) ** 3
    terms[:3, R] = 0.2 * rng.random(terms[:3, R].shape)
    terms[:, ONE] = 0.1 * rng.random(terms[:, ONE].shape)
    bill = GridBill(GridStack(terms), [GridCut(0, 0, nested=False)] * 6, rng.random(6).tolist(), mesh)

    def some() -> tuple[float, ...]:
        drawn = rng.dirichlet(np.ones(len(mesh.node_of)) * rng.choice([0.3, 1.0, 5.0]))
        # Devices of one class, and nodes of one kind, have equal shares.
        each = np.bincount(mesh.class_of, drawn) / np.bincount(mesh.class_of)
        return tuple(each[mesh.class_of].tolist())

    best = bill.best_ratios(some() if start else mesh.ratios(*mesh.even()))
    assert sum(best) == pytest.approx(1.0)
    for other in [some() for _ in range(60)]:
        assert bill.seconds(best) <= bill.seconds(other) * (1 + 1e-6)


def waiting(*nodes: tuple[float, ...]) -> Fleet:
    """Nodes of slow devices (GFLOP/s) beside which links are quick: the slowest device sets the pace."""
    link = {"bandwidth": "1 GB/s", "latency": "1 us"}

    def device(speed: float) -> dict[str, Any]:
        rates = {"flops": f"{speed} GFLOP/s", "memory_bandwidth": f"{2 * speed} GB/s", "memory": "1 GB"}
        return {"type": {"name": f"cpu-{speed}", **rates, "launch": "0.01 us"}}

    made = [{"devices": [device(speed) for speed in node], "link": link} for node in nodes]
    network = {"bandwidth": "200 MB/s", "latency": "5 us"}
    return Fleet.from_dict({"name": "waiting", "nodes": made, "network": network})


@pytest.mark.parametrize(
    "nodes", [((0.08, 0.02), (0.04, 0.02)), ((0.08, 0.02), (0.02, 0.04)), ((0.08, 0.02, 0.02), (0.04, 0.04))]
)
def test_two_axes_are_no_dearer_than_one_on_mixed_nodes(nodes: tuple[tuple[float, ...], ...]) -> None:
    """Programs on one axis are among those on two, and the ratios of both are free."""
    one, two = (
        shardwright.synthesize(train_step, *arguments(), fleet=waiting(*nodes), axes=axes, devices="all")
        for axes in (1, 2)
    )
    assert two.cost_s <= one.cost_s * 1.01
    assert two.gap < 0.06
