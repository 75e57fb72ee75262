"""Devices, models and graphs that the tests of prices share."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from shardwright.cost.fleet import Fleet
from shardwright.cost.model import CostModel
from shardwright.cost.share_cost import ShareCost
from shardwright.cost.traffic import Traffic
from shardwright.ir.graph import Equation, Graph
from shardwright.ir.placement import Partial, Shard
from shardwright.ir.registry import rule_of
from shardwright.ir.rules import Signature
from shardwright.ir.trace import trace

CPU = {
    "name": "cpu",
    "flops": "20 GFLOP/s",
    "memory_bandwidth": "10 GB/s",
    "memory": "4 GB",
    "launch": "2 us",
}
SLOW = {
    "name": "slow",
    "flops": "5 GFLOP/s",
    "memory_bandwidth": "2 GB/s",
    "memory": "1 GB",
    "launch": "8 us",
}
S0, S1, SUM = Shard(0), Shard(1), Partial("sum")
ALL = Traffic((True, True), (True,))


def model_of(*kinds: Any) -> CostModel:
    link = {"bandwidth": "1 GB/s", "latency": "1 us"}
    devices = [{"type": kind} for kind in kinds]
    return CostModel(
        Fleet.from_dict({"name": "test", "nodes": [{"count": 1, "devices": devices, "link": link}]})
    )


def f32(*dims: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(dims, jnp.float32)


def graph_of(function: Any, *args: Any) -> Graph:
    return trace(function, *args, state={}).graph


def only(graph: Graph, primitive: str) -> Equation:
    (found,) = (e for e in graph.equations if e.primitive == primitive)
    return found


def price(model: CostModel, equation: Equation, signature: Signature, through: Traffic = ALL) -> ShareCost:
    return model.compute(equation, rule_of(equation), signature, through)
