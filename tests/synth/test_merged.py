"""Sums of tables that do not tell some values apart, against the same value by value."""

from __future__ import annotations

from unittest import mock

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from shardwright.cost.share_cost import Floats
from shardwright.synth.search import merged, minimum
from shardwright.synth.search.merged import Merged, Seen, Table, compared, firsts, whole


@st.composite
def tables(draw: st.DrawFn) -> Floats:
    """Of up to four axes, with slices repeated, entries of few values, some of them infinite."""
    shape = draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    table = rng.integers(0, draw(st.sampled_from([2, 50])), shape).astype(float)
    table[rng.random(shape) < draw(st.sampled_from([0.0, 0.2]))] = np.inf
    for axis, size in enumerate(shape):
        table = table.take(rng.integers(0, draw(st.integers(1, size)), size), axis)
    return table


@given(tables())
def test_values_of_one_class_are_equal_slice_by_slice_and_others_are_not(table: Floats) -> None:
    for axis, labels in enumerate(compared(table)):
        rows = np.moveaxis(table, axis, 0)
        for a, one in enumerate(labels):
            for b, other in enumerate(labels):
                assert (one == other) == np.array_equal(rows[a], rows[b])
        assert [labels[k] for k in firsts(labels)] == list(range(max(labels) + 1))


@given(tables())
def test_a_table_of_more_cells_is_not_compared(table: Floats) -> None:
    with mock.patch.object(merged, "_COMPARED", table.size - 1):
        assert compared(table) == tuple([tuple(range(size)) for size in table.shape])


@given(st.lists(tables(), min_size=2, max_size=4), st.integers(0, 2**32))
def test_a_sum_of_merged_tables_is_that_of_whole_ones(some: list[Floats], seed: int) -> None:
    """Round after round: what one round leaves is among the tables of the next."""
    rng = np.random.default_rng(seed)
    seen, message = Seen(), None
    for table in some:
        shape = table.shape
        sources: list[tuple[Table, tuple[int, ...]]] = [(table, tuple(range(table.ndim)))]
        sources.append((rng.integers(0, 3, shape[0]).astype(float), (0,)))
        if message is not None:
            # Its axes come after those of the table.
            axes = tuple(range(table.ndim, table.ndim + whole(message).ndim))
            sources.append((message, axes))
            shape = (*shape, *whole(message).shape)
        total = np.zeros(shape)
        for each, axes in sources:
            total = total + whole(each).reshape(
                [size if axis in axes else 1 for axis, size in enumerate(shape)]
            )
        with mock.patch.object(minimum, "_MERGED", 0):
            found, cells = minimum.minimum(sources, shape, seen)
            low, message = minimum.apart(found, len(shape) - 1)
        assert np.array_equal(whole(found), total.min(axis=0)) and cells <= total.size
        assert low == total.min()
        if message is None:
            break
        assert np.array_equal(whole(message), total.min(axis=0) - (low if np.isfinite(low) else 0.0))
        if isinstance(message, Merged):
            at = tuple(int(rng.integers(size)) for size in shape[1:])
            assert message[at] == whole(message)[at]
            assert np.array_equal(message[(slice(None), *at[1:])], whole(message)[(slice(None), *at[1:])])
