"""Tables that hold one entry for all values which they do not tell apart.

A choice has more values than most of its neighbours care about: where a tensor is held besides its base
matters to some readers and not to others. Where the tables of a bucket are equal, slice by slice, for two
values of a choice, their sum is worked out once for both, and so is the message.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from shardwright.cost.share_cost import Floats

#: Of every value of an axis, the number of its class; classes are numbered as they first appear.
Labels: TypeAlias = tuple[int, ...]

#: Tables of more cells are not compared slice by slice.
_COMPARED = 1 << 18

#: Entries in which slices are compared before they are in all of them.
_SAMPLE = 48


@dataclass(frozen=True, slots=True, eq=False)
class Merged:
    """A table with one entry for all values that are alike.

    Attributes:
        cells: (classes of every axis).
        labels: per axis, the class of every value.
    """

    cells: Floats
    labels: tuple[Labels, ...]

    @property
    def ndim(self) -> int:
        """Axes."""
        return self.cells.ndim

    def __getitem__(self, at: tuple[int | slice, ...]) -> Floats:
        """The entries at some values, an axis of all of them where `at` has a slice."""
        pairs = zip(self.labels, at, strict=True)
        return self.cells[tuple([list(mine) if isinstance(k, slice) else mine[k] for mine, k in pairs])]

    def whole(self) -> Floats:
        """The table, entry by entry."""
        return repeated(self.cells, self.labels)

    def some(self, first: Sequence[Sequence[int]]) -> Floats:
        """The entries at some values of every axis."""
        pairs = zip(self.labels, first, strict=True)
        return taken(self.cells, [[mine[k] for k in values] for mine, values in pairs])


Table: TypeAlias = Floats | Merged


def whole(table: Table) -> Floats:
    """A table, entry by entry."""
    return table.whole() if isinstance(table, Merged) else table


def some(table: Table, first: Sequence[Sequence[int]]) -> Floats:
    """The entries of a table at some values of every axis."""
    return table.some(first) if isinstance(table, Merged) else taken(table, first)


def merged(cells: Floats, labels: Sequence[Labels]) -> Merged:
    """A table of these cells, merged further where that is seen at a glance."""
    coarser = compared(cells)
    if all(max(mine) + 1 == size for mine, size in zip(coarser, cells.shape, strict=True)):
        return Merged(cells, tuple(labels))
    both = tuple([tuple([again[k] for k in mine]) for mine, again in zip(labels, coarser, strict=True)])
    return Merged(taken(cells, [firsts(mine) for mine in coarser]), both)


def firsts(labels: Labels) -> list[int]:
    """The first value of every class."""
    found: dict[int, int] = {}
    for value, kind in enumerate(labels):
        found.setdefault(kind, value)
    return list(found.values())


class Seen:
    """Which values plain tables do not tell apart, found when asked for."""

    def __init__(self) -> None:
        #: By `id`, with the table, so that no other has it.
        self._known: dict[int, tuple[Floats, tuple[Labels, ...]]] = {}

    def of(self, table: Table) -> tuple[Labels, ...]:
        """Per axis of a table."""
        if isinstance(table, Merged):
            return table.labels
        found = self._known.get(id(table))
        if found is None:
            found = self._known[id(table)] = table, compared(table)
        return found[1]

    def joint(self, sources: Sequence[tuple[Table, tuple[int, ...]]], shape: Sequence[int]) -> list[Labels]:
        """Per axis of `shape`, the values that none of some tables over some of the axes tells apart."""
        found: list[Labels] = [(0,) * size for size in shape]
        for table, axes in sources:
            for axis, labels in zip(axes, self.of(table), strict=True):
                found[axis] = _both(found[axis], labels) if any(found[axis]) else labels
        return found


def _both(one: Labels, other: Labels) -> Labels:
    """What either tells apart."""
    known: dict[tuple[int, int], int] = {}
    return tuple([known.setdefault(pair, len(known)) for pair in zip(one, other, strict=True)])


def compared(table: Floats) -> tuple[Labels, ...]:
    """Per axis, the values that a table does not tell apart; of a large one none."""
    if table.size > _COMPARED:
        return tuple([tuple(range(size)) for size in table.shape])
    found: list[Labels] = []
    for axis, size in enumerate(table.shape):
        found.append(_labels(table.swapaxes(0, axis)))
        if max(found[-1]) + 1 < size:  # what repeats itself need not be compared along other axes
            table = table.take(firsts(found[-1]), axis)
    return tuple(found)


def _labels(rows: Floats) -> Labels:
    """Which entries of the first axis are equal throughout; a few of the others tell most of them apart."""
    sample = rows if rows.ndim == 1 else rows[slice(None), *_sampled(rows.shape[1:])]
    cells, width = sample.tobytes(), sample.nbytes // len(rows)
    parts = [cells[begin : begin + width] for begin in range(0, len(cells), width)]
    if len(set(parts)) == len(parts):
        return tuple(range(len(parts)))
    found: list[int] = []
    alike: dict[bytes, list[tuple[int, Floats]]] = {}
    count = 0
    for value, part in enumerate(parts):
        mine, near = rows[value], alike.setdefault(part, [])
        kind = next((kind for kind, other in near if (mine == other).all()), count)
        if kind == count:
            near.append((kind, mine))
            count += 1
        found.append(kind)
    return tuple(found)


@cache
def _sampled(shape: tuple[int, ...]) -> tuple[NDArray[np.intp], ...]:
    """Some entries of an array of this shape, spread over it."""
    cells = math.prod(shape)
    return np.unravel_index((np.arange(_SAMPLE) * (cells // _SAMPLE | 1) + cells // 2) % cells, shape)


def taken(table: Floats, values: Sequence[Sequence[int]]) -> Floats:
    """The entries of an array at some values of every axis."""
    for axis, mine in enumerate(values):
        if list(mine) != list(range(table.shape[axis])):
            table = table.take(mine, axis)
    return table


def repeated(table: Floats, labels: Sequence[Labels]) -> Floats:
    """A table of classes, value by value."""
    for axis, mine in enumerate(labels):
        if len(mine) > table.shape[axis]:
            table = table.take(mine, axis)
    return table
