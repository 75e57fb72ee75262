"""Planning does not blow up: with depth, with parallel branches, with the number of devices."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from synth_cases import fleet, sgd, shape

from shardwright.cost.fleet import Fleet
from shardwright.cost.model import CostModel
from shardwright.ir.trace import trace
from shardwright.synth.prices.lists import PriceList
from shardwright.synth.prices.tables import Prices
from shardwright.synth.search.priced import SpaceSolver
from shardwright.synth.space.space import Space

MODEL = CostModel(fleet((4, 2, 1)))


def stacked(layers: int, scanned: bool) -> Space:
    """A residual MLP of equal layers."""

    def layer(h: Any, w: Any) -> tuple[Any, None]:
        return h + jnp.tanh(h @ w["up"]) @ w["down"], None

    def loss(p: Any, x: Any) -> Any:
        if scanned:
            return (jax.lax.scan(layer, x, p)[0] ** 2).mean()
        for k in range(layers):
            x, _ = layer(x, p[k])
        return (x**2).mean()

    one = {"up": shape(32, 64), "down": shape(64, 32)}
    stack = jax.tree.map(lambda w: shape(layers, *w.shape), one)
    return Space(trace(sgd(loss), stack if scanned else [one] * layers, shape(24, 32)).graph)


def work(space: Space) -> tuple[int, int]:
    """Distinct eliminations, and cells added up in them, at even shares."""
    solver, listed = SpaceSolver(space), PriceList(MODEL)
    tables = Prices.at(listed, (1 / 3, 1 / 3, 1 / 3)).tables(solver.factors)
    layers = solver.solver.layers(tables)
    done = {id(one): one for layer in layers for one in layer.elimination.done}
    return len(done), sum(layer.elimination.cells for layer in layers)


def test_equal_layers_are_priced_once() -> None:
    short, long = stacked(6, False), stacked(24, False)
    assert len(long.choices) > 3 * len(short.choices)
    factors = [{use.factor for use in space.uses} for space in (short, long)]
    assert len(factors[0]) == len(factors[1])


def test_distinct_work_grows_far_less_than_depth() -> None:
    (few, cells), (many, more) = work(stacked(6, False)), work(stacked(24, False))
    assert many <= 2 * few and more <= 2 * cells


def test_scanned_layers_cost_nothing() -> None:
    short, long = stacked(12, True), stacked(96, True)
    assert len(short.choices) == len(long.choices)
    assert work(short)[0] == work(long)[0]


@pytest.mark.parametrize("branches", [4, 6, 8])
def test_parallel_branches_are_exact_and_straight(branches: int) -> None:
    """Chains of products and sigmoids side by side: A* expands one node per choice that is open."""

    def loss(p: Any, x: Any) -> Any:
        total = jnp.zeros_like(x)
        for chain in p:
            h = x
            for w in chain:
                h = jax.nn.sigmoid(h @ w)
            total = total + h
        return (total**2).mean()

    params = [[shape(32, 32)] * 3 for _ in range(branches)]
    space = Space(trace(sgd(loss), params, shape(48, 32)).graph)
    solver = SpaceSolver(space)
    found = solver.solve(Prices.at(MODEL, (0.5, 0.3, 0.2)))
    assert found.bound_s == found.seconds
    assert found.expanded <= len(space.choices)


def test_devices_of_a_class_are_priced_once() -> None:
    """A thousand times as many devices in as many classes: as many lines, tables and eliminations."""

    def model(count: int) -> CostModel:
        link = {"bandwidth": "10 GB/s", "latency": "10 us"}
        nodes = [
            {"count": count, "devices": {"type": kind, "count": 8}, "link": link}
            for kind in ("V100-16GB", "T4")
        ]
        return CostModel(Fleet.from_dict({"name": "large", "nodes": nodes, "network": link}))

    space, lines = stacked(2, False), list[int]()
    for count in (1, 256):
        listed = PriceList(model(count))
        devices = len(listed.model.class_of)
        solver = SpaceSolver(space)
        assert solver.solve(Prices.at(listed, (1 / devices,) * devices)).seconds > 0
        lines.append(len(listed))
    assert lines[0] == lines[1]
