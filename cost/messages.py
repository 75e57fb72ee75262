"""Exchanges gathered into messages, and taken as early as their inputs allow, for `timeline.py`.

Every exchange moves up to where its input is ready, into a bucket of its kind: what may share a message is
carried out in one way, between the same placements, equally often. A bucket leaves as one message when the
next member would not fit, when a kernel needs one of its members, or when a loop begins or ends.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from shardwright.cost.bill import Item, Shares, Token
from shardwright.cost.model import CostModel
from shardwright.cost.share_cost import Floats
from shardwright.ir.collectives import gathered_as, together
from shardwright.ir.graph import TensorType

#: What exchanges have in common that may share a message; the last of it is how often they happen.
_Kind: TypeAlias = tuple[object, ...]


@dataclass(frozen=True, slots=True)
class Step:
    """A kernel, or the exchanges of one message, sent by `strategy`; seconds by device."""

    items: tuple[Item, ...]
    seconds: Floats
    strategy: str = ""

    @property
    def label(self) -> str:
        """Of its span."""
        first = self.items[0]
        if first.move is None or len(self.items) == 1:
            return first.label
        return f"{first.move.kind}.{self.strategy} × {len(self.items)}"


def seconds_of(item: Item, shares: Shares) -> Floats:
    """Seconds that an item takes each device."""
    return item.weight * shares.per_device(item.cost, item.cut)


def gathered(
    items: Sequence[Item],
    model: CostModel,
    shares: Shares,
    seconds: Mapping[int, Floats],
    bucket_bytes: int,
) -> Iterator[Step]:
    """Kernels in their order, and every exchange where its input is ready, gathered into messages.

    Args:
        items: in execution order.
        model: prices messages.
        shares: of the devices.
        seconds: by the id of an item, what it takes every device.
        bucket_bytes: largest message that gathers exchanges; 0 gathers none.
    """
    return _Gathering(items, model, shares, bucket_bytes).steps(items, seconds)


class _Gathering:
    """The messages under way: buckets that are open, and exchanges that wait for their input."""

    def __init__(self, items: Sequence[Item], model: CostModel, shares: Shares, bucket_bytes: int) -> None:
        self._model, self._shares, self._bucket_bytes = model, shares, bucket_bytes
        self._waiting: dict[Token, list[Item]] = {}
        #: Exchanges of what is there from the beginning.
        self._ready: list[Item] = []
        self._exchange_of = {token: item for item in items if item.exchange for token in item.writes}
        self._open: dict[_Kind, list[Item]] = {}
        self._bucket_of: dict[Token, _Kind] = {}
        made = {token for item in items for token in item.writes}
        for item in items:
            if item.exchange:
                (source,) = item.reads or (-1,)
                queue = self._waiting.setdefault(source, []) if source in made else self._ready
                queue.append(item)

    def steps(self, items: Sequence[Item], seconds: Mapping[int, Floats]) -> Iterator[Step]:
        """Kernels in their order, each after the messages that it needs; see `gathered`."""
        for item in self._ready:
            yield from self._add(item)
        for item in items:
            if item.exchange:
                continue
            for token in item.reads:
                yield from self._need(token)
            for kind in [kind for kind in self._open if kind[-1] != item.weight]:
                yield from self._close(kind)  # a loop begins or ends
            yield Step((item,), seconds[id(item)])
            yield from self._made(item)
        while self._open:
            yield from self._close(next(iter(self._open)))

    def _add(self, item: Item) -> Iterator[Step]:
        """An exchange whose input is there goes into its bucket."""
        assert item.move is not None
        strategy = gathered_as(item.move.kind, item.move.strategy)
        kind = (item.move.kind, strategy, item.move.pre, item.move.post, item.weight)
        held = sum(member.nbytes for member in self._open.get(kind, ()))
        if held + item.nbytes > self._bucket_bytes:
            yield from self._close(kind)
        self._open.setdefault(kind, []).append(item)
        self._bucket_of[item.writes[0]] = kind
        if item.nbytes >= self._bucket_bytes:
            yield from self._close(kind)

    def _close(self, kind: _Kind) -> Iterator[Step]:
        """A bucket leaves; what waited for its members follows."""
        members = tuple(self._open.pop(kind, ()))
        if members:
            yield _message(members, self._model, self._shares)
            for member in members:
                self._bucket_of.pop(member.writes[0], None)
            for member in members:
                yield from self._made(member)

    def _made(self, item: Item) -> Iterator[Step]:
        """Exchanges of what an item makes are ready."""
        for token in item.writes:
            for follower in self._waiting.pop(token, ()):
                yield from self._add(follower)

    def _need(self, token: Token) -> Iterator[Step]:
        """What a kernel reads must have left; what was exchanged twice leaves twice."""
        if token in self._exchange_of:
            for source in self._exchange_of[token].reads:
                yield from self._need(source)
        if token in self._bucket_of:
            yield from self._close(self._bucket_of[token])


def _message(members: tuple[Item, ...], model: CostModel, shares: Shares) -> Step:
    """One message with the bytes of all its members."""
    first = members[0]
    if len(members) == 1 or first.move is None:
        return Step(members, seconds_of(first, shares))
    move, nbytes = first.move, sum(member.nbytes for member in members)
    exchanges = [(m.move.strategy, m.nbytes) for m in members if m.move is not None]
    strategy = together(move.kind, exchanges, near=len(model.fleet.nodes) == 1)
    cost = model.move(move.kind, strategy, TensorType((nbytes,), "uint8"), move.pre, move.post)
    return Step(members, first.weight * shares.per_device(cost, first.cut), strategy)
