"""What checks of plans on four devices of JAX share: a fleet, plans of our choice, and how they are run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from greedy import build
from steps import STEPS, starts

from shardwright import Fleet, Plan, synthesize

UNEVEN, PAIRS, EVEN = (0.5, 0.25, 0.15, 0.1), (0.4, 0.4, 0.1, 0.1), (0.25,) * 4


def fleet() -> Fleet:
    """Four devices whose links make it worth cutting something."""
    cpu = {"name": "cpu", "flops": "1 MFLOP/s", "memory_bandwidth": "2 MB/s", "memory": "1 GB"}
    node = {"devices": {"type": cpu, "count": 4}, "link": {"bandwidth": "1 GB/s", "latency": "1 us"}}
    return Fleet.from_dict({"name": "four", "nodes": [node]})


def planned(name: str, start: str, ratios: tuple[float, ...]) -> tuple[Any, tuple[Any, ...], Plan]:
    """A plan with a program and shares of our choice."""
    step, args = STEPS[name]()
    plan = synthesize(step, *args, fleet=fleet(), devices="all")
    assert plan.traced is not None
    graph = plan.traced.graph
    return step, args, replace(plan, program=build(graph, starts(graph)[start]), ratios=ratios)


def assert_close(got: Any, wanted: Any) -> None:
    a, b = np.asarray(got, np.float64), np.asarray(wanted, np.float64)
    assert a.shape == b.shape
    np.testing.assert_allclose(a, b, atol=1e-5 * float(np.max(np.abs(b), initial=1e-3)))


def run_all(names: Mapping[str, Any]) -> None:
    """Call every check of a module; the first one that fails ends the process."""
    for name, check in list(names.items()):
        if name.startswith("test_"):
            print(name, flush=True)
            check()
