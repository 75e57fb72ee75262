"""Collective schedules: what every rank exchanges in a step, complete enough to be run by something else.

    schedule ::= {format, plan, devices, ranks: [{rank, device, messages: [message]}]}
    message  ::= what travels together: instructions of the program, collective, strategy, participants,
                 dtype, members (tensor, placements, stretches), dependencies, and the rank's routine

The JSON form is described by `schedule.schema.json`. The `mpi` backend runs the very same routines
(`backends/schedule/ops.py`) through a transport (`backends/transport.py`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

import jsonschema
import numpy as np

from shardwright.backends.layout import members, stretches, wire_type
from shardwright.backends.schedule.acts import Launch, Order, Repeat
from shardwright.backends.schedule.geometry import Geometry, Member
from shardwright.backends.schedule.grid import is_by_node, routine_on_grid
from shardwright.backends.schedule.ops import Combine, Copy, Local, Routine, Slot, Transfer, View
from shardwright.backends.schedule.table import builders, routine_of
from shardwright.ir.arguments import check_several, is_whole
from shardwright.ir.collectives import step
from shardwright.ir.errors import PlanError
from shardwright.ir.graph import TensorType
from shardwright.ir.patterns import patterns
from shardwright.ir.placement import Grid, Placement, own_from_json, own_to_json, parse_placement
from shardwright.ir.program import Move, Program, own_ratios
from shardwright.ir.wiring import Wiring

FORMAT = 1


@dataclass(frozen=True, slots=True)
class Planned:
    """A message of a plan, without what differs between ranks.

    Attributes:
        number: in the order of the step.
        where: loop instruction and body, from the outside in; () outside of loops.
        instructions: positions of the exchanges in their program.
        moves: the exchanges.
        tensors: global types of what they exchange.
        after: numbers of messages of the same program from whose results its operands are computed.
        pattern: what the program does with it, if that has a name: see `shardwright.ir.patterns`.
    """

    number: int
    where: tuple[tuple[int, int], ...]
    instructions: tuple[int, ...]
    moves: tuple[Move, ...]
    tensors: tuple[TensorType, ...]
    after: tuple[int, ...] = ()
    pattern: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Plain data, as it stands in a plan file."""
        first = self.moves[0]
        nodes = next((p.nodes for p in (first.pre, first.post) if isinstance(p, Grid)), None)
        own = own_ratios(Program((), self.moves, ()))
        return {
            "number": self.number,
            "where": [list(place) for place in self.where],
            "instructions": list(self.instructions),
            "collective": first.kind,
            "strategy": first.strategy,
            "group": None if first.group is None else list(first.group),
            "root": first.root,
            **({} if nodes is None else {"nodes": list(nodes)}),
            **({"own_ratios": own_to_json(own)} if own else {}),
            "after": list(self.after),
            "pattern": self.pattern,
            "members": [
                {
                    "value": move.value,
                    "shape": list(tensor.shape),
                    "dtype": tensor.dtype,
                    "pre": str(move.pre),
                    "post": str(move.post),
                }
                for move, tensor in zip(self.moves, self.tensors, strict=True)
            ],
        }

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Planned:
        """Inverse of `to_dict`."""
        group = None if data["group"] is None else tuple(data["group"])
        nodes = tuple(data["nodes"]) if "nodes" in data else None
        own = own_from_json(data.get("own_ratios", {}))
        moves = tuple(
            Move(
                data["collective"],
                m["value"],
                parse_placement(m["pre"], nodes, own),
                parse_placement(m["post"], nodes, own),
                data["strategy"],
                group,
                data["root"],
            )
            for m in data["members"]
        )
        return Planned(
            data["number"],
            tuple((place[0], place[1]) for place in data["where"]),
            tuple(data["instructions"]),
            moves,
            tuple(TensorType(tuple(m["shape"]), m["dtype"]) for m in data["members"]),
            tuple(data["after"]),
            data["pattern"],
        )


def planned(order: Order) -> tuple[Planned, ...]:
    """The messages of an order."""
    named = patterns(order.program, order.graph)

    def walk(inner: Order, where: tuple[tuple[int, int], ...]) -> Iterator[Planned]:
        for act in inner.steps:
            if isinstance(act, Launch):
                message = act.message
                tensors = tuple(inner.types[move.value] for move in message.moves)
                # The message's moves may have its strategy in place of the program's.
                own = [inner.program.instructions[i] for i in message.positions]
                labels = {named.get(id(move), "") for move in own}
                yield Planned(
                    message.number,
                    where,
                    tuple(inner.stood[i] for i in message.positions),
                    message.moves,
                    tensors,
                    message.after,
                    labels.pop() if len(labels) == 1 else "",
                )
            elif isinstance(act, Repeat):
                for number, body in enumerate(act.bodies):
                    yield from walk(body, (*where, (act.first, number)))

    return tuple(walk(order, ()))


def geometry_of(
    moves: Sequence[Move],
    tensors: Sequence[TensorType],
    ratios: Sequence[float],
    device: int,
    wiring: Wiring | None,
) -> Geometry | None:
    """Exchanges of one kind as `device` sees them; None where it takes no part.

    Args:
        moves: the exchanges, of one kind, strategy, group and root.
        tensors: what they exchange, all of one dtype.
        ratios: share of every device.
        device: which.
        wiring: who shares a node; needed by hierarchical strategies only.
    """
    first = moves[0]
    participants = members(first.group, len(ratios))
    if device not in participants:
        return None
    found: list[Member] = []
    for move, tensor in zip(moves, tensors, strict=True):
        found.append(
            Member(
                wire_type(tensor)[0],
                *_on_all(move),
                stretches(tensor, move.pre, move.group, ratios),
                stretches(tensor, move.post, move.group, ratios),
            )
        )
    dtype = np.dtype(wire_type(tensors[0])[1])
    nodes = (
        (tuple(range(len(participants))),)
        if wiring is None or not wiring.node_of
        else wiring.groups(participants)
    )
    leads = tuple(node[0] for node in nodes)
    if wiring is not None and wiring.node_of:
        leads = tuple(wiring.leader(participants, node) for node in nodes)
    return Geometry(
        participants,
        participants.index(device),
        str(dtype),
        dtype.itemsize,
        tuple(found),
        None if first.root is None else participants.index(first.root),
        nodes,
        leads,
    )


def _on_all(move: Move) -> tuple[Placement, Placement]:
    """Placements before and after, as one axis of all devices has them."""
    found = step(move.pre, move.post)
    assert found is not None, f"no single move turns {move.pre} into {move.post}"
    return found.pre, found.post


def routine_for(
    moves: Sequence[Move],
    tensors: Sequence[TensorType],
    ratios: Sequence[float],
    device: int,
    wiring: Wiring | None,
) -> Routine | None:
    """A device's routine of exchanges of one kind, see `geometry_of`; None where it takes no part.

    Raises:
        PlanError: the strategy is carried out by a function of its own.
    """
    move = moves[0]
    _check_written(move)
    if is_by_node(move):
        (tensor,) = tensors
        return routine_on_grid(move, tensor, ratios, device)
    geometry = geometry_of(moves, tensors, ratios, device, wiring)
    return None if geometry is None else routine_of(move.kind, move.strategy, geometry)


def _check_written(move: Move) -> None:
    if (move.kind, move.strategy) not in builders():
        raise PlanError(
            place=f"{move.kind}.{move.strategy}",
            reason="is carried out by a function of its own (add_strategy), which no schedule can express",
            remedy="Plan without it, or write it as a routine (backends/schedule/lower.py)",
        )


# ---------------------------------------------------------------------------------------------------
# The artefact


def emit(
    messages: Sequence[Planned],
    ratios: Sequence[float],
    wiring: Wiring | None,
    *,
    devices: Sequence[str],
    plan: str,
    ranks: Sequence[int] | None = None,
) -> dict[str, Any]:
    """The schedule as plain data.

    Args:
        messages: of the plan.
        ratios: share of every device of the program.
        wiring: which of them share a node.
        devices: their names.
        plan: fingerprint of the step that was planned.
        ranks: write these only; all by default.

    Raises:
        PlanError: a strategy cannot be expressed, or there is no such rank.
    """
    wanted = range(len(ratios)) if ranks is None else ranks
    check_several("ranks", wanted, "[0]")
    for rank in wanted:
        if not is_whole(rank) or not 0 <= rank < len(ratios):
            raise PlanError(
                place=f"rank {rank!r}",
                reason=f"does not exist: the plan uses {len(ratios)} devices",
                remedy=f"Choose one of 0 to {len(ratios) - 1}",
            )
    return {
        "format": FORMAT,
        "plan": plan,
        "devices": list(devices),
        "ratios": list(ratios),
        "ranks": [
            {
                "rank": rank,
                "device": devices[rank],
                "messages": list(_messages(messages, ratios, wiring, rank)),
            }
            for rank in wanted
        ],
    }


def _messages(
    messages: Sequence[Planned], ratios: Sequence[float], wiring: Wiring | None, rank: int
) -> Iterator[dict[str, Any]]:
    for message in messages:
        geometry = geometry_of(message.moves, message.tensors, ratios, rank, wiring)
        if geometry is None:
            continue
        routine = routine_for(message.moves, message.tensors, ratios, rank, wiring)
        assert routine is not None, "it has a geometry"
        common = message.to_dict()
        del common["group"]
        common["participants"] = list(geometry.participants)
        common["dtype"] = geometry.dtype
        for told, member in zip(common["members"], geometry.members, strict=True):
            told["shape"] = list(member.shape)
            told["stretches_before"] = list(member.before)
            told["stretches_after"] = list(member.after)
        yield common | routine_to_dict(routine)


def routine_to_dict(routine: Routine) -> dict[str, Any]:
    """A routine as plain data."""
    return {
        "buffers": [{"role": b.role, "dtype": b.dtype, "count": b.count} for b in routine.buffers],
        "stages": [
            {
                "locals": [_local(local) for local in stage.locals],
                "transfers": [_transfer(transfer) for transfer in stage.transfers],
            }
            for stage in routine.stages
        ],
        "outputs": [_view(view) for view in routine.outputs],
    }


def _view(view: View) -> dict[str, Any]:
    return {
        "buffer": view.buffer,
        "offset": view.offset,
        "shape": list(view.shape),
        "strides": list(view.strides),
    }


def _local(local: Local) -> dict[str, Any]:
    ends = {"source": _view(local.source), "target": _view(local.target)}
    if isinstance(local, Copy):
        return {"kind": "copy", **ends}
    assert isinstance(local, Combine)
    return {"kind": "combine", "op": local.op, **ends}


def _slot(slot: Slot | None) -> dict[str, Any] | None:
    if slot is None:
        return None
    return {"buffer": slot.buffer, "counts": list(slot.counts), "displacements": list(slot.displs)}


def _transfer(transfer: Transfer) -> dict[str, Any]:
    return {
        "kind": transfer.kind,
        "participants": list(transfer.participants),
        "send": _slot(transfer.send),
        "recv": _slot(transfer.recv),
        "root": transfer.root,
        "op": transfer.op,
    }


@cache
def _validator() -> Any:
    text = (
        resources.files("shardwright.backends.schedule").joinpath("schedule.schema.json").read_text("utf-8")
    )
    return jsonschema.Draft202012Validator(json.loads(text))


def check_schedule(data: Any, place: str = "schedule") -> None:
    """Raises PlanError where `data` does not follow `schedule.schema.json`."""
    problem = next(iter(sorted(_validator().iter_errors(data), key=lambda e: list(map(str, e.path)))), None)
    if problem is not None:
        where = ".".join(map(str, problem.path)) or "top level"
        raise PlanError(
            place=f"{place}: {where}", reason=problem.message[:200], remedy="Write it with `shardwright emit`"
        )
