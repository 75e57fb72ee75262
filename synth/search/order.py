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
from collections.abc import Iterable, Sequence

from shardwright.synth.search.fold import Scope

#: Choices tied to more others than this (a scalar that every update reads) wait until few are left.
_HUB = 48


def _ties(scopes: Iterable[Scope]) -> dict[int, set[int]]:
    """Of every choice in a term, the others that it occurs together with."""
    of: dict[int, set[int]] = {}
    for scope in scopes:
        for v in scope:
            mine = of.get(v)
            if mine is None:
                of[v] = set(scope)
            else:
                mine.update(scope)
    for v, tied in of.items():
        tied.discard(v)
    return of


def simple_order(sizes: Sequence[int], scopes: Sequence[Scope], degree: int, cells: int) -> list[int]:
    """Choices tied to at most `degree` others, by tables of at most `cells`, until there are none left."""
    of = _ties(scopes)
    order: list[int] = []

    def simple(v: int) -> bool:
        tied = of[v]
        if len(tied) > degree:
            return False
        table = sizes[v]
        for a in tied:
            table *= sizes[a]
        return table <= cells

    current = sorted(filter(simple, of))
    while current:
        touched: set[int] = set()
        for v in current:
            if simple(v):
                order.append(v)
                tied = of.pop(v)
                for a in tied:
                    mine = of[a]
                    mine |= tied
                    mine.discard(a)
                    mine.discard(v)
                touched |= tied
        current = sorted([v for v in touched if v in of and simple(v)])
    return order


class _Filled:
    """Ties, and what eliminating a choice would add to them: kept up to date, not counted anew.

    Attributes:
        of: who is tied to whom.
        fill: pairs of a choice's neighbours that are not tied, weighted by their sizes; hubs have none.
        gone: sizes of its neighbours together.
        cells: of the table over it and its neighbours.
    """

    def __init__(self, sizes: Sequence[int], scopes: Sequence[Scope]) -> None:
        self.of, self._sizes = _ties(scopes), sizes
        self.fill = {v: self._counted(tied) for v, tied in self.of.items() if len(tied) <= _HUB}
        self.gone = {v: sum([sizes[a] for a in tied]) for v, tied in self.of.items()}
        self.cells = {v: math.prod([sizes[v], *[sizes[a] for a in tied]]) for v, tied in self.of.items()}

    def cost(self, v: int) -> tuple[float, int]:
        """What says when a choice is eliminated, and the size of its table."""
        tied, fill = self.of[v], self.fill
        if len(tied) > _HUB:
            return math.inf, len(tied)
        if v not in fill:  # it was a hub
            fill[v] = self._counted(tied)
        return fill[v] / (1 + self.gone[v] * self._sizes[v]) ** 0.5, self.cells[v]

    def _counted(self, tied: set[int]) -> int:
        of, sizes, twice = self.of, self._sizes, 0
        for a in tied:
            # It is not tied to itself, either.
            twice += sizes[a] * (sum([sizes[b] for b in tied - of[a]]) - sizes[a])
        return twice // 2

    def take(self, v: int) -> set[int]:
        """Take a choice out, its neighbours being tied to each other; all whose cost may have changed."""
        of, fill, gone, cells, sizes = self.of, self.fill, self.gone, self.cells, self._sizes
        tied, size = of.pop(v), sizes[v]
        changed, waiting = set(tied), set(tied)
        for a in tied:
            of[a].discard(v)
            gone[a] -= size
            cells[a] //= size
            if a in fill:
                fill[a] -= size * sum([sizes[x] for x in of[a] - tied])
        for a in tied:
            waiting.discard(a)
            mine, by_a = of[a], sizes[a]
            for b in waiting - mine:
                theirs, by_b = of[b], sizes[b]
                common = mine & theirs
                changed |= common
                both = 0
                for x in common:
                    both += sizes[x]
                    if x in fill:  # it lacks one tie less
                        fill[x] -= by_a * by_b
                # All others that one of them is tied to are not tied to the other.
                if a in fill:
                    fill[a] += by_b * (gone[a] - both)
                if b in fill:
                    fill[b] += by_a * (gone[b] - both)
                mine.add(b)
                theirs.add(a)
                gone[a] += by_b
                gone[b] += by_a
                cells[a] *= by_b
                cells[b] *= by_a
        return changed


def full_order(sizes: Sequence[int], scopes: Sequence[Scope]) -> list[int]:
    """All choices that occur in `scopes`."""
    ties = _Filled(sizes, scopes)
    latest = {v: ties.cost(v) for v in ties.of}
    heap = [(*c, v) for v, c in latest.items()]
    heapq.heapify(heap)
    order: list[int] = []
    while heap:
        fill, table, v = heapq.heappop(heap)
        if v not in ties.of or (fill, table) != latest[v]:
            continue
        order.append(v)
        for a in ties.take(v):
            now = ties.cost(a)
            if now != latest[a]:
                latest[a] = now
                heapq.heappush(heap, (*now, a))
    return order
