"""Prices of instructions on two mesh axes: nodes, and the devices of each.

With r the share of a device's node, and q its own share of what the node has, device class c takes

    t_c(r, q) = max over rows of  sum over f of terms[f, row, c] * f(r, q)                  seconds
    f: 1, r, q, rq, r (1 - r), q (1 - q), rq (1 - rq), r q (1 - q)                          see `FEATURES`

and the instruction takes the maximum over the devices. A kernel's work shrinks with r where it is cut across
the nodes, with q where it is cut within them, with rq where both; so do its bytes, operand by operand. What a
collective costs on an axis is what its strategies cost on the fleet of that axis:

    within    each node by itself, on what it has of the tensor (a share r where that is cut across)
    across    the nodes as the devices of a fleet, joined by their uplinks: either all devices of a node at
              once, each with its stretch, or a leader that hands on what it gets
    all       all devices at once, as on one axis, with the share rq

so that no strategy is priced twice. With one of r and q fixed, t is affine in the other (but for the
products, which are taken by their tangent): two linear programs in turns set both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from shardwright.cost.model import CostModel
from shardwright.cost.share_cost import CostStack, Floats
from shardwright.ir.placement import deal, node_members

#: How many functions of (r, q) a cost is a combination of, and which is which.
FEATURES = 8
ONE, R, Q, RQ, R2, Q2, RQ2, R_Q2 = range(FEATURES)


def features(r: Floats, q: Floats) -> Floats:
    """(features, *shape of r): what terms are multiplied with."""
    rq = r * q
    return np.stack([np.ones_like(r), r, q, rq, r * (1 - r), q * (1 - q), rq * (1 - rq), rq * (1 - q)])


@dataclass(frozen=True, slots=True, eq=False)
class GridCost:
    """Seconds of one instruction as a function of the shares; `terms` is (features, rows, classes)."""

    terms: Floats

    @property
    def varies(self) -> bool:
        """Whether the shares matter."""
        return bool(self.terms[1:].any())


class GridCut(NamedTuple):
    """How an instruction cuts its tensors, which is what its shares are rounded by.

    Attributes:
        across: units of the dimension that is cut over the nodes; 0 where none is.
        within: units of the dimension that is cut within them, as a whole; 0 where none is.
        nested: whether the two are one dimension: a node then cuts what it has of it.
    """

    across: int = 0
    within: int = 0
    nested: bool = False


WHOLE = GridCut()


@dataclass(frozen=True, slots=True, eq=False)
class Mesh:
    """A fleet by nodes; arrays have one entry per device class of the fleet, but for `kind_counts`.

    Attributes:
        nodes: devices of every node.
        kind_of: the kind of every class's nodes.
        kind_counts: nodes of every kind.
        inside: devices of every class in one of its nodes.
        node_of, class_of: of every device.
    """

    nodes: tuple[int, ...]
    kind_of: NDArray[np.int64]
    kind_counts: NDArray[np.int64]
    inside: NDArray[np.int64]
    node_of: NDArray[np.int64]
    class_of: NDArray[np.int64]

    @staticmethod
    def of(model: CostModel) -> Mesh:
        """The mesh of a model's fleet."""
        fleet = model.fleet
        kinds: dict[object, int] = {}
        kind_of_node = [kinds.setdefault(node.kind, len(kinds)) for node in fleet.nodes]
        home = [fleet.devices[c.members[0]].node for c in model.classes]
        counts = np.bincount(kind_of_node, minlength=len(kinds))
        kind_of = np.array([kind_of_node[n] for n in home], dtype=np.int64)
        return Mesh(
            nodes=tuple(len(node.devices) for node in fleet.nodes),
            kind_of=kind_of,
            kind_counts=counts,
            inside=model.counts // counts[kind_of],
            node_of=np.array([d.node for d in fleet.devices], dtype=np.int64),
            class_of=model.class_of,
        )

    def ratios(self, r: Floats, q: Floats) -> tuple[float, ...]:
        """Share of every device from those per class of its node, and of itself in the node."""
        return tuple((r[self.class_of] * q[self.class_of]).tolist())

    def even(self) -> tuple[Floats, Floats]:
        """Shares r and q per class where all nodes have equal shares, and all devices of a node."""
        devices = np.bincount(self.kind_of, self.inside, minlength=len(self.kind_counts))
        return np.full(len(self.kind_of), 1.0 / len(self.nodes)), 1.0 / devices[self.kind_of]


#: Features (features, kinds of devices), class of each kind, and kind of every device.
_At: TypeAlias = tuple[Floats, NDArray[np.int64], NDArray[np.intp]]


class GridShares:
    """Shares per device after rounding, for every way to cut, and what stacks of costs take at them."""

    def __init__(self, ratios: Sequence[float], mesh: Mesh) -> None:
        self.mesh = mesh
        devices = np.asarray(ratios, dtype=np.float64)
        node_share: Floats = np.bincount(mesh.node_of, devices, minlength=len(mesh.nodes)).astype(np.float64)
        size = np.asarray(mesh.nodes)[mesh.node_of]
        total = node_share[mesh.node_of]
        self.of_nodes = node_share
        self.inside = np.where(total > 0, devices / np.where(total > 0, total, 1.0), 1.0 / size)
        self._known: dict[GridCut, _At] = {}
        #: The same by the shares that cuts make: many make the same ones.
        self._alike: dict[bytes, _At] = {}

    def shares(self, cut: GridCut) -> tuple[Floats, Floats]:
        """Shares r and q of every device, rounded to whole units."""
        mesh = self.mesh
        units = deal(cut.across, self.of_nodes) if cut.across else None
        r: Floats = self.of_nodes if units is None else np.asarray(units / cut.across, dtype=np.float64)
        if not cut.within:
            return r[mesh.node_of], self.inside
        q: Floats = np.empty(len(self.inside))
        known: dict[tuple[int, bytes], Floats] = {}
        for node, devices in enumerate(node_members(mesh.nodes)):
            here = slice(devices.start, devices.stop)
            own = int(units[node]) if units is not None and cut.nested else cut.within
            key = own, self.inside[here].tobytes()
            if key not in known:
                # A node that has nothing of a dimension has no units to deal: its shares count as they are.
                known[key] = deal(own, self.inside[here]) / own if own else self.inside[here]
            q[here] = known[key]
        return r[mesh.node_of], q

    def _at(self, cut: GridCut) -> _At:
        found = self._known.get(cut)
        if found is None:
            r, q = self.shares(cut)
            columns = np.stack([self.mesh.class_of, np.round(r, 12), np.round(q, 12)], axis=1)
            key = columns.tobytes()
            if key not in self._alike:
                _, first, kind = np.unique(columns, axis=0, return_index=True, return_inverse=True)
                self._alike[key] = features(r[first], q[first]), self.mesh.class_of[first], kind.reshape(-1)
            found = self._known[cut] = self._alike[key]
        return found

    def per_device(self, cost: GridCost, cut: GridCut) -> Floats:
        """Seconds of every device."""
        at, class_of, kind = self._at(cut)
        return np.einsum("frd,fd->rd", cost.terms[:, :, class_of], at).max(axis=0)[kind]

    def stack(self, stack: GridStack, cuts: Sequence[GridCut]) -> Floats:
        """Seconds of the slowest device for many instructions, each with its cut."""
        seconds = np.empty(len(cuts))
        by_shares: dict[int, tuple[_At, list[int]]] = {}
        for k, cut in enumerate(cuts):
            found = self._at(cut)
            by_shares.setdefault(id(found), (found, []))[1].append(k)
        for (at, class_of, _), which in by_shares.values():
            seconds[which] = np.einsum("kfrd,fd->krd", stack.terms[which][:, :, :, class_of], at).max(
                axis=(1, 2)
            )
        return seconds


@dataclass(frozen=True, slots=True, eq=False)
class GridStack:
    """Costs of many instructions; `terms` is (instructions, features, rows, classes)."""

    terms: Floats

    @staticmethod
    def of(blocks: Sequence[Floats]) -> GridStack:
        """Terms of many instructions, block by block; those of fewer rows repeat their first."""
        if not blocks:
            return GridStack(np.zeros((0, FEATURES, 1, 1)))
        rows = max(terms.shape[2] for terms in blocks)
        return GridStack(np.concatenate([padded_rows(terms, rows) for terms in blocks]))

    def take(self, which: NDArray[np.intp]) -> GridStack:
        """The stack of some of the instructions."""
        return GridStack(self.terms[which])

    def floor(self, mesh: Mesh) -> Floats:
        """The least every instruction can cost, whatever the shares: see `docs/search.md`.

        The products are never negative. Of the three shares r, q and rq, whichever alone says most is kept,
        each at its own best: the nodes' shares sum to one over the nodes, the devices' in each node, and rq
        over all devices. What the other two would add at least (nothing, or all of it where it is negative)
        is added to the constant. No instruction costs less than any of its rows at its best corner, either.
        """
        one, kinds = self.terms[:, ONE], range(len(mesh.kind_counts))
        least = {f: np.minimum(self.terms[:, f], 0.0) for f in (R, Q, RQ)}
        # Without the products a row is least at a corner of 0 <= r, q <= 1.
        r, q, both = (
            self.terms[:, R],
            self.terms[:, Q],
            self.terms[:, R] + self.terms[:, Q] + self.terms[:, RQ],
        )
        corners = one + np.minimum(np.minimum(r, q), np.minimum(both, 0.0))
        level = corners.max(axis=(1, 2))
        if self.terms[:, RQ].any():
            base = one + least[R] + least[Q]
            level = np.maximum(
                level, _level(base, self.terms[:, RQ], mesh.inside * mesh.kind_counts[mesh.kind_of])
            )
        if self.terms[:, Q].any():
            base = one + least[R] + least[RQ]
            for kind in kinds:
                mine = np.flatnonzero(mesh.kind_of == kind)
                level = np.maximum(
                    level, _level(base[..., mine], self.terms[:, Q][..., mine], mesh.inside[mine])
                )
        if self.terms[:, R].any():
            base = one + least[Q] + least[RQ]
            columns = [_as_rows(base, np.flatnonzero(mesh.kind_of == kind)) for kind in kinds]
            slopes = [_as_rows(self.terms[:, R], np.flatnonzero(mesh.kind_of == kind)) for kind in kinds]
            rows = max(column.shape[1] for column in columns)
            level = np.maximum(
                level, _level(_side_by_side(columns, rows), _side_by_side(slopes, rows), mesh.kind_counts)
            )
        return level


def _as_rows(array: Floats, mine: NDArray[np.intp]) -> Floats:
    """(instructions, rows x classes): the classes of one kind of nodes as rows of one column."""
    return array[..., mine].reshape(len(array), -1)


def _side_by_side(columns: Sequence[Floats], rows: int) -> Floats:
    full = [np.concatenate([c, c[:, :1].repeat(rows - c.shape[1], axis=1)], axis=1) for c in columns]
    return np.stack(full, axis=2)


def _level(constant: Floats, linear: Floats, counts: NDArray[np.int64]) -> Floats:
    return CostStack(constant, linear, np.zeros_like(linear)).floor(counts)


def padded_rows(array: Floats, rows: int) -> Floats:
    """An array (..., rows, classes) with so many rows: the first is repeated."""
    missing = rows - array.shape[-2]
    if not missing:
        return array
    return np.concatenate([array, array[..., :1, :].repeat(missing, axis=-2)], axis=-2)


def tangent_in_nodes(stack: GridStack, r: Floats, q: Floats) -> tuple[Floats, Floats]:
    """Constant and slope, (instructions, rows, classes), of rows that touch the cost at r; q is fixed."""
    t = stack.terms
    slope = t[:, R] + t[:, RQ] * q + t[:, R2] * (1 - 2 * r) + t[:, RQ2] * q * (1 - 2 * r * q)
    slope = slope + t[:, R_Q2] * q * (1 - q)
    constant = t[:, ONE] + t[:, Q] * q + t[:, Q2] * q * (1 - q) + t[:, R2] * r * r + t[:, RQ2] * (r * q) ** 2
    return constant, slope


def tangent_in_both(stack: GridStack, r: Floats, q: Floats) -> tuple[Floats, Floats, Floats]:
    """Constant, slope in r and slope in s = rq, (instructions, rows, classes), of rows that touch the cost.

    What grows with r and with rq is linear in these; of all else it is the tangent where they are, with
    q = s / r. All r have to be positive.
    """
    t = stack.terms
    in_s = t[:, RQ] + t[:, RQ2] * (1 - 2 * r * q) + (t[:, Q] + t[:, Q2] * (1 - 2 * q)) / r
    # Of a share s that stays, a larger r leaves less of the node: R_Q2 is s (1 - q) = s - s^2 / r.
    in_s = in_s + t[:, R_Q2] * (1 - 2 * q)
    in_r = t[:, R] + t[:, R2] * (1 - 2 * r) - (t[:, Q] + t[:, Q2] * (1 - 2 * q)) * q / r + t[:, R_Q2] * q * q
    there = np.einsum("tfrc, fc -> trc", t, features(r, q))
    return there - in_r * r - in_s * r * q, in_r, in_s


def tangent_in_devices(stack: GridStack, r: Floats, q: Floats) -> tuple[Floats, Floats]:
    """Constant and slope, (instructions, rows, classes), of rows that touch the cost at q; r is fixed."""
    t = stack.terms
    slope = t[:, Q] + t[:, RQ] * r + t[:, Q2] * (1 - 2 * q) + t[:, RQ2] * r * (1 - 2 * r * q)
    slope = slope + t[:, R_Q2] * r * (1 - 2 * q)
    constant = t[:, ONE] + t[:, R] * r + t[:, R2] * r * (1 - r) + t[:, Q2] * q * q
    return constant + t[:, RQ2] * (r * q) ** 2 + t[:, R_Q2] * r * q * q, slope
