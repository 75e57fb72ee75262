"""A lower bound where tables would be too large: the dual of the linear relaxation, by message passing.

    bound = sum over factors  min (factor - its messages)  +  sum over choices  min (messages to it)

holds for any messages. MPLP (Globerson and Jaakkola 2007) raises it factor by factor: what a factor adds to
each of its choices at least, value by value (its min-marginals), is passed on to them in equal parts. A factor
is taken as a *star*, never as a table: the least over its signatures of a sum of one vector per choice, so that
its min-marginals take signatures × values steps instead of values ** choices.

Equal layers share their messages: factors of one kind, between choices of one colour, have one message. Any
messages make a bound, also shared ones; where the bound adds up choices, their colour says exactly which
messages each gets.

Afterwards every value of every choice has a bound of its own, what all programs with that value cost at least.
Values whose bound lies above what a known program costs can go; what is left is small enough to be solved exactly.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from shardwright.cost.share_cost import Floats

#: Seconds that stand for "impossible": far beyond any program, and small enough to be added up.
NEVER = 1e9

#: Rounds of refinement by which layers are told apart.
_ROUNDS = int(os.environ.get('ROUNDS','4'))


@dataclass(frozen=True, slots=True)
class Star:
    """A factor: the least over s of `centre[s] + sum over choices of rays[choice][s, value]`."""

    centre: Floats
    rays: tuple[Floats, ...]

    @staticmethod
    def of_table(table: Floats) -> Star:
        """A table over one choice or two as a star, whose centre is the first choice."""
        if table.ndim == 1:
            return Star(np.zeros(1), (finite(table)[None, :],))
        same = np.where(np.eye(len(table), dtype=np.bool_), 0.0, NEVER)
        return Star(np.zeros(len(table)), (same, finite(table)))

    def table(self, values: Sequence[NDArray[np.intp]]) -> Floats:
        """The factor over some values of each choice."""
        total = self.centre
        for ray, kept in zip(self.rays, values, strict=True):
            mine = ray[:, kept]
            total = total[..., None] + mine.reshape(len(mine), *(1,) * (total.ndim - 1), -1)
        least = np.asarray(total.min(axis=0))
        return np.where(least >= NEVER / 2, np.inf, least)


def finite(array: Floats) -> Floats:
    """With `NEVER` for what is infinite."""
    return np.where(np.isfinite(array), array, NEVER)


@dataclass(slots=True)
class _Kind:
    """Factors that share their messages.

    Attributes:
        star: the factor.
        scope: colours of its choices.
        count: how many there are.
        close: positions of choices that few factors of the kind share.
        damping: part of an update of these that may be made at once, since neighbours move together.
        slow: the same for an update of all.
        messages: to each choice.
    """

    star: Star
    scope: tuple[int, ...]
    count: int
    close: tuple[int, ...] = ()
    damping: float = 1.0
    slow: float = 1.0
    last: int = 0
    first: int = 0
    messages: list[Floats] = field(default_factory=list[Floats])


class Dual:
    """Messages of one problem at one set of prices.

    Args:
        domains: of every choice, what tells it from others.
        sizes: values of every choice.
        uses: factor (by number) and the choices on its axes.
        stars: every factor.
    """

    def __init__(
        self,
        domains: Sequence[Hashable],
        sizes: Sequence[int],
        uses: Sequence[tuple[int, tuple[int, ...]]],
        stars: Sequence[Star],
    ) -> None:
        colour = _refined(domains, uses, _ROUNDS)
        kinds: dict[tuple[int, tuple[int, ...]], int] = {}
        number = [
            kinds.setdefault((factor, tuple([colour[v] for v in scope])), len(kinds)) for factor, scope in uses
        ]
        counts = Counter(number)
        reps = {}
        for k, (_, scope) in zip(number, uses, strict=True):
            reps.setdefault(k, scope)
        acc = [[] for _ in domains]
        for at, (_, scope) in enumerate(uses):
            for v in scope: acc[v].append(at)
        import os
        mode = os.environ.get("PLACE", "mean")
        place = [(sum(a) / len(a) if mode == "mean" else (min(a) if mode=="min" else max(a))) if a else 0 for a in acc]
        self.kinds = [_Kind(stars[f], scope, counts[k]) for (f, scope), k in kinds.items()]
        for kind in self.kinds:
            kind.messages = [np.zeros(ray.shape[1]) for ray in kind.star.rays]
        incident: list[Counter[tuple[int, int]]] = [Counter() for _ in domains]
        for k, (_, scope) in zip(number, uses, strict=True):
            for position, choice in enumerate(scope):
                incident[choice][k, position] += 1
        # Choices that get the same messages: told apart once more than the kinds of factors.
        shades: dict[tuple[int, frozenset[tuple[tuple[int, int], int]]], int] = {}
        self.shade_of = [
            shades.setdefault((c, frozenset(mine.items())), len(shades))
            for c, mine in zip(colour, incident, strict=True)
        ]
        first = {shade: choice for choice, shade in reversed(list(enumerate(self.shade_of)))}
        self._incident = [incident[first[s]] for s in range(len(shades))]
        self._shade_counts = Counter(self.shade_of)
        self._sizes = [sizes[first[s]] for s in range(len(shades))]
        self._shades_of_colour: dict[int, list[int]] = {}
        for s in range(len(shades)):
            self._shades_of_colour.setdefault(colour[first[s]], []).append(s)
        for k, kind in enumerate(self.kinds):
            touching = [self._touching(k, c) for c in kind.scope]
            kind.close = tuple(p for p, n in enumerate(touching) if n <= _FEW and kind.star.rays[p].shape[1] > 1)
            kind.damping = 1.0 / max([touching[p] for p in kind.close], default=1)
            kind.slow = 1.0 / max(touching)
            rep = reps[k]
            close = kind.close or (0,)
            kind.last = max(close, key=lambda p: place[rep[p]])
            kind.first = min(close, key=lambda p: place[rep[p]])
        self._sums = [np.zeros(size) for size in self._sizes]
        self.sweeps = 0

    def _touching(self, kind: int, colour: int) -> int:
        """How many factors of a kind one choice of a colour is in, at most."""
        return max(
            sum(times for (other, _), times in self._incident[s].items() if other == kind)
            for s in self._shades_of_colour[colour]
        )

    def _seen(self, colour: int) -> Floats:
        """What choices of a colour get in all, on average over their shades."""
        shades = self._shades_of_colour[colour]
        if len(shades) == 1:
            return self._sums[shades[0]]
        weights = np.array([self._shade_counts[s] for s in shades], dtype=np.float64)
        return np.average([self._sums[s] for s in shades], axis=0, weights=weights)

    def sweep(self) -> None:
        """Update the messages of every kind of factor once."""
        numbered = list(enumerate(self.kinds))
        everybody = self.sweeps % _SELDOM == _SELDOM - 1
        for number, kind in numbered if self.sweeps % 2 == 0 else reversed(numbered):
            positions = tuple(range(len(kind.scope))) if everybody else kind.close
            if not positions:
                continue
            damping = kind.slow if everybody else kind.damping
            incoming = [self._seen(c) - m for c, m in zip(kind.scope, kind.messages, strict=True)]
            marginals = _marginals(kind.star, incoming)
            last = kind.last if self.sweeps % 2 == 0 else kind.first
            for position in positions:
                weight = (1 - BETA) / len(positions) + BETA * (position == last) if last in positions else 1 / len(positions)
                new = weight * marginals[position] - incoming[position]
                change = damping * (new - kind.messages[position])
                kind.messages[position] = kind.messages[position] + change
                for shade in self._shades_of_colour[kind.scope[position]]:
                    times = self._incident[shade].get((number, position), 0)
                    if times:
                        self._sums[shade] = self._sums[shade] + times * change
        self.sweeps += 1

    def bound(self) -> float:
        """What no assignment costs less than, by these messages."""
        total = sum(self._shade_counts[s] * float(sums.min()) for s, sums in enumerate(self._sums))
        for kind in self.kinds:
            inner = kind.star.centre
            for ray, message in zip(kind.star.rays, kind.messages, strict=True):
                inner = inner + (ray - message).min(axis=1)
            total += kind.count * float(inner.min())
        return total

    def excess(self) -> list[Floats]:
        """Per shade and value: by how much any assignment with that value exceeds the bound at least."""
        found = [sums - sums.min() for sums in self._sums]
        for number, kind in enumerate(self.kinds):
            marginals = _marginals(kind.star, [-message for message in kind.messages])
            for position, marginal in enumerate(marginals):
                # Of what a factor says of a value, messages to the value itself are already counted.
                over = marginal - marginal.min()
                for shade in self._shades_of_colour[kind.scope[position]]:
                    times = self._incident[shade].get((number, position), 0)
                    if times:
                        found[shade] = found[shade] + times * over
        return found

    def raise_bound(
        self, enough: Callable[[float, float], bool], most_sweeps: int, stop: Callable[[], bool]
    ) -> float:
        """Sweep until `enough(bound, gain of the last round)`; the best bound seen."""
        best = previous = self.bound()
        while self.sweeps < most_sweeps and not stop():
            for _ in range(_PER_ROUND):
                self.sweep()
            here = self.bound()
            best = max(best, here)
            if enough(here, here - previous):
                break
            previous = here
        return best


_PER_ROUND = 4
import os
BETA = float(os.environ.get('BETA', '0.7'))

#: So many factors of a kind at one choice move together well; choices of more move every so many sweeps.
_FEW, _SELDOM = 3, 8


def _marginals(star: Star, incoming: Sequence[Floats]) -> list[Floats]:
    """Per choice and value, the least of the factor plus all incoming, given the value."""
    least = [(ray + seen).min(axis=1) for ray, seen in zip(star.rays, incoming, strict=True)]
    total = star.centre + sum(least)
    return [
        (ray + (total - mine)[:, None]).min(axis=0) + seen
        for ray, mine, seen in zip(star.rays, least, incoming, strict=True)
    ]


def _refined(
    domains: Sequence[Hashable], uses: Sequence[tuple[int, tuple[int, ...]]], rounds: int
) -> list[int]:
    known: dict[Hashable, int] = {}
    colour = [known.setdefault(domain, len(known)) for domain in domains]
    for _ in range(rounds):
        around: list[list[tuple[int, int, tuple[int, ...]]]] = [[] for _ in colour]
        for factor, scope in uses:
            colours = tuple([colour[v] for v in scope])
            for position, choice in enumerate(scope):
                around[choice].append((factor, position, colours))
        numbers: dict[Hashable, int] = {}
        colour = [
            numbers.setdefault((c, tuple(sorted(mine))), len(numbers))
            for c, mine in zip(colour, around, strict=True)
        ]
    return colour
