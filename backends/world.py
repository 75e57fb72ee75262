"""The ranks of an MPI job as the devices of a plan, and arrays that lie on them."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shardwright.backends.layout import dtype_of, is_key, members, stretches, to_numpy
from shardwright.backends.local import key_implementation
from shardwright.backends.mpi_link import Division, Link, mpi
from shardwright.backends.mpi_moves import lowerings
from shardwright.backends.wire import to_jax
from shardwright.ir.collectives import between
from shardwright.ir.errors import PlanError
from shardwright.ir.graph import TensorType
from shardwright.ir.placement import Placement, R, Replicate
from shardwright.ir.program import Group, Move
from shardwright.ir.wiring import Wiring

#: Seconds between two looks at an unfinished transfer, where waiting would take cores from working ranks.
POLL_S = 5e-5
#: Looks in a row before sleeping again: each moves a large transfer on by a piece. On 4 ranks of 2 cores,
#: 10 in place of 1 make an all-to-all of 16 MiB seven times faster and small exchanges by a third; 30 slow
#: the ranks that compute meanwhile.
LOOKS = 10


class World:
    """Rank i of a communicator is device i of a plan.

    Args:
        comm: an mpi4py communicator; COMM_WORLD by default.
        ratios: share of every device.
        wiring: which devices share a node; by default, which ranks share memory.
        poll: sleep between looks at unfinished transfers instead of spinning in MPI; by default where
            more ranks run on this machine than they may use cores between them.

    Raises:
        PlanError: the communicator has another number of ranks than the plan has devices.
    """

    def __init__(
        self,
        ratios: Sequence[float],
        comm: Any = None,
        *,
        wiring: Wiring | None = None,
        poll: bool | None = None,
    ) -> None:
        self.comm = mpi().COMM_WORLD if comm is None else comm
        self.ratios = tuple(ratios)
        if self.comm.size != len(self.ratios):
            raise PlanError(
                place="backend mpi",
                reason=f"the plan is for {len(self.ratios)} devices, but {self.comm.size} ranks are running",
                remedy=f"Start it with mpiexec -n {len(self.ratios)}",
            )
        self.rank: int = self.comm.rank
        if poll is None or wiring is None:
            here = self.comm.Split_type(mpi().COMM_TYPE_SHARED)
            if poll is None:
                # Each rank may be pinned to cores of its own.
                cores: set[int] = set().union(*here.allgather(os.sched_getaffinity(0)))
                poll = bool(here.size > len(cores))
            wiring = wiring or Wiring(tuple(self.comm.allgather(here.allreduce(self.rank, mpi().MIN))))
            here.Free()
        self.wiring = wiring
        # Every rank must take the same path through a transfer's rounds only, so each may wait its own way.
        self.poll = poll
        self._communicators: dict[tuple[int, ...], Any] = {tuple(range(self.comm.size)): self.comm}
        self._divisions: dict[tuple[int, ...], Division] = {}

    def join(self, groups: Iterable[Group]) -> None:
        """Make the communicators of groups; all ranks must call it with the same groups in the same order."""
        for group in groups:
            devices = members(group, self.comm.size)
            if devices not in self._communicators:
                color = 0 if self.rank in devices else mpi().UNDEFINED
                self._communicators[devices] = self.comm.Split(color, self.rank)

    def wait(self, requests: Sequence[Any]) -> None:
        """Finish transfers, sleeping in between where cores are scarce."""
        if not self.poll:
            mpi().Request.Waitall(list(requests))
            return
        while not any(mpi().Request.Testall(list(requests)) for _ in range(LOOKS)):
            time.sleep(POLL_S)

    def _divide(self, devices: tuple[int, ...]) -> Division:
        """The devices by node; the first time a collective call among them."""
        if devices not in self._divisions:
            comm = self._communicators[devices]
            nodes = self.wiring.groups(devices)
            mine = next(k for k, node in enumerate(nodes) if comm.rank in node)
            here = comm.Split(mine, comm.rank)
            leader = self.wiring.leader(devices, nodes[mine])
            leaders = comm.Split(0 if comm.rank == leader else mpi().UNDEFINED, mine)
            self._divisions[devices] = Division(
                nodes, mine, here, nodes[mine].index(leader), leaders if comm.rank == leader else None
            )
        return self._divisions[devices]

    def move(self, move: Move, tensor: TensorType, value: Any) -> Any:
        """Carry out a collective; None on ranks outside its group."""
        devices = members(move.group, self.comm.size)
        if self.rank not in devices:
            return None
        shape, dtype = wire_type(tensor)
        link = Link(
            comm=self._communicators[devices],
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
        """The global array on every rank; a collective call unless it is replicated already."""
        collective = between(placement, R)
        if collective is None:
            return value
        exact = "exact" in collective.strategies
        strategy = "exact" if exact else collective.strategies[0]
        return self.move(Move(collective.kind, 0, placement, R, strategy), tensor, value)


def wire_type(tensor: TensorType) -> tuple[tuple[int, ...], Any]:
    """Shape and numpy dtype in which a tensor travels."""
    if not is_key(tensor.dtype):
        return tensor.shape, dtype_of(tensor.dtype)
    data = jax.eval_shape(
        lambda: jax.random.key_data(jax.random.key(0, impl=key_implementation(tensor.dtype)))
    )
    return (*tensor.shape, *data.shape), np.dtype(data.dtype)


@dataclass(frozen=True, slots=True, eq=False)
class ShardedArray:
    """A tensor that lies on the ranks; a leaf of JAX's pytrees.

    Attributes:
        local: what this rank holds.
        placement: how the tensor lies on the ranks.
        tensor: its global shape and dtype.
        world: the ranks.
    """

    local: Any
    placement: Placement
    tensor: TensorType
    world: World

    @property
    def shape(self) -> tuple[int, ...]:
        """Global shape."""
        return self.tensor.shape

    @property
    def dtype(self) -> Any:
        return self.local.dtype

    @property
    def ndim(self) -> int:
        return self.tensor.rank

    def gather(self) -> jax.Array:
        """The global array, on every rank. A collective call: all ranks must make it."""
        return self.world.replicate(self.local, self.tensor, self.placement)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        if not isinstance(self.placement, Replicate):
            raise PlanError(
                place=repr(self),
                reason="no single rank holds it whole, and converting it must not communicate",
                remedy="Call gather() on every rank",
            )
        return np.array(self.local, dtype=dtype, copy=copy) if copy else np.asarray(self.local, dtype=dtype)

    def __float__(self) -> float:
        return float(self.__array__())

    def __jax_array__(self) -> jax.Array:
        return jnp.asarray(self.__array__())

    def __repr__(self) -> str:
        return f"ShardedArray({self.tensor}, {self.placement}, local {tuple(self.local.shape)})"
