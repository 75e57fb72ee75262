"""A lower bound where buckets would be too large: the dual of the linear relaxation, by message passing.

    bound = sum over factors  min (factor - its messages)  +  sum over choices  min (messages to it)

holds for any messages. MPLP (Globerson and Jaakkola 2007) raises it factor by factor: what a factor adds to
each of its choices at least, value by value (its min-marginals), is passed on to them in equal parts.

Equal layers share their messages: factors of one kind, between choices of one colour, have one message. Any
messages make a bound, also shared ones; where the bound adds up choices, their shade says exactly which
messages each of them gets.

Afterwards every value of every choice has a bound of its own: what all programs with that value cost at
least. Values whose bound lies above what a known program costs can go, and what is left is small enough to
be solved exactly (`shardwright.synth.grid.solve`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

import numpy as np

from shardwright.cost.share_cost import Floats
from shardwright.synth.search.fold import Scope

#: Seconds that stand for "impossible": far beyond any program, and small enough to be added up.
_NEVER = 1e9

#: So many factors of a kind at one choice move together well; choices of more move every so many sweeps.
_FEW, _SELDOM = 3, 8

#: Sweeps between two looks at the bound: all choices have moved.
_PER_ROUND = _SELDOM


@dataclass(slots=True)
class _Kind:
    """Factors that share their messages.

    Attributes:
        table: seconds, by the values of its choices.
        scope: colours of its choices.
        count: how many there are.
        close: positions of choices that few factors of the kind share.
        damping: part of an update of these that may be made at once, since neighbours move together.
        slow: the same for an update of all.
        messages: to each choice.
    """

    table: Floats
    scope: Scope
    count: int
    close: tuple[int, ...] = ()
    damping: float = 1.0
    slow: float = 1.0
    messages: list[Floats] = field(default_factory=list[Floats])

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


def marginals(total: Floats, positions: Sequence[int]) -> list[Floats]:
    """Of some axes, in ascending order, per value the least of a table.

    The least over the first axis, or over all others, is many times faster than over the last.
    """
    found: list[Floats] = []
    for axis in range(max(positions, default=-1) + 1):
        if axis in positions:
            found.append(total.reshape(len(total), -1).min(axis=1) if total.ndim > 1 else total)
        if total.ndim > 1:
            total = total.min(axis=0)
    return found


class Dual:
    """Messages of one problem at one set of prices.

    Args:
        colours: of every choice, what tells it from others: choices of one colour get the same messages.
        sizes: values of every choice.
        uses: factor (by number) and the choices on its axes.
        tables: of every factor, infinite where something is impossible.
    """

    def __init__(
        self,
        colours: Sequence[Hashable],
        sizes: Sequence[int],
        uses: Sequence[tuple[int, Scope]],
        tables: Sequence[Floats],
    ) -> None:
        known: dict[Hashable, int] = {}
        colour = [known.setdefault(c, len(known)) for c in colours]
        numbers: dict[tuple[int, Scope], int] = {}
        number = [
            numbers.setdefault((f, tuple([colour[v] for v in scope])), len(numbers)) for f, scope in uses
        ]
        self._uses = [(k, scope) for k, (_, scope) in zip(number, uses, strict=True)]
        counts = Counter(number)
        finite = [np.where(np.isfinite(table), table, _NEVER) for table in tables]
        self.kinds = [_Kind(finite[f], scope, counts[k]) for (f, scope), k in numbers.items()]
        incident: list[Counter[tuple[int, int]]] = [Counter() for _ in colour]
        for k, (_, scope) in zip(number, uses, strict=True):
            for position, choice in enumerate(scope):
                incident[choice][k, position] += 1
        shades: dict[tuple[int, frozenset[tuple[tuple[int, int], int]]], int] = {}
        self.shade_of = [
            shades.setdefault((c, frozenset(mine.items())), len(shades))
            for c, mine in zip(colour, incident, strict=True)
        ]
        first = {shade: choice for choice, shade in reversed(list(enumerate(self.shade_of)))}
        self._incident = [incident[first[s]] for s in range(len(shades))]
        self._counts = Counter(self.shade_of)
        self._of_colour: dict[int, list[int]] = {}
        for s in range(len(shades)):
            self._of_colour.setdefault(colour[first[s]], []).append(s)
        #: Per colour, the part of its choices that each of its shades has.
        self._part_of = {
            c: np.array([self._counts[s] for s in some]) / sum(self._counts[s] for s in some)
            for c, some in self._of_colour.items()
        }
        #: Per shade, the messages that its choices get, added up.
        self._sums = [np.zeros(sizes[first[s]]) for s in range(len(shades))]
        for k, kind in enumerate(self.kinds):
            touching = [self._touching(k, c) for c in kind.scope]
            kind.close = tuple(p for p, n in enumerate(touching) if n <= _FEW and kind.table.shape[p] > 1)
            kind.damping = 1.0 / max([touching[p] for p in kind.close], default=1)
            kind.slow = 1.0 / max(touching, default=1)
            kind.messages = [np.zeros(size) for size in kind.table.shape]
            if kind.table.ndim == 1:  # says all it has to say at once
                self._send(k, 0, kind.table)
        self.sweeps = 0
        self._rooms: dict[tuple[int, ...], Floats] = {}

    def _room(self, shape: tuple[int, ...]) -> Floats:
        """Room for a table that is soon forgotten: new memory takes longer than what is written to it."""
        if shape not in self._rooms:
            self._rooms[shape] = np.empty(shape)
        return self._rooms[shape]

    def _touching(self, kind: int, colour: int) -> int:
        """How many factors of a kind one choice of a colour is in, at most."""
        return max(
            sum(times for (other, _), times in self._incident[s].items() if other == kind)
            for s in self._of_colour[colour]
        )

    def _seen(self, colour: int) -> Floats:
        """What choices of a colour get in all, on average over their shades."""
        shades = self._of_colour[colour]
        if len(shades) == 1:
            return self._sums[shades[0]]
        return self._part_of[colour] @ np.stack([self._sums[s] for s in shades])

    def sweep(self) -> None:
        """Update the messages of every kind of factor once."""
        numbered = list(enumerate(self.kinds))
        everybody = self.sweeps % _SELDOM == _SELDOM - 1
        for number, kind in numbered if self.sweeps % 2 == 0 else reversed(numbered):
            positions = tuple(range(len(kind.scope))) if everybody else kind.close
            if not positions or kind.table.ndim == 1:
                continue
            damping = kind.slow if everybody else kind.damping
            incoming = [self._seen(c) - m for c, m in zip(kind.scope, kind.messages, strict=True)]
            total = kind.with_messages(incoming, self._room(kind.table.shape))
            for position, marginal in zip(positions, marginals(total, positions), strict=True):
                new = marginal / len(positions) - incoming[position]
                self._send(number, position, damping * (new - kind.messages[position]))
        self.sweeps += 1

    def _send(self, number: int, position: int, change: Floats) -> None:
        """Change the message of a kind of factor to one of its choices."""
        kind = self.kinds[number]
        kind.messages[position] = kind.messages[position] + change
        for shade in self._of_colour[kind.scope[position]]:
            times = self._incident[shade].get((number, position), 0)
            if times:
                self._sums[shade] = self._sums[shade] + times * change

    def kind_of_use(self) -> list[int]:
        """The number of every use's kind of factor."""
        return [number for number, _ in self._uses]

    def start_from(self, number: int, messages: Sequence[Floats]) -> None:
        """Messages of a kind of factor to begin with, such as those found at other prices."""
        if self.kinds[number].table.ndim > 1:
            for position, message in enumerate(messages):
                self._send(number, position, message - self.kinds[number].messages[position])

    def bound(self) -> float:
        """What no assignment costs less than, by these messages."""
        total = sum(self._counts[s] * float(sums.min()) for s, sums in enumerate(self._sums))
        return total + sum(
            kind.count
            * float(kind.with_messages([-m for m in kind.messages], self._room(kind.table.shape)).min())
            for kind in self.kinds
        )

    def excess(self) -> list[Floats]:
        """Per shade and value, by how much an assignment with that value exceeds the bound at least."""
        found = [sums - sums.min() for sums in self._sums]
        for number, kind in enumerate(self.kinds):
            everywhere = range(len(kind.scope))
            total = kind.with_messages([-m for m in kind.messages], self._room(kind.table.shape))
            for position, marginal in enumerate(marginals(total, everywhere)):
                over = marginal - marginal.min()
                for shade in self._of_colour[kind.scope[position]]:
                    times = self._incident[shade].get((number, position), 0)
                    if times:
                        found[shade] = found[shade] + times * over
        return found

    def reparametrised(self) -> tuple[list[tuple[int, Scope]], list[Floats]]:
        """The same problem with what the messages moved: factors with the choices they tie, and tables.

        Every assignment costs the same; but what each factor says is now close to what all of it costs.
        """
        tables = [kind.with_messages([-m for m in kind.messages]) for kind in self.kinds]
        tables = [np.where(table > _NEVER / 2, np.inf, table) for table in tables]
        sums = [np.where(mine > _NEVER / 2, np.inf, mine) for mine in self._sums]
        alone = [
            (len(tables) + shade, (choice,))
            for choice, shade in enumerate(self.shade_of)
            if self._incident[shade]
        ]
        return [*self._uses, *alone], [*tables, *sums]

    def rise(
        self, most_sweeps: int, enough: float, stop: Callable[[], bool], target: float = math.inf
    ) -> float:
        """Sweep until a round raises the bound by less than `enough`, as a part of it, or it is at a target.

        Shared messages may lower it in the end: those of the best round are the ones that stay.
        """
        best, kept = self.bound(), self._state()
        while self.sweeps < most_sweeps and best < target and not stop():
            for _ in range(_PER_ROUND):
                self.sweep()
            here = self.bound()
            done = here < best + enough * abs(here)
            if here > best:
                best, kept = here, self._state()
            if done:
                break
        self._sums, messages = kept
        for kind, mine in zip(self.kinds, messages, strict=True):
            kind.messages = mine
        return best

    def move(self, sweeps: int, stop: Callable[[], bool]) -> None:
        """Sweep so often, whether the bound rises or not."""
        last = self.sweeps + sweeps
        while self.sweeps < last and not stop():
            self.sweep()

    def _state(self) -> tuple[list[Floats], list[list[Floats]]]:
        return list(self._sums), [list(kind.messages) for kind in self.kinds]
