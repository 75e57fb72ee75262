"""What a lowering over MPI works with: the move as one participant sees it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeAlias

import numpy as np

from shardwright.backends.launch import launched, tcp_pieces
from shardwright.backends.wire import Array
from shardwright.ir.errors import InputError
from shardwright.ir.placement import Placement, ReduceOp


@dataclass(frozen=True, slots=True)
class Division:
    """The participants of a move by node, as one of them sees it.

    Attributes:
        nodes: positions of the participants, by node; this participant's own node is number `mine`.
        mine: see above.
        here: communicator of this participant's node, in the order of positions.
        lead: rank in `here` of the leader.
        leaders: communicator of the leaders, in the order of nodes; None on all others.
    """

    nodes: tuple[tuple[int, ...], ...]
    mine: int
    here: Any
    lead: int
    leaders: Any


@dataclass(frozen=True, slots=True)
class Link:
    """A move as one participant sees it.

    Attributes:
        comm: communicator of the participants.
        shape: global shape on the wire (of a key tensor, that of its data).
        dtype: numpy dtype on the wire.
        pre: placement before.
        post: placement after.
        before: elements of the dimension sharded before, per participant; () if there is none.
        after: the same after.
        root: participant that has the tensor at first, for rooted collectives.
        wait: finishes requests.
        divide: the participants by node; the first call is a collective one.
    """

    comm: Any
    shape: tuple[int, ...]
    dtype: Any
    pre: Placement
    post: Placement
    before: tuple[int, ...]
    after: tuple[int, ...]
    root: int | None
    wait: Callable[[Sequence[Any]], None]
    divide: Callable[[], Division]

    @property
    def me(self) -> int:
        return self.comm.rank


Lowering: TypeAlias = Callable[[Link, Array], Array]


def mpi() -> Any:
    """The MPI module of mpi4py, whose first import initialises MPI, with `tcp_pieces`.

    Raises:
        InputError: there is no mpi4py, no MPI library that it could load, or one that is not the launcher's.
    """
    if "mpi4py.MPI" not in sys.modules:
        os.environ.update(tcp_pieces())
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError, OSError) as error:
        raise InputError(
            place="backend mpi",
            reason=f"MPI cannot be loaded ({error})",
            remedy="pip install 'shardwright[mpi]'",
        ) from error
    _refuse_another_launcher()
    return MPI


@cache
def _refuse_another_launcher() -> None:
    """Refuse a launcher of another MPI library: every rank takes itself for the only one."""
    from mpi4py import MPI

    started = launched()
    if started is not None and started > 1 and MPI.COMM_WORLD.size == 1:
        library = " ".join(MPI.Get_library_version().partition("\n")[0].strip("\0").split())
        raise InputError(
            place="backend mpi",
            reason=f"mpiexec started {started} ranks, but the MPI library of mpi4py ({library}) sees one",
            remedy="Start it with that library's mpiexec, or install mpi4py against this mpiexec's library",
        )


@cache
def operation(op: ReduceOp, dtype: np.dtype[Any]) -> Any:
    """The operation of MPI for a reduction; of floats numpy's maxima and minima, as MPI's may lose NaNs."""
    if op == "sum":
        return mpi().SUM
    if dtype.kind != "f":
        return mpi().MAX if op == "max" else mpi().MIN
    of_two = np.maximum if op == "max" else np.minimum

    def combine(one: Any, other: Any, kind: Any) -> None:
        into = np.frombuffer(other, dtype)
        of_two(np.frombuffer(one, dtype), into, out=into)

    return mpi().Op.Create(combine, commute=True)
