"""What tests of stages share: nodes of one device each, steps in stages, and a plan that has them."""

from __future__ import annotations

from functools import cache
from typing import Any

from rewriting_cases import layered

from shardwright import Fleet, Plan, synthesize
from shardwright.ir.rewrites.rewriting import Rewriting, rewritten
from shardwright.ir.stages import relays
from shardwright.ir.trace import Traced


def apart(
    speeds: tuple[float | tuple[float, ...], ...], network: str = "100 Mbit/s", memory: str = "1 GB"
) -> Fleet:
    """Nodes of one device each, or of several with these speeds, on a network."""

    def device(speed: float) -> dict[str, Any]:
        rates = {"flops": f"{speed} GFLOP/s", "memory_bandwidth": f"{speed} GB/s"}
        return {"type": {"name": f"cpu-{speed}", **rates, "memory": memory}}

    nodes = [
        {
            "devices": [device(speed) for speed in (node if isinstance(node, tuple) else (node,))],
            "link": {"bandwidth": "1 GB/s", "latency": "10 us"},
        }
        for node in speeds
    ]
    link = {"bandwidth": network, "latency": "10 us"}
    return Fleet.from_dict({"name": "apart", "nodes": nodes, "network": link})


def staged(traced: Traced, pieces: int) -> Traced:
    return rewritten(traced, Rewriting(stages=pieces))


@cache
def on_three() -> Plan:
    """Five layers on three devices, in four pieces."""
    step, args = layered(scan=True, layers=5, width=128)
    found = synthesize(step, *args, fleet=apart((2, 2, 1)), stages=4, devices="all")
    assert found.traced is not None
    assert any(relays(instruction, found.traced.graph) for instruction in found.program.instructions)
    return found


@cache
def on_nodes() -> Plan:
    """Five layers on nodes of one and of three devices, which share eight pieces out."""
    step, args = layered(scan=True, layers=5, width=128)
    found = synthesize(step, *args, fleet=apart((3, (1, 1, 1))), stages=8, axes=2, devices="all")
    assert found.traced is not None and found.axes == 2
    assert any(relays(instruction, found.traced.graph) for instruction in found.program.instructions)
    return found
