"""The ranks of an MPI job as the devices of a plan, and arrays that lie on them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shardwright.backends.direct import DirectExchanger, is_direct
from shardwright.backends.layout import members, stretches, to_numpy, typed, wire_type
from shardwright.backends.local import extents
from shardwright.backends.mpi.link import Division, Link, mpi
from shardwright.backends.mpi.moves import lowerings
from shardwright.backends.schedule.document import routine_for
from shardwright.backends.transport import Exchanger, Lane, Pool
from shardwright.backends.transport_mpi import MpiTransport, cuda_aware
from shardwright.backends.wire import aligned, as_bytes, on_host, to_jax
from shardwright.ir.collectives import between
from shardwright.ir.dtypes import dtype_of, is_key
from shardwright.ir.errors import InputError, PlanError
from shardwright.ir.graph import TensorType
from shardwright.ir.placement import Placement, R, Replicate, axis_by_axis
from shardwright.ir.program import Group, Move
from shardwright.ir.wiring import Seats, Wiring


class World:
    """Rank i of a communicator is device i of a fleet; those that a program uses share a communicator.

    Ranks of other devices are *idle*: they only hear of results, when all ranks call `replicate`.

    Args:
        comm: an mpi4py communicator; COMM_WORLD by default. It has a rank for every device of the fleet, or
            one for every device used.
        ratios: share of every device used.
        seats: which devices these are, and which of them share a node; by default the ranks are the devices,
            and those that share memory share a node.
        poll: sleep between looks at unfinished transfers instead of spinning in MPI; by default where
            more ranks run on this machine than they may use cores between them.
        direct: hand MPI the memory of devices where nothing is packed or added up on the way; by default
            where devices have memory of their own and the MPI says that it reads and writes it.

    Attributes:
        comm: the ranks of devices that are used; a null communicator on idle ranks.
        rank: of this rank in `comm`, -1 on idle ranks.
        used: the ranks, in the communicator given, of the devices used.

    Raises:
        PlanError: the communicator has another number of ranks.
    """

    def __init__(
        self,
        ratios: Sequence[float],
        comm: Any = None,
        *,
        seats: Seats | None = None,
        poll: bool | None = None,
        direct: bool | None = None,
    ) -> None:
        whole = mpi().COMM_WORLD if comm is None else comm
        self.ratios = tuple(ratios)
        seats = seats or Seats(tuple(range(len(ratios))), len(ratios))
        _check_size(whole.size, seats)
        self.used = seats.used if whole.size == seats.devices else tuple(range(len(ratios)))
        everybody = len(self.used) == whole.size
        self.comm = whole if everybody else whole.Split(_color(whole.rank in self.used), whole.rank)
        self.rank: int = self.used.index(whole.rank) if whole.rank in self.used else -1
        # Who has results and those who want to hear of them.
        speaks = whole.rank == self.used[0]
        self._audience = None if everybody else whole.Split(_color(self.idle or speaks), not speaks)
        wiring = seats.wiring
        if poll is None or wiring is None:
            here = whole.Split_type(mpi().COMM_TYPE_SHARED)
            if poll is None:
                # Each rank may be pinned to cores of its own.
                cores: set[int] = set().union(*here.allgather(os.sched_getaffinity(0)))
                poll = bool(here.size > len(cores))
            node = here.allreduce(whole.rank, mpi().MIN)
            here.Free()
            if wiring is None and not self.idle:
                wiring = Wiring(tuple(self.comm.allgather(node)))
        self.wiring = wiring or Wiring(())
        # Every rank must take the same path through a transfer's rounds only, so each may wait its own way.
        self.poll = poll
        self.transport = MpiTransport(self.comm)
        self.lane = Lane(self.transport, poll)
        self.pool = Pool()
        self.direct = not on_host() and cuda_aware() if direct is None else direct
        self._exchangers: dict[tuple[Any, ...], Exchanger | DirectExchanger] = {}
        self._divisions: dict[tuple[int, ...], Division] = {}

    @property
    def idle(self) -> bool:
        """Whether the device of this rank is not used."""
        return self.rank < 0

    def alike(self, other: World) -> bool:
        """Whether tensors are cut on the same ranks at the same points."""
        return other is self or (other.ratios == self.ratios and other.used == self.used)

    def join(self, groups: Iterable[Group]) -> None:
        """Make the communicators of groups; all but idle ranks call it, with the same in the same order."""
        for group in groups:
            devices = members(group, len(self.ratios))
            if self.rank in devices:
                self.transport.join(devices)

    def wait(self, requests: Sequence[Any]) -> None:
        """Finish transfers, sleeping in between where cores are scarce."""
        self.lane.wait(list(requests))

    def settle(self) -> None:
        """Before a collective call of the caller's own: everything launched so far is started."""
        self.lane.settle()

    def exchanger(
        self, moves: tuple[Move, ...], tensors: tuple[TensorType, ...]
    ) -> Exchanger | DirectExchanger | None:
        """What carries out exchanges as one message; None on ranks that take no part.

        The first call for these is a collective one among the participants.
        """
        key = tuple((m.kind, m.strategy, m.pre, m.post, m.group, m.root) for m in moves), tensors
        if key not in self._exchangers:
            routine = routine_for(moves, tensors, self.ratios, self.rank, self.wiring)
            if routine is None:
                return None
            keys = any(is_key(tensor.dtype) for tensor in tensors)
            if self.direct and not keys and is_direct(routine):
                self._exchangers[key] = DirectExchanger(routine, self.transport)
            else:
                self._exchangers[key] = Exchanger(routine, self.transport, self.pool)
        return self._exchangers[key]

    def _divide(self, devices: tuple[int, ...]) -> Division:
        """The devices by node; the first time a collective call among them."""
        if devices not in self._divisions:
            comm = self.transport.communicator(devices)
            nodes = self.wiring.groups(devices)
            mine = next(k for k, node in enumerate(nodes) if comm.rank in node)
            here = comm.Split(mine, comm.rank)
            leader = self.wiring.leader(devices, nodes[mine])
            leaders = comm.Split(_color(comm.rank == leader), mine)
            self._divisions[devices] = Division(
                nodes, mine, here, nodes[mine].index(leader), leaders if comm.rank == leader else None
            )
        return self._divisions[devices]

    def move(self, move: Move, tensor: TensorType, value: Any) -> Any:
        """Carry out a collective; None on ranks outside its group."""
        if (move.kind, move.strategy) in lowerings():
            return self.by_function(move, tensor, value)
        exchanger = self.exchanger((move,), (tensor,))
        if exchanger is None:
            return None
        if isinstance(exchanger, DirectExchanger):
            (result,) = self.lane.land(self.lane.launch(exchanger, [value]))
            return value if exchanger.same[0] else result
        operand = np.empty(0, wire_type(tensor)[1]) if value is None else to_numpy(value)
        (result,) = self.lane.land(self.lane.launch(exchanger, [operand]))
        return value if exchanger.same[0] else to_jax(result, tensor.dtype)

    def by_function(self, move: Move, tensor: TensorType, value: Any) -> Any:
        """Carry out a collective by a function that was added for its strategy."""
        devices = members(move.group, len(self.ratios))
        if self.rank not in devices:
            return None
        self.settle()
        shape, dtype = wire_type(tensor)
        link = Link(
            comm=self.transport.communicator(devices),
            shape=shape,
            dtype=dtype,
            pre=move.pre,
            post=move.post,
            before=stretches(tensor, move.pre, move.group, self.ratios),
            after=stretches(tensor, move.post, move.group, self.ratios),
            root=None if move.root is None else devices.index(move.root),
            wait=self.wait,
            divide=partial(self._divide, devices),
        )
        array = np.empty(0, dtype) if value is None else to_numpy(value)
        result = lowerings()[move.kind, move.strategy](link, array)
        return value if link.root == link.me else to_jax(result, tensor.dtype)

    def replicate(self, value: Any, tensor: TensorType, placement: Placement) -> Any:
        """The global array on every rank; a collective call unless it is there already."""
        if self.everywhere(tensor, placement):
            return value
        return self.tell([None if self.idle else self._whole(value, tensor, placement)], [tensor])[0]

    def everywhere(self, tensor: TensorType, placement: Placement) -> bool:
        """Whether even idle ranks have the tensor: of what a step returns, they are told the scalars."""
        return placement == R and (self._audience is None or tensor.rank == 0)

    def tell(self, values: Sequence[Any], tensors: Sequence[TensorType]) -> list[Any]:
        """Global arrays on every rank that all but the idle ones have; a call that all ranks must make."""
        if self._audience is None or self._audience == mpi().COMM_NULL:
            return list(values)
        types = [wire_type(tensor) for tensor in tensors]
        arrays = [
            aligned(shape, dtype) if self.idle else np.ascontiguousarray(to_numpy(value)).reshape(shape)
            for value, (shape, dtype) in zip(values, types, strict=True)
        ]
        self.wait([self._audience.Ibcast(as_bytes(array), root=0) for array in arrays])
        if not self.idle:
            return list(values)
        return [to_jax(array, tensor.dtype) for array, tensor in zip(arrays, tensors, strict=True)]

    def _whole(self, value: Any, tensor: TensorType, placement: Placement) -> Any:
        """The global array on every rank that is not idle."""
        for post, pre in reversed(axis_by_axis(placement)):
            collective = between(pre, post)
            assert collective is not None, f"no single move turns {pre} into {post}"
            exact = "exact" in collective.strategies
            strategy = "exact" if exact else collective.strategies[0]
            value = self.move(Move(collective.kind, 0, pre, post, strategy), tensor, value)
        return value


def _check_size(size: int, seats: Seats) -> None:
    used, devices = len(seats.used), seats.devices
    if size in (used, devices):
        return
    which = f"the plan is for {devices} devices"
    remedy = f"Start it with mpiexec -n {devices}"
    if used != devices:
        which = f"the plan uses {used} of {devices} devices"
        remedy = f"Start it with mpiexec -n {used}, or -n {devices} with a rank for every device"
    raise PlanError(place="backend mpi", reason=f"{which}, but {size} ranks are running", remedy=remedy)


def _color(joins: bool) -> int:
    """For splitting a communicator in two, of which one is of no interest."""
    return 0 if joins else mpi().UNDEFINED


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class ShardedArray:
    """A tensor that lies on the ranks; a leaf of JAX's pytrees.

    Attributes:
        local: what this rank holds; None where the plan does not use its device, but for scalars.
        placement: how the tensor lies on the ranks.
        tensor: its global shape and dtype.
        world: the ranks.
        weak_type: whether it is typed weakly, see `jax.Array.weak_type`; `local` need not be.
    """

    local: Any
    placement: Placement
    tensor: TensorType
    world: World
    weak_type: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """Global shape."""
        return self.tensor.shape

    @property
    def dtype(self) -> Any:
        return dtype_of(self.tensor.dtype)

    @property
    def ndim(self) -> int:
        return self.tensor.rank

    def held_by(self, device: int) -> tuple[tuple[int, int], ...] | None:
        """Where what a device of the plan holds begins, by dimension, and how long it is; None if nothing."""
        held = extents(self.tensor, self.placement, device, self.world.ratios)
        return tuple([(e.offset, e.length) for e in held]) if all(e.length for e in held) else None

    def gather(self) -> jax.Array:
        """The global array, on every rank. A collective call: all ranks must make it.

        Raises:
            InputError: it was donated to a step.
        """
        self._check_there()
        return typed(self.world.replicate(self.local, self.tensor, self.placement), self.weak_type)

    def block_until_ready(self) -> ShardedArray:
        """Wait until what this rank holds is computed; `jax.block_until_ready` does so for pytrees."""
        jax.block_until_ready(self.local)
        return self

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        if not isinstance(self.placement, Replicate) or self.local is None:
            raise PlanError(
                place=repr(self),
                reason="this rank does not hold it whole, and converting it must not communicate",
                remedy="Call gather() on every rank",
            )
        self._check_there()
        return np.array(self.local, dtype=dtype, copy=copy) if copy else np.asarray(self.local, dtype=dtype)

    def _check_there(self) -> None:
        """Raises InputError where a step took the memory of what this rank holds."""
        if isinstance(self.local, jax.Array) and self.local.is_deleted():
            raise InputError(
                place=repr(self),
                reason="was passed to a step that took its memory",
                remedy="Use what that step returned",
            )

    def __bool__(self) -> bool:
        return bool(self.__array__())

    def __int__(self) -> int:
        return int(self.__array__())

    def __float__(self) -> float:
        return float(self.__array__())

    def __format__(self, spec: str) -> str:
        return format(self.__array__()[()], spec) if spec else repr(self)

    def __jax_array__(self) -> jax.Array:
        return typed(jnp.asarray(self.__array__()), self.weak_type)

    def __repr__(self) -> str:
        local = "none" if self.local is None else tuple(self.local.shape)
        return f"ShardedArray({self.tensor}, {self.placement}, local {local})"
