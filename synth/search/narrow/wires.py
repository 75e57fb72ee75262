"""What message passing (`shardwright.synth.search.narrow.dual`) keeps of factors that share their messages.

All messages of a kind are one vector, and so is what the choices that it meets get; `Wires` says where. A
sweep is then a few operations on whole vectors per kind, and as few on its table.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from shardwright.cost.share_cost import Floats
from shardwright.synth.search.fold import Scope

#: In single precision.
Rough: TypeAlias = NDArray[np.float32]

#: Of tables of so many axes and cells, walking over them once less is worth some calls.
_MANY_AXES, _MANY_CELLS = 3, 1 << 12


@dataclass(frozen=True, slots=True)
class Update:
    """Messages that a sweep updates: to which positions; per value, what part of the marginal; and damping.

    The last two are one vector over the values of all positions in turn, nothing where none is updated; no
    damping where all are updated, at once.
    """

    positions: tuple[int, ...]
    part: Floats
    damping: Floats | None


class Bench:
    """Room to work with tables of one shape in single precision, with what is left of it axis after axis.

    Tables of other shapes may be worked with in the same room: it then stays in the cache.

    Args:
        shape: of the tables.
        room: a vector of at least `cells` of the shape.

    Attributes:
        sums: for vectors of the last axes added up, from the last two on to all but the first.
        total: for the whole table.
        left: tables over the axes from each one on; the first is `total`.
        rows: the same, as tables of two axes.
    """

    def __init__(self, shape: tuple[int, ...], room: Rough) -> None:
        parts = [shape[axis:] for axis in range(len(shape))]
        ends = np.cumsum([0, *map(math.prod, parts)]).tolist()
        self.left = [room[ends[k] : ends[k + 1]].reshape(part) for k, part in enumerate(parts)]
        # What is left of the table is there when the vectors are not needed any more.
        self.sums = self.left[-2:0:-1]
        self.total = self.left[0]
        self.rows = [table.reshape(len(table), -1) for table in self.left]

    @staticmethod
    def cells(shape: tuple[int, ...]) -> int:
        """How much room it takes."""
        return sum(math.prod(shape[axis:]) for axis in range(len(shape)))


class Wires:
    """Where a kind's messages go, as vectors over the values of all of its positions in turn.

    Attributes:
        at: places in what all choices get, per shade: (shades, values); 0 where there is no such shade.
        heard, times: see `Kind`, likewise: (shades, values).
        twice: whether a place is in it more than once.
        once: whether all `times` are one.
        rough: room for what the choices say, in single precision; `columns` are its stretches, one per
            position, each shaped so that it can be added to tables over its axis and those after it.
        least, stretches: likewise for what the factor says.
    """

    def __init__(self, places: Sequence[NDArray[np.intp]], kind: Kind) -> None:
        shape = kind.table.shape
        ends = np.cumsum([0, *shape]).tolist()
        shades = max((len(place) for place in places), default=1)
        self.at = np.zeros((shades, ends[-1]), dtype=np.intp)
        self.heard, self.times = np.zeros((2, shades, ends[-1]))
        self.rough, self.least = np.zeros((2, ends[-1]), dtype=np.float32)
        self.columns: list[Rough] = []
        self.stretches: list[Rough] = []
        self.ends = ends
        for axis, place in enumerate(places):
            mine = slice(ends[axis], ends[axis + 1])
            self.at[: len(place), mine] = place
            self.heard[: len(place), mine] = kind.heard[axis][:, None]
            self.times[: len(place), mine] = kind.times[axis]
            self.columns.append(self.rough[mine].reshape(-1, *(1,) * (len(shape) - 1 - axis)))
            self.stretches.append(self.least[mine])
        self.twice = len(set(kind.scope)) < len(kind.scope)
        self.once = bool((self.times == 1).all())


@dataclass(slots=True)
class Kind:
    """Factors that share their messages.

    Attributes:
        table: seconds, by the values of its choices.
        rough: the same in single precision, which is enough to find messages.
        scope: colours of its choices.
        count: how many there are.
        never: the seconds that stand for "impossible" in the table.
        close: positions of choices that few factors of the kind share.
        damping: part of an update of these that may be made at once, since neighbours move together.
        slow: the same for an update of all.
        said: messages to all choices in turn, one vector.
        messages: its stretches, one for each choice.
        times: of every choice, how often each shade of its colour gets its message, (shades, 1).
        heard: of every choice, the part of the kind's factors that meet each shade of its colour.
    """

    table: Floats
    scope: Scope
    count: int
    never: float = math.inf
    close: tuple[int, ...] = ()
    damping: float = 1.0
    slow: float = 1.0
    said: Floats = field(default_factory=lambda: np.zeros(0))
    messages: list[Floats] = field(default_factory=list[Floats])
    times: list[Floats] = field(default_factory=list[Floats])
    heard: list[Floats] = field(default_factory=list[Floats])
    rough: Rough = field(init=False)
    wires: Wires = field(init=False)

    def __post_init__(self) -> None:
        self.rough = self.table.astype(np.float32)

    def reprice(self, table: Floats, never: float) -> None:
        """Have another table of the same shape, and what stands for "impossible" in it."""
        self.table, self.never = table, never
        self.rough[...] = table

    def with_messages(self, messages: Sequence[Floats], room: Floats | None = None) -> Floats:
        """The table with a vector added along each axis.

        Args:
            messages: the vectors.
            room: where to write it; by default somewhere new.
        """
        if not messages:
            return self.table
        inner = messages[-1]
        for axis in range(len(messages) - 2, 0, -1):
            inner = messages[axis].reshape(-1, *(1,) * inner.ndim) + inner
        total = np.add(self.table, inner, out=room)
        if len(messages) > 1:
            total += messages[0].reshape(-1, *(1,) * inner.ndim)
        return total

    def cut(self, values: Mapping[int, NDArray[np.intp]] | None = None) -> Floats:
        """The table without its messages, for some values of its colours; infinite where it is impossible.

        The table alone says where: messages carry what is impossible about like any cost, so that they may
        take as much from what is possible, or add it.
        """
        if values is None or not self.scope:
            table, total = self.table, self.with_messages([-m for m in self.messages])
        else:
            mine = [values[colour] for colour in self.scope]
            table = total = self.table[np.ix_(*mine)]
            for axis, (message, some) in enumerate(zip(self.messages, mine, strict=True)):
                total = total - message[some].reshape(-1, *(1,) * (total.ndim - 1 - axis))
        return total if self.never == math.inf else np.where(table < self.never, total, np.inf)

    def least(self, room: Floats) -> float:
        """The least of the table without its messages; `room` is for a table as large."""
        if self.table.ndim < _MANY_AXES or self.table.size < _MANY_CELLS:
            return float(self.with_messages([-m for m in self.messages], room).min())
        # What is said along the first axis is added when there is little left: rounding keeps the order.
        inner = -self.messages[-1]
        for message in self.messages[-2:0:-1]:
            inner = inner - message.reshape(-1, *(1,) * inner.ndim)
        np.add(self.table, inner, out=room)
        return float((np.minimum.reduce(room.reshape(len(room), -1), axis=1) - self.messages[0]).min())

    def ask(self, positions: Sequence[int], bench: Bench) -> None:
        """Write to the wires, per value of some positions, the least of the table with what the choices say.

        The least over the first axis, or over all others, is many times faster than over the last.

        Args:
            positions: in ascending order.
            bench: room for tables of its shape.
        """
        columns, stretches = self.wires.columns, self.wires.stretches
        inner = columns[-1]
        for room, column in zip(bench.sums, columns[-2:0:-1], strict=True):
            inner = np.add(column, inner, room)
        np.add(self.rough, inner, bench.total)
        bench.total += columns[0]
        least, last = np.minimum.reduce, positions[-1]
        for axis in range(last):
            if axis in positions:
                least(bench.rows[axis], 1, out=stretches[axis])
            # Of a table of two axes that leaves what is said along the second.
            only = axis == len(columns) - 2
            least(bench.left[axis], 0, out=stretches[-1] if only else bench.left[axis + 1])
        if last < len(columns) - 1:
            least(bench.rows[last], 1, out=stretches[last])


def marginals(total: Floats) -> list[Floats]:
    """Of every axis, per value the least of a table.

    The least over the first axis, or over all others, is many times faster than over the last.
    """
    found: list[Floats] = []
    for _ in range(total.ndim):
        found.append(total.reshape(len(total), -1).min(axis=1) if total.ndim > 1 else total)
        if total.ndim > 1:
            total = total.min(axis=0)
    return found


def finite(tables: Sequence[Floats]) -> tuple[list[Floats], float]:
    """Tables without infinite entries, and the seconds that stand for these.

    No more than twice what everything possible may cost: messages are found in single precision, and what is
    impossible is passed on like any cost.
    """
    if all(table.max(initial=0.0) < math.inf for table in tables):
        return list(tables), math.inf
    never = 2 * sum(float(np.abs(table[np.isfinite(table)]).max(initial=0.0)) for table in tables) or 1.0
    return [np.asarray(np.minimum(table, never)) for table in tables], never
