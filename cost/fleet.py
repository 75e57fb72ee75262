"""Fleets: nodes of devices, and the links between them.

A fleet file::

    name: lab
    nodes:
      - {count: 2, devices: {type: V100-16GB, count: 8}, link: {bandwidth: 130 GB/s, latency: 5 us}}
      - count: 1                          # default
        devices:                          # a box with unlike cards
          - {type: A100-40GB}
          - {type: {name: slow-cpu, flops: 20 GFLOP/s, memory_bandwidth: 8 GB/s, memory: 4 GB}, count: 2}
        link: {bandwidth: 12 GB/s, latency: 10 us}
    network: {bandwidth: 10.4 Gbit/s, latency: 30 us}

`type` is a name of the catalogue or an inline mapping (keys: `shardwright.cost.device`); `price_per_hour`
beside it is what one such device costs. `link` joins the
devices of one node and may be left out where a node has one device; `network` joins the nodes and may be
left out where there is one, or where every node has an `uplink` of its own. How the nodes and the fleet are
joined beyond that (`uplink`, `rails`, `host_link`, `oversubscription`, `transport`): docs/fleet-files.md.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from itertools import groupby
from os import PathLike
from typing import Any, TypeAlias, TypeVar

from shardwright.cost.catalogue import catalogue, device_type
from shardwright.cost.device import DeviceType
from shardwright.cost.document import Entry, load_yaml
from shardwright.cost.link import Link, plain_link, read_link
from shardwright.ir.errors import InputError

MOST_DEVICES = 4096
MOST_RAILS = 64

#: What moves the bytes of an exchange. `host-mpi` is what `backend="mpi"` does: from the device into the
#: host's memory, over MPI, and back; with the others, devices send from their own memory.
TRANSPORTS = ("host-mpi", "cuda-mpi", "nccl")

#: What functions that need a fleet accept: one, or the path of a fleet file (see `Fleet.of`).
FleetLike: TypeAlias = "Fleet | str | PathLike[str]"

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Device:
    """One device of a fleet.

    Attributes:
        index: its position in `Fleet.devices`.
        name: such as "n0.d3": the fourth device of the first node.
        type: what it is.
        node: the index of its node.
        host_link: joins it to its host's memory, as the fleet says; None where the fleet does not say.
    """

    index: int
    name: str
    type: DeviceType
    node: int
    host_link: Link | None = None


@dataclass(frozen=True, slots=True)
class Node:
    """A machine.

    Attributes:
        name: such as "n0", the first node.
        devices: in order.
        link: joins the devices; None for a single one.
        uplink: one of its connections to the other nodes; None: the fleet's network.
        rails: how many such connections it has, for different devices to use at the same time.
        host_links: each device's connection to the host's memory; () where the fleet says nothing of any.
    """

    name: str
    devices: tuple[DeviceType, ...]
    link: Link | None
    uplink: Link | None = None
    rails: int = 1
    host_links: tuple[Link | None, ...] = ()

    @property
    def equipped(self) -> tuple[tuple[DeviceType, Link | None], ...]:
        """Every device with its link to the host."""
        return tuple(zip(self.devices, self.host_links or (None,) * len(self.devices), strict=True))

    @property
    def kind(self) -> tuple[object, ...]:
        """Equal for nodes that differ in name and in the order of devices only."""
        return frozenset(Counter(self.equipped).items()), self.link, self.uplink, self.rails


@dataclass(frozen=True, slots=True)
class DeviceClass:
    """Devices that are interchangeable: of one type and host link, in nodes with the same devices and links.

    Attributes:
        index: its position in `Fleet.classes`.
        type: the type of every member.
        members: the indices of its devices, ascending.
    """

    index: int
    type: DeviceType
    members: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Fleet:
    """An inventory of devices. `load` and `from_dict` validate; the constructor takes what it is given.

    Attributes:
        name: what the fleet is called.
        nodes: at least one.
        network: each node's connection to the others, if it has none of its own; None where none needs it.
        oversubscription: what the nodes' connections are divided by while all nodes talk at once, because the
            network between them is that much narrower; 1 or more.
        transport: what moves the bytes, one of `TRANSPORTS`.
    """

    name: str
    nodes: tuple[Node, ...]
    network: Link | None
    oversubscription: float = 1.0
    transport: str = TRANSPORTS[0]
    _memo: dict[str, Any] = field(default_factory=dict[str, Any], init=False, repr=False, compare=False)

    @classmethod
    def load(cls, path: str | PathLike[str]) -> Fleet:
        """The fleet that a YAML file describes.

        Raises:
            InputError: the file cannot be used; the place names the file and the key.
        """
        return _read_fleet(load_yaml(path))

    @classmethod
    def of(cls, given: FleetLike) -> Fleet:
        """The fleet itself, or the one that the file at a path describes.

        Raises:
            InputError: it is neither, or the file cannot be used.
        """
        if isinstance(given, Fleet):
            return given
        if isinstance(given, (str, PathLike)):  # pyright: ignore[reportUnnecessaryIsInstance]
            return cls.load(given)
        raise InputError(
            place="fleet",
            reason=f"is a {type(given).__name__}",
            remedy="Pass a shardwright.Fleet or the path of a fleet file",
        )

    @classmethod
    def from_dict(cls, data: Mapping[str, object]) -> Fleet:
        """The fleet that plain data describes, in the grammar of a fleet file.

        Raises:
            InputError: the data does not follow the grammar; the place names the key.
        """
        return _read_fleet(Entry(data, "fleet"))

    def to_dict(self) -> dict[str, object]:
        """Plain data that `from_dict` reads back to an equal fleet; equal neighbours share an entry."""
        return self._plain(by_name=True)

    def under(self, strategy: str, nbytes: float) -> Fleet:
        """The fleet with the links that `strategy` finds for a tensor of this size (itself: no fits)."""
        if not self.fitted:
            return self

        def seen(link: Link | None) -> Link | None:
            return None if link is None else link.under(strategy, nbytes)

        nodes = tuple([replace(node, link=seen(node.link), uplink=seen(node.uplink)) for node in self.nodes])
        return replace(self, nodes=nodes, network=seen(self.network))

    @property
    def fitted(self) -> bool:
        """Whether strategies were measured on a link: what they take there may depend on the bytes."""
        if "fitted" not in self._memo:
            links = [self.network, *(link for node in self.nodes for link in (node.link, node.uplink))]
            self._memo["fitted"] = any(link is not None and link.strategies for link in links)
        return self._memo["fitted"]

    def fingerprint(self) -> str:
        """A SHA-256 (hexadecimal) of all the fleet says, the numbers behind catalogue names included."""
        text = json.dumps(
            self._plain(by_name=False), sort_keys=True, separators=(",", ":"), ensure_ascii=True
        )
        return sha256(text.encode()).hexdigest()

    @property
    def devices(self) -> tuple[Device, ...]:
        """Every device, node by node."""
        if "devices" not in self._memo:
            placed = (
                (f"{node.name}.d{d}", kind, n, host_link)
                for n, node in enumerate(self.nodes)
                for d, (kind, host_link) in enumerate(node.equipped)
            )
            self._memo["devices"] = tuple([Device(index, *rest) for index, rest in enumerate(placed)])
        return self._memo["devices"]

    @property
    def types(self) -> tuple[DeviceType, ...]:
        """That of every device."""
        return tuple([device.type for device in self.devices])

    @property
    def compiler(self) -> str:
        """Whose memory its devices have: "gpu" where all are cards, else "cpu"; that mostly takes more."""
        return "gpu" if all(each.is_card for each in self.types) else "cpu"

    @property
    def classes(self) -> tuple[DeviceClass, ...]:
        """The devices grouped into classes, in order of first appearance."""
        if "classes" not in self._memo:
            self._memo["classes"] = self._grouped()
        return self._memo["classes"]

    def _grouped(self) -> tuple[DeviceClass, ...]:
        members: dict[object, list[int]] = {}
        # Nodes of one entry of a fleet file share their parts: what these are is looked at once.
        groups: dict[tuple[int, ...], dict[object, list[int]]] = {}
        first = 0
        for node in self.nodes:
            parts = (id(node.devices), id(node.link), id(node.uplink), node.rails, id(node.host_links))
            if parts not in groups:
                kind, mine = node.kind, groups.setdefault(parts, {})
                for place, (device, host_link) in enumerate(node.equipped):
                    mine.setdefault((device, host_link, kind), []).append(place)
            for key, places in groups[parts].items():
                members.setdefault(key, []).extend([first + place for place in places])
            first += len(node.devices)
        devices = self.devices
        return tuple(
            DeviceClass(index, devices[group[0]].type, tuple(group))
            for index, group in enumerate(members.values())
        )

    def __str__(self) -> str:
        counts = Counter(device.type.name for device in self.devices)
        nodes = "1 node" if len(self.nodes) == 1 else f"{len(self.nodes)} nodes"
        return f"{self.name}: {' + '.join(f'{count} × {name}' for name, count in counts.items())} in {nodes}"

    def _plain(self, *, by_name: bool) -> dict[str, object]:
        data: dict[str, object] = {"name": self.name}
        data["nodes"] = [
            _plain_node(count, node, by_name=by_name)
            for count, node in _runs([replace(node, name="") for node in self.nodes], _prices)
        ]
        if self.network is not None:
            data["network"] = plain_link(self.network)
        # What has its default is left out, so that the fingerprint of a fleet outlives new keys.
        if self.oversubscription != 1.0:
            data["oversubscription"] = self.oversubscription
        if self.transport != TRANSPORTS[0]:
            data["transport"] = self.transport
        return data


def _read_fleet(entry: Entry) -> Fleet:
    given = entry.mapping(required=("name", "nodes"), optional=("network", "oversubscription", "transport"))
    nodes: list[Node] = []
    room = MOST_DEVICES
    for item in given["nodes"].sequence():
        count, node = _read_node(item, room)
        room -= count * len(node.devices)
        nodes += [replace(node, name=f"n{len(nodes) + i}") for i in range(count)]
    _refuse_two_types_of_one_name(given["nodes"], nodes)
    network = read_link(given["network"]) if "network" in given else None
    if network is None and len(nodes) > 1 and any(node.uplink is None for node in nodes):
        raise entry.error(
            f"lacks the key 'network', which joins its {len(nodes)} nodes",
            "Add network: {bandwidth: 10 Gbit/s, latency: 30 us}, with your numbers",
        )
    return Fleet(
        given["name"].text(),
        tuple(nodes),
        network,
        given["oversubscription"].factor() if "oversubscription" in given else 1.0,
        given["transport"].one_of(TRANSPORTS) if "transport" in given else TRANSPORTS[0],
    )


def _read_node(entry: Entry, room: int) -> tuple[int, Node]:
    """How many equal nodes the entry stands for, and one of them, without a name."""
    given = entry.mapping(required=("devices",), optional=("count", "link", "uplink", "rails", "host_link"))
    count = given["count"].count(most=MOST_DEVICES) if "count" in given else 1
    listed = given["devices"]
    groups = listed.sequence() if isinstance(listed.value, list | tuple) else (listed,)
    host_link = read_link(given["host_link"]) if "host_link" in given else None
    devices: list[DeviceType] = []
    host_links: list[Link | None] = []
    for group in groups:
        times, kind, own = _read_devices(group)
        devices += [kind] * times
        host_links += [own or host_link] * times
        if count * len(devices) > room:
            raise group.error(
                f"brings the fleet beyond {MOST_DEVICES} devices",
                f"Plan for at most {MOST_DEVICES} devices at a time",
            )
    link = read_link(given["link"]) if "link" in given else None
    if link is None and len(devices) > 1:
        raise entry.error(
            f"lacks the key 'link', which joins its {len(devices)} devices",
            "Add link: {bandwidth: 16 GB/s, latency: 10 us}, with your numbers",
        )
    return count, Node(
        "",
        tuple(devices),
        link,
        read_link(given["uplink"]) if "uplink" in given else None,
        given["rails"].count(most=MOST_RAILS) if "rails" in given else 1,
        tuple(host_links) if any(host_links) else (),
    )


def _read_devices(entry: Entry) -> tuple[int, DeviceType, Link | None]:
    """How many equal devices the entry stands for, their type, and their own link to the host, if given."""
    given = entry.mapping(required=("type",), optional=("count", "host_link", "price_per_hour"))
    kind = given["type"]
    if isinstance(kind.value, Mapping):
        found = DeviceType.from_entry(kind)
    else:
        found = device_type(kind.text(), place=kind.place)
    if "price_per_hour" in given:
        found = replace(found, price_per_hour=given["price_per_hour"].price())
    count = given["count"].count(most=MOST_DEVICES) if "count" in given else 1
    return count, found, read_link(given["host_link"]) if "host_link" in given else None


def _refuse_two_types_of_one_name(entry: Entry, nodes: Sequence[Node]) -> None:
    """Names are how plans speak of types: one name, one type."""
    seen: dict[str, DeviceType] = {}
    for kind in (kind for node in nodes for kind in node.devices):
        if seen.setdefault(kind.name, kind) != kind:
            raise entry.error(
                f"describes two different types as '{kind.name}'",
                "Give each type of device a name of its own",
            )


def _plain_node(count: int, node: Node, *, by_name: bool) -> dict[str, object]:
    groups: list[dict[str, object]] = []
    for times, (kind, host_link) in _runs(node.equipped, lambda each: each[0].price_per_hour):
        named = by_name and catalogue().get(kind.name) == kind
        group: dict[str, object] = {"type": kind.name if named else kind.to_dict(), "count": times}
        if named and kind.price_per_hour is not None:
            group["price_per_hour"] = kind.price_per_hour
        groups.append(group if host_link is None else group | {"host_link": plain_link(host_link)})
    data: dict[str, object] = {"count": count, "devices": groups[0] if len(groups) == 1 else groups}
    if node.link is not None:
        data["link"] = plain_link(node.link)
    if node.uplink is not None:
        data["uplink"] = plain_link(node.uplink)
    if node.rails != 1:
        data["rails"] = node.rails
    return data


def _prices(node: Node) -> tuple[float | None, ...]:
    return tuple([kind.price_per_hour for kind in node.devices])


def _runs(items: Sequence[_T], price: Callable[[_T], object]) -> Iterator[tuple[int, _T]]:
    """Each run of equal neighbours, in price too: its length and the item."""
    for (item, _), run in groupby(items, lambda item: (item, price(item))):
        yield sum(1 for _ in run), item
