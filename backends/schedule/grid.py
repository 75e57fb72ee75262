"""Exchanges on one of two mesh axes, made of exchanges among some devices as on one axis.

    within    one exchange per node, of what the node has of the tensor
    across    devices whose stretches overlap talk: one exchange per interval between the cut points of all
              nodes, each among one device of every node; where every device has all, leaders talk and hand on

Every rank takes part in its own exchanges in the order of their intervals, which is the same for all: whoever
waits, waits for somebody who is at an earlier interval, and the first one goes on.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from shardwright.backends.layout import wire_type
from shardwright.backends.schedule.geometry import Geometry, Member
from shardwright.backends.schedule.ops import Builder, Copy, Routine, Slot, Transfer, View, whole
from shardwright.backends.schedule.table import routine_of
from shardwright.ir.collectives import Step, step
from shardwright.ir.graph import TensorType
from shardwright.ir.placement import (
    Grid,
    Partial,
    Placement,
    Shard,
    Single,
    by_node,
    components,
    lengths,
    node_members,
    region,
    seat,
)
from shardwright.ir.program import Move


def is_by_node(move: Move) -> bool:
    """Whether a move is across or within nodes, and not over all devices at once."""
    return _step(move).axis != "all"


def routine_on_grid(move: Move, tensor: TensorType, ratios: Sequence[float], device: int) -> Routine:
    """A device's part of a move across the nodes or within them.

    Args:
        move: the exchange.
        tensor: global type of what it exchanges.
        ratios: share of every device.
        device: which.
    """
    nodes = next(p.nodes for p in (move.pre, move.post) if isinstance(p, Grid))
    found = _step(move)
    job = _Job(move, found, tensor, tuple(ratios), nodes, device)
    if found.axis == "within":
        return job.within()
    within = components(move.pre)[1]
    assert not isinstance(within, Partial), "what is Partial within the nodes is not exchanged between them"
    return job.by_intervals(within) if isinstance(within, Shard) else job.by_leaders()


def _step(move: Move) -> Step:
    found = step(move.pre, move.post)
    assert found is not None, f"no single move turns {move.pre} into {move.post}"
    return found


class _Job:
    """One move as one device sees it."""

    def __init__(
        self,
        move: Move,
        found: Step,
        tensor: TensorType,
        ratios: tuple[float, ...],
        nodes: tuple[int, ...],
        device: int,
    ) -> None:
        self.move, self.found, self.tensor, self.ratios, self.device = move, found, tensor, ratios, device
        shape, dtype = wire_type(tensor)
        self.extra = shape[tensor.rank :]  # of typed keys, the numbers they consist of
        self.dtype = np.dtype(dtype)
        self.members = node_members(nodes)
        self.node, self.position = seat(device, nodes)
        self.of_nodes, self.inside = by_node(ratios, nodes)

    def within(self) -> Routine:
        """The node's own exchange of what it has."""
        across = components(self.move.pre)[0]
        held = region(self.tensor.shape, across, self.node, self.of_nodes)
        shape, own = tuple(length for _, length in held), self.inside[self.node]
        geometry = self.geometry(tuple(self.members[self.node]), self.position, shape, own)
        return routine_of(self.move.kind, self.move.strategy, geometry)

    def by_intervals(self, within: Shard) -> Routine:
        """One exchange per interval, with the devices of other nodes that hold it."""
        b = Builder()
        came, goes = self.local(self.move.pre), self.local(self.move.post)
        taken = View.of(b.buffer("in", self.name, _size(came)), came)
        given = View.of(b.buffer("out", self.name, _size(goes)), goes)
        size = self.tensor.shape[within.dim]
        ends = [np.cumsum((0, *lengths(size, within.unit, own))).tolist() for own in self.inside]
        first, last = ends[self.node][self.position : self.position + 2]
        points = sorted({point for cut in ends for point in cut if first <= point <= last})
        for start, end in pairwise(points):
            holders = tuple(
                devices[max(i for i in range(len(devices)) if cut[i] <= start < cut[i + 1])]
                for devices, cut in zip(self.members, ends, strict=True)
            )
            shape = (*self.tensor.shape[: within.dim], end - start, *self.tensor.shape[within.dim + 1 :])
            routine = routine_of(
                self.move.kind, self.move.strategy, self.geometry(holders, self.node, shape, self.of_nodes)
            )
            part = start - first, end - start
            (result,) = _inlined(b, routine, [taken.stretch(within.dim, *part)])
            b.copy(result, given.stretch(within.dim, *part))
        return b.routine([given])

    def by_leaders(self) -> Routine:
        """The first device of every node exchanges, and broadcasts what it gets."""
        b = Builder()
        came, goes = self.local(self.move.pre), self.local(self.move.post)
        taken = View.of(b.buffer("in", self.name, _size(came)), came)
        given = View.of(b.buffer("out", self.name, _size(goes)), goes)
        if not self.position:
            leaders = tuple(devices[0] for devices in self.members)
            geometry = self.geometry(leaders, self.node, self.tensor.shape, self.of_nodes)
            (result,) = _inlined(b, routine_of(self.move.kind, self.move.strategy, geometry), [taken])
            b.copy(result, given)
        here = tuple(self.members[self.node])
        if len(here) > 1 and given.size:
            b.transfer(Transfer("broadcast", here, None, whole(given.buffer, 0, given.size), 0))
        return b.routine([given])

    @property
    def name(self) -> str:
        """The dtype on the wire."""
        return str(self.dtype)

    def local(self, placement: Placement) -> tuple[int, ...]:
        """Local shape of the tensor in a placement."""
        held = region(self.tensor.shape, placement, self.device, self.ratios)
        return (*(length for _, length in held), *self.extra)

    def geometry(
        self, participants: tuple[int, ...], me: int, shape: tuple[int, ...], shares: Sequence[float]
    ) -> Geometry:
        """The exchange among some devices, of a tensor of this shape that they hold together."""

        def cut(placement: Single) -> tuple[int, ...]:
            if not isinstance(placement, Shard):
                return ()
            return lengths(shape[placement.dim], placement.unit, shares)

        pre, post = self.found.pre, self.found.post
        member = Member((*shape, *self.extra), pre, post, cut(pre), cut(post))
        alone = tuple((i,) for i in range(len(participants)))
        leads = tuple(range(len(participants)))
        return Geometry(participants, me, self.name, self.dtype.itemsize, (member,), None, alone, leads)


def _size(shape: Sequence[int]) -> int:
    return int(np.prod(shape, dtype=np.int64))


def _inlined(b: Builder, routine: Routine, operands: Sequence[View]) -> list[View]:
    """Write another routine's stages, its buffers being scratch here; where its results then lie."""
    at = [b.buffer("temp", buffer.dtype, buffer.count) for buffer in routine.buffers]
    handed_in = [i for i, buffer in enumerate(routine.buffers) if buffer.role == "in"]
    for i, operand in zip(handed_in, operands, strict=True):
        b.copy(operand, View.of(at[i], operand.shape))

    def moved(view: View) -> View:
        return View(at[view.buffer], view.offset, view.shape, view.strides)

    def slot(found: Slot | None) -> Slot | None:
        return None if found is None else Slot(at[found.buffer], found.counts, found.displs)

    for stage in routine.stages:
        for local in stage.locals:
            if isinstance(local, Copy):
                b.copy(moved(local.source), moved(local.target))
            else:
                b.combine(local.op, moved(local.source), moved(local.target))
        for transfer in stage.transfers:
            b.transfer(
                Transfer(
                    transfer.kind,
                    transfer.participants,
                    slot(transfer.send),
                    slot(transfer.recv),
                    transfer.root,
                    transfer.op,
                )
            )
        b.wait()
    return [moved(view) for view in routine.outputs]
