"""Values that cannot matter are dropped before the search: a reduction with an inverse.

A value of a choice is dropped if it is impossible (every completion is infinite), or dominated: another
value of the same choice costs no more in every factor combined, whatever the neighbours do,

    sum over terms of  max over contexts of  term[a, context] - term[b, context]  <=  0,

so that some optimum does without b (dead-end elimination, Desmet et al. 1992; soft neighbourhood
substitutability). Choices left with one value disappear from the tables.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardwright.cost.share_cost import Floats
from shardwright.synth.eliminate import Term, collect


@dataclass(frozen=True, slots=True)
class Pruned:
    """A smaller problem with the same optimum.

    Attributes:
        sizes: values left per choice; choices of the original that became fixed are not among them.
        terms: over the remaining choices, renumbered.
        kept: per original choice, the original values left.
        number: original number of every remaining choice.
    """

    sizes: tuple[int, ...]
    terms: tuple[Term, ...]
    kept: tuple[NDArray[np.int64], ...]
    number: tuple[int, ...]

    def lift(self, assignment: Sequence[int]) -> tuple[int, ...]:
        """An assignment of the original choices from one of the remaining."""
        full = [int(values[0]) for values in self.kept]
        for choice, value in zip(self.number, assignment, strict=True):
            full[choice] = int(self.kept[choice][value])
        return tuple(full)


def prune(sizes: Sequence[int], terms: Sequence[Term], rounds: int = 4) -> Pruned:
    """Drop impossible and dominated values until nothing changes, at most `rounds` times."""
    kept = [np.arange(size) for size in sizes]
    current = list(terms)
    for _ in range(rounds):
        alive = _survivors([len(k) for k in kept], current)
        if all(a.all() for a in alive):
            break
        kept = [values[a] for values, a in zip(kept, alive, strict=True)]
        current = _restrict(current, alive)
    remaining = [v for v, values in enumerate(kept) if len(values) > 1]
    new = {v: k for k, v in enumerate(remaining)}
    small: list[Term] = []
    done: dict[tuple[int, tuple[bool, ...]], Floats] = {}
    for term in current:
        left = tuple(v in new for v in term.scope)
        key = (id(term.table), left)
        if key not in done:
            done[key] = np.asarray(term.table[tuple(slice(None) if stays else 0 for stays in left)])
        small.append(Term(tuple(new[v] for v in term.scope if v in new), done[key]))
    return Pruned(
        tuple(len(kept[v]) for v in remaining), tuple(collect(small)), tuple(kept), tuple(remaining)
    )


def _restrict(terms: Sequence[Term], alive: Sequence[NDArray[np.bool_]]) -> list[Term]:
    """Cut the tables to the values alive; tables shared between terms stay shared."""
    done: dict[tuple[int, tuple[bytes, ...]], Floats] = {}
    masks = [a.tobytes() for a in alive]
    result: list[Term] = []
    for term in terms:
        key = (id(term.table), tuple(masks[v] for v in term.scope))
        if key not in done:
            done[key] = term.table[np.ix_(*(alive[v] for v in term.scope))] if term.scope else term.table
        result.append(Term(term.scope, done[key]))
    return result


def _survivors(sizes: Sequence[int], terms: Sequence[Term]) -> list[NDArray[np.bool_]]:
    """Per choice, which values are neither impossible nor dominated."""
    worst = [np.zeros((size, size)) for size in sizes]
    possible = [np.ones(size, dtype=np.bool_) for size in sizes]
    cache: dict[tuple[int, int], tuple[Floats, NDArray[np.bool_]]] = {}
    for term in terms:
        for axis, v in enumerate(term.scope):
            if sizes[v] == 1:
                continue
            key = (id(term.table), axis)
            if key not in cache:
                cache[key] = _differences(term.table, axis)
            difference, finite = cache[key]
            worst[v] += difference
            possible[v] &= finite
    alive: list[NDArray[np.bool_]] = []
    for v, size in enumerate(sizes):
        keep = possible[v].copy()
        if not keep.any():
            keep[0] = True  # no assignment is possible at all; the search will find that out
        if size > 1:
            # b goes if a living a is nowhere worse; walking from the last value keeps the first of equals.
            for b in range(size - 1, -1, -1):
                if keep[b]:
                    others = keep.copy()
                    others[b] = False
                    keep[b] = not (worst[v][others, b] <= 0).any()
        alive.append(keep)
    return alive


def _differences(table: Floats, axis: int) -> tuple[Floats, NDArray[np.bool_]]:
    """[a, b]: max of table[a] - table[b] over contexts possible for b; and which values are possible."""
    rows = np.moveaxis(table, axis, 0).reshape(table.shape[axis], -1)
    size = rows.shape[0]
    result = np.empty((size, size))
    finite = np.isfinite(rows)
    for b in range(size):
        here = finite[b]
        if not here.any():
            result[:, b] = -np.inf
            continue
        result[:, b] = (rows[:, here] - rows[b, here]).max(axis=1)
    # inf - inf never arises above; a sum of +inf and -inf over terms must not either.
    return np.clip(result, -1e30, 1e30), np.asarray(finite.any(axis=1))
