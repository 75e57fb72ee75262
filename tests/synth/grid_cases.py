"""A step, fleets of a few nodes and prices on two mesh axes, which the tests of grids share."""

from __future__ import annotations

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
from hypothesis import strategies as st

from shardwright.cost.fleet import Fleet
from shardwright.cost.grid.model import GridModel
from shardwright.cost.model import CostModel
from shardwright.ir.graph import Graph
from shardwright.ir.trace import trace
from shardwright.synth.grid.pricing import GridPriceList, grid_floors
from shardwright.synth.grid.solve import GridSolver
from shardwright.synth.space.space import Space


def fleet(*nodes: tuple[tuple[int, int], ...], network: str = "1 Gbit/s") -> Fleet:
    """Nodes of (GFLOP/s, how many) devices with a fast link each, on a slow network."""

    def kind(speed: int) -> dict[str, str]:
        memory = f"{speed / 4} GB/s"
        return {
            "name": f"cpu-{speed}",
            "flops": f"{speed} GFLOP/s",
            "memory_bandwidth": memory,
            "memory": "2 GB",
        }

    entries: list[dict[str, Any]] = []
    for node in nodes:
        entry: dict[str, Any] = {"devices": [{"type": kind(speed), "count": count} for speed, count in node]}
        if sum(count for _, count in node) > 1:
            entry["link"] = {"bandwidth": "20 GB/s", "latency": "5 us"}
        entries.append(entry)
    link = {"bandwidth": network, "latency": "30 us"}
    return Fleet.from_dict({"name": "mesh", "nodes": entries, "network": link})


FLEETS = {
    "1 + 3": fleet(((40, 1),), ((20, 3),)),
    "2 + 3, one of them mixed": fleet(((40, 2),), ((20, 2), (10, 1))),
    "2 + 2": fleet(((40, 2),), ((40, 2),)),
}


def train_step(params: Any, batch: Any) -> Any:
    x, y = batch

    def loss_of(params: Any) -> Any:
        hidden = jax.nn.relu(x @ params["w1"])
        return jnp.mean((hidden @ params["w2"] - y) ** 2)

    loss, gradients = jax.value_and_grad(loss_of)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), loss


def arguments(batch: int = 48, wide: int = 64) -> tuple[Any, Any]:
    keys = jax.random.split(jax.random.key(0), 4)
    params = {"w1": jax.random.normal(keys[0], (24, wide)), "w2": jax.random.normal(keys[1], (wide, 12))}
    return params, (jax.random.normal(keys[2], (batch, 24)), jax.random.normal(keys[3], (batch, 12)))


@cache
def graph() -> Graph:
    return trace(train_step, *jax.eval_shape(arguments)).graph


@cache
def listed(name: str) -> tuple[Space, GridSolver, GridPriceList]:
    """The space on a fleet, with a price list that has all of its lines."""
    model = GridModel(CostModel(FLEETS[name]))
    space = Space(graph(), model.mesh.nodes)
    solver, prices = GridSolver(space), GridPriceList(model)
    grid_floors(prices).tables(solver.factors)
    return space, solver, prices


@st.composite
def shares(draw: st.DrawFn, name: str) -> tuple[float, ...]:
    parts = draw(
        st.lists(st.integers(0, 9), min_size=len(FLEETS[name].devices), max_size=len(FLEETS[name].devices))
    )
    parts[0] += not any(parts)
    return tuple(part / sum(parts) for part in parts)
