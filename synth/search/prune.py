"""Values that cannot matter are dropped before the search: a reduction with an inverse.

A value of a choice is dropped if it is impossible (every completion is infinite), or dominated: another
value of the same choice costs no more in every factor combined, whatever the neighbours do,

    sum over terms of  max over contexts of  term[a, context] - term[b, context]  <=  0,

so that some optimum does without b (dead-end elimination, Desmet et al. 1992; soft neighbourhood
substitutability). Choices of one class keep the same values, so this is done once per class. Where prices
are several, what goes is impossible or dominated at each of them.

Comparing all pairs of values in all contexts would take longer than what follows. A few contexts tell most
pairs apart; of the others, every value is compared with those that look best.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from shardwright.cost.share_cost import Floats
from shardwright.synth.search.fold import Folded, Scope

#: Stands for infinity on the left of a difference; on the right it is three times as large, so that
#: contexts which are impossible for b never speak for b.
HUGE = 1e30

#: Contexts of a term in which values are compared before they are in all of them.
_SAMPLE = 24

#: A term, as far as tables go: its recipe, and the classes of its choices.
_Place: TypeAlias = tuple[int, Scope]

#: Values with which one that may be dominated is compared, one after another.
_TRIES = 4


class Kept:
    """The values kept of every class, and terms cut down to them (equal ones are one object)."""

    def __init__(self, folded: Folded, sizes: Sequence[int], cooked: Sequence[Floats]) -> None:
        self.folded = folded
        self.values: list[NDArray[np.intp]] = [np.arange(size) for size in sizes]
        self._cooked = cooked
        self._mark = [0] * len(self.values)
        self._marks: dict[bytes, int] = {}
        self._cut: dict[tuple[int, ...], Floats] = {}

    def keep(self, kind: int, values: NDArray[np.intp]) -> None:
        """Keep only `values` of a class."""
        self.values[kind] = values
        self._mark[kind] = self._marks.setdefault(values.tobytes(), len(self._marks) + 1)

    def size(self, kind: int) -> int:
        """Values left."""
        return len(self.values[kind])

    def key(self, recipe: int, kinds: Scope) -> tuple[int, ...]:
        """Equal keys have equal cut tables."""
        return (recipe, *[self._mark[kind] for kind in kinds])

    def table(self, recipe: int, kinds: Scope) -> Floats:
        """The table of a term, cut down."""
        key = self.key(recipe, kinds)
        found = self._cut.get(key)
        if found is None:
            found = self._cooked[recipe]
            for axis, kind in enumerate(kinds, found.ndim - len(kinds)):
                if self._mark[kind]:
                    found = found.take(self.values[kind], axis)
            self._cut[key] = found
        return found


def prune(folded: Folded, sizes: Sequence[int], cooked: Sequence[Floats]) -> Kept:
    """Drop values that are impossible, or seen to be dominated.

    All classes are judged by what there was before: what survives then depends on no more of a choice's
    surroundings than `fold.ROUNDS` of refinement have told apart.

    Args:
        folded: the problem.
        sizes: values of every class.
        cooked: table of every recipe; where prices are several, with an axis of them in front.
    """
    kept, compared = Kept(folded, sizes, cooked), _Compared(folded, cooked)
    for kind, size in enumerate(sizes):
        if not folded.incident[kind]:
            kept.keep(kind, kept.values[kind][:1])  # decided in another stage: any value will do
        elif size > 1:
            survivors = compared.survivors(kind, size)
            if not survivors.all():
                kept.keep(kind, survivors.nonzero()[0])
    return kept


def supported(kept: Kept) -> bool:
    """Leave out values that are impossible beside all that is left of some neighbour, until there are none.

    `prune` judges a value by what there was before: what is impossible beside values that went stays. This is
    arc consistency (Mackworth 1977). Neighbours of a class's choices may be of several classes: a value goes
    where none of them can have it.

    Returns:
        Whether every choice has values left: if not, no assignment is possible.
    """
    folded = kept.folded
    hard: dict[_Place, bool] = {}
    around: list[set[tuple[_Place, int]]] = [set() for _ in folded.class_of]
    for scope, recipe in zip(folded.scopes, folded.recipe_of, strict=True):
        place = recipe, tuple([folded.class_of[v] for v in scope])
        if place not in hard:
            hard[place] = kept.table(*place).max(initial=0.0) == math.inf
        if hard[place]:
            for axis, v in enumerate(scope):
                around[v].add((place, axis))
    shades = {(kind, frozenset(mine)) for kind, mine in zip(folded.class_of, around, strict=True)}
    of_kind: dict[int, list[frozenset[tuple[_Place, int]]]] = {}
    for kind, shade in shades:
        of_kind.setdefault(kind, []).append(shade)
    changed = any(hard.values())
    while changed:
        changed = False
        for kind, mine in of_kind.items():
            found = [_possible(kept, kind, shade) for shade in mine]
            if not all(possible.any() for possible in found):
                return False
            left = np.logical_or.reduce(found)
            if not left.all():
                kept.keep(kind, kept.values[kind][left])
                changed = True
    return True


def _possible(kept: Kept, kind: int, shade: Iterable[tuple[_Place, int]]) -> NDArray[np.bool_]:
    """Which values of a class are possible at some places: in terms, on an axis of each."""
    found = np.ones(kept.size(kind), dtype=np.bool_)
    for place, axis in shade:
        finite = np.isfinite(kept.table(*place))
        found &= finite.any(axis=tuple([k for k in range(finite.ndim) if k != axis]))
    return found


@dataclass(frozen=True, slots=True)
class _Term:
    """Values of one axis of a table.

    Attributes:
        rows: the table as [contexts before, values, contexts after], prices coming first.
        prices: how many there are.
        finite: of `rows`; None where all of it is.
        possible: [price, value], whether a value is possible; None where all are.
        sampled: [a, b]: what a costs more than b at most, in a few contexts.
    """

    rows: Floats
    prices: int
    finite: NDArray[np.bool_] | None
    possible: NDArray[np.bool_] | None
    sampled: Floats

    def exceeds(self, a: NDArray[np.intp], b: NDArray[np.intp]) -> Floats:
        """[price, pair]: max of what a value costs more than another, over contexts possible for that."""
        left, right = self.rows[:, a], self.rows[:, b]
        if self.finite is not None:
            left = np.where(self.finite[:, a], left, HUGE)
            right = np.where(self.finite[:, b], right, 3 * HUGE)
        more = left - right
        if more.shape[2] > 1:
            more = np.maximum.reduce(more, axis=2)
        return np.maximum.reduce(more.reshape(self.prices, -1, len(a)), axis=1)


class _Compared:
    """Values of classes, compared in the terms that they are in."""

    def __init__(self, folded: Folded, cooked: Sequence[Floats]) -> None:
        self._folded, self._cooked = folded, cooked
        self._finite: dict[int, NDArray[np.bool_] | None] = {}
        self._terms: dict[tuple[int, int], _Term] = {}

    def survivors(self, kind: int, size: int) -> NDArray[np.bool_]:
        """Which of so many values of a class are left."""
        terms: list[tuple[_Term, int]] = []
        sampled, possible = np.zeros((size, size)), None
        for (recipe, kinds, axis), times in self._folded.incident[kind].items():
            term = self._terms.get((recipe, axis)) or self._term(recipe, len(kinds), axis)
            terms.append((term, times))
            sampled += term.sampled if times == 1 else term.sampled * times
            if term.possible is not None:
                possible = term.possible if possible is None else possible & term.possible
        candidates = sampled <= 0
        if possible is None:
            keep = np.ones(size, dtype=np.bool_)
        else:
            keep = np.logical_or.reduce(possible, axis=0)
            candidates &= keep[:, None]
            if not keep.any():
                keep[0] = True  # no assignment is possible at all; the search will find that out
        # Of equals the first is kept.
        candidates &= ~(candidates.T & _not_before(size))
        for _ in range(_TRIES):
            b = (np.logical_or.reduce(candidates, axis=0) & keep).nonzero()[0]
            if not len(b):
                break
            a = np.where(candidates, sampled, np.inf).argmin(axis=0)[b]
            more = sum(term.exceeds(a, b) * times for term, times in terms)
            dearer = more > 0 if possible is None else (more > 0) & possible[:, b]
            # What dominates need not survive itself: what dominates it dominates both.
            keep[b[~np.logical_or.reduce(dearer, axis=0)]] = False
            candidates[a, b] = False
        return keep

    def _term(self, recipe: int, rank: int, axis: int) -> _Term:
        table = self._cooked[recipe]
        front = table.ndim - rank
        prices, size = table.shape[0] if front else 1, table.shape[front + axis]
        after = math.prod(table.shape[front + axis + 1 :])
        rows = table.reshape(-1, size, after)
        if recipe not in self._finite:
            finite = np.isfinite(table)
            self._finite[recipe] = None if np.logical_and.reduce(finite, axis=None) else finite
        finite, possible = self._finite[recipe], None
        if finite is not None:
            finite = finite.reshape(rows.shape)
            possible = np.logical_or.reduce(finite, axis=2).reshape(prices, -1, size)
            possible = np.logical_or.reduce(possible, axis=1)
        before, after = _contexts(len(rows), after)
        left = right = rows[before, :, after]
        if finite is not None:
            some = finite[before, :, after]
            left, right = np.where(some, left, HUGE), np.where(some, right, 3 * HUGE)
        sampled = np.maximum.reduce(left[:, :, None] - right[:, None, :], axis=0)
        found = self._terms[recipe, axis] = _Term(rows, prices, finite, possible, sampled)
        return found


@cache
def _not_before(size: int) -> NDArray[np.bool_]:
    """[a, b]: whether a does not come before b."""
    return np.tri(size, dtype=np.bool_)


@cache
def _contexts(before: int, after: int) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """A few contexts, spread over all: where they lie before the axis and after it."""
    stride = max(1, before * after // _SAMPLE) | 1  # odd, as sizes are often even
    return np.divmod(np.arange(0, before * after, stride), after)
