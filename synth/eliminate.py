"""Bucket elimination over the choice graph: exact messages, or admissible ones where tables would not fit.

Eliminating a choice v adds up the factors that mention it and minimises over v; what remains is a
message to the choices it was tied to. In reverse order, the messages tell the cost of completing any
partial assignment: a perfect heuristic for A*. Where a table would exceed `most_cells`, the factors of
the bucket are minimised in several smaller groups (mini-buckets); the sum of the minima is then a lower
bound, and the heuristic stays admissible (Dechter 1999; Kask & Dechter 2001).

Repeated layers have the same tables (the same objects: see `collect`), and so have their messages: what
was done once to certain tables in a certain arrangement is not done again.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from shardwright.cost.share_cost import Floats


@dataclass(frozen=True, slots=True)
class Term:
    """A table over some choices, given by their numbers in ascending order of the axes."""

    scope: tuple[int, ...]
    table: Floats


@dataclass(frozen=True, slots=True)
class Bucket:
    """What was eliminated with one choice.

    Attributes:
        choice: its number.
        terms: the terms it was in at that time, messages included.
        messages: what they became, over other choices.
        constant: what became of those that mention no other choice.
    """

    choice: int
    terms: tuple[Term, ...]
    messages: tuple[Term, ...]
    constant: float


@dataclass(frozen=True, slots=True)
class Elimination:
    """The result: buckets in order of elimination, and the bound they prove.

    Attributes:
        buckets: in order of elimination.
        bound: least cost of any assignment; a lower bound on it where `exact` is false.
        exact: whether no bucket was split.
        width: most choices in one table.
        cells: size of all tables together, those of repeated layers once.
    """

    buckets: tuple[Bucket, ...]
    bound: float
    exact: bool
    width: int
    cells: int


def min_fill(sizes: Sequence[int], scopes: Sequence[tuple[int, ...]]) -> list[int]:
    """An elimination order by least fill-in (new ties between neighbours), ties broken by number."""
    neighbours: list[set[int]] = [set() for _ in sizes]
    for scope in scopes:
        for v in scope:
            neighbours[v].update(scope)
    for v, tied in enumerate(neighbours):
        tied.discard(v)

    def fill(v: int) -> int:
        tied = neighbours[v]
        return sum(len(tied) - 1 - len(tied & neighbours[a]) for a in tied) // 2

    current = [fill(v) for v in range(len(sizes))]
    heap = [(cost, v) for v, cost in enumerate(current)]
    heapq.heapify(heap)
    done = [False] * len(sizes)
    order: list[int] = []
    while heap:
        cost, v = heapq.heappop(heap)
        if done[v] or cost != current[v]:
            continue
        done[v] = True
        order.append(v)
        tied = neighbours[v]
        changed = set(tied)
        for a in tied:
            if cost:
                neighbours[a] |= tied
                neighbours[a].discard(a)
            neighbours[a].discard(v)
            if cost:
                changed |= neighbours[a]
        for a in changed:
            if not done[a]:
                now = fill(a)
                if now != current[a]:
                    current[a] = now
                    heapq.heappush(heap, (now, a))
    return order


def collect(terms: Iterable[Term]) -> list[Term]:
    """One term per scope (as a set), axes ascending, so that thousands of small factors become few.

    Equal sums of equal tables are one object: what is done to a table later is done once per distinct
    layer of the model.
    """
    parts: dict[tuple[int, ...], list[tuple[int, tuple[int, ...]]]] = {}
    tables: dict[int, Floats] = {}
    for term in terms:
        order = tuple(sorted(range(len(term.scope)), key=term.scope.__getitem__))
        tables[id(term.table)] = term.table
        parts.setdefault(tuple(term.scope[k] for k in order), []).append((id(term.table), order))
    sums: dict[tuple[tuple[int, tuple[int, ...]], ...], Floats] = {}
    result: list[Term] = []
    for scope, mine in parts.items():
        key = tuple(sorted(mine))
        if key not in sums:
            turned = [tables[which].transpose(order) if order else tables[which] for which, order in mine]
            sums[key] = turned[0] if len(turned) == 1 else np.sum(turned, axis=0)
        result.append(Term(scope, sums[key]))
    return result


def quantised(terms: Sequence[Term]) -> list[Term]:
    """Tables rounded to multiples of a power of two so small that nobody can care, yet sums are exact.

    Equal prices then stay equal in whatever order they are added: ties are real ties, and A* does not
    chase rounding errors. The step is 2^-44 of the sum of all tables' least entries.
    """
    scale = sum(float(term.table.min()) for term in terms)
    if not (0 < scale < np.inf):
        return list(terms)
    step = 2.0 ** (np.ceil(np.log2(scale)) - 44)
    rounded: dict[int, Floats] = {}
    for term in terms:
        if id(term.table) not in rounded:
            rounded[id(term.table)] = np.rint(term.table / step) * step
    return [Term(term.scope, rounded[id(term.table)]) for term in terms]


def add_up(terms: Sequence[Term], scope: tuple[int, ...], sizes: Sequence[int]) -> Floats:
    """The sum of terms as one table over `scope`."""
    axis = {v: k for k, v in enumerate(scope)}
    total = np.zeros([sizes[v] for v in scope])
    for term in terms:
        shape = [1] * len(scope)
        for v in term.scope:
            shape[axis[v]] = sizes[v]
        places = np.argsort([axis[v] for v in term.scope], kind="stable")
        total += term.table.transpose(places).reshape(shape)
    return total


def eliminate(
    sizes: Sequence[int], terms: Sequence[Term], order: Sequence[int], most_cells: int
) -> Elimination:
    """Eliminate all choices in `order`."""
    place = {v: k for k, v in enumerate(order)}
    waiting: list[list[Term]] = [[] for _ in sizes]
    bound = 0.0
    for term in terms:
        if term.scope:
            waiting[min(term.scope, key=place.__getitem__)].append(term)
        else:
            bound += float(term.table)
    buckets: list[Bucket] = []
    done: dict[tuple[object, ...], Floats] = {}
    exact, width, cells = True, 0, 0
    for v in order:
        mine = waiting[v]
        messages: list[Term] = []
        constant = 0.0
        groups = _groups(mine, sizes, most_cells)
        exact = exact and len(groups) <= 1
        for group in groups:
            tied = {u for term in group for u in term.scope}
            tied.discard(v)
            rest = tuple(sorted(tied, key=place.__getitem__))
            axis = {u: k for k, u in enumerate((v, *rest))}
            arrangement = (sizes[v], *sorted((id(t.table), *(axis[u] for u in t.scope)) for t in group))
            if arrangement not in done:
                table = add_up(group, (v, *rest), sizes)
                width, cells = max(width, len(rest) + 1), cells + table.size
                done[arrangement] = table.min(axis=0)
            least = done[arrangement]
            if rest:
                message = Term(rest, least)
                messages.append(message)
                waiting[rest[0]].append(message)
            else:
                constant += float(least)
        bound += constant
        buckets.append(Bucket(v, tuple(mine), tuple(messages), constant))
    return Elimination(tuple(buckets), bound, exact, width, cells)


def _groups(terms: Sequence[Term], sizes: Sequence[int], most_cells: int) -> list[list[Term]]:
    """All terms together if their table fits, else greedily, largest first, into tables that fit."""
    if not terms:
        return []

    def cells(scope: set[int]) -> int:
        product = 1
        for u in scope:
            product *= sizes[u]
        return product

    everything = {u for term in terms for u in term.scope}
    if cells(everything) <= most_cells:
        return [list(terms)]
    groups: list[tuple[set[int], list[Term]]] = []
    for term in sorted(terms, key=lambda t: -t.table.size):
        for scope, members in groups:
            if cells(scope | set(term.scope)) <= most_cells:
                scope.update(term.scope)
                members.append(term)
                break
        else:
            groups.append((set(term.scope), [term]))
    return [members for _, members in groups]
