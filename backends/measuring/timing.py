"""Times kernels and exchanges on MPI ranks, in the way a plan runs them.

All ranks run a kernel at the same time, because those of one machine share its memory and perhaps its
cores. An exchange is timed as it stands in a plan: on data that are in no cache, after another exchange, and
after a segment. Rounds visit every case once, so that a drift of the machine meets all alike.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import pairwise, product
from math import isqrt
from statistics import mean
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from shardwright.backends.direct import DirectExchanger
from shardwright.backends.layout import stretches, to_numpy, wire_type
from shardwright.backends.load import Usage, others
from shardwright.backends.measuring.kernel_cases import KernelCase, compiled, copies, is_cold
from shardwright.backends.mpi.moves import lowerings, mpi
from shardwright.backends.wire import on_host, to_segment
from shardwright.backends.world import World
from shardwright.ir.collectives import registry
from shardwright.ir.graph import TensorType
from shardwright.ir.placement import Partial, Placement, R, Shard
from shardwright.ir.program import Move

#: Told how many of how many cases are compiled and samples taken.
Tick = Callable[[int, int], None]

#: Takes one sample: one or several times in seconds.
Timer: TypeAlias = Callable[[], list[float]]

#: A kernel is repeated until about so long has passed, but not more often than MOST_TIMES.
KERNEL_SAMPLE_S = 1.2e-2
MOST_TIMES = 64
#: And a piece of a step so many times, because what comes before each run takes long.
PIECES = 3
#: A segment fills the caches with other things: so many bytes are read and written before an exchange.
COLD_BYTES = 1 << 24
#: The same on a card, where it takes no time; caches of newer ones hold 60 MB (H100, by its datasheet 50).
CARD_COLD_BYTES = 1 << 28
#: Exchanges of so many bytes are timed after a segment that takes its time, too: this one.
RESUMED_BYTES = 1 << 16
SEGMENT = KernelCase("backward:mlp", (8, 64, 256, 512))
#: And after one that adds two numbers, as between the reductions of one gradient and the next.
BRIEF = KernelCase("dispatch", ())
#: Up to so many bytes, so many exchanges are timed together, behind one that is not timed: a rank that is
#: ahead waits in the next, so that the slowest of the ranks tells what an exchange takes, not who was late.
CHAINS = ((1 << 16, 4), (1 << 20, 2), (1 << 62, 1))
#: Cases whose common load is read at a time: enough for the system's ticks of a hundredth of a second.
BLOCK = 24
#: Part of the cores that others may use while a sample is taken that counts as undisturbed.
QUIET = 0.1


@dataclass(frozen=True, slots=True)
class ExchangeCase:
    """A float32 tensor of about `nbytes` carried by a strategy, cut in `ratios` where it is cut."""

    kind: str
    strategy: str
    nbytes: int
    ratios: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Request:
    """What to time.

    Attributes:
        exchanges, kernels: the cases.
        rounds: samples of each.
        patience_s: how long to go on in search of samples that nobody disturbed.
    """

    exchanges: tuple[ExchangeCase, ...] = ()
    kernels: tuple[KernelCase, ...] = ()
    rounds: int = 7
    patience_s: float = 0.0

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Request:
        """Inverse of `dataclasses.asdict`, also after a passage through JSON."""
        exchanges = (
            ExchangeCase(e["kind"], e["strategy"], e["nbytes"], tuple(e["ratios"])) for e in data["exchanges"]
        )
        kernels = (
            KernelCase(k["op"], tuple(k["shape"]), k["dtype"], k["precision"]) for k in data["kernels"]
        )
        return Request(tuple(exchanges), tuple(kernels), data["rounds"], data["patience_s"])


@dataclass(frozen=True, slots=True)
class RankInfo:
    """What a rank runs on.

    Attributes:
        host: its machine.
        device: what JAX calls its device.
        memory_bytes: of the device; of a processor, the rank's part of the machine's memory.
        cores: that it may use.
    """

    host: str
    device: str
    memory_bytes: int
    cores: int


@dataclass(frozen=True, slots=True)
class Resumed:
    """Segments and an exchange, in seconds, one per round.

    Attributes:
        through_s: a segment that takes its time and the exchange after it, of the slowest rank.
        brief_s: after an exchange, the briefest of segments and another exchange, of the slowest rank.
        alone_s: the former segment alone, of all ranks' mean.
        empty_s: one of many operands and no work, the caches full of other things, of all ranks' mean.
    """

    through_s: tuple[float, ...]
    brief_s: tuple[float, ...]
    alone_s: tuple[float, ...]
    empty_s: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Measured:
    """What came out; times are in seconds, one per round.

    Attributes:
        exchange_s: per case: of the slowest rank, one exchange following another.
        resumed: per case, what it takes beside segments; None but for exchanges of `RESUMED_BYTES`.
        kernel_s: per rank and case: of one kernel.
        ranks: what each runs on.
        others: part of the cores of the busiest machine that other processes, or other guests of its host,
            used during the samples kept; None where the system does not say.
    """

    exchange_s: tuple[tuple[float, ...], ...]
    resumed: tuple[Resumed | None, ...]
    kernel_s: tuple[tuple[tuple[float, ...], ...], ...]
    ranks: tuple[RankInfo, ...]
    others: float | None


def measure(request: Request, comm: Any = None, tick: Tick = lambda done, total: None) -> Measured:
    """Measure on the ranks of `comm`; all of them must call it, and all get the same answer."""
    comm = mpi().COMM_WORLD if comm is None else comm
    meet = World((1.0 / comm.size,) * comm.size, comm)
    worlds = {case.ratios: World(case.ratios, comm) for case in request.exchanges}
    kernels = len(request.kernels)
    # Compiling a case takes about as long as some blocks of samples: on a card, seconds.
    total = kernels + request.rounds * len(_blocks(kernels + len(request.exchanges)))
    runs: list[Timer] = []
    for case in request.kernels:
        runs.append(_kernel_timer(case))
        tick(len(runs), total)
    runs += [_exchange_timer(case, worlds[case.ratios], meet) for case in request.exchanges]
    taken, load = _quietest(runs, request, meet, lambda done, _: tick(kernels + done, total))
    of_ranks = comm.allgather(taken)

    def together(case: int, part: int, of: Callable[[Sequence[float]], float] = max) -> tuple[float, ...]:
        """Of the ranks, by round."""
        by_round = zip(*(ranks[case] for ranks in of_ranks), strict=True)
        return tuple(of([sample[part] for sample in samples]) for samples in by_round)

    def resumed(case: int) -> Resumed | None:
        if len(taken[case][0]) == 1:
            return None
        return Resumed(together(case, 1), together(case, 2), together(case, 3, mean), together(case, 4, mean))

    exchanges = range(kernels, len(runs))
    return Measured(
        exchange_s=tuple(together(case, 0) for case in exchanges),
        resumed=tuple(map(resumed, exchanges)),
        kernel_s=tuple(
            tuple(tuple(t for (t,) in samples) for samples in mine[:kernels]) for mine in of_ranks
        ),
        ranks=tuple(comm.allgather(_rank_info(comm))),
        others=load,
    )


def _blocks(cases: int) -> list[range]:
    """Cases whose common load is read at a time."""
    return [range(first, min(first + BLOCK, cases)) for first in range(0, cases, BLOCK)]


def _quietest(
    runs: Sequence[Timer], request: Request, meet: World, tick: Tick
) -> tuple[list[list[list[float]]], float | None]:
    """`request.rounds` samples of each, from the moments when others used the machine least, and that use.

    Cases are timed in blocks, and each block's load is known. Blocks that were disturbed are timed again as
    long as patience lasts.
    """
    blocks = _blocks(len(runs))
    records: list[list[tuple[float, list[list[float]]]]] = [[] for _ in blocks]
    gauge = LoadGauge(meet.comm)
    total = request.rounds * len(blocks)

    def time_block(number: int) -> None:
        gauge.start()
        samples: list[list[float]] = []
        for case in blocks[number]:
            meet.wait([meet.comm.Ibarrier()])
            samples.append(runs[case]())
        records[number].append((gauge.stop(), samples))

    def missing() -> list[int]:
        quiet = [sum(load <= QUIET for load, _ in record) for record in records]
        return [number for number, good in enumerate(quiet) if good < request.rounds]

    for turn in range(request.rounds):
        for number in range(len(blocks)):
            time_block(number)
            tick(turn * len(blocks) + number + 1, total)
    deadline = time.monotonic() + request.patience_s
    while meet.comm.bcast(bool(missing()) and time.monotonic() < deadline):
        for number in missing():
            time_block(number)
    kept = [sorted(record, key=lambda entry: entry[0])[: request.rounds] for record in records]
    taken = [[samples[i] for _, samples in record] for record in kept for i in range(len(record[0][1]))]
    loads = [load for record in kept for load, _ in record]
    return taken, None if not gauge.known else sum(loads) / max(1, len(loads))


def _kernel_timer(case: KernelCase) -> Timer:
    """Seconds of a kernel; pieces of steps find the caches full of other things, as segments of a plan do."""
    run = compiled(case)
    if is_cold(case):

        def once() -> float:
            _fill_caches().block_until_ready()
            begin = time.perf_counter()
            run()
            return time.perf_counter() - begin

        return lambda: [sum(once() for _ in range(PIECES)) / PIECES]
    run()
    begin = time.perf_counter()
    run()
    times = max(1, min(MOST_TIMES, round(KERNEL_SAMPLE_S / (time.perf_counter() - begin))))

    def timer() -> list[float]:
        begin = time.perf_counter()
        for _ in range(times):
            run()
        return [(time.perf_counter() - begin) / (times * copies(case))]

    return timer


def _exchange_timer(case: ExchangeCase, world: World, meet: World) -> Timer:
    """Seconds of an exchange that follows another; at one size, then those of `Resumed`."""
    move, tensor = example(case.kind, case.strategy, case.nbytes)
    world.join([move.group])
    lengths = stretches(tensor, move.pre, move.group, world.ratios)
    shape = list(tensor.shape)
    if isinstance(move.pre, Shard):
        shape[move.pre.dim] = lengths[world.rank]
    # The data of later exchanges are not in the caches, but what runs them is.
    chain = next(times for most, times in CHAINS if case.nbytes <= most)
    values = [jnp.full(tuple(shape), number, tensor.dtype) for number in range(chain + 1)]
    carry = _carrier(world, move, tensor)
    moves = [partial(carry, value) for value in values]
    resumes = case.nbytes == RESUMED_BYTES
    trivial = _compiled(KernelCase("start", ()))
    brief, segment = (_compiled(BRIEF), _compiled(SEGMENT)) if resumes else (trivial, trivial)

    def timed(*steps: Callable[[], Any]) -> list[float]:
        _fill_caches().block_until_ready()
        meet.wait([meet.comm.Ibarrier()])
        times = [time.perf_counter()]
        for step in steps:
            step()
            times.append(time.perf_counter())
        return [end - begin for begin, end in pairwise(times)]

    def once() -> list[float]:
        following_s = mean(timed(trivial, *moves)[2:])
        if not resumes:
            return [following_s]
        begin, *rest = moves
        through_s = sum(timed(segment, begin))
        brief_s = sum(timed(begin, *(step for one in rest for step in (brief, one)))[1:]) / len(rest)
        return [following_s, through_s, brief_s, *timed(segment), *timed(trivial)]

    def sample() -> list[float]:
        meet.wait([meet.comm.Ibarrier()])
        for one in moves[:2]:  # in a plan the memory of an exchange is that of the step before
            one()
        found = [sum(pair) / 2 for pair in zip(once(), once(), strict=True)]
        world.pool.clear()  # the next case has other sizes
        return found

    return sample


def _carrier(world: World, move: Move, tensor: TensorType) -> Callable[[Any], Any]:
    """Carries an exchange out as a plan's script does: prepared, and with a result for a segment to read."""
    exchanger = None if (move.kind, move.strategy) in lowerings() else world.exchanger((move,), (tensor,))
    if exchanger is None or isinstance(exchanger, DirectExchanger):
        return partial(world.move, move, tensor)
    nothing = np.empty(0, wire_type(tensor)[1])

    def carry(value: Any) -> Any:
        operand = nothing if value is None else to_numpy(value)
        (result,) = world.lane.land(world.lane.launch(exchanger, [operand]))
        return value if exchanger.same[0] else to_segment(result, tensor.dtype)

    return carry


_compiled = cache(compiled)


@cache
def _cold() -> jax.Array:
    return jnp.zeros((COLD_BYTES if on_host() else CARD_COLD_BYTES) // 4)


def _fill_caches() -> jax.Array:
    """What a segment does to the caches: read and write other things."""
    return _negative(_cold())


_negative = jax.jit(jnp.negative)


def example(kind: str, strategy: str, nbytes: int) -> tuple[Move, TensorType]:
    """A move of this kind over all devices (rooted between two: the first two), of a nearly square matrix."""
    collective = registry()[kind]
    placements: tuple[Placement, ...] = (Shard(0), Partial("sum"), R)
    goals: tuple[Placement, ...] = (R, Shard(0), Shard(1))
    pre, post = next(pair for pair in product(placements, goals) if collective.allows(*pair))
    elements = max(1, nbytes // 4)
    rows = isqrt(elements)
    group = (0, 1) if kind == "send" else None
    move = Move(kind, 0, pre, post, strategy, group, 0 if collective.rooted else None)
    return move, TensorType((rows, elements // rows), "float32")


def _rank_info(comm: Any) -> RankInfo:
    here = comm.Split_type(mpi().COMM_TYPE_SHARED)
    device = jax.devices()[0]
    stats: Mapping[str, int] = getattr(device, "memory_stats", lambda: None)() or {}
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    memory = stats.get("bytes_limit") or whole // here.size
    here.Free()
    return RankInfo(socket.gethostname(), device.device_kind, memory, len(os.sched_getaffinity(0)))


class LoadGauge:
    """Part of the cores of the busiest machine of a job that others use; all ranks call it together."""

    def __init__(self, comm: Any) -> None:
        self.comm = comm
        self.here = comm.Split_type(mpi().COMM_TYPE_SHARED)
        self.known: bool = all(comm.allgather(Usage.now() is not None))
        self._start: Usage | None = None

    def start(self) -> None:
        """From now on."""
        self._start = Usage.now()

    def stop(self) -> float:
        """Until now; 0 where the system does not say."""
        end = Usage.now()
        if not self.known or self._start is None or end is None:
            return 0.0
        own = sum(self.here.allgather(end.own_s - self._start.own_s))
        return max(self.comm.allgather(others(self._start, end, own, os.cpu_count() or 1)))
