"""Transfers over MPI: non-blocking calls of mpi4py with everything prepared."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np

from shardwright.backends.mpi.link import mpi, operation
from shardwright.backends.schedule.ops import Slot, Transfer
from shardwright.backends.transport import Memory, Start
from shardwright.ir.dtypes import dtype_of


class MpiTransport:
    """Ranks of a communicator; rank i is device i of the program.

    Args:
        comm: an mpi4py communicator.
    """

    def __init__(self, comm: Any) -> None:
        self.comm = comm
        self._communicators: dict[tuple[int, ...], Any] = {}
        if comm != mpi().COMM_NULL:
            self._communicators[tuple(range(comm.size))] = comm

    def join(self, participants: tuple[int, ...]) -> None:
        """Make the communicator of some ranks; only they call it, all in the same order."""
        if participants not in self._communicators:
            group = self.comm.Get_group().Incl(list(participants))
            self._communicators[participants] = self.comm.Create_group(group)
            group.Free()

    def communicator(self, participants: tuple[int, ...]) -> Any:
        """Of ranks that joined before."""
        return self._communicators[participants]

    def prepare(self, transfer: Transfer, dtypes: Sequence[str]) -> Start:
        """See `Transport`. Reductions use the dtype's MPI type, everything else moves bytes."""
        if transfer.kind in ("send", "recv"):
            return self._message(transfer, dtypes)
        comm = self._communicators[transfer.participants]
        return _COLLECTIVES[transfer.kind](comm, transfer, dtypes)

    def _message(self, transfer: Transfer, dtypes: Sequence[str]) -> Start:
        sender, receiver = transfer.participants
        if transfer.kind == "send":
            buffer, piece = _bytes(transfer.send, dtypes)
            post, other = self.comm.Isend, receiver
        else:
            buffer, piece = _bytes(transfer.recv, dtypes)
            post, other = self.comm.Irecv, sender
        return lambda memory: post(memory[buffer][piece], other)

    def done(self, requests: list[Any]) -> bool:
        return bool(mpi().Request.Testall(requests))

    def wait(self, requests: list[Any]) -> None:
        mpi().Request.Waitall(requests)


def _item(slot: Slot | None, dtypes: Sequence[str]) -> int:
    assert slot is not None
    return np.dtype(dtype_of(dtypes[slot.buffer])).itemsize


def _bytes(slot: Slot | None, dtypes: Sequence[str]) -> tuple[int, slice]:
    """One stretch: its buffer and the bytes in it."""
    assert slot is not None
    item = _item(slot, dtypes)
    first = slot.displs[0] * item
    return slot.buffer, slice(first, first + slot.counts[0] * item)


def _vector(slot: Slot | None, dtypes: Sequence[str]) -> tuple[int, list[int], list[int]]:
    """One stretch per participant: the buffer, bytes, and where they begin."""
    assert slot is not None
    item = _item(slot, dtypes)
    return slot.buffer, [n * item for n in slot.counts], [d * item for d in slot.displs]


def _typed(slot: Slot | None, dtypes: Sequence[str]) -> tuple[int, slice, Any]:
    """One stretch for a reduction: the buffer, its bytes, and the MPI type of an element."""
    assert slot is not None
    buffer, piece = _bytes(slot, dtypes)
    return buffer, piece, mpi().Datatype.fromcode(np.dtype(dtype_of(dtypes[slot.buffer])).char)


def _operation(transfer: Transfer, dtypes: Sequence[str]) -> Any:
    slot = transfer.send or transfer.recv
    assert slot is not None
    return operation(transfer.op or "sum", np.dtype(dtype_of(dtypes[slot.buffer])))


def _broadcast(comm: Any, transfer: Transfer, dtypes: Sequence[str]) -> Start:
    buffer, piece = _bytes(transfer.recv, dtypes)
    root = transfer.root
    return lambda memory: comm.Ibcast(memory[buffer][piece], root=root)


def _reduce(comm: Any, transfer: Transfer, dtypes: Sequence[str]) -> Start:
    root, op = transfer.root, _operation(transfer, dtypes)
    target: Any = None if transfer.recv is None else _typed(transfer.recv, dtypes)
    source: Any = None if transfer.send is None else _typed(transfer.send, dtypes)

    def start(memory: Sequence[Memory]) -> Any:
        sent = mpi().IN_PLACE if source is None else [memory[source[0]][source[1]], source[2]]
        received = None if target is None else [memory[target[0]][target[1]], target[2]]
        return comm.Ireduce(sent, received, op, root)

    return start


def _all_reduce(comm: Any, transfer: Transfer, dtypes: Sequence[str]) -> Start:
    buffer, piece, kind = _typed(transfer.recv, dtypes)
    op = _operation(transfer, dtypes)
    if transfer.send is None:
        return lambda memory: comm.Iallreduce(mpi().IN_PLACE, [memory[buffer][piece], kind], op)
    source, part, _ = _typed(transfer.send, dtypes)
    return lambda memory: comm.Iallreduce([memory[source][part], kind], [memory[buffer][piece], kind], op)


def _gather(comm: Any, transfer: Transfer, dtypes: Sequence[str]) -> Start:
    source, piece = _bytes(transfer.send, dtypes)
    root = transfer.root
    if transfer.recv is None:
        return lambda memory: comm.Igatherv(memory[source][piece], None, root)
    buffer, counts, displs = _vector(transfer.recv, dtypes)
    kind = mpi().BYTE
    return lambda memory: comm.Igatherv(memory[source][piece], [memory[buffer], counts, displs, kind], root)


def _scatter(comm: Any, transfer: Transfer, dtypes: Sequence[str]) -> Start:
    root, kind = transfer.root, mpi().BYTE
    if transfer.send is None:
        target, piece = _bytes(transfer.recv, dtypes)
        return lambda memory: comm.Iscatterv(None, memory[target][piece], root)
    buffer, counts, displs = _vector(transfer.send, dtypes)
    if transfer.recv is None:
        here = mpi().IN_PLACE
        return lambda memory: comm.Iscatterv([memory[buffer], counts, displs, kind], here, root)
    target, piece = _bytes(transfer.recv, dtypes)
    return lambda memory: comm.Iscatterv([memory[buffer], counts, displs, kind], memory[target][piece], root)


def _all_gather(comm: Any, transfer: Transfer, dtypes: Sequence[str]) -> Start:
    buffer, counts, displs = _vector(transfer.recv, dtypes)
    kind = mpi().BYTE
    if transfer.send is None:
        return lambda memory: comm.Iallgatherv(mpi().IN_PLACE, [memory[buffer], counts, displs, kind])
    source, piece = _bytes(transfer.send, dtypes)
    return lambda memory: comm.Iallgatherv(memory[source][piece], [memory[buffer], counts, displs, kind])


def _all_gather_block(comm: Any, transfer: Transfer, dtypes: Sequence[str]) -> Start:
    source, piece = _bytes(transfer.send, dtypes)
    buffer, room = _bytes(transfer.recv, dtypes)
    every = slice(room.start, room.start + comm.size * (room.stop - room.start))
    return lambda memory: comm.Iallgather(memory[source][piece], memory[buffer][every])


def _reduce_scatter(comm: Any, transfer: Transfer, dtypes: Sequence[str]) -> Start:
    assert transfer.send is not None
    op, counts = _operation(transfer, dtypes), list(transfer.send.counts)
    first = Slot(transfer.send.buffer, (sum(counts),), (transfer.send.displs[0],))
    source, part, kind = _typed(first, dtypes)
    target, piece, _ = _typed(transfer.recv, dtypes)
    return lambda memory: comm.Ireduce_scatter(
        [memory[source][part], kind], [memory[target][piece], kind], counts, op
    )


def _reduce_scatter_block(comm: Any, transfer: Transfer, dtypes: Sequence[str]) -> Start:
    assert transfer.send is not None
    op, block = _operation(transfer, dtypes), transfer.send.counts[0]
    every = Slot(transfer.send.buffer, (comm.size * block,), transfer.send.displs)
    source, part, kind = _typed(every, dtypes)
    target, piece, _ = _typed(transfer.recv, dtypes)
    return lambda memory: comm.Ireduce_scatter_block(
        [memory[source][part], block, kind], [memory[target][piece], block, kind], op
    )


def _all_to_all(comm: Any, transfer: Transfer, dtypes: Sequence[str]) -> Start:
    source, out_counts, out_displs = _vector(transfer.send, dtypes)
    target, in_counts, in_displs = _vector(transfer.recv, dtypes)
    kind = mpi().BYTE
    return lambda memory: comm.Ialltoallv(
        [memory[source], out_counts, out_displs, kind], [memory[target], in_counts, in_displs, kind]
    )


_COLLECTIVES = {
    "broadcast": _broadcast,
    "reduce": _reduce,
    "all_reduce": _all_reduce,
    "gather": _gather,
    "scatter": _scatter,
    "all_gather": _all_gather,
    "all_gather_block": _all_gather_block,
    "reduce_scatter": _reduce_scatter,
    "reduce_scatter_block": _reduce_scatter_block,
    "all_to_all": _all_to_all,
}


def cuda_aware() -> bool:
    """Whether the MPI library says that it reads and writes the memory of CUDA devices."""
    mpi()
    for name in ("MPIX_Query_cuda_support", "MPIX_GPU_query_support"):
        query = getattr(ctypes.CDLL(None), name, None)
        if query is None:
            continue
        if name == "MPIX_Query_cuda_support":
            query.restype = ctypes.c_int
            return bool(query())
        supported = ctypes.c_int(0)
        return query(0, ctypes.byref(supported)) == 0 and bool(supported.value)
    return False
