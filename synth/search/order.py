"""The order in which choices are eliminated.

`simple_order` takes those tied to few others, as long as there are any: cheap, and after it `prune` sees
further. `full_order` takes all: next is the choice that adds the least fill (new ties between its
neighbours, weighted by the sizes they join) in proportion to the square root of the ties that go with
it: of ten rules tried on the examples the one that never went far wrong. Ties are broken by the size of
its table and then by number, so that equal layers are taken alike.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence

from shardwright.synth.search.fold import Scope

#: Choices tied to more others than this (a scalar that every update reads) wait until few are left.
_HUB = 48


class _Ties:
    """Which choices occur together in a term."""

    def __init__(self, scopes: Sequence[Scope]) -> None:
        self.of: dict[int, set[int]] = {}
        for scope in scopes:
            for v in scope:
                self.of.setdefault(v, set()).update(scope)
        for v, tied in self.of.items():
            tied.discard(v)

    def eliminate(self, v: int) -> list[int]:
        """Take a choice out; its neighbours, now tied to each other, in ascending order."""
        return sorted(self.take(v)[0])

    def take(self, v: int) -> tuple[set[int], set[int]]:
        """Take a choice out: its neighbours, now tied to each other, and all whose fill may have changed."""
        of = self.of
        tied = of.pop(v)
        changed = set(tied)
        for a in tied:
            of[a].discard(v)
        for a in tied:
            for b in tied - of[a]:
                if b > a:
                    # What is tied to both lacks one tie less.
                    changed |= of[a] & of[b]
        for a in tied:
            mine = of[a]
            mine |= tied
            mine.discard(a)
        return tied, changed


def simple_order(sizes: Sequence[int], scopes: Sequence[Scope], degree: int, cells: int) -> list[int]:
    """Choices tied to at most `degree` others, by tables of at most `cells`, until there are none left."""
    ties = _Ties(scopes)
    order: list[int] = []

    def simple(v: int) -> bool:
        tied = ties.of.get(v)
        if tied is None or len(tied) > degree:
            return False
        return sizes[v] * math.prod([sizes[a] for a in tied]) <= cells

    current = sorted(filter(simple, ties.of))
    while current:
        touched: dict[int, None] = {}
        for v in current:
            if simple(v):
                order.append(v)
                touched.update(dict.fromkeys(ties.eliminate(v)))
        current = sorted(filter(simple, touched))
    return order


def full_order(sizes: Sequence[int], scopes: Sequence[Scope]) -> list[int]:
    """All choices that occur in `scopes`."""
    ties = _Ties(scopes)

    def cost(v: int) -> tuple[float, int]:
        tied = sorted(ties.of[v])
        if len(tied) > _HUB:
            return float("inf"), len(tied)
        fill, table, gone = 0, sizes[v], 0
        for k, a in enumerate(tied):
            table *= sizes[a]
            gone += sizes[a]
            near = ties.of[a]
            for b in tied[k + 1 :]:
                if b not in near:
                    fill += sizes[a] * sizes[b]
        return fill / (1 + gone * sizes[v]) ** 0.5, table

    latest = {v: cost(v) for v in ties.of}
    heap = [(*c, v) for v, c in latest.items()]
    heapq.heapify(heap)
    order: list[int] = []
    while heap:
        fill, table, v = heapq.heappop(heap)
        if v not in ties.of or (fill, table) != latest[v]:
            continue
        order.append(v)
        for a in ties.take(v)[1]:
            now = cost(a)
            if now != latest[a]:
                latest[a] = now
                heapq.heappush(heap, (*now, a))
    return order
