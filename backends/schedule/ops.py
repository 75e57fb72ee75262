"""What a rank does in one exchange, as data: local copies and reductions, and transfers among participants.

    routine  ::= buffers (memory, dtype, elements)*  stage*  outputs (view*)
    stage    ::= local*  transfer*         a stage's transfers start together; the next stage waits for them
    local    ::= copy view -> view         with a conversion of the dtype where they differ
               | combine op view -> view   target = op(target, source), elementwise
    transfer ::= kind participants send? recv? root? op?

Nothing here knows MPI or JAX. Offsets, counts and displacements are in elements of the buffer's dtype; a
transport moves them as it likes (`backends/transport.py`). The operands of an exchange are its first buffers;
its results are views into buffers, contiguous and aligned.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Literal, TypeAlias

from shardwright.ir.placement import ReduceOp

TransferKind: TypeAlias = Literal[
    "send", "recv", "broadcast", "reduce", "all_reduce", "gather", "scatter", "all_gather",
    "reduce_scatter", "reduce_scatter_block", "all_gather_block", "all_to_all",
]  # fmt: skip

#: What a buffer is for: an operand handed in, the memory of results, or scratch.
Role: TypeAlias = Literal["in", "out", "temp"]

#: Bytes: XLA reads host memory without a copy only where it is aligned so.
ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class Buffer:
    """`count` elements of a numpy (or ml_dtypes) dtype."""

    role: Role
    dtype: str
    count: int


@dataclass(frozen=True, slots=True)
class View:
    """A strided window into a buffer; offset and strides in elements."""

    buffer: int
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @staticmethod
    def of(buffer: int, shape: Sequence[int], offset: int = 0) -> View:
        """A contiguous window in C order."""
        strides = [prod(shape[d + 1 :]) for d in range(len(shape))]
        return View(buffer, offset, tuple(shape), tuple(strides))

    @property
    def size(self) -> int:
        return prod(self.shape)

    def stretch(self, dim: int, first: int, length: int) -> View:
        """`length` elements of dimension `dim` from `first`."""
        shape = (*self.shape[:dim], length, *self.shape[dim + 1 :])
        return View(self.buffer, self.offset + first * self.strides[dim], shape, self.strides)

    def leading(self, dim: int) -> View:
        """The same elements with `dim` first."""
        order = (dim, *(d for d in range(len(self.shape)) if d != dim))
        return View(
            self.buffer,
            self.offset,
            tuple(self.shape[d] for d in order),
            tuple(self.strides[d] for d in order),
        )

    def contiguous(self) -> bool:
        """Whether its elements lie in memory in C order, without gaps."""
        expected = 1
        for length, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if length > 1 and stride != expected:
                return False
            expected *= length
        return True


@dataclass(frozen=True, slots=True)
class Copy:
    """target = source, converted to the target's dtype."""

    source: View
    target: View


@dataclass(frozen=True, slots=True)
class Combine:
    """target = op(target, source)."""

    op: ReduceOp
    source: View
    target: View


Local: TypeAlias = Copy | Combine


@dataclass(frozen=True, slots=True)
class Slot:
    """Where a transfer reads or writes: one stretch of a buffer, or one per participant.

    Attributes:
        buffer: which.
        counts: elements; one entry, or one per participant.
        displs: where each stretch begins.
    """

    buffer: int
    counts: tuple[int, ...]
    displs: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Transfer:
    """What the participants carry out together, as one of them sees it.

    `send` is None where the data already lie in `recv` (in place), and for pure receivers; `recv` is None for
    pure senders.

    Attributes:
        kind: `reduce_scatter_block` and `all_gather_block` are those with equal counts; send and recv have
            two participants.
        participants: devices, in the order of counts and displacements.
        send, recv: see above.
        root: position among the participants, of rooted kinds.
        op: of reductions.
    """

    kind: TransferKind
    participants: tuple[int, ...]
    send: Slot | None = None
    recv: Slot | None = None
    root: int | None = None
    op: ReduceOp | None = None


@dataclass(frozen=True, slots=True)
class Stage:
    """Local operations one after another, then transfers side by side."""

    locals: tuple[Local, ...] = ()
    transfers: tuple[Transfer, ...] = ()


@dataclass(frozen=True, slots=True)
class Routine:
    """One rank's part of one exchange.

    Attributes:
        buffers: the first ones, of role "in", are the operands.
        stages: in order.
        outputs: per operand, where its result lies.
    """

    buffers: tuple[Buffer, ...]
    stages: tuple[Stage, ...]
    outputs: tuple[View, ...]

    def groups(self) -> tuple[tuple[int, ...], ...]:
        """The sets of participants of collective transfers, in order of first appearance."""
        found = (
            t.participants for stage in self.stages for t in stage.transfers if t.kind not in ("send", "recv")
        )
        return tuple(dict.fromkeys(found))


@dataclass(slots=True)
class Builder:
    """Writes a routine. A local operation after a transfer, and `wait`, begin a new stage."""

    buffers: list[Buffer] = field(default_factory=list[Buffer])
    _stages: list[Stage] = field(default_factory=list[Stage])
    _locals: list[Local] = field(default_factory=list[Local])
    _transfers: list[Transfer] = field(default_factory=list[Transfer])

    def buffer(self, role: Role, dtype: str, count: int) -> int:
        """A new buffer's number."""
        self.buffers.append(Buffer(role, dtype, count))
        return len(self.buffers) - 1

    def copy(self, source: View, target: View) -> None:
        """Copy, unless there is nothing to copy or it lies there already."""
        if source.size and source != target:
            self._local(Copy(source, target))

    def combine(self, op: ReduceOp, source: View, target: View) -> None:
        """Reduce into `target`."""
        if source.size:
            self._local(Combine(op, source, target))

    def transfer(self, transfer: Transfer) -> None:
        """Start it with the others of this stage."""
        self._transfers.append(transfer)

    def wait(self) -> None:
        """What follows needs what was transferred so far."""
        if self._locals or self._transfers:
            self._stages.append(Stage(tuple(self._locals), tuple(self._transfers)))
            self._locals, self._transfers = [], []

    def routine(self, outputs: Sequence[View]) -> Routine:
        """What was written."""
        self.wait()
        return Routine(tuple(self.buffers), tuple(self._stages), tuple(outputs))

    def _local(self, operation: Local) -> None:
        if self._transfers:
            self.wait()
        self._locals.append(operation)


def whole(buffer: int, first: int, count: int) -> Slot:
    """One stretch of a buffer."""
    return Slot(buffer, (count,), (first,))
