"""The sum of tables, minimised over one of their axes: what eliminating a choice works out."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from functools import cache
from typing import Any, TypeAlias

import numpy as np

from shardwright.cost.share_cost import Floats
from shardwright.synth.search.fold import least
from shardwright.synth.search.merged import Merged, Seen, Table, firsts, merged, repeated, some, whole

#: Axes of a message, ascending, and a table over them, with axes of prices in front.
Loose: TypeAlias = tuple[tuple[int, ...], Floats]

#: Tables larger than this are minimised in slices of at most so many cells, which stay in the cache.
_LARGE, _SLICE = 1 << 15, 1 << 18

#: Tables larger than this are worked out for values that are not alike alone: finding them takes a while.
_MERGED = 1 << 16


def minimum(
    sources: Sequence[tuple[Table, tuple[int, ...]]], shape: tuple[int, ...], seen: Seen | None
) -> tuple[Table, int]:
    """The sum of tables over axes of `shape`, minimised over the first axis; and cells added up.

    Args:
        sources: tables, each with its axes; where prices are several, they may have one more axis in front.
        shape: values of every axis.
        seen: which values tables do not tell apart; None: all count as different.
    """
    fronts: tuple[int, ...] = next(
        (t.shape[: t.ndim - len(a)] for t, a in sources if not isinstance(t, Merged) and t.ndim > len(a)), ()
    )
    cells = math.prod(shape) * math.prod(fronts)
    if seen is None or cells <= _MERGED or len(shape) == 1 or len(sources) == 1 or fronts:
        return _minimum(
            [(whole(table), axes) for table, axes in sources], (*fronts, *shape), len(fronts)
        ), cells
    labels = seen.joint(sources, shape)
    first = [firsts(mine) for mine in labels]
    cut = [(some(table, [first[axis] for axis in axes]), axes) for table, axes in sources]
    small = tuple(map(len, first))
    return merged(_minimum(cut, small, 0), labels[1:]), math.prod(small)


def apart(table: Table, axes: int) -> tuple[Floats, Table | None]:
    """The least entry over the last axes (see `fold.least`), and the table less it where that is finite.

    Without axes there is nothing else.
    """
    if isinstance(table, Merged):
        low, cells = _apart(table.cells, axes)
        return low, Merged(cells, table.labels)
    return _apart(table, axes) if axes else (table, None)


def loosened(table: Table, axes: int, some: tuple[int, ...]) -> tuple[Table, Loose | None]:
    """A table less what it is at least by some of its last axes, and that; None where it is nothing."""
    cells = table.cells if isinstance(table, Merged) else table
    front = cells.ndim - axes
    others = tuple([front + axis for axis in range(axes) if axis not in some])
    low = np.minimum.reduce(cells, axis=others, keepdims=True)
    low = np.where(np.isfinite(low), low, 0.0)
    if not low.any():
        return table, None
    taken = low.squeeze(others)
    if isinstance(table, Merged):
        return Merged(cells - low, table.labels), (
            some,
            repeated(taken, [table.labels[axis] for axis in some]),
        )
    return cells - low, (some, taken)


def content(table: Table) -> tuple[object, ...]:
    """Equal for tables of equal content."""
    if isinstance(table, Merged):
        return table.labels, table.cells.tobytes()
    return table.shape, table.tobytes()


def _apart(table: Floats, axes: int) -> tuple[Floats, Floats]:
    """See `apart`."""
    if table.ndim == axes:
        low = np.minimum.reduce(table, axis=None)
        return low, table - low if math.isfinite(low) else table
    low = least(table, axes)
    away = np.where(np.isfinite(low), low, 0.0)
    return low, table - away.reshape(*away.shape, *(1,) * axes)


@cache
def _layout(axes: tuple[tuple[int, ...], ...], shape: tuple[int, ...]) -> tuple[int, ...]:
    """An order of axes in which tables over some of them are added up in long strides; the first stays so.

    Axes that are in the same tables stand together, those of the most cells last: numpy then walks over all
    of them at once. A table over all axes is left as it lies.
    """
    if any(len(mine) == len(shape) for mine in axes):
        return tuple(range(len(shape)))
    groups: dict[tuple[bool, ...], list[int]] = {}
    for axis in range(1, len(shape)):
        groups.setdefault(tuple([axis in mine for mine in axes]), []).append(axis)
    ordered = sorted(groups.values(), key=lambda group: math.prod([shape[axis] for axis in group]))
    return (0, *[axis for group in ordered for axis in group])


@cache
def _spread(axes: tuple[int, ...], rank: int) -> tuple[tuple[int, ...] | None, tuple[Any, ...]]:
    """How a table over some of `rank` axes is spread over all: the order of its own, if another; an index."""
    order = tuple(sorted(range(len(axes)), key=axes.__getitem__))
    index = (..., *[slice(None) if axis in axes else None for axis in range(rank)])
    return (None if order == tuple(range(len(axes))) else order), index


def _minimum(sources: Sequence[tuple[Floats, tuple[int, ...]]], shape: tuple[int, ...], front: int) -> Floats:
    """`minimum` of plain tables; `shape` with so many axes of prices in front."""
    rank, cells = len(shape) - front, math.prod(shape)
    if cells > _LARGE and len(sources) > 1:
        return _sliced(sources, shape[front:], shape[:front])
    spread = [_over(table, axes, rank) for table, axes in sources]
    if len(spread) > 2:
        spread.sort(key=lambda table: table.size)
    total = spread[0]
    for table in spread[1:]:
        total = total + table
    if total.size < cells:
        total = np.broadcast_to(total, shape)
    return np.minimum.reduce(total, axis=-rank)


def _over(table: Floats, axes: tuple[int, ...], rank: int) -> Floats:
    """A table over some of `rank` axes, with axes of length one for the others."""
    order, index = _spread(axes, rank)
    if order is not None:
        front = table.ndim - len(axes)
        table = table.transpose(*range(front), *[front + k for k in order])
    return table[index]


def _sliced(
    sources: Sequence[tuple[Floats, tuple[int, ...]]], shape: tuple[int, ...], fronts: tuple[int, ...]
) -> Floats:
    """`_minimum` of what is large, slice by slice, so that what is added up stays in the cache."""
    rank, front = len(shape), len(fronts)
    layout = _layout(tuple([axes for _, axes in sources]), shape)
    place = {axis: k for k, axis in enumerate(layout)}
    spread: list[Floats] = []
    for table, axes in sources:
        laid = _over(table, tuple([place[axis] for axis in axes]), rank)
        # What is read again and again lies in the order in which it is read.
        spread.append(np.ascontiguousarray(laid).reshape((1,) * (front + rank - laid.ndim) + laid.shape))
    spread.sort(key=lambda table: table.size)
    rest = tuple([shape[axis] for axis in layout[1:]])
    lowest = np.empty((*fronts, *rest))
    # One value of each of the first axes at a time, until what is left over the others is small.
    looped, size = 0, math.prod(rest) * math.prod(fronts)
    while size > _SLICE:
        size //= rest[looped]
        looped += 1
    slice_ = np.empty((*fronts, *rest[looped:]))
    ahead, axes = (slice(None),) * front, slice(front + 1, front + 1 + looped)
    for at in itertools.product(*map(range, rest[:looped])):
        low = lowest[(*ahead, *at)]
        mine = [
            table[(*ahead, slice(None), *[min(i, n - 1) for i, n in zip(at, table.shape[axes], strict=True)])]
            for table in spread
        ]
        for value in range(shape[0]):
            parts = [table[(*ahead, value)] for table in mine]
            total = parts[0]
            for table in parts[1:-1]:
                total = total + table
            np.add(total, parts[-1], out=slice_ if value else low)
            if value:
                np.minimum(low, slice_, out=low)
    back = [front + place[axis] - 1 for axis in range(1, rank)]
    return np.ascontiguousarray(lowest.transpose(*range(front), *back))
