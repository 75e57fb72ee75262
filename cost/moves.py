"""Strategies of collectives: what each costs and what it sends, in one register.

With N bytes, m devices, n nodes, latency a and seconds per byte g of the ring's slowest link, A and G of the
slowest uplink, s the share of a device and S that of its node (Thakur, Rabenseifner, Gropp 2005):

    all_gather      padded        (m-1) (a + N max s g)              blocks padded to the largest
                    grouped       m a ceil(log2 m) + N g             one pipelined broadcast per owner
                    exact         (m-1) a + N max (1 - s) g          a ring pipelined in chunks (Allgatherv)
                    hierarchical  gather in the node, exact ring of leaders, broadcast in the node
    reduce_scatter  padded, grouped, exact, hierarchical             the same, backwards
    all_reduce      ring          2 (m-1) (a + N g / m)
                    rs_ag         2 sum_k (a_k + N g_k / 2^k), k = 1, 2, ...   halving, then doubling
                    tree          sum_k (a_k + N g_k)                recursive doubling of whole tensors
                    hierarchical  reduce in the node, ring of leaders, broadcast in the node
    all_to_all      exact         (m-1) a + N max (s (1 - s) g, S (1 - S) G)
                    hierarchical  gather in the node, leaders swap, scatter in the node
    broadcast       tree          ceil(log2 m) (a + N g)
                    scatter_ag    (ceil(log2 m) + m-1) a + 2 (m-1) N g / m
    send            direct        a + N g

Round k is between devices 2^(k-1) apart, so that halving sends the large pieces inside a node. A transport
that stages adds the copies between device and host (`STAGED`), the same for all strategies of a collective.
Prices of hierarchical strategies are exact where the devices of a node have equal shares; elsewhere they
take a node's share to be up to `size` times that of any device in it, which is never below.

`register` adds a strategy; `shardwright.add_strategy` does so together with its lowering.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil, log2
from typing import Any, TypeAlias

import numpy as np

from shardwright.cost.share_cost import CostStack, Floats, ShareCost
from shardwright.cost.topology import Topology
from shardwright.ir.collectives import name_strategy

#: Of a tensor, or of many: see `Strategy.many`.
Bytes: TypeAlias = Any
#: Seconds on the links, staging excepted, from topology and bytes of the tensor.
Transfer: TypeAlias = Callable[[Topology, Bytes], ShareCost]
#: Bytes that the busiest link carries in one direction; the shares are per device of the fleet.
LinkBytes: TypeAlias = Callable[[Topology, int, Floats], float]
#: Whether a strategy makes sense on a topology.
Supported: TypeAlias = Callable[[Topology], bool]

#: How often a device copies the whole tensor, and its own part of it, between its memory and the host's.
STAGED: Mapping[str, tuple[int, int]] = {
    "all_gather": (1, 1),
    "reduce_scatter": (1, 1),
    "all_reduce": (2, 0),
    "all_to_all": (0, 2),
    "broadcast": (2, 0),  # the root's copy, then that of all others
    "send": (2, 0),
}


def _always(_topology: Topology) -> bool:
    return True


@dataclass(frozen=True, slots=True)
class Strategy:
    """One way to carry out a collective.

    Attributes:
        kind: the collective.
        name: of the strategy.
        transfer: seconds on the links.
        link_bytes: bytes that the busiest link carries in one direction: a device's link, or all uplinks of
            a node together; from topology, bytes of the tensor and shares per device.
        supported: whether it can be planned on a topology.
        many: whether `transfer` also takes bytes as an array (tensors, 1, 1), for many tensors at once; its
            arrays then have an axis of tensors in front, or none where bytes do not matter.
    """

    kind: str
    name: str
    transfer: Transfer
    link_bytes: LinkBytes
    supported: Supported = _always
    many: bool = False

    def prices(self, topology: Topology, nbytes: Sequence[int], classes: int) -> CostStack:
        """`price` of many tensors."""
        return self._stacked(nbytes, lambda some: self.price(topology, some, classes))

    def transfers(self, topology: Topology, nbytes: Sequence[int]) -> CostStack:
        """`transfer` of many tensors."""
        return self._stacked(nbytes, lambda some: self.transfer(topology, some))

    def _stacked(self, nbytes: Sequence[int], priced: Callable[[Any], ShareCost]) -> CostStack:
        if not self.many:
            return CostStack.of([priced(each) for each in nbytes])
        cost = priced(np.array(nbytes, dtype=np.float64)[:, None, None])
        arrays = (cost.constant, cost.linear, cost.product)
        shape = (len(nbytes), *np.broadcast_shapes(*(array.shape[-2:] for array in arrays)))
        constant, linear, product = (np.broadcast_to(array, shape) for array in arrays)
        return CostStack(constant, linear, product)

    def price(self, topology: Topology, nbytes: Bytes, classes: int) -> ShareCost:
        """Seconds by shares, staging included.

        Args:
            topology: of the fleet.
            nbytes: of the tensor as a whole.
            classes: device classes of the fleet.
        """
        assert classes == topology.classes, f"{classes} classes, but the topology has {topology.classes}"
        cost = self.transfer(topology, nbytes)
        whole, part = STAGED.get(self.kind, (2, 0))
        copy = nbytes * topology.host_s_per_byte
        latency = (whole + part) * topology.host_latency_s
        return ShareCost(
            cost.constant + latency + whole * copy, cost.linear + part * copy, cost.product + 0 * copy
        )


_STRATEGIES: dict[tuple[str, str], Strategy] = {}


def strategies() -> Mapping[tuple[str, str], Strategy]:
    """All strategies by (collective, name)."""
    return _STRATEGIES


def register(strategy: Strategy) -> None:
    """Let the planner choose a strategy. Running it takes a lowering; see `shardwright.add_strategy`."""
    name_strategy(strategy.kind, strategy.name)
    _STRATEGIES[strategy.kind, strategy.name] = strategy


def affine(
    topology: Topology,
    constant: float | Floats,
    linear: float | Floats = 0.0,
    product: float | Floats = 0.0,
) -> ShareCost:
    """A cost of one row: constant + linear s + product s (1 - s); numbers hold for all classes."""

    def row(value: float | Floats) -> Floats:
        array = np.asarray(value, dtype=np.float64)
        whole = np.empty((*array.shape[:-2], 1, topology.classes))
        whole[:] = array
        return whole

    return ShareCost(row(constant), row(linear), row(product))


# ---------------------------------------------------------------------------------------------------
# Rings and broadcasts over all devices


def _padded(t: Topology, nbytes: Bytes) -> ShareCost:
    steps = t.devices - 1
    return affine(t, steps * t.ring.latency_s, steps * nbytes * t.ring.s_per_byte)


def _exact(t: Topology, nbytes: Bytes) -> ShareCost:
    whole = nbytes * t.ring.s_per_byte
    return affine(t, (t.devices - 1) * t.ring.latency_s + whole, -whole)


def _grouped(t: Topology, nbytes: Bytes) -> ShareCost:
    return affine(t, t.devices * t.hops * t.ring.latency_s + nbytes * t.ring.s_per_byte)


def _padded_bytes(t: Topology, nbytes: int, shares: Floats) -> float:
    return (t.devices - 1) * nbytes * float(shares.max())


def _exact_bytes(_t: Topology, nbytes: int, shares: Floats) -> float:
    return nbytes * (1.0 - float(shares.min()))


def _all_reduce_ring(t: Topology, nbytes: Bytes) -> ShareCost:
    return affine(t, 2 * (t.devices - 1) * t.ring.seconds(nbytes / t.devices))


def _all_reduce_ring_bytes(t: Topology, nbytes: int, _shares: Floats) -> float:
    return 2 * (t.devices - 1) / t.devices * nbytes


def _leaving(t: Topology) -> tuple[float, Floats]:
    """What a node of share S sends to others of a tensor, S (1 - S): constant, and times a device's share.

    The tangent at even shares, S = 1/n: exact there, and nowhere below.
    """
    return 1 / t.nodes**2, np.array([(1 - 2 / t.nodes) * size for size in t.size])


def _all_to_all(t: Topology, nbytes: Bytes) -> ShareCost:
    latency, (constant, linear) = (t.devices - 1) * t.ring.latency_s, _leaving(t)
    # Rows: a device's own link, and its node's uplink.
    own = nbytes * np.array([[pace.s_per_byte for pace in t.inside]])
    nothing, uplink = np.zeros_like(own), nbytes * t.outward[None, :]
    return ShareCost(
        np.concatenate([nothing, constant * uplink], axis=-2) + latency,
        np.concatenate([nothing, linear * uplink], axis=-2),
        np.concatenate([own, nothing], axis=-2),
    )


def _all_to_all_bytes(t: Topology, nbytes: int, shares: Floats) -> float:
    nodes = t.per_node(shares)
    return nbytes * float(max((nodes * (1 - nodes)).max(), (shares * (1 - shares)).max()))


def _broadcast(t: Topology, nbytes: Bytes) -> ShareCost:
    return affine(t, t.hops * t.ring.seconds(nbytes))


def _broadcast_bytes(t: Topology, nbytes: int, _shares: Floats) -> float:
    return float(t.hops * nbytes)


def _scatter_ag(t: Topology, nbytes: Bytes) -> ShareCost:
    steps = t.devices - 1
    return affine(t, (t.hops + steps) * t.ring.latency_s + 2 * steps / t.devices * nbytes * t.ring.s_per_byte)


def _send(t: Topology, nbytes: Bytes) -> ShareCost:
    return affine(t, t.pair.seconds(nbytes))


def _send_bytes(_t: Topology, nbytes: int, _shares: Floats) -> float:
    return float(nbytes)


# ---------------------------------------------------------------------------------------------------
# Recursive doubling


def _tree(t: Topology, nbytes: Bytes) -> ShareCost:
    fold = 0.0 if t.fold is None else 2 * t.fold.pace.seconds(nbytes)
    return affine(t, fold + sum(r.pace.seconds(nbytes) for r in t.rounds))


def _tree_bytes(t: Topology, nbytes: int, _shares: Floats) -> float:
    uplink = sum(r.crossing for r in t.rounds) + (0 if t.fold is None else 2 * t.fold.crossing)
    return float(nbytes * max(len(t.rounds) + (t.fold is not None), uplink))


def _rs_ag(t: Topology, nbytes: Bytes) -> ShareCost:
    fold = 0.0 if t.fold is None else 2 * t.fold.pace.seconds(nbytes)
    return affine(t, fold + 2 * sum(r.pace.seconds(nbytes / 2**k) for k, r in enumerate(t.rounds, 1)))


def _rs_ag_bytes(t: Topology, nbytes: int, _shares: Floats) -> float:
    uplink = 2 * sum(r.crossing / 2**k for k, r in enumerate(t.rounds, 1))
    uplink += 0 if t.fold is None else 2 * t.fold.crossing
    return nbytes * max(2 * (1 - 0.5 ** len(t.rounds)) + (t.fold is not None), uplink)


# ---------------------------------------------------------------------------------------------------
# Hierarchical: leaders speak for their nodes


def _nested(t: Topology) -> bool:
    return 1 < t.nodes < t.devices


def _rooted(t: Topology, nbytes: Bytes) -> tuple[Bytes, Bytes]:
    """Reducing to the leader, or broadcasting from it, in the slowest node: seconds, and bytes at the leader.

    MPI takes a binomial tree for few bytes, a reduce-scatter and a gather (or a scatter and an all-gather)
    for many.
    """
    slowest: Bytes = 0.0
    most: Bytes = 0.0
    for pace, size in zip(t.inside, t.size.tolist(), strict=True):
        hops = ceil(log2(size))
        tree = hops * pace.seconds(nbytes)
        sent = 2 * (size - 1) / size * nbytes
        chain = (hops + size - 1) * pace.latency_s + sent * pace.s_per_byte
        slowest = np.maximum(slowest, np.minimum(tree, chain))
        most = np.maximum(most, np.where(tree <= chain, hops * nbytes, sent))
    return slowest, most


def _inside(t: Topology) -> tuple[Floats, Floats]:
    """Latencies of all messages between a leader and its node, and seconds per byte, per class."""
    latency = np.array([pace.latency_s * (size - 1) for pace, size in zip(t.inside, t.size, strict=True)])
    return latency, np.array([pace.s_per_byte for pace in t.inside])


def _gathered_by_leaders(t: Topology, nbytes: Bytes) -> ShareCost:
    """All-gather; backwards, reduce-scatter: the leader's own part counts as if it were sent, too."""
    latency, s_per_byte = _inside(t)
    rooted, _ = _rooted(t, nbytes)
    fixed = latency + (t.nodes - 1) * t.across.latency_s + rooted
    own, ring = nbytes * (t.size * s_per_byte)[None, :], nbytes * t.across.s_per_byte
    fixed = fixed + 0 * own
    # The second row: however large the share, the ring takes no less than nothing.
    constant = np.concatenate([fixed + ring, fixed], axis=-2)
    linear = np.concatenate([own - ring * t.size, own], axis=-2)
    return ShareCost(constant, linear, np.zeros_like(linear))


def _gathered_by_leaders_bytes(t: Topology, nbytes: int, shares: Floats) -> float:
    nodes = t.per_node(shares)
    own = shares[list(t.wiring.leaders)]
    return max(nbytes * float(max((1 - nodes).max(), (nodes - own).max())), float(_rooted(t, nbytes)[1]))


def _swapped_by_leaders(t: Topology, nbytes: Bytes) -> ShareCost:
    latency, s_per_byte = _inside(t)
    constant, linear = _leaving(t)
    ring = nbytes * t.across.s_per_byte
    fixed = 2 * latency + (t.nodes - 1) * t.across.latency_s + constant * ring
    return affine(t, fixed, 2 * nbytes * t.size * s_per_byte + linear * ring)


def _swapped_by_leaders_bytes(t: Topology, nbytes: int, shares: Floats) -> float:
    nodes, own = t.per_node(shares), shares[list(t.wiring.leaders)]
    return nbytes * float(max((nodes * (1 - nodes)).max(), (nodes - own).max()))


def _reduced_by_leaders(t: Topology, nbytes: Bytes) -> ShareCost:
    rooted, _ = _rooted(t, nbytes)
    return affine(t, 2 * rooted + 2 * (t.nodes - 1) * t.across.seconds(nbytes / t.nodes))


def _reduced_by_leaders_bytes(t: Topology, nbytes: int, _shares: Floats) -> float:
    return max(2 * (t.nodes - 1) / t.nodes * nbytes, float(_rooted(t, nbytes)[1]))


for _strategy in (
    Strategy("all_gather", "padded", _padded, _padded_bytes),
    Strategy("all_gather", "grouped", _grouped, _exact_bytes),
    Strategy("all_gather", "exact", _exact, _exact_bytes),
    Strategy(
        "all_gather", "hierarchical", _gathered_by_leaders, _gathered_by_leaders_bytes, _nested, many=True
    ),
    Strategy("reduce_scatter", "padded", _padded, _padded_bytes),
    Strategy("reduce_scatter", "grouped", _grouped, _exact_bytes),
    Strategy("reduce_scatter", "exact", _exact, _exact_bytes),
    Strategy(
        "reduce_scatter", "hierarchical", _gathered_by_leaders, _gathered_by_leaders_bytes, _nested, many=True
    ),
    Strategy("all_reduce", "ring", _all_reduce_ring, _all_reduce_ring_bytes),
    Strategy("all_reduce", "rs_ag", _rs_ag, _rs_ag_bytes),
    Strategy("all_reduce", "tree", _tree, _tree_bytes),
    Strategy(
        "all_reduce", "hierarchical", _reduced_by_leaders, _reduced_by_leaders_bytes, _nested, many=True
    ),
    Strategy("all_to_all", "exact", _all_to_all, _all_to_all_bytes),
    Strategy(
        "all_to_all", "hierarchical", _swapped_by_leaders, _swapped_by_leaders_bytes, _nested, many=True
    ),
    Strategy("broadcast", "tree", _broadcast, _broadcast_bytes),
    Strategy("broadcast", "scatter_ag", _scatter_ag, _all_reduce_ring_bytes),
    Strategy("send", "direct", _send, _send_bytes),
):
    register(replace(_strategy, many=True))
