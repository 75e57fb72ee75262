"""A lower bound where buckets would be too large: the dual of the linear relaxation, by message passing.

    bound = sum over factors  min (factor - its messages)  +  sum over choices  min (messages to it)

holds for any messages. MPLP (Globerson and Jaakkola 2007) raises it factor by factor: what a factor adds to
each of its choices at least, value by value (its min-marginals), is passed on to them in equal parts.

Equal layers share their messages: factors of one kind, between choices of one colour, have one message. Any
messages make a bound, also shared ones; where the bound adds up choices, their shade says exactly which
messages each of them gets.

Afterwards every value of every choice has a bound of its own: what all programs with that value cost at
least. Values whose bound lies above what a known program costs can go, and what is left is small enough to
be solved exactly (`narrowing.py`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from shardwright.cost.share_cost import Floats
from shardwright.synth.search.fold import Scope
from shardwright.synth.search.narrow.wires import Bench, Kind, Update, Wires, finite, marginals

#: So many factors of a kind at one choice move together well; choices of more move every so many sweeps.
_FEW, _SELDOM = 3, 8

#: Sweeps between two looks at the bound: all choices have moved.
PER_ROUND = _SELDOM


#: What part of a factor's say goes to choices that other factors hear of in the same sweep, and in how many
#: sweeps where messages are shared by choices that hear different ones: that is quick, but then gets stuck.
_ONWARD, _HURRY = 0.8, 6

#: From which sweep on messages are moved on, between two sweeps, in the direction in which they went, and by
#: what part of their way; that part is halved where a round no longer adds such a part of the bound.
_START, _MOMENTUM, _STALLED = 6, 0.72, 5e-3


class Dual:
    """Messages of one problem at one set of prices.

    Args:
        colours: of every choice, what tells it from others: choices of one colour get the same messages.
        sizes: values of every choice.
        uses: factor (by number) and the choices on its axes.
        tables: of every factor, infinite where something is impossible.

    Attributes:
        alike: whether choices of one colour hear the same: then no update lowers the bound.
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
        priced, self._never = finite(tables)
        self.kinds = [Kind(priced[f], scope, counts[k], self._never) for (f, scope), k in numbers.items()]
        self._factors = [f for f, _ in numbers]
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
        places: dict[int, NDArray[np.intp]] = {}
        used = 1  # the first is nobody's
        for c, some in self._of_colour.items():
            end = used + len(some) * sizes[first[some[0]]]
            places[c] = np.arange(used, end).reshape(len(some), -1)
            used = end
        #: What choices of each shade get, all messages added up, colour by colour.
        self._got = np.zeros(used)
        #: Its stretches, per colour: (shades, values).
        self._sums = {
            c: self._got[place[0, 0] : place[-1, -1] + 1].reshape(place.shape) for c, place in places.items()
        }
        self._row = {s: (c, row) for c, some in self._of_colour.items() for row, s in enumerate(some)}
        ends = np.cumsum([0, *[sum(kind.table.shape) for kind in self.kinds]]).tolist()
        #: Messages of all kinds in turn.
        self._said = np.zeros(ends[-1])
        for k, kind in enumerate(self.kinds):
            touching = [self._touching(k, c) for c in kind.scope]
            kind.close = tuple(p for p, n in enumerate(touching) if n <= _FEW and kind.table.shape[p] > 1)
            kind.damping = 1.0 / max([touching[p] for p in kind.close], default=1)
            kind.slow = 1.0 / max(touching, default=1)
            kind.said = self._said[ends[k] : ends[k + 1]]
            kind.messages = np.split(kind.said, np.cumsum(kind.table.shape)[:-1]) if kind.scope else []
            kind.times = [self._times(k, p, c) for p, c in enumerate(kind.scope)]
            kind.heard = [self._heard(c, times) for c, times in zip(kind.scope, kind.times, strict=True)]
            kind.wires = Wires([places[c] for c in kind.scope], kind)
        several = [kind for kind in self.kinds if kind.table.ndim > 1]
        # The latest choice of a kind says when all that comes before it has been told.
        self._in_order = sorted(several, key=lambda kind: (max(kind.scope), min(kind.scope)))
        #: The first and the last kind in that order of every colour.
        self._first: dict[int, int] = {}
        self._last: dict[int, int] = {}
        for place, kind in enumerate(self._in_order):
            for c in kind.scope:
                self._first.setdefault(c, place)
                self._last[c] = place
        self._updates: dict[tuple[bool, int], list[tuple[Kind, Bench, Update]]] = {}
        self.alike = all(len(some) == 1 for some in self._of_colour.values())
        self._rooms = np.empty(max([kind.table.size for kind in self.kinds], default=0))
        self._bench = np.empty(
            max([Bench.cells(k.table.shape) for k in self.kinds], default=0), dtype=np.float32
        )
        self._benches: dict[tuple[int, ...], Bench] = {}
        self._begin()

    def renew(self, tables: Sequence[Floats]) -> None:
        """Begin anew with other tables of the same shapes, as if made with these."""
        priced, self._never = finite(tables)
        for kind, factor in zip(self.kinds, self._factors, strict=True):
            kind.reprice(priced[factor], self._never)
        self.forget()

    def forget(self) -> tuple[Floats, Floats]:
        """Begin anew; what was said until then, for `remember`."""
        said = self._state()
        self._got[:], self._said[:] = 0.0, 0.0
        self._begin()
        return said

    def remember(self, said: tuple[Floats, Floats]) -> None:
        """Say again what was forgotten."""
        self._got[:], self._said[:] = self._before = said
        self._bound = None

    def _begin(self) -> None:
        for kind in self.kinds:
            if kind.table.ndim == 1:  # says all it has to say at once
                self._send(kind, 0, kind.table)
        self.sweeps = 0
        #: Of the messages as they are, if somebody asked.
        self._bound: float | None = None
        self._momentum, self._before = _MOMENTUM, self._state()

    def _room(self, shape: tuple[int, ...]) -> Floats:
        """Room for a table that is soon forgotten: new memory takes longer than what is written to it."""
        return self._rooms[: math.prod(shape)].reshape(shape)

    def _times(self, kind: int, position: int, colour: int) -> Floats:
        """How often choices of every shade of a colour get a kind's message: (shades, 1)."""
        times = [self._incident[shade].get((kind, position), 0) for shade in self._of_colour[colour]]
        return np.array(times, dtype=np.float64)[:, None]

    def _heard(self, colour: int, times: Floats) -> Floats:
        """Of factors that meet choices of a colour so often, the part that meets each of its shades."""
        meetings = np.array([self._counts[s] for s in self._of_colour[colour]]) * times[:, 0]
        return meetings / meetings.sum()

    def _touching(self, kind: int, colour: int) -> int:
        """How many factors of a kind one choice of a colour is in, at most."""
        return max(
            sum(times for (other, _), times in self._incident[s].items() if other == kind)
            for s in self._of_colour[colour]
        )

    def _sums_of(self, shade: int) -> Floats:
        """What choices of a shade get in all."""
        colour, row = self._row[shade]
        return self._sums[colour][row]

    def sweep(self) -> None:
        """Update the messages of every kind of factor once, from the first choices to the last or back."""
        everybody = self.sweeps % _SELDOM == _SELDOM - 1
        onward, hurry = self.sweeps % 2 == 0, self.alike or self.sweeps < _HURRY
        got = self._got
        updates = self._updates_of(everybody, hurry * (1 if onward else -1))
        for kind, bench, update in updates if onward else reversed(updates):
            wires = kind.wires
            each = got[wires.at]
            seen = each[0] if len(each) == 1 else np.add.reduce(wires.heard * each, 0)
            np.subtract(seen, kind.said, wires.rough)
            kind.ask(update.positions, bench)
            change = update.part * wires.least
            change -= seen if update.damping is None else update.damping * seen
            kind.said += change
            if wires.twice:
                np.add.at(got, wires.at, wires.times * change)
            else:
                each += change if wires.once else wires.times * change
                got[wires.at] = each
        self.sweeps += 1
        self._bound = None

    def _updates_of(self, everybody: bool, way: int) -> list[tuple[Kind, Bench, Update]]:
        """The updates of a sweep, of everybody or not, onward (1), back (-1), or the same both ways (0)."""
        if (everybody, way) not in self._updates:
            found: list[tuple[Kind, Bench, Update]] = []
            for place, kind in enumerate(self._in_order):
                update = self._update(place, kind, everybody, way)
                if update.positions:
                    shape = kind.table.shape
                    if shape not in self._benches:
                        self._benches[shape] = Bench(shape, self._bench)
                    found.append((kind, self._benches[shape], update))
            self._updates[everybody, way] = found
        return self._updates[everybody, way]

    def _update(self, place: int, kind: Kind, everybody: bool, way: int) -> Update:
        """Which messages of a kind are updated in a sort of sweep, and what part of its say each gets.

        As in sequential tree-reweighted passing (Kolmogorov 2006, 2015) most goes to where it is taken on in
        the same sweep. Any parts that add up to one keep the bound from falling.
        """
        positions = tuple(range(len(kind.scope))) if everybody else kind.close
        damping = kind.slow if everybody else kind.damping
        mine = [kind.scope[p] for p in positions]
        taken_on = [self._last[c] > place if way > 0 else self._first[c] < place for c in mine]
        ahead = _ONWARD if way and 0 < sum(taken_on) < len(mine) else 0.0
        part, damp = np.zeros((2, len(kind.said)))
        for position, here in zip(positions, taken_on, strict=True):
            own = slice(*kind.wires.ends[position : position + 2])
            part[own] = damping * ((1 - ahead) / len(mine) + (ahead / sum(taken_on) if here else 0.0))
            damp[own] = damping
        return Update(positions, part, None if len(mine) == len(kind.scope) and damping == 1 else damp)

    def _send(self, kind: Kind, position: int, change: Floats) -> None:
        """Change the message of a kind of factor to one of its choices."""
        self._bound = None
        kind.messages[position] += change
        self._sums[kind.scope[position]] += kind.times[position] * change

    def kind_of_use(self) -> list[int]:
        """The number of every use's kind of factor."""
        return [number for number, _ in self._uses]

    def start_from(self, number: int, messages: Sequence[Floats]) -> None:
        """Messages of a kind of factor to begin with, such as those found at other prices."""
        kind = self.kinds[number]
        if kind.table.ndim > 1:
            for position, message in enumerate(messages):
                self._send(kind, position, message - kind.messages[position])

    def balance(self) -> None:
        """Have factors take back in equal parts what they say of a choice together, but for its least.

        Messages that were right beside others say too much, or too little, where some of these are missing.
        """
        tellers = dict.fromkeys(self._of_colour, 0.0)
        for kind in self._in_order:
            for position, colour in enumerate(kind.scope):
                tellers[colour] += float(kind.heard[position] @ kind.times[position][:, 0])
        excess: dict[int, Floats] = {}
        for colour, shades in self._of_colour.items():
            counts = np.array([self._counts[shade] for shade in shades])
            got = counts @ self._sums[colour] / counts.sum()
            excess[colour] = got - got.min()
        for kind in self._in_order:
            for position, colour in enumerate(kind.scope):
                self._send(kind, position, excess[colour] / -tellers[colour])
        self._before = self._state()

    def bound(self) -> float:
        """What no assignment costs less than, by these messages."""
        if self._bound is None:
            self._bound = self._bounded()
        return self._bound

    def _bounded(self) -> float:
        total = sum(n * float(self._sums_of(s).min()) for s, n in sorted(self._counts.items()))
        return total + sum(kind.count * kind.least(self._room(kind.table.shape)) for kind in self.kinds)

    def excess(self) -> list[Floats]:
        """Per shade and value, by how much an assignment with that value exceeds the bound at least."""
        each = [self._sums_of(s) for s in range(len(self._counts))]
        found = [sums - sums.min() for sums in each]
        for kind in self.kinds:
            total = kind.with_messages([-m for m in kind.messages], self._room(kind.table.shape))
            for position, marginal in enumerate(marginals(total)):
                over = marginal - marginal.min()
                shades = self._of_colour[kind.scope[position]]
                for shade, times in zip(shades, kind.times[position], strict=True):
                    found[shade] = found[shade] + times * over
        return found

    def likely(self, most: int) -> dict[int, NDArray[np.intp]]:
        """Per colour, so many values at most that exceed the bound least, in ascending order."""
        least: dict[int, Floats] = {}
        for shade, excess in enumerate(self.excess()):
            colour, _ = self._row[shade]
            least[colour] = np.minimum(least[colour], excess) if colour in least else excess
        return {colour: np.sort(excess.argsort(kind="stable")[:most]) for colour, excess in least.items()}

    def reparametrised(
        self, values: Mapping[int, NDArray[np.intp]] | None = None
    ) -> tuple[list[tuple[int, Scope]], list[Floats]]:
        """The same problem with what the messages moved: factors with the choices they tie, and tables.

        Every assignment costs the same; but what each factor says is now close to what all of it costs.

        Args:
            values: per colour, those that tables are cut down to; all by default.
        """
        tables = [kind.cut(values) for kind in self.kinds]
        sums = [self._sums_of(s).copy() for s in range(len(self._counts))]
        if values is not None:
            sums = [mine[values[self._row[s][0]]] for s, mine in enumerate(sums)]
        alone = [
            (len(tables) + shade, (choice,))
            for choice, shade in enumerate(self.shade_of)
            if self._incident[shade]
        ]
        return [*self._uses, *alone], [*tables, *sums]

    def rise(
        self,
        most_sweeps: int,
        enough: float,
        stop: Callable[[], bool],
        settled: Callable[[float, float], bool] = lambda bound, more: False,
    ) -> float:
        """Sweep until a round raises the bound by less than `enough`, as a part of it, or that is settled.

        Shared messages may lower it in the end: those of the best round are the ones that stay.

        Args:
            most_sweeps: at most.
            enough: see above.
            stop: whether to stop before that.
            settled: whether a bound will do, which goes on rising by about so much more if every round adds
                such a part of what the one before did.
        """
        best, kept = self.bound(), self._state()
        gain, end = math.inf, settled(best, math.inf)
        while self.sweeps < most_sweeps and not end and not stop():
            self._round()
            here = self.bound()
            if here < best + _STALLED * abs(here):
                self._momentum /= 2
            # Where messages were moved on too far, the next round is better.
            fell = here < best and self._momentum > _MOMENTUM / 4
            done, before, gain = not fell and here < best + enough * abs(here), gain, max(here - best, 0.0)
            if here > best:
                best, kept = here, self._state()
            more = gain * gain / (before - gain) if 0 < gain < before < math.inf else math.inf
            end = settled(best, more) or done
        self._got[:], self._said[:] = self._before = kept
        self._bound = best
        return best

    def move(self, rounds: int, stop: Callable[[], bool]) -> None:
        """Sweep so many rounds, whether the bound rises or not.

        Where something is impossible it must not fall: messages that unlike choices share would carry that
        to choices for which it is possible, and say little else.
        """
        if self._never < math.inf:
            self.rise(self.sweeps + rounds * PER_ROUND, -math.inf, stop)
        else:
            for _ in range(rounds):
                if stop():
                    break
                self._round()

    def _round(self) -> None:
        """Sweeps onward and back, between which messages move on as they went (Polyak's heavy ball)."""
        for _ in range(PER_ROUND // 2):
            now = self._state()
            if self.sweeps >= _START:
                self._got += self._momentum * (now[0] - self._before[0])
                self._said += self._momentum * (now[1] - self._before[1])
            self._before = now
            self.sweep()
            self.sweep()

    def _state(self) -> tuple[Floats, Floats]:
        return self._got.copy(), self._said.copy()
