"""The testbed's ranks as a fleet: one core as it was measured, times the part of it that each rank reaches.

Within a quota a short kernel either runs at full speed or waits for the next period, so that timing kernels
there tells little. So two ranks are calibrated with a core each and no quota, once; rates are multiplied by
the ranks' speeds, delays divided by them. A rank's speed is what the core is predicted to take for the rank's
part of a step by itself, over what that takes the rank (`testbed_speed.py`). An exchange through shared
memory is copying: it goes as fast as its slowest rank may. Links are what they are shaped to.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import Any

from shardwright import Fleet, synthesize
from shardwright.commands.calibrate import write_fleet
from shardwright.cost.device import DeviceType
from shardwright.cost.fleet import Link, Node
from shardwright.fleets.calibrate import calibrate

#: Of a shaped rate, the part that is data: 1448 of the 1538 bytes that a full frame takes on Ethernet.
PAYLOAD = 1448 / 1538
#: A message over TCP between two namespaces of this machine, polled every 50 µs.
LINK_LATENCY_S = 1e-4

_MEASURED = {
    "name": "one core",
    "nodes": [
        {
            "devices": {
                "type": {
                    "name": "core",
                    "flops": "20 GFLOP/s",
                    "memory_bandwidth": "8 GB/s",
                    "memory": "2 GB",
                },
                "count": 2,
            },
            "link": {"bandwidth": "2 GB/s", "latency": "50 us"},
        }
    ],
}


def measured_cores(path: Path) -> Fleet:
    """Two ranks with a core each, read from `path` or measured and written there."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_fleet(calibrate(2, Fleet.from_dict(_MEASURED), force=True).fleet, str(path))
    return Fleet.load(path)


def scaled(kind: DeviceType, part: float, name: str) -> DeviceType:
    """A rank with a part of a core."""

    def times(rate: float | None) -> float | None:
        return None if rate is None else rate * part

    return replace(
        kind,
        name=name,
        float32_flop_per_s=kind.float32_flop_per_s * part,
        float64_flop_per_s=times(kind.float64_flop_per_s),
        float16_flop_per_s=times(kind.float16_flop_per_s),
        bfloat16_flop_per_s=times(kind.bfloat16_flop_per_s),
        tf32_flop_per_s=times(kind.tf32_flop_per_s),
        memory_bandwidth_byte_per_s=kind.memory_bandwidth_byte_per_s * part,
        launch_s=kind.launch_s / part,
        resume_s=kind.resume_s / part,
        restart_s=kind.restart_s / part,
        resume_over_s=kind.resume_over_s / part,
    )


def alone_s(cores: Fleet, step: Callable[..., Any], args: tuple[Any, ...]) -> float:
    """Seconds that a step is predicted to take a core by itself."""
    (node,) = cores.nodes
    one = Fleet("core", (Node("n0", node.devices[:1], None),), None)
    return synthesize(step, *args, fleet=one).iteration_s


def slowed(link: Link, part: float) -> Link:
    """A link through shared memory whose slowest rank has a part of a core."""
    strategies = tuple(
        replace(
            strategy,
            ranges=tuple(
                replace(r, latency_s=r.latency_s / part, bandwidth_byte_per_s=r.bandwidth_byte_per_s * part)
                for r in strategy.ranges
            ),
        )
        for strategy in link.strategies
    )
    return Link(link.bandwidth_byte_per_s * part, link.latency_s / part, strategies)


def fleet_of(
    cores: Fleet,
    quotas: Sequence[float],
    speeds: Sequence[float],
    rate_byte_per_s: float | None,
    nodes: Sequence[int] = (),
) -> Fleet:
    """Ranks of these speeds: in one node, or each in its own where they are joined by shaped links.

    Args:
        cores: of `measured_cores`.
        quotas: of every rank, in cores; those of equal quotas are of one type.
        speeds: of every rank, as parts of what a core is predicted to do.
        rate_byte_per_s: of the links; None: shared memory.
        nodes: ranks of every node, if there are links and several in one.
    """
    alike = {quota: fmean(s for s, q in zip(speeds, quotas, strict=True) if q == quota) for quota in quotas}
    types = {
        quota: scaled(cores.devices[0].type, part, f"core × {quota:.3g}") for quota, part in alike.items()
    }
    kinds = tuple(types[quota] for quota in quotas)
    link, rest = cores.nodes[0].link, iter(kinds)
    assert link is not None
    within = slowed(link, min(quotas))
    if rate_byte_per_s is None:
        return Fleet("testbed", (Node("n0", kinds, within),), None)
    network = Link(rate_byte_per_s * PAYLOAD, LINK_LATENCY_S)
    each = [tuple(islice(rest, ranks)) for ranks in nodes or (1,) * len(kinds)]
    found = [Node(f"n{i}", some, within if len(some) > 1 else None) for i, some in enumerate(each)]
    return Fleet("testbed", tuple(found), network)
