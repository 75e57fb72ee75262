"""The order in which a rank computes and exchanges: exchanges leave early, arrive late, and travel together.

Without buckets that is the program's order, every message holds one exchange and lands as soon as it was
launched. With buckets, an exchange leaves as soon as its operand is there, in one message with others of its
kind; computation that waits for no message goes on first; and a message lands when nothing else is left to
compute. Gathers take memory, so they leave early only while what was gathered and not yet read is no more
than a bucket. The order follows from program and graph alone: it is the same on every rank.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TypeAlias

from shardwright.backends.schedule.acts import Act, Land, Launch, Message, Order, Repeat
from shardwright.backends.schedule.geometry import MERGED
from shardwright.ir.collectives import gathered_as, together
from shardwright.ir.dtypes import is_key
from shardwright.ir.flow import Flow, inputs, is_local, outputs
from shardwright.ir.graph import Graph
from shardwright.ir.hoist import hoisted
from shardwright.ir.late import Run, late
from shardwright.ir.placement import Grid, Partial, Placement
from shardwright.ir.program import Compute, Loop, Program, Property
from shardwright.ir.repeated import begins_again
from shardwright.ir.segments import Relay, Segment, check_order

#: Messages under way at most; another one lands the first. They keep operands and results alive.
UNDER_WAY = 16


def arrange(program: Program, graph: Graph, bucket_bytes: int | None = None, *, near: bool = False) -> Order:
    """Order a verified program.

    Args:
        program: the program.
        graph: what it computes.
        bucket_bytes: exchanges of one kind travel together up to so many bytes; None: one by one, and where
            the program has them.
        near: whether all devices share a node.
    """
    return _Arranger(bucket_bytes, near).order(program, graph)


class _Arranger:
    """Numbers messages through all bodies."""

    def __init__(self, bucket_bytes: int | None, near: bool) -> None:
        self.bucket_bytes, self.near = bucket_bytes, near
        self.count = 0

    def order(self, program: Program, graph: Graph) -> Order:
        program, stood = hoisted(program, graph)
        flow = Flow(program, graph)
        steps = self._steps(flow, self._acts(flow), self._runs(flow))
        check_order(steps, inputs(program, graph))
        return Order(program, graph, _with_lifetimes(steps, outputs(program, graph)), flow.types, stood)

    def message(self, flow: Flow, positions: Sequence[int], after: Iterable[int] = ()) -> Message:
        moves = [flow.move(i) for i in positions]
        number, self.count = self.count, self.count + 1
        exchanges = [(flow.move(i).strategy, flow.nbytes(i)) for i in positions]
        strategy = together(moves[0].kind, exchanges, near=self.near)
        return Message(
            number,
            min(positions),
            tuple(positions),
            tuple(m if m.strategy == strategy else replace(m, strategy=strategy) for m in moves),
            tuple(flow.needs[i][0] for i in positions),
            tuple(flow.gives[i][0] for i in positions),
            tuple(sorted(after)),
        )

    def _as_written(self, flow: Flow) -> Iterator[_Act]:
        of: dict[int, set[int]] = {}
        for position in range(len(flow.program.instructions)):
            before = {m for p in flow.producers[position] for m in of[p]}
            of[position] = before
            if flow.exchange[position]:
                message = self.message(flow, [position], before)
                of[position] = {message.number}
                yield "launch", message
                yield "land", message
            else:
                yield "compute", position

    def _acts(self, flow: Flow) -> Iterator[_Act]:
        if self.bucket_bytes is None:
            return self._as_written(flow)
        return _Early(self, flow, self.bucket_bytes).acts()

    def _runs(self, flow: Flow) -> list[Run]:
        """What is computed before, between and after the other acts."""
        count = self.count
        runs: list[list[int]] = [[]]
        between: list[tuple[int, ...]] = []
        for act, what in self._acts(flow):
            if isinstance(what, Message):
                between.append(what.positions if act == "launch" else ())
            elif is_local(flow.program.instructions[what], flow.graph):
                if _ends(flow, runs[-1], what):
                    between.append(())
                    runs.append([])
                runs[-1].append(what)
                continue
            else:
                between.append((what,))
            runs.append([])
        self.count = count  # nothing is numbered yet
        return late(flow, runs, between)

    def _steps(self, flow: Flow, acts: Iterable[_Act], runs: Sequence[Run]) -> list[Act]:
        steps: list[Act] = []
        rest = iter(runs)

        def segment() -> bool:
            run = next(rest)
            if run.positions:
                instructions = tuple(flow.program.instructions[i] for i in run.positions)
                steps.append(Segment(run.first, instructions, *run.interface(flow)))
            return bool(run.positions)

        leaving: list[Act] = []
        pending: list[int] = []
        for act, what in acts:
            if isinstance(what, int) and is_local(flow.program.instructions[what], flow.graph):
                if _ends(flow, pending, what):
                    segment()
                    steps += leaving
                    leaving.clear()
                    pending.clear()
                pending.append(what)
                continue
            pending.clear()
            # The segment that follows a launch is handed to the device before the launch waits for its
            # operand, so that the device does not pause meanwhile.
            if segment() or act != "launch":
                steps += leaving
                leaving.clear()
            if isinstance(what, int):
                loop = flow.program.instructions[what]
                if isinstance(loop, Compute):
                    steps.append(Relay(what, loop, flow.needs[what], flow.gives[what]))
                    continue
                assert isinstance(loop, Loop)
                regions = flow.graph.equations[loop.equation].regions
                bodies = tuple(
                    self.order(body, region) for body, region in zip(loop.bodies, regions, strict=True)
                )
                steps.append(Repeat(what, loop, bodies, flow.needs[what], flow.gives[what]))
            elif act == "launch":
                leaving.append(Launch(what, tuple(dict.fromkeys(what.needs))))
            else:
                steps.append(Land(what, what.gives))
        segment()
        return steps + leaving


def _ends(flow: Flow, pending: Sequence[int], position: int) -> bool:
    """Whether a segment of the `pending` instructions ends before another, which computes something again."""
    instructions = flow.program.instructions
    before = (instructions[i] for i in pending)
    return bool(pending) and begins_again(instructions[position], flow.graph, before)


_Act: TypeAlias = tuple[str, "int | Message"]
_Kind: TypeAlias = tuple[object, ...]


class _Early:
    """List scheduling; see the head of this file."""

    def __init__(self, arranger: _Arranger, flow: Flow, bucket_bytes: int) -> None:
        self.arranger, self.flow, self.bucket_bytes = arranger, flow, bucket_bytes
        self.missing = [len(producers) for producers in flow.producers]
        self.key = _urgency(flow)
        self.ready: list[tuple[int, int]] = []
        self.buckets: dict[_Kind, list[int]] = {}
        self.under_way: deque[Message] = deque()
        self.gathers: list[int] = []  # whose operand is there, and which may not leave yet
        self.ahead: dict[int, int] = {}  # bytes of gathers that left and were not read yet, by position
        self.of: list[set[int]] = [set() for _ in flow.producers]

    def acts(self) -> Iterator[_Act]:
        for position, count in enumerate(self.missing):
            if not count:
                yield from self._released(position)
        while True:
            while self.ready:
                _, position = heapq.heappop(self.ready)
                for producer in self.flow.producers[position]:
                    self.of[position] |= self.of[producer]
                yield "compute", position
                yield from self._done(position)
            if self.buckets:
                yield from self._close(next(iter(self.buckets)))
            elif self.under_way:
                yield from self._land()
            elif self.gathers:
                yield from self._leave(heapq.heappop(self.gathers))
            else:
                return

    def _done(self, position: int) -> Iterator[_Act]:
        """An instruction's results are there."""
        for producer in self.flow.producers[position]:
            self.ahead.pop(producer, None)  # from now on it is there wherever it was gathered
        for follower in self.flow.consumers[position]:
            self.missing[follower] -= 1
            if not self.missing[follower]:
                yield from self._released(follower)
        while (
            self.gathers and sum(self.ahead.values()) + self.flow.nbytes(self.gathers[0]) <= self.bucket_bytes
        ):
            yield from self._leave(heapq.heappop(self.gathers))

    def _released(self, position: int) -> Iterator[_Act]:
        """An instruction's operands are there."""
        if not self.flow.exchange[position]:
            heapq.heappush(self.ready, (self.key[position], position))
        elif isinstance(self.flow.move(position).pre, Partial):
            yield from self._leave(position)
        else:
            heapq.heappush(self.gathers, position)

    def _leave(self, position: int) -> Iterator[_Act]:
        """Into a bucket."""
        nbytes, kind = self.flow.nbytes(position), _kind(self.flow, position)
        if not isinstance(self.flow.move(position).pre, Partial):
            self.ahead[position] = nbytes
        held = sum(map(self.flow.nbytes, self.buckets.get(kind, ())))
        if held and held + nbytes > self.bucket_bytes:
            yield from self._close(kind)
        self.buckets.setdefault(kind, []).append(position)
        if held + nbytes >= self.bucket_bytes:
            yield from self._close(kind)

    def _close(self, kind: _Kind) -> Iterator[_Act]:
        """The bucket leaves as a message."""
        positions = self.buckets.pop(kind, None)
        if positions is None:
            return
        if len(self.under_way) >= UNDER_WAY:
            yield from self._land()
        before = {m for i in positions for p in self.flow.producers[i] for m in self.of[p]}
        message = self.arranger.message(self.flow, positions, before)
        for position in positions:
            self.of[position] = {message.number}
        self.under_way.append(message)
        yield "launch", message

    def _land(self) -> Iterator[_Act]:
        message = self.under_way.popleft()
        yield "land", message
        for position in message.positions:
            yield from self._done(position)


def _kind(flow: Flow, position: int) -> _Kind:
    """Exchanges of equal kind may share a message."""
    move = flow.move(position)
    tensor = flow.types[move.value]
    if move.kind not in MERGED or is_key(tensor.dtype):
        return (position,)
    if isinstance(move.pre, Grid) or isinstance(move.post, Grid):
        return (position,)  # its groups are its own

    def shape(placement: Placement) -> object:
        return placement if isinstance(placement, Partial) else type(placement)

    strategy = gathered_as(move.kind, move.strategy)
    return move.kind, strategy, shape(move.pre), shape(move.post), move.group, tensor.dtype


def _urgency(flow: Flow) -> list[int]:
    """What instructions that can run are sorted by: the program's order, what a reduction waits for first."""
    count = len(flow.program.instructions)
    urgent = [False] * count
    for position in reversed(range(count)):
        if flow.exchange[position]:
            urgent[position] = isinstance(flow.move(position).pre, Partial)
        else:
            after = flow.consumers[position]
            urgent[position] = any(urgent[i] and (flow.exchange[i] or len(flow.needs[i]) == 1) for i in after)
    key = list(range(count))
    for position in range(count):
        if urgent[position] and flow.producers[position]:
            key[position] = max(key[i] for i in flow.producers[position])
    return key


def _with_lifetimes(steps: Sequence[Act], kept: Iterable[Property]) -> tuple[Act, ...]:
    """Drop everything after its last reader; segments hand on only what is read later."""
    live = set(kept)
    result: list[Act] = []
    for step in reversed(steps):
        if isinstance(step, Segment):
            step = replace(step, gives=tuple(prop for prop in step.gives if prop in live))
        drops = tuple(prop for prop in dict.fromkeys((*step.needs, *step.gives)) if prop not in live)
        result.append(replace(step, drops=drops))
        live.difference_update(step.gives)  # what is established anew need not live until then
        live.update(step.needs)
    result.reverse()
    return tuple(result)
