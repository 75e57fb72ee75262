"""The order in which a rank computes and exchanges: exchanges leave early, arrive late, and travel together.

    order ::= step*
    step  ::= segment     instructions that every device runs alone, as one compiled function
            | launch      a message leaves: the exchanges in it are started
            | land        it has arrived: its results may be read
            | loop        a loop whose body exchanges: its orders, run iteration by iteration

Without buckets that is the program's order, every message holds one exchange and lands as soon as it was
launched. With buckets, an exchange leaves as soon as its operand is there, in one message with others of its
kind; computation that waits for no message goes on first; and a message lands when nothing else is left to
compute. Gathers take memory, so they leave early only while what was gathered and not yet read is no more
than a bucket. The order follows from program and graph alone: it is the same on every rank.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import TypeAlias

import numpy as np

from shardwright.backends.layout import dtype_of, is_key
from shardwright.backends.schedule_lower import MERGED
from shardwright.backends.segments import Segment, find, inputs, is_local, outputs, reads, writes
from shardwright.ir.graph import Graph, TensorType
from shardwright.ir.placement import Grid, Partial, Placement
from shardwright.ir.program import Instruction, Loop, Move, Program, Property
from shardwright.ir.recompute import begins_again

#: Messages under way at most; another one lands the first. They keep operands and results alive.
UNDER_WAY = 16


@dataclass(frozen=True, slots=True, eq=False)
class Message:
    """Exchanges that travel together.

    Attributes:
        number: in the order of the whole step, loop bodies included.
        first: position of the first exchange in its program.
        positions: of all of them.
        moves: the exchanges.
        needs: operands, one per exchange.
        gives: results, one per exchange.
        after: numbers of messages of the same program whose results its operands were made from.
    """

    number: int
    first: int
    positions: tuple[int, ...]
    moves: tuple[Move, ...]
    needs: tuple[Property, ...]
    gives: tuple[Property, ...]
    after: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Launch:
    """A message leaves."""

    message: Message
    needs: tuple[Property, ...]
    gives: tuple[Property, ...] = ()
    drops: tuple[Property, ...] = ()

    @property
    def first(self) -> int:
        return self.message.first


@dataclass(frozen=True, slots=True, eq=False)
class Land:
    """A message has arrived."""

    message: Message
    gives: tuple[Property, ...]
    needs: tuple[Property, ...] = ()
    drops: tuple[Property, ...] = ()

    @property
    def first(self) -> int:
        return self.message.first


@dataclass(frozen=True, slots=True, eq=False)
class Repeat:
    """A loop run by the host; `bodies` are in the order of the equation's regions."""

    first: int
    loop: Loop
    bodies: tuple[Order, ...]
    needs: tuple[Property, ...]
    gives: tuple[Property, ...]
    drops: tuple[Property, ...] = ()


Act: TypeAlias = Segment | Launch | Land | Repeat


@dataclass(frozen=True, slots=True, eq=False)
class Order:
    """The steps of `program` over `graph`, and the global types of its values by index."""

    program: Program
    graph: Graph
    steps: tuple[Act, ...]
    types: dict[int, TensorType]

    def messages(self) -> Iterator[tuple[Order, Message]]:
        """All messages, those of loop bodies where the loop is, with the order that they are in."""
        for step in self.steps:
            if isinstance(step, Launch):
                yield self, step.message
            elif isinstance(step, Repeat):
                for body in step.bodies:
                    yield from body.messages()


def arrange(program: Program, graph: Graph, bucket_bytes: int | None = None) -> Order:
    """Order a verified program.

    Args:
        program: the program.
        graph: what it computes.
        bucket_bytes: exchanges of one kind travel together up to so many bytes; None: one by one, and where
            the program has them.
    """
    return _Arranger(bucket_bytes).order(program, graph)


def nbytes_of(tensor: TensorType) -> int:
    """Bytes of a tensor; of keys, nominal ones."""
    return prod(tensor.shape) * (8 if is_key(tensor.dtype) else np.dtype(dtype_of(tensor.dtype)).itemsize)


_Kind: TypeAlias = tuple[object, ...]


class _Arranger:
    """Numbers messages through all bodies."""

    def __init__(self, bucket_bytes: int | None) -> None:
        self.bucket_bytes = bucket_bytes
        self.count = 0

    def order(self, program: Program, graph: Graph) -> Order:
        flow = _Flow(program, graph)
        acts = self._early(flow) if self.bucket_bytes is not None else self._as_written(flow)
        steps = self._steps(flow, acts)
        return Order(program, graph, _with_lifetimes(steps, outputs(program, graph)), flow.types)

    def message(self, flow: _Flow, positions: Sequence[int], after: Iterable[int] = ()) -> Message:
        moves = tuple(flow.program.instructions[i] for i in positions)
        number, self.count = self.count, self.count + 1
        return Message(
            number,
            min(positions),
            tuple(positions),
            tuple(move for move in moves if isinstance(move, Move)),
            tuple(flow.needs[i][0] for i in positions),
            tuple(flow.gives[i][0] for i in positions),
            tuple(sorted(after)),
        )

    def _as_written(self, flow: _Flow) -> Iterator[_Act]:
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

    def _early(self, flow: _Flow) -> Iterator[_Act]:
        yield from _Early(self, flow, self.bucket_bytes or 0).acts()

    def _steps(self, flow: _Flow, acts: Iterable[_Act]) -> list[Act]:
        steps: list[Act] = []
        pending: list[int] = []

        def flush() -> None:
            if not pending:
                return
            found = tuple(flow.program.instructions[i] for i in pending)
            given = dict.fromkeys(prop for i in pending for prop in flow.gives[i])
            made: set[Property] = set()
            needed: dict[Property, None] = {}
            for i in pending:
                needed |= dict.fromkeys(prop for prop in flow.needs[i] if prop not in made)
                made.update(flow.gives[i])
            steps.append(Segment(min(pending), found, tuple(needed), tuple(given)))
            pending.clear()

        leaving: list[Act] = []
        for act, what in acts:
            if act == "compute":
                assert isinstance(what, int)
                instruction = flow.program.instructions[what]
                if is_local(instruction, flow.graph):
                    if begins_again(instruction, flow.graph, [flow.program.instructions[i] for i in pending]):
                        flush()
                        steps += leaving
                        leaving.clear()
                    pending.append(what)
                    continue
                # The segment that follows a launch is handed to the device before the launch waits for its
                # operand, so that the device does not pause meanwhile.
                flush()
                steps += leaving
                leaving.clear()
                assert isinstance(instruction, Loop)
                regions = flow.graph.equations[instruction.equation].regions
                bodies = tuple(
                    self.order(body, region) for body, region in zip(instruction.bodies, regions, strict=True)
                )
                steps.append(Repeat(what, instruction, bodies, flow.needs[what], flow.gives[what]))
                continue
            assert isinstance(what, Message)
            if pending:
                flush()
                steps += leaving
                leaving.clear()
            if act == "launch":
                leaving.append(Launch(what, tuple(dict.fromkeys(what.needs))))
            else:
                steps += leaving
                leaving.clear()
                steps.append(Land(what, what.gives))
        flush()
        return steps + leaving


_Act: TypeAlias = tuple[str, "int | Message"]


class _Flow:
    """What each instruction reads, writes and waits for."""

    def __init__(self, program: Program, graph: Graph) -> None:
        self.program, self.graph = program, graph
        self.types = {value.index: value.type for value in graph.values()}
        held: dict[int, list[Property]] = {}
        made_by: dict[Property, int] = {}
        made_first: dict[int, int] = {}
        for prop in inputs(program, graph):
            held.setdefault(prop.value, []).append(prop)
        self.needs: list[tuple[Property, ...]] = []
        self.gives: list[tuple[Property, ...]] = []
        self.producers: list[set[int]] = []
        self.consumers: list[list[int]] = [[] for _ in program.instructions]
        for position, instruction in enumerate(program.instructions):
            needs = tuple(
                dict.fromkeys(find(want, held.get(want.value, ())) for want in reads(instruction, graph))
            )
            gives = writes(instruction, graph)
            producers = {made_by[prop] for prop in needs if prop in made_by}
            producers |= _waits_for(instruction, graph, made_first)
            for producer in producers:
                self.consumers[producer].append(position)
            for prop in gives:
                known = held.setdefault(prop.value, [])
                if prop not in known:
                    known.append(prop)
                made_by[prop] = position
                made_first.setdefault(prop.value, position)
            self.needs.append(needs)
            self.gives.append(gives)
            self.producers.append(producers)
        self.exchange = [isinstance(i, Move) and not is_local(i) for i in program.instructions]

    def move(self, position: int) -> Move:
        """The exchange at a position."""
        move = self.program.instructions[position]
        assert isinstance(move, Move)
        return move

    def nbytes(self, position: int) -> int:
        """Bytes of the tensor that an exchange is about."""
        return nbytes_of(self.types[self.move(position).value])

    def kind(self, position: int) -> _Kind:
        """Exchanges of equal kind may share a message."""
        move = self.move(position)
        tensor = self.types[move.value]
        if move.kind not in MERGED or is_key(tensor.dtype):
            return (position,)
        if isinstance(move.pre, Grid) or isinstance(move.post, Grid):
            return (position,)  # its groups are its own

        def shape(placement: Placement) -> object:
            return placement if isinstance(placement, Partial) else type(placement)

        return move.kind, move.strategy, shape(move.pre), shape(move.post), move.group, tensor.dtype


def _waits_for(instruction: Instruction, graph: Graph, made_first: Mapping[int, int]) -> set[int]:
    """Where what an instruction is not to run before is made, beside its operands."""
    after = None if isinstance(instruction, Move) else graph.equations[instruction.equation].after
    return {made_first[after.index]} if after is not None and after.index in made_first else set()


class _Early:
    """List scheduling; see the head of this file."""

    def __init__(self, arranger: _Arranger, flow: _Flow, bucket_bytes: int) -> None:
        self.arranger, self.flow, self.bucket_bytes = arranger, flow, bucket_bytes
        self.missing = [len(producers) for producers in flow.producers]
        self.unread = [len(consumers) for consumers in flow.consumers]
        self.ready: list[int] = []
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
                position = heapq.heappop(self.ready)
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
            self.unread[producer] -= 1
            if not self.unread[producer]:
                self.ahead.pop(producer, None)
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
            heapq.heappush(self.ready, position)
        elif isinstance(self.flow.move(position).pre, Partial):
            yield from self._leave(position)
        else:
            heapq.heappush(self.gathers, position)

    def _leave(self, position: int) -> Iterator[_Act]:
        """Into a bucket."""
        nbytes, kind = self.flow.nbytes(position), self.flow.kind(position)
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


def instructions_of(step: Act) -> tuple[Instruction, ...]:
    """What a step carries out."""
    if isinstance(step, Segment):
        return step.instructions
    return (step.loop,) if isinstance(step, Repeat) else step.message.moves
