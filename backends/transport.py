"""Running routines: memory, local operations, and transfers through a transport.

A transport moves bytes among ranks; everything else about exchanges is here. To run on another library
(NCCL), implement `Transport`: prepare a transfer once, start it many times, ask and wait for what was
started.

Several exchanges may be under way at once. Stages of different exchanges are started in one order that is the
same on every rank: an exchange starts its first stage only after all stages of the one before it were
started.
So collective calls match, and the first unfinished exchange can always go on: there is no deadlock.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from shardwright.backends.schedule.ops import ALIGNMENT, Combine, Copy, Local, Routine, Transfer, View
from shardwright.ir.dtypes import dtype_of

Memory: TypeAlias = NDArray[np.uint8]
Start: TypeAlias = Callable[[Sequence[Memory]], Any]

#: Seconds between looks at unfinished transfers, where waiting would take cores from working ranks: at least,
#: at most, and as a part of what was waited so far. To wake up costs whoever computes on the core more than
#: the look does: over links of 1 Gbit/s, sleeping 50 µs throughout made a step take 418 in place of 364 ms.
POLL_S, LONGEST_POLL_S, PATIENCE = 5e-5, 3e-4, 1 / 16
#: Seconds between looks while the rank computes. To wake up takes the core from the computation, and the
#: kernel keeps what comes and goes meanwhile: 120 kB at 1 Gbit/s. There, with exchanges for a third of the
#: step, looks every 0.3 ms left 53 % of them exposed (489 ms of the processor a step), every 1 ms 36 %
#: (455 ms, as much as waiting for each exchange takes), every 2 ms 58 % and every 5 ms 83 %: now the wire
#: waits. Less in the beginning, so that what is soon computed is not waited for much longer.
BESIDE_S, BESIDE_PATIENCE = 1e-3, 1 / 8
#: A look that took longer than this has moved data on, by a piece as a rule, and another one follows at once;
#: so many in a row that did not, and the rank sleeps.
MOVED_S, IDLE_LOOKS = 4e-6, 2


class Pause:
    """Sleeps between looks at something, the longer the longer it takes.

    Args:
        longest_s: at most so long.
        patience: a sleep, as a part of what was waited so far.
    """

    def __init__(self, longest_s: float = LONGEST_POLL_S, patience: float = PATIENCE) -> None:
        self.longest_s, self.patience = longest_s, patience
        self.begin = time.perf_counter()

    def sleep(self) -> None:
        """Until the next look."""
        waited = time.perf_counter() - self.begin
        time.sleep(min(self.longest_s, max(POLL_S, self.patience * waited)))


class Transport(Protocol):
    """Moves bytes among the ranks of a program; all ranks make the same calls in the same order."""

    def join(self, participants: tuple[int, ...]) -> None:
        """Set up what transfers among these ranks need; all of them call it."""
        ...

    def prepare(self, transfer: Transfer, dtypes: Sequence[str]) -> Start:
        """A function of a routine's buffers, as bytes, that starts the transfer and gives a request.

        Args:
            transfer: what to do.
            dtypes: of the buffers.
        """
        ...

    def done(self, requests: list[Any]) -> bool:
        """Whether all are finished; does what is needed for them to go on."""
        ...

    def wait(self, requests: list[Any]) -> None:
        """Come back when all are finished."""
        ...


def _references(kept: list[Memory]) -> int:
    """References to memory that nobody but its list knows, counted as the pool counts them."""
    for memory in kept:
        return sys.getrefcount(memory)
    raise AssertionError("the list is empty")


#: Every array on the memory is one more.
_ALONE = _references([np.zeros(1, np.uint8)])


class Pool:
    """Aligned memory that is used again once nobody refers to it.

    What was received is handed to XLA without a copy, and lives as long as the arrays made of it: a buffer
    that is still read, by a running computation or by whoever keeps a result, has references, and another one
    is taken. Steps that follow one another so alternate between two buffers where they must.
    """

    def __init__(self) -> None:
        self._free: dict[int, list[Memory]] = {}

    def take(self, nbytes: int) -> Memory:
        """At least one byte of aligned memory that nobody else uses; `nbytes` long."""
        kept = self._free.setdefault(nbytes, [])
        for memory in kept:
            if sys.getrefcount(memory) == _ALONE:
                return memory
        memory = aligned_bytes(nbytes)
        kept.append(memory)
        return memory

    def clear(self) -> None:
        """Give back what nobody refers to."""
        for nbytes in list(self._free):
            self._free[nbytes] = [m for m in self._free[nbytes] if sys.getrefcount(m) != _ALONE]

    @property
    def nbytes(self) -> int:
        """All that it holds."""
        return sum(size * len(kept) for size, kept in self._free.items())


def aligned_bytes(nbytes: int) -> Memory:
    """Fresh aligned memory."""
    raw = np.zeros(nbytes + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    # A base of its own: views of a view refer to the owner, and the pool counts references to this one.
    return np.frombuffer(raw[start : start + nbytes].data, np.uint8) if nbytes else np.zeros(0, np.uint8)


def window(memory: Memory, view: View, dtype: np.dtype[Any]) -> NDArray[Any]:
    """A view as an array."""
    item = dtype.itemsize
    strides = tuple(stride * item for stride in view.strides)
    return np.ndarray(view.shape, dtype, memory, view.offset * item, strides)


_COMBINE = {"sum": np.add, "max": np.maximum, "min": np.minimum}


def _operation(local: Local, dtypes: Sequence[np.dtype[Any]]) -> Callable[[Sequence[Memory]], None]:
    source, target = local.source, local.target
    of_source, of_target = dtypes[source.buffer], dtypes[target.buffer]
    from_, to = source.buffer, target.buffer
    if isinstance(local, Copy):

        def copy(memory: Sequence[Memory]) -> None:
            np.copyto(
                window(memory[to], target, of_target),
                window(memory[from_], source, of_source),
                casting="unsafe",
            )

        return copy
    assert isinstance(local, Combine)
    combine = _COMBINE[local.op]

    def reduce(memory: Sequence[Memory]) -> None:
        mine = window(memory[to], target, of_target)
        combine(mine, window(memory[from_], source, of_source), out=mine)

    return reduce


class Exchanger:
    """A routine, prepared to run step after step."""

    def __init__(self, routine: Routine, transport: Transport, pool: Pool) -> None:
        self.routine = routine
        self.pool = pool
        names = [buffer.dtype for buffer in routine.buffers]
        self.dtypes = [np.dtype(dtype_of(name)) for name in names]
        for group in routine.groups():
            transport.join(group)
        self.stages: list[tuple[list[Any], list[Any]]] = [
            (
                [_operation(local, self.dtypes) for local in stage.locals],
                [transport.prepare(transfer, names) for transfer in stage.transfers],
            )
            for stage in routine.stages
        ]
        self.operands = [i for i, buffer in enumerate(routine.buffers) if buffer.role == "in"]
        self.rest = [
            (i, buffer.count * self.dtypes[i].itemsize)
            for i, buffer in enumerate(routine.buffers)
            if buffer.role != "in"
        ]
        #: Results that are their operands: nothing moved, nothing is copied.
        self.same = [routine.buffers[view.buffer].role == "in" for view in routine.outputs]

    def memory(self, operands: Sequence[NDArray[Any]]) -> list[Memory]:
        """Buffers for one run, as bytes."""
        found: list[Memory] = [_EMPTY] * len(self.routine.buffers)
        for i, operand in zip(self.operands, operands, strict=True):
            found[i] = _bytes(operand)
        for i, nbytes in self.rest:
            found[i] = self.pool.take(nbytes)
        return found

    def results(self, memory: Sequence[Memory]) -> list[NDArray[Any]]:
        """The results of a finished run."""
        return [window(memory[v.buffer], v, self.dtypes[v.buffer]) for v in self.routine.outputs]


_EMPTY: Memory = np.empty(0, np.uint8)


def _bytes(array: NDArray[Any]) -> Memory:
    """The memory of an array in C order, copied where it is in another."""
    if not array.flags.c_contiguous:
        array = np.ascontiguousarray(array)
    return array.reshape(-1).view(np.uint8)


class Carrier(Protocol):
    """What carries out exchanges as one message, run after run."""

    stages: list[tuple[list[Any], list[Any]]]
    same: list[bool]

    def memory(self, operands: Sequence[Any]) -> list[Any]:
        """Buffers for one run."""
        ...

    def results(self, memory: Sequence[Any]) -> list[Any]:
        """The results of a finished run."""
        ...


class Running:
    """One run of an exchanger."""

    __slots__ = ("exchanger", "memory", "requests", "stage")

    def __init__(self, exchanger: Carrier, operands: Sequence[Any]) -> None:
        self.exchanger = exchanger
        self.memory = exchanger.memory(operands)
        self.stage = 0
        self.requests: list[Any] = []

    @property
    def started(self) -> bool:
        """Whether its last stage was started."""
        return self.stage == len(self.exchanger.stages)

    @property
    def finished(self) -> bool:
        return self.started and not self.requests

    def go_on(self) -> None:
        """Start the next stage; the transfers of the one before are finished."""
        operations, starts = self.exchanger.stages[self.stage]
        self.stage += 1
        for operation in operations:
            operation(self.memory)
        self.requests = [start(self.memory) for start in starts]


class Lane:
    """The exchanges under way on a rank.

    Args:
        transport: carries out transfers.
        poll: sleep between looks at unfinished transfers instead of spinning in the transport.
    """

    def __init__(self, transport: Transport, poll: bool) -> None:
        self.transport = transport
        self.poll = poll
        #: Whether the rank is waiting for others now.
        self.waiting = False
        self._starting: deque[Running] = deque()
        self._under_way: list[Running] = []

    def launch(self, exchanger: Carrier, operands: Sequence[Any]) -> Running:
        """Start an exchange behind those that were launched before."""
        running = Running(exchanger, operands)
        self._starting.append(running)
        self._pump()
        return running

    @property
    def busy(self) -> bool:
        return bool(self._starting or self._under_way)

    def beside(self, computed: Callable[[], bool]) -> None:
        """Let what is under way go on while something is computed, until that or all exchanges are done.

        Transfers only go on when somebody looks, and to wake up for a look takes the core from the
        computation, on a virtual machine for some 40 µs. So nobody looks any more once no exchange is under
        way: looking on until all was computed took ranks of one core 8 % more processor time.

        Args:
            computed: whether it is.
        """
        pause = Pause(BESIDE_S, BESIDE_PATIENCE)
        while self.busy and not computed():
            self.look()
            pause.sleep()

    def look(self) -> None:
        """Let what is under way go on."""
        for running in self._under_way:
            if running.requests and self._moved(running.requests):
                running.requests = []
        self._under_way = [running for running in self._under_way if running.requests]
        self._pump()

    def land(self, running: Running) -> list[Any]:
        """Wait for an exchange and give its results."""
        with np.errstate(all="ignore"):  # padding holds anything
            while not running.finished:
                self._wait(running)
        return running.exchanger.results(running.memory)

    def settle(self) -> None:
        """Start all stages of everything that was launched, so that collective calls may follow."""
        while self._starting:
            self._wait(self._starting[0])

    def wait(self, requests: list[Any]) -> None:
        """Finish transfers of the caller's own, sleeping in between where cores are scarce."""
        self.waiting = True
        if not self.poll:
            self.transport.wait(requests)
        else:
            pause = Pause()
            while not self._moved(requests):
                pause.sleep()
        self.waiting = False

    def _moved(self, requests: list[Any]) -> bool:
        """Whether transfers are finished, after looks for as long as these move them on."""
        idle = 0
        while idle < IDLE_LOOKS:
            begin = time.perf_counter()
            if self.transport.done(requests):
                return True
            idle = 0 if time.perf_counter() - begin > MOVED_S else idle + 1
        return False

    def _wait(self, running: Running) -> None:
        """Until `running`, or what must start before it, can go on."""
        awaited = running if running.started or not self._starting else self._starting[0]
        if awaited.requests:
            self.wait(awaited.requests)
            awaited.requests = []
            if awaited.started and awaited in self._under_way:
                self._under_way.remove(awaited)
        self._pump()

    def _pump(self) -> None:
        """Start whatever may start."""
        with np.errstate(all="ignore"):
            while self._starting:
                head = self._starting[0]
                if head.requests:
                    if not self.transport.done(head.requests):
                        return
                    head.requests = []
                while not head.started and not head.requests:
                    head.go_on()
                if not head.started:
                    return
                self._starting.popleft()
                if head.requests:
                    self._under_way.append(head)
