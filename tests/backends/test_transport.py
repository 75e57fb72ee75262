"""Memory between steps: what XLA still reads is not written; orders of exchanges; drift."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardwright.backends import transport
from shardwright.backends.layout import as_array
from shardwright.backends.schedule.geometry import Geometry, Member
from shardwright.backends.schedule.ops import Copy, Transfer
from shardwright.backends.schedule.table import routine_of
from shardwright.backends.transport import Exchanger, Lane, Pool
from shardwright.backends.wire import to_jax, to_segment
from shardwright.ir.graph import TensorType
from shardwright.ir.placement import Partial, R


def array_on(pool: Pool, count: int) -> Any:
    return np.ndarray((count,), np.float32, pool.take(4 * count))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "bool", "complex64"])
def test_memory_is_shared_with_xla_and_used_again_only_when_nobody_reads_it(dtype: str) -> None:
    pool = Pool()
    memory = pool.take(1 << 12)
    address = memory.ctypes.data
    array = np.ndarray((256,), jnp.dtype(dtype), memory)
    array[:] = 1
    held = to_jax(array, dtype)
    assert held.unsafe_buffer_pointer() == address, "no copy"
    del memory, array
    other = pool.take(1 << 12)
    assert other.ctypes.data != address, "the array lives"
    other[:] = 7
    assert np.asarray(held == 1).all()
    del held, other
    for _ in range(10):  # JAX may let go of what it read a little later
        array = np.ndarray((256,), jnp.dtype(dtype), pool.take(1 << 12))
        array[:] = 1
        held = to_jax(array, dtype)
        jnp.square(held).block_until_ready()
        del array, held
    assert pool.nbytes <= 3 << 12, "steps alternate between buffers, and there are no more"


def test_what_users_hand_in_is_no_memory_of_theirs() -> None:
    """Whoever reads batches into one buffer fills it again while arrays made of it live."""
    batch = array_on(Pool(), 256)
    batch[:] = 1
    held = as_array(batch, TensorType((256,), "float32"))
    batch[:] = 7
    assert np.asarray(held == 1).all()


@pytest.mark.parametrize("entering", [to_jax, to_segment])
def test_memory_that_a_computation_still_reads_is_not_used_again(entering: Any) -> None:
    pool = Pool()
    array = array_on(pool, 1 << 20)
    array[:] = 1
    square = jax.jit(lambda x: jnp.tanh(x.reshape(1024, 1024) @ x.reshape(1024, 1024)).sum())
    work = square.lower(array).compile()
    wanted = float(work(entering(array, "float32")))
    del array
    for _ in range(5):
        array = array_on(pool, 1 << 20)
        array[:] = 1
        result = work(entering(array, "float32"))
        del array
        following = array_on(pool, 1 << 20)  # while `work` may be running
        following[:] = np.nan
        assert float(result) == wanted
        del following, result
    assert pool.nbytes <= 3 << 22


class Recorded:
    """A transport whose transfers finish when they are told to; it notes the order of starts."""

    def __init__(self) -> None:
        self.started: list[str] = []
        self.open: set[int] = set()

    def join(self, participants: tuple[int, ...]) -> None:
        pass

    def prepare(self, transfer: Transfer, dtypes: Sequence[str]) -> Any:
        def start(memory: Any) -> int:
            self.started.append(transfer.kind)
            self.open.add(len(self.started))
            return len(self.started)

        return start

    def done(self, requests: list[int]) -> bool:
        return not self.open.intersection(requests)

    def wait(self, requests: list[int]) -> None:
        self.open.difference_update(requests)


class Finishing(Recorded):
    """Transfers finish when they have been looked at so often."""

    looks_needed = 3

    def done(self, requests: list[int]) -> bool:
        self.looks_needed -= 1
        if self.looks_needed <= 0:
            self.open.difference_update(requests)
            self.looks_needed = 3
        return super().done(requests)


def exchanger(strategy: str, transport: Recorded, pool: Pool, members: int = 1) -> Exchanger:
    member = Member((8,), Partial("sum"), R)
    geometry = Geometry((0, 1), 0, "float32", 4, (member,) * members, None, ((0, 1),), (0,))
    return Exchanger(routine_of("all_reduce", strategy, geometry), transport, pool)


def test_stages_of_different_exchanges_start_in_one_order() -> None:
    transport, pool = Recorded(), Pool()
    lane = Lane(transport, poll=False)
    ring, flat = (exchanger(strategy, transport, pool) for strategy in ("ring", "hierarchical"))
    operand = [np.ones(8, np.float32)]
    first = lane.launch(ring, operand)
    second = lane.launch(flat, operand)
    assert transport.started == ["recv", "send"], "the second exchange waits for the first one's last stage"
    transport.open.clear()
    lane.look()
    assert transport.started == ["recv", "send", "recv", "send", "reduce"]
    lane.land(second)
    lane.land(first)
    assert transport.started[4:] == ["reduce", "all_reduce", "broadcast"]
    assert not lane.busy


class Computing:
    """Something that is computed after it was asked for so often."""

    def __init__(self, asked: int) -> None:
        self.left = asked

    def __call__(self) -> bool:
        self.left -= 1
        return self.left < 0


def test_exchanges_go_on_while_something_is_computed() -> None:
    transport, pool = Finishing(), Pool()
    lane = Lane(transport, poll=True)
    running = lane.launch(exchanger("ring", transport, pool), [np.ones(8, np.float32)])
    assert transport.started == ["recv", "send"]
    computing = Computing(100)
    lane.beside(computing)
    assert transport.started == ["recv", "send"] * 2 and running.finished, "all its rounds, by looks alone"
    assert computing.left > 0, "nobody looks at computation any more once no exchange is under way"
    transport.looks_needed = 10**9
    lane.launch(exchanger("ring", transport, pool), [np.ones(8, np.float32)])
    lane.beside(Computing(3))
    assert lane.busy and transport.started == ["recv", "send"] * 3, "computation may end first"


class Clock:
    """Time that passes while somebody sleeps, and 40 µs at every look at it."""

    def __init__(self) -> None:
        self.now = 0.0
        self.slept: list[float] = []

    def perf_counter(self) -> float:
        self.now += 4e-5
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


def test_a_rank_that_computes_is_woken_up_less_and_less(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, wire, pool = Clock(), Finishing(), Pool()
    monkeypatch.setattr(transport, "time", clock)
    wire.looks_needed = 10**9
    lane = Lane(wire, poll=True)
    lane.launch(exchanger("ring", wire, pool), [np.ones(8, np.float32)])
    lane.beside(lambda: clock.now > 0.1)
    assert clock.slept == sorted(clock.slept)
    assert clock.slept[0] == transport.POLL_S, "what is soon computed is not waited for much longer"
    assert clock.slept[-1] == transport.BESIDE_S
    assert len(clock.slept) < 1.5 * 0.1 / transport.BESIDE_S


def test_every_operand_of_a_message_is_copied_once() -> None:
    for strategy in ("ring", "rs_ag", "tree"):
        routine = exchanger(strategy, Recorded(), Pool(), members=3).routine
        copies = [local for stage in routine.stages for local in stage.locals if isinstance(local, Copy)]
        assert sorted(copy.source.buffer for copy in copies) == [0, 1, 2], (
            "packed; results lie where they came"
        )
        assert {view.buffer for view in routine.outputs} == {copy.target.buffer for copy in copies}


def test_members_of_a_message_share_memory_and_begin_aligned() -> None:
    transport, pool = Recorded(), Pool()
    lane = Lane(transport, poll=False)
    together = exchanger("tree", transport, pool, members=3)
    results = lane.land(lane.launch(together, [np.full(8, i, np.float32) for i in range(3)]))
    assert [r.ctypes.data % 64 for r in results] == [0, 0, 0]
    assert len({r.ctypes.data for r in results}) == 3
