"""Parts of a fleet."""

from __future__ import annotations

from collections.abc import Collection

from shardwright.cost.fleet import Fleet, Node


def subfleet(fleet: Fleet, members: Collection[int], name: str) -> Fleet:
    """The fleet of some devices of another, in the same order; what joins them stays.

    Args:
        fleet: all devices.
        members: indices into `fleet.devices`, at least one.
        name: of the new fleet.
    """
    listed, kept = fleet.devices, list[Node]()
    for number, node in enumerate(fleet.nodes):
        devices = tuple(d.type for d in listed if d.node == number and d.index in members)
        if devices:
            kept.append(Node(f"n{len(kept)}", devices, node.link if len(devices) > 1 else None))
    return Fleet(name, tuple(kept), fleet.network if len(kept) > 1 else None)
