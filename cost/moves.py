"""Prices of collectives by strategy: alpha-beta on the ring through all devices.

The ring visits the devices node by node, so it crosses every node's network connection once in each
direction; its slowest link sets the pace. With N bytes, m devices, latency a and bandwidth w of that
link, and s_i the share of device i (Thakur, Rabenseifner, Gropp 2005 for even shares):

    all_gather      padded   (m-1) (a + N max s / w)           blocks are padded to the largest
                    exact    (m-1) a + N max (1 - s) / w       a ring pipelined in chunks (MPICH's Allgatherv)
                    grouped  m a ceil(log2 m) + N / w          one pipelined broadcast per owner
    reduce_scatter  padded, exact                              the same, backwards
    all_reduce      ring     2 (m-1) (a + N / (m w))           tree  2 ceil(log2 m) (a + N / w)
    all_to_all      exact    (m-1) a + N max s (1 - s) / w'    w': a device's part of its node's connection
    broadcast       tree     ceil(log2 m) (a + N / w)          send direct  a + N / w

Adding a strategy: list it in `shardwright.ir.collectives`, price it here, lower it in the backends.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import ceil, log2
from typing import TypeAlias

import numpy as np

from shardwright.cost.fleet import Fleet
from shardwright.cost.share_cost import ShareCost


@dataclass(frozen=True, slots=True)
class Ring:
    """The ring through all devices of a fleet.

    Attributes:
        devices: how many take part.
        latency_s: of its slowest link.
        byte_per_s: of its slowest link.
        own_byte_per_s: what every device has to itself when all send at once.
    """

    devices: int
    latency_s: float
    byte_per_s: float
    own_byte_per_s: float

    @staticmethod
    def of(fleet: Fleet) -> Ring:
        """The ring that visits the devices node by node."""
        links = [node.link for node in fleet.nodes if node.link is not None and len(node.devices) > 1]
        inside = min((link.bandwidth_byte_per_s for link in links), default=np.inf)
        latency = max((link.latency_s for link in links), default=0.0)
        across = fleet.network if len(fleet.nodes) > 1 else None
        if across is None:
            return Ring(len(fleet.devices), latency, inside, inside)
        widest = max(len(node.devices) for node in fleet.nodes)
        return Ring(
            devices=len(fleet.devices),
            latency_s=max(latency, across.latency_s),
            byte_per_s=min(inside, across.bandwidth_byte_per_s),
            own_byte_per_s=min(inside, across.bandwidth_byte_per_s / widest),
        )


def _uniform(classes: int, constant: float, linear: float = 0.0, product: float = 0.0) -> ShareCost:
    def row(value: float) -> np.typing.NDArray[np.float64]:
        return np.full((1, classes), value)

    return ShareCost(row(constant), row(linear), row(product))


def _padded(ring: Ring, nbytes: int, classes: int) -> ShareCost:
    steps = ring.devices - 1
    return _uniform(classes, steps * ring.latency_s, steps * nbytes / ring.byte_per_s)


def _exact(ring: Ring, nbytes: int, classes: int) -> ShareCost:
    whole = nbytes / ring.byte_per_s
    return _uniform(classes, (ring.devices - 1) * ring.latency_s + whole, -whole)


def _grouped(ring: Ring, nbytes: int, classes: int) -> ShareCost:
    latency = ring.devices * ceil(log2(ring.devices)) * ring.latency_s
    return _uniform(classes, latency + nbytes / ring.byte_per_s)


def _all_reduce_ring(ring: Ring, nbytes: int, classes: int) -> ShareCost:
    each = ring.latency_s + nbytes / (ring.devices * ring.byte_per_s)
    return _uniform(classes, 2 * (ring.devices - 1) * each)


def _all_reduce_tree(ring: Ring, nbytes: int, classes: int) -> ShareCost:
    return _uniform(classes, 2 * ceil(log2(ring.devices)) * (ring.latency_s + nbytes / ring.byte_per_s))


def _all_to_all(ring: Ring, nbytes: int, classes: int) -> ShareCost:
    latency = (ring.devices - 1) * ring.latency_s
    return _uniform(classes, latency, product=nbytes / ring.own_byte_per_s)


def _broadcast(ring: Ring, nbytes: int, classes: int) -> ShareCost:
    return _uniform(classes, ceil(log2(ring.devices)) * (ring.latency_s + nbytes / ring.byte_per_s))


def _send(ring: Ring, nbytes: int, classes: int) -> ShareCost:
    return _uniform(classes, ring.latency_s + nbytes / ring.byte_per_s)


Price: TypeAlias = Callable[[Ring, int, int], ShareCost]

_PRICES: Mapping[tuple[str, str], Price] = {
    ("all_gather", "padded"): _padded,
    ("all_gather", "exact"): _exact,
    ("all_gather", "grouped"): _grouped,
    ("reduce_scatter", "padded"): _padded,
    ("reduce_scatter", "exact"): _exact,
    ("all_reduce", "ring"): _all_reduce_ring,
    ("all_reduce", "tree"): _all_reduce_tree,
    ("all_to_all", "exact"): _all_to_all,
    ("broadcast", "tree"): _broadcast,
    ("send", "direct"): _send,
}


def prices() -> Mapping[tuple[str, str], Price]:
    """(collective, strategy) -> its price from ring, bytes and number of device classes."""
    return _PRICES
