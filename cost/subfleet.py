"""Parts of a fleet."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from shardwright.cost.fleet import Fleet, Node


def subfleet(fleet: Fleet, members: Collection[int], name: str) -> Fleet:
    """The fleet of some devices of another, in the same order; what joins them stays.

    Args:
        fleet: all devices.
        members: indices into `fleet.devices`, at least one.
        name: of the new fleet.
    """
    wanted, kept = frozenset(members), list[Node]()
    first = 0
    for node in fleet.nodes:
        here = [d for d in range(len(node.devices)) if first + d in wanted]
        first += len(node.devices)
        if here:
            kept.append(_part(node, here, f"n{len(kept)}"))
    if len(kept) == 1:
        # Nobody is left to talk to: only what joins the devices of the node, and each to its host, remains.
        kept = [replace(kept[0], uplink=None, rails=1)]
        return Fleet(name, tuple(kept), None, transport=fleet.transport)
    return replace(fleet, name=name, nodes=tuple(kept))


def _part(node: Node, here: list[int], name: str) -> Node:
    if len(here) == len(node.devices) > 1:
        return replace(node, name=name)
    host_links = tuple(node.host_links[d] for d in here) if node.host_links else ()
    return replace(
        node,
        name=name,
        devices=tuple(node.devices[d] for d in here),
        link=node.link if len(here) > 1 else None,
        host_links=host_links if any(host_links) else (),
    )
