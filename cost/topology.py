"""How the devices of a fleet reach each other, as the prices of exchanges need it.

The ring through all devices visits them node by node: it crosses every node's uplink once in each
direction, the least any ring can, whatever the order of the nodes, and its slowest link sets the pace.

Under the transport `host-mpi` a device hands what it sends to its host and fetches what it receives, one
after the other: the *staging*, at the speed of its host link. Between devices of one node the bytes are
then copied from host memory to host memory, which is taken to be no faster than the host links.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import ceil, log2

import numpy as np
from numpy.typing import NDArray

from shardwright.cost.device import DeviceType
from shardwright.cost.fleet import Device, DeviceClass, Fleet, Link, Node
from shardwright.cost.share_cost import Floats
from shardwright.ir.wiring import Wiring

#: Of a card whose fleet does not say: PCIe 3.0 x16 (15.75 GB/s by its standard) as copies reach it. Assumed.
ASSUMED_HOST_LINK = Link(12e9, 10e-6)


@dataclass(frozen=True, slots=True)
class Pace:
    """What a message takes on a link: latency, and seconds per byte (0: there is no link to cross)."""

    latency_s: float = 0.0
    s_per_byte: float = 0.0

    @staticmethod
    def of(link: Link | None, narrowing: float = 1.0) -> Pace:
        """The pace of a link whose bandwidth is divided by `narrowing`."""
        return Pace() if link is None else Pace(link.latency_s, narrowing / link.bandwidth_byte_per_s)

    @staticmethod
    def slowest(paces: Iterable[Pace]) -> Pace:
        """The largest latency and the largest seconds per byte."""
        latency_s = s_per_byte = 0.0
        for pace in paces:
            latency_s, s_per_byte = max(latency_s, pace.latency_s), max(s_per_byte, pace.s_per_byte)
        return Pace(latency_s, s_per_byte)

    def seconds(self, nbytes: float) -> float:
        """Seconds of one message."""
        return self.latency_s + nbytes * self.s_per_byte


@dataclass(frozen=True, slots=True)
class Round:
    """One round of recursive doubling: its pace, and the messages that the busiest uplink carries."""

    pace: Pace
    crossing: int


@dataclass(frozen=True, slots=True, eq=False)
class Topology:
    """Links by who uses them at the same time; arrays have one entry per device class.

    Attributes:
        devices: how many.
        nodes: how many.
        ring: the slowest link of the ring through all devices, all talking.
        pair: the slowest link while two devices talk.
        across: the slowest uplink while one device of every node talks.
        inside: per class, the links of its node.
        size: per class, devices of its node.
        outward: per class, seconds per byte that its node sends to others while all of its devices do.
        host: per class, its link to the host, if exchanges are staged.
        host_latency_s, host_s_per_byte: the same, as arrays: one copy between device and host.
        fold: what comes before and after recursive doubling where the devices are no power of two: their
            excess over one hands its data to a neighbour.
        rounds: recursive doubling among devices in order: partners at distance 1, 2, 4, ...
        node_of: node of every device.
        wiring: the same for the backends, with the leaders: in each node the device with the fastest link to
            its host.
        assumptions: what had to be assumed, in words.
    """

    devices: int
    nodes: int
    ring: Pace
    pair: Pace
    across: Pace
    inside: tuple[Pace, ...]
    size: NDArray[np.int64]
    outward: Floats
    host: tuple[Pace, ...]
    fold: Round | None
    rounds: tuple[Round, ...]
    node_of: NDArray[np.int64]
    wiring: Wiring
    assumptions: tuple[str, ...]
    host_latency_s: Floats = field(init=False)
    host_s_per_byte: Floats = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "host_latency_s", np.array([pace.latency_s for pace in self.host]))
        object.__setattr__(self, "host_s_per_byte", np.array([pace.s_per_byte for pace in self.host]))

    @staticmethod
    def of(fleet: Fleet, classes: Sequence[DeviceClass] | None = None) -> Topology:
        """The topology of a fleet; of the classes of another, if its devices differ in more than here."""
        devices, classes = fleet.devices, fleet.classes if classes is None else classes
        staged = fleet.transport == "host-mpi"
        several = len(fleet.nodes) > 1
        paces: dict[tuple[int, int], Pace] = {}  # many devices are alike, and so are many nodes
        for d in devices if staged else ():
            key = (id(d.type), id(d.host_link))
            if key not in paces:
                paces[key] = Pace.of(host_link(d.type, d.host_link))
        host = [paces[id(d.type), id(d.host_link)] if staged else Pace() for d in devices]
        within: dict[tuple[int, ...], Pace] = {}
        for node in fleet.nodes:
            parts = (id(node.devices), id(node.link), id(node.host_links))
            if parts not in within:
                within[parts] = _inside(node, staged)
        inside = [within[id(node.devices), id(node.link), id(node.host_links)] for node in fleet.nodes]
        links = [node.uplink or fleet.network if several else None for node in fleet.nodes]
        uplink = [Pace.of(link, fleet.oversubscription) for link in links]
        across = Pace.slowest(uplink)
        node_of = np.array([d.node for d in devices], dtype=np.int64)
        rails = [node.rails for node in fleet.nodes]
        home = [devices[c.members[0]].node for c in classes]
        fold, rounds = _doubling(node_of, inside, uplink, rails)
        return Topology(
            devices=len(devices),
            nodes=len(fleet.nodes),
            ring=Pace.slowest((*inside, across)),
            pair=Pace.slowest((*inside, *map(Pace.of, links))),
            across=across,
            inside=tuple(inside[n] for n in home),
            size=np.array([len(fleet.nodes[n].devices) for n in home], dtype=np.int64),
            outward=np.array([uplink[n].s_per_byte / _used_rails(fleet.nodes[n]) for n in home]),
            host=tuple(host[c.members[0]] for c in classes),
            fold=fold,
            rounds=rounds,
            node_of=node_of,
            wiring=Wiring(tuple(int(n) for n in node_of), _leaders(fleet, host)),
            assumptions=_assumptions(fleet.transport, devices) if len(devices) > 1 else (),
        )

    @property
    def hops(self) -> int:
        """Rounds of a binomial tree over all devices."""
        return ceil(log2(self.devices))

    @property
    def classes(self) -> int:
        """How many device classes there are."""
        return len(self.inside)

    def per_node(self, shares: Floats) -> Floats:
        """Sums over the devices of every node of `shares`, one per device."""
        sums = np.zeros(self.nodes)
        np.add.at(sums, self.node_of, shares)
        return sums


def host_link(kind: DeviceType, given: Link | None) -> Link | None:
    """A device's link to the host; None where its memory is the host's.

    A card's is its own.
    """
    return given or (ASSUMED_HOST_LINK if kind.is_card else None)


def without_host(fleet: Fleet) -> tuple[str, ...]:
    """Devices whose memory is the host's, as far as the fleet says: nothing can be moved out of it."""
    return tuple(d.name for d in fleet.devices if host_link(d.type, d.host_link) is None)


def _inside(node: Node, staged: bool) -> Pace:
    """The links among the devices of a node."""
    if len(node.devices) == 1:
        return Pace()
    link = Pace.of(node.link)
    if not staged:
        return link
    copies = [Pace.of(host_link(kind, given)).s_per_byte for kind, given in node.equipped]
    return Pace(link.latency_s, max(link.s_per_byte, *copies))


def _used_rails(node: Node) -> int:
    """Rails in use while all devices of the node talk to other nodes."""
    return min(node.rails, len(node.devices))


def _leaders(fleet: Fleet, host: Sequence[Pace]) -> tuple[int, ...]:
    leaders: list[int] = []
    first = 0
    for node in fleet.nodes:
        members = range(first, first + len(node.devices))
        leaders.append(min(members, key=lambda d: (host[d].s_per_byte, host[d].latency_s)))
        first += len(node.devices)
    return tuple(leaders)


def _doubling(
    node_of: NDArray[np.int64], inside: Sequence[Pace], uplink: Sequence[Pace], rails: Sequence[int]
) -> tuple[Round | None, tuple[Round, ...]]:
    """Fold and rounds of recursive doubling.

    With r devices beyond a power of two, devices 1, 3, ..., 2r - 1 fold onto the ones before them.
    """
    devices = len(node_of)
    levels = devices.bit_length() - 1
    excess = devices - (1 << levels)
    everyone = np.arange(devices)
    active = np.concatenate([everyone[: 2 * excess : 2], everyone[2 * excess :]])

    def once(one: NDArray[np.int64], other: NDArray[np.int64]) -> Round:
        here, there = node_of[one], node_of[other]
        crossing = np.bincount(here[here != there], minlength=len(inside)).tolist()
        # The messages of one node share its rails, and each waits for the slower of its two uplinks.
        used = [
            Pace(uplink[n].latency_s, uplink[n].s_per_byte * crossing[n] / min(rails[n], crossing[n]))
            for n in range(len(inside))
            if crossing[n]
        ]
        within = [inside[n] for n in set(here[here == there].tolist())]
        return Round(Pace.slowest((*used, *within)), max(crossing))

    places = np.arange(len(active))
    rounds = tuple(once(active, active[places ^ (1 << k)]) for k in range(levels))
    if not excess:
        return None, rounds
    evens, odds = everyone[: 2 * excess : 2], everyone[1 : 2 * excess : 2]
    return once(np.concatenate([evens, odds]), np.concatenate([odds, evens])), rounds


def _assumptions(transport: str, devices: Sequence[Device]) -> tuple[str, ...]:
    if transport != "host-mpi":
        return (
            f"exchanges are priced for transport {transport}, but no backend here runs {transport}: "
            "backend mpi stages them through the host (host-mpi)",
        )
    assumed = dict.fromkeys(
        d.type.name for d in devices if d.host_link is None and host_link(d.type, None) is not None
    )
    if not assumed:
        return ()
    link = ASSUMED_HOST_LINK
    return (
        f"exchanges are staged through the host (host-mpi); the host link of {', '.join(assumed)} is assumed "
        f"as {link.bandwidth_byte_per_s / 1e9:g} GB/s, {link.latency_s * 1e6:g} us",
    )
