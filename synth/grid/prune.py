"""Dominated values found again at other prices, without looking for what dominates them.

Pruning compares every value of a choice with every other (`shardwright.synth.search.prune`). Prices of one
problem have much in common: what dominates a value at some mostly does so at others, which takes one
comparison to see. Where that often fails, it is looked for anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from shardwright.cost.share_cost import Floats
from shardwright.synth.search.fold import Folded
from shardwright.synth.search.prune import HUGE, Kept

#: Values left may be more than last time by this part before all of them are compared again.
_MORE = 0.1

#: Differences that single precision may make up, as a part of what they are between.
_ROUGH = 1e-6

#: Entries compared at once.
_CELLS = 1 << 18

#: Values of a class that went, and the value that each gave way to (itself where it is impossible).
_Went: TypeAlias = tuple[NDArray[np.intp], NDArray[np.intp]]


@dataclass(slots=True)
class Dominated:
    """What went at the last prices, by class, and how many values were left."""

    went: dict[int, _Went] = field(default_factory=dict[int, _Went])
    left: int = 0

    def prune(self, folded: Folded, sizes: Sequence[int], cooked: Sequence[Floats]) -> Kept:
        """See `shardwright.synth.search.prune.prune`; what is left may be a little more."""
        whole = Kept(folded, sizes, cooked)
        gone = {kind: went[_still(whole, kind, went, by)] for kind, (went, by) in self.went.items()}
        if not self.left or sum(sizes) - sum(map(len, gone.values())) > self.left * (1 + _MORE):
            self.went = {kind: _compared(whole, kind) for kind, size in enumerate(sizes) if size > 1}
            gone = {kind: went for kind, (went, _) in self.went.items()}
            self.left = sum(sizes) - sum(map(len, gone.values()))
        for kind, values in gone.items():
            if len(values):
                whole.keep(kind, np.setdiff1d(whole.values[kind], values, assume_unique=True))
        return whole


def _compared(whole: Kept, kind: int) -> _Went:
    """Values that are impossible or dominated, each by one that is neither."""
    dominates, possible = _dominating(whole, kind)
    if not possible.any():
        possible[0] = True  # no assignment is possible at all; the search will find that out
    keep = possible.copy()
    for b in np.flatnonzero(dominates.any(axis=0) & possible)[::-1]:  # keeps the first of equals
        keep[b] = not (dominates[:, b] & keep).any()
    went = np.flatnonzero(~keep)
    by = np.where(possible[went], (dominates & keep[:, None])[:, went].argmax(axis=0), went)
    return went, by


def _dominating(whole: Kept, kind: int) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """[a, b]: whether value a of a class is possible and nowhere dearer than b; and which are possible.

    Most pairs are told apart by the few contexts that suit some value best, which are compared first, in
    single precision: pairs that seem equal there are left to the second comparison.
    """
    size = whole.size(kind)
    least, possible = np.zeros((size, size), dtype=np.float32), np.ones(size, dtype=np.bool_)
    scale = 0.0
    terms: list[tuple[Floats, Floats, int]] = []
    for (recipe, kinds, axis), times in whole.folded.incident[kind].items():
        rows = np.moveaxis(whole.table(recipe, kinds), axis, 0).reshape(size, -1)
        finite = np.isfinite(rows)
        left = right = rows
        if not finite.all():
            possible &= finite.any(axis=1)
            left, right = np.where(finite, rows, HUGE), np.where(finite, rows, 3 * HUGE)
        if rows.shape[1] > 2 * size:
            some = np.union1d(right.argmin(axis=1), (right - left.min(axis=0)).argmin(axis=1))
            mine, other = left[:, some], right[:, some]
        else:
            mine, other = left, right
        rough, others = mine.astype(np.float32), other.astype(np.float32)
        least += times * np.maximum.reduce(rough[:, None] - others[None], axis=2)
        scale += times * float(np.abs(rows[finite]).max(initial=0.0))
        terms.append((left, right, times))
    dominates = (least <= scale * _ROUGH) & possible[:, None] & possible
    np.fill_diagonal(dominates, val=False)
    a, b = dominates.nonzero()
    worst = np.zeros(len(a))
    for left, right, times in terms:
        step = max(1, _CELLS // left.shape[1])
        for at in range(0, len(a), step):
            part = slice(at, at + step)
            worst[part] += times * (left[a[part]] - right[b[part]]).max(axis=1)
    dominates[a, b] = worst <= 0
    return dominates, possible


def _still(whole: Kept, kind: int, went: NDArray[np.intp], by: NDArray[np.intp]) -> NDArray[np.bool_]:
    """Which values are still dominated by those that they gave way to, or impossible."""
    worst, impossible = np.zeros(len(went)), np.zeros(len(went), dtype=np.bool_)
    if not len(went):
        return impossible
    for (recipe, kinds, axis), times in whole.folded.incident[kind].items():
        rows = np.moveaxis(whole.table(recipe, kinds), axis, 0)
        rows = rows.reshape(len(rows), -1)
        theirs = rows[went]
        # A context that is impossible for a value does not speak for it: inf - inf is no number.
        with np.errstate(invalid="ignore"):
            more = np.fmax.reduce(rows[by] - theirs, axis=1)
        nowhere = ~np.isfinite(theirs).any(axis=1)
        impossible |= nowhere
        worst = worst + times * np.where(nowhere, 0.0, more)
    return impossible | ((worst <= 0) & (by != went))
