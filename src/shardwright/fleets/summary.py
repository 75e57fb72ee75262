"""A fleet added up: what there is of each type, what all of it can do, and which link is the narrowest."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

from shardwright.cost.device import DeviceType
from shardwright.cost.fleet import Fleet, Link, Node


@dataclass(frozen=True, slots=True)
class TypeCount:
    """How many devices there are of a type, and what an hour of one costs: every price that is given."""

    type: DeviceType
    count: int
    prices_per_hour: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class NodeRun:
    """Neighbouring nodes that differ in nothing but their name.

    Attributes:
        names: of the nodes, in order.
        devices: types and how many of each one of these nodes has, in order of appearance.
        link: between the devices of a node.
        uplink: to the other nodes, the fleet's network where a node has none of its own; None for one node.
        rails: how many of these it has.
    """

    names: tuple[str, ...]
    devices: tuple[TypeCount, ...]
    link: Link | None
    uplink: Link | None
    rails: int


@dataclass(frozen=True, slots=True)
class Narrowest:
    """The link that sets the pace of what all devices exchange.

    Attributes:
        where: in words, such as "the network between the nodes".
        bandwidth_byte_per_s: of one end, one direction, while all nodes talk at once.
        latency_s: of that link.
    """

    where: str
    bandwidth_byte_per_s: float
    latency_s: float


@dataclass(frozen=True, slots=True)
class Summary:
    """A fleet added up.

    Attributes:
        types: in order of first appearance.
        nodes: runs of equal ones.
        float32_flop_per_s: peaks of all devices, added up, of single precision outside of matrix units.
        matrix_flop_per_s: the same of bfloat16 products, or float16 where a type has no bfloat16, or single
            precision where it has neither.
        memory_bytes, memory_bandwidth_byte_per_s: of all devices.
        narrowest: the narrowest link; None for a single device.
        price_per_hour: of all devices; None where one has no price.
    """

    types: tuple[TypeCount, ...]
    nodes: tuple[NodeRun, ...]
    float32_flop_per_s: float
    matrix_flop_per_s: float
    memory_bytes: int
    memory_bandwidth_byte_per_s: float
    narrowest: Narrowest | None
    price_per_hour: float | None


def matrix_rate(kind: DeviceType) -> float:
    """Peak FLOP/s of products in the best 16-bit format a type has, or in single precision."""
    return kind.bfloat16_flop_per_s or kind.float16_flop_per_s or kind.float32_flop_per_s


def summary(fleet: Fleet) -> Summary:
    """Add a fleet up."""
    kinds = [device.type for device in fleet.devices]
    prices = [kind.price_per_hour for kind in kinds if kind.price_per_hour is not None]
    return Summary(
        types=_counted(kinds),
        nodes=tuple(_runs(fleet)),
        float32_flop_per_s=sum(kind.float32_flop_per_s for kind in kinds),
        matrix_flop_per_s=sum(map(matrix_rate, kinds)),
        memory_bytes=sum(kind.memory_bytes for kind in kinds),
        memory_bandwidth_byte_per_s=sum(kind.memory_bandwidth_byte_per_s for kind in kinds),
        narrowest=min(_links(fleet), key=lambda link: link.bandwidth_byte_per_s, default=None),
        price_per_hour=sum(prices) if len(prices) == len(kinds) else None,
    )


def _counted(kinds: list[DeviceType]) -> tuple[TypeCount, ...]:
    def prices(kind: DeviceType) -> tuple[float, ...]:
        return tuple(sorted({k.price_per_hour for k in kinds if k == kind and k.price_per_hour is not None}))

    return tuple(TypeCount(kind, kinds.count(kind), prices(kind)) for kind in dict.fromkeys(kinds))


def _runs(fleet: Fleet) -> Iterator[NodeRun]:
    def alike(node: Node) -> object:
        return node.devices, node.link, node.uplink, node.rails, node.host_links

    for _, run in groupby(fleet.nodes, key=alike):
        nodes = list(run)
        first = nodes[0]
        uplink = (first.uplink or fleet.network) if len(fleet.nodes) > 1 else None
        names = tuple(node.name for node in nodes)
        yield NodeRun(names, _counted(list(first.devices)), first.link, uplink, first.rails)


def _links(fleet: Fleet) -> Iterator[Narrowest]:
    """Every kind of link that an exchange of all devices crosses."""
    several = len(fleet.nodes) > 1
    for run in _runs(fleet):
        names = run.names[0] if len(run.names) == 1 else f"{run.names[0]} … {run.names[-1]}"
        if run.link is not None:
            yield Narrowest(f"the link inside {names}", run.link.bandwidth_byte_per_s, run.link.latency_s)
        if several and run.uplink is not None:
            own = any(node.uplink for node in fleet.nodes)
            where = f"the uplink of {names}" if own else "the network between the nodes"
            bandwidth = run.uplink.bandwidth_byte_per_s / fleet.oversubscription
            yield Narrowest(where, bandwidth, run.uplink.latency_s)
    if len(fleet.devices) > 1:
        for device in fleet.devices:
            if device.host_link is not None and fleet.transport == "host-mpi":
                link = device.host_link
                yield Narrowest(
                    f"the link of {device.name} to its host", link.bandwidth_byte_per_s, link.latency_s
                )
