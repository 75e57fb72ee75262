"""Values that cannot matter are dropped before the search: a reduction with an inverse.

A value of a choice is dropped if it is impossible (every completion is infinite), or dominated: another
value of the same choice costs no more in every factor combined, whatever the neighbours do,

    sum over terms of  max over contexts of  term[a, context] - term[b, context]  <=  0,

so that some optimum does without b (dead-end elimination, Desmet et al. 1992; soft neighbourhood
substitutability). Choices of one class keep the same values, so this is done once per class.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from shardwright.cost.share_cost import Floats
from shardwright.synth.search.fold import ROUNDS, Folded, Scope

#: Stands for infinity on the left of a difference; on the right it is three times as large, so that
#: contexts which are impossible for b never speak for b.
HUGE = 1e30

#: Larger arrays of differences are not made at once.
_LARGE = 1 << 16


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
    """Drop impossible and dominated values until nothing changes, at most `fold.ROUNDS` times.

    Args:
        folded: the problem.
        sizes: values of every class.
        cooked: table of every recipe.
    """
    kept = Kept(folded, sizes, cooked)
    known: dict[tuple[tuple[int, ...], int], tuple[Floats, NDArray[np.bool_]]] = {}
    changed = set(range(len(folded.classes)))
    for _ in range(ROUNDS):
        # All classes are judged by what was left before the round: what survives then depends on no more
        # of a choice's surroundings than the rounds of refinement have told apart.
        alive: dict[int, NDArray[np.bool_]] = {}
        for kind in sorted(changed):
            if not folded.incident[kind]:
                kept.keep(kind, kept.values[kind][:1])  # decided in another stage: any value will do
            elif kept.size(kind) > 1:
                survivors = _survivors(kept, kind, known)
                if not survivors.all():
                    alive[kind] = survivors
        if not alive:
            break
        for kind, survivors in alive.items():
            kept.keep(kind, kept.values[kind][survivors])
        changed = {k for kind in alive for _, kinds, _ in folded.incident[kind] for k in kinds}
    return kept


def _survivors(
    kept: Kept, kind: int, known: dict[tuple[tuple[int, ...], int], tuple[Floats, NDArray[np.bool_]]]
) -> NDArray[np.bool_]:
    """Which values of a class are neither impossible nor dominated."""
    worst, possible = compared(kept, kind, known)
    if not possible.any():
        possible[0] = True  # no assignment is possible at all; the search will find that out
    dominates = worst <= 0
    dominates &= possible[:, None]
    np.fill_diagonal(dominates, val=False)
    keep = possible
    # b goes if a living a is nowhere worse; walking from the last value keeps the first of equals.
    for b in (dominates.any(axis=0) & possible).nonzero()[0][::-1].tolist():
        keep[b] = not (dominates[:, b] & keep).any()
    return keep


def compared(
    kept: Kept, kind: int, known: dict[tuple[tuple[int, ...], int], tuple[Floats, NDArray[np.bool_]]]
) -> tuple[Floats, NDArray[np.bool_]]:
    """[a, b]: what value a of a class costs more than b at most; and which values are possible."""
    size = kept.size(kind)
    worst, possible = np.zeros((size, size)), np.ones(size, dtype=np.bool_)
    for (recipe, kinds, axis), times in kept.folded.incident[kind].items():
        key = (kept.key(recipe, kinds), axis)
        found = known.get(key)
        if found is None:
            found = known[key] = _differences(kept.table(recipe, kinds), axis)
        worst += found[0] if times == 1 else found[0] * times
        possible &= found[1]
    return worst, possible


def _differences(table: Floats, axis: int) -> tuple[Floats, NDArray[np.bool_]]:
    """[a, b]: max of table[a] - table[b] over contexts possible for b; and which values are possible."""
    size = table.shape[axis]
    rest = [k for k in range(table.ndim) if k != axis]
    rows = table.transpose(*rest, axis).reshape(-1, size)
    finite = np.isfinite(rows)
    left = right = rows
    if np.logical_and.reduce(finite, axis=None):
        possible = np.ones(size, dtype=np.bool_)
    else:
        possible = np.logical_or.reduce(finite, axis=0)
        left, right = np.where(finite, rows, HUGE), np.where(finite, rows, 3 * HUGE)
    if rows.size * size <= _LARGE:
        return np.maximum.reduce(left[:, :, None] - right[:, None, :], axis=0), possible
    # Value by value, so that what is compared stays in the cache.
    found = np.empty((size, size))
    for a in range(size):
        np.maximum.reduce(left[:, a, None] - right, axis=0, out=found[a])
    return found, possible
