"""Dominated values found again at other prices, without looking for what dominates them.

Pruning compares every value of a choice with every other (`shardwright.synth.search.prune`). Prices of one
problem have much in common: what dominates a value at some mostly does so at others, which takes one
comparison to see. Where that often fails, it is looked for anew.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from shardwright.cost.share_cost import Floats
from shardwright.synth.search.fold import Folded
from shardwright.synth.search.prune import HUGE, Kept

#: Values left may be more than last time by this part before all of them are compared again.
_MORE = 0.1

#: Values left may be more than need be by this part where the same ones are left as last time: messages then
#: have their tables.
_SAME = 0.02

#: Differences that single precision may make up, as a part of what they are between.
_ROUGH = 1e-6

#: Contexts in which all pairs of values are compared, and about so many these are chosen from at most.
_SOME, _MANY = 64, 512

#: Entries compared at once.
_CELLS = 1 << 18

#: Values of a class that went, and the value that each gave way to (itself where it is impossible).
Went: TypeAlias = tuple[NDArray[np.intp], NDArray[np.intp]]


@dataclass(slots=True)
class Dominated:
    """What went when all values were compared, by class, and how many were left; and what went last."""

    went: dict[int, Went] = field(default_factory=dict[int, Went])
    left: int = 0
    last: dict[int, NDArray[np.intp]] = field(default_factory=dict[int, NDArray[np.intp]])

    def begin(
        self, folded: Folded, sizes: Sequence[int], cooked: Sequence[Floats], went: Mapping[int, Went]
    ) -> None:
        """Begin with values that went in a similar problem, by class; others are looked for.

        If many of them turn out to stay, `prune` looks for all anew.
        """
        whole = Kept(folded, sizes, cooked)
        self.went = {
            kind: went[kind] if kind in went else _compared(whole, kind)
            for kind, size in enumerate(sizes)
            if size > 1
        }
        self.left = sum(sizes) - sum(len(values) for values, _ in self.went.values())

    def prune(self, folded: Folded, sizes: Sequence[int], cooked: Sequence[Floats]) -> Kept:
        """See `shardwright.synth.search.prune.prune`; what is left may be a little more."""
        whole = Kept(folded, sizes, cooked)
        gone = {kind: went[_still(whole, kind, went, by)] for kind, (went, by) in self.went.items()}
        if not self.left or sum(sizes) - sum(map(len, gone.values())) > self.left * (1 + _MORE):
            self.went = {kind: _compared(whole, kind) for kind, size in enumerate(sizes) if size > 1}
            gone = {kind: went for kind, (went, _) in self.went.items()}
            self.left = sum(sizes) - sum(map(len, gone.values()))
        elif self.last and self._same(gone):
            gone = self.last
        self.last = gone
        for kind, values in gone.items():
            if len(values):
                whole.keep(kind, np.setdiff1d(whole.values[kind], values, assume_unique=True))
        return whole

    def _same(self, gone: Mapping[int, NDArray[np.intp]]) -> bool:
        """Whether all values that went last go, and hardly any others."""
        more = sum(map(len, gone.values())) - sum(map(len, self.last.values()))
        return 0 <= more <= self.left * _SAME and all(
            np.isin(values, gone[kind], assume_unique=True).all() for kind, values in self.last.items()
        )


def _compared(whole: Kept, kind: int) -> Went:
    """Values that are impossible (by themselves) or dominated, each by one that is possible.

    Most pairs are told apart by the few contexts that suit some value best, which are compared first, in
    single precision. Where a value may be dominated by several, the one that seems cheapest is compared with
    it in all contexts, and the next only where it is not the one.
    """
    if not whole.folded.incident[kind]:  # decided in another stage: any value will do
        went = np.arange(1, whole.size(kind))
        return went, np.zeros_like(went)
    terms, least, scale, possible = _glanced(whole, kind)
    if not possible.any():
        possible[0] = True  # no assignment is possible at all; the search will find that out
    rank = np.where((least <= scale * _ROUGH) & possible[:, None] & possible, least, np.inf)
    np.fill_diagonal(rank, np.inf)
    by = np.full(len(rank), -1)
    b = np.flatnonzero(np.isfinite(rank).any(axis=0))
    while len(b):
        a = rank[:, b].argmin(axis=0)
        worst = np.zeros(len(b))
        for left, right, times in terms:
            step = max(1, _CELLS // left.shape[1])
            for at in range(0, len(b), step):
                part = slice(at, at + step)
                worst[part] += times * (left[a[part]] - right[b[part]]).max(axis=1)
        by[b[worst <= 0]] = a[worst <= 0]
        rank[a, b] = np.inf
        b = b[worst > 0]
        b = b[np.isfinite(rank[:, b]).any(axis=0)]
    for b in np.flatnonzero(by >= 0).tolist():
        at, met = int(by[b]), set[int]()
        while at not in (-1, b) and at not in met:
            met.add(at)
            at = int(by[at])
        if at == b:
            by[b] = -1  # of equals, which give way to each other, the first stays
    by[~possible] = np.flatnonzero(~possible)
    went = np.flatnonzero(by >= 0)
    return went, by[went]


def _glanced(
    whole: Kept, kind: int
) -> tuple[list[tuple[Floats, Floats, int]], NDArray[np.float32], float, NDArray[np.bool_]]:
    """A class's terms, and what a few contexts say of its values.

    Returns:
        Of every term, (values, contexts) for values on the left and on the right of a difference, and how
        often it counts; [a, b], what value a costs more than b at most in some contexts; the scale of what
        that is between; and which values are possible.
    """
    size = whole.size(kind)
    least, possible = np.zeros((size, size), dtype=np.float32), np.ones(size, dtype=np.bool_)
    scale = 0.0
    terms: list[tuple[Floats, Floats, int]] = []
    for (recipe, kinds, axis), times in whole.folded.incident[kind].items():
        rows = np.moveaxis(whole.table(recipe, kinds), axis, 0).reshape(size, -1)
        left = right = rows
        top = float(rows.max(initial=0.0))
        if not math.isfinite(top):
            finite = np.isfinite(rows)
            possible &= finite.any(axis=1)
            top = float(rows[finite].max(initial=0.0))
            left, right = np.where(finite, rows, HUGE), np.where(finite, rows, 3 * HUGE)
        step = 1 + rows.shape[1] // _MANY
        rough = others = left[:, ::step].astype(np.float32)
        if left is not right:
            others = right[:, ::step].astype(np.float32)
        if rough.shape[1] > _SOME:
            best = np.concatenate([others.argmin(axis=1), (others - rough.min(axis=0)).argmin(axis=1)])
            some, values = np.unique(best, return_counts=True)
            some = some[np.argsort(-values, kind="stable")[:_SOME]]
            rough, others = rough[:, some], others[:, some]
        least += times * np.maximum.reduce(rough[:, None] - others[None], axis=2)
        scale += times * top
        terms.append((left, right, times))
    return terms, least, scale, possible


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
