"""What a choice costs by itself travels beside the messages: the same results, and equal layers repeat."""

from __future__ import annotations

from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_search import STAGINGS, Problem, problems

from shardwright.cost.share_cost import Floats
from shardwright.synth.search import eliminate, minimum
from shardwright.synth.search.astar import a_star
from shardwright.synth.search.eliminate import record
from shardwright.synth.search.fold import cook
from shardwright.synth.search.merged import Merged, compared, firsts, taken, whole
from shardwright.synth.search.prune import Kept


def loosening(later: int, few: int = 0) -> Any:
    return mock.patch.multiple(eliminate, _LATER=later, _FEW=few)


@given(
    problems(),
    st.sampled_from([4, 12, 10**6]),
    st.sampled_from(STAGINGS),
    st.sampled_from([0, 2]),
    st.sampled_from([0, 1 << 16]),
)
def test_results_are_the_same(
    problem: Problem, most_cells: int, stages: tuple[tuple[int, int], ...], later: int, merged: int
) -> None:
    with mock.patch.object(minimum, "_MERGED", merged):
        with loosening(later=10**6):
            plain = problem.solver(most_cells, stages).layers(problem.tables)
        with loosening(later):
            layers = problem.solver(most_cells, stages).layers(problem.tables)
    bounds = [float(sum(layer.elimination.constant for layer in some)) for some in (plain, layers)]
    assert bounds[0] == bounds[1]
    found, best = a_star(layers), problem.best()
    assert (found is None) == np.isinf(best)
    if found is not None:
        assert found.cost == problem.cost(found.assignment) == best


@given(problems(), st.sampled_from([4, 12, 10**6]), st.integers(0, 2**32))
def test_several_prices_at_once_are_each_by_itself(problem: Problem, most_cells: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    tables = [
        np.stack([t, t + rng.integers(0, 3, t.shape), t[::-1]]) if t.ndim else t for t in problem.tables
    ]
    with loosening(0):
        together, _ = problem.solver(10**6, ()).bounds(tables, most_cells)
        for number in range(3):
            one = [table[number] if table.ndim else table for table in tables]
            alone = problem.solver(10**6, ()).bounds(one, most_cells)[0]
            assert np.broadcast_to(together, 3)[number] == alone


@given(st.integers(0, 2**32), st.sets(st.integers(0, 3), max_size=3), st.sampled_from([0.0, 0.3, 1.0]))
def test_a_table_is_the_sum_of_what_it_is_taken_apart_into(seed: int, some: set[int], holes: float) -> None:
    rng = np.random.default_rng(seed)
    prices = rng.integers(0, 9, (2, 3, 2, 3, 4)).astype(float)
    prices[rng.random(prices.shape) < holes] = np.inf
    axes = tuple(sorted(some))
    labels = compared(prices[0])
    cut = Merged(taken(prices[0], [firsts(mine) for mine in labels]), labels)
    for table, total in ((prices, prices), (prices[0], prices[0]), (cut, prices[0])):
        rest, loose = minimum.loosened(table, 4, axes)
        found = whole(rest)
        if loose is not None:
            assert loose[0] == axes and np.isfinite(loose[1]).all()
            others = tuple(total.ndim - 4 + k for k in range(4) if k not in some)
            found = found + np.expand_dims(loose[1], others)
        assert np.array_equal(found, total)


def tied(layers: int, rng: np.random.Generator) -> Problem:
    """Equal layers, one after another, all of them tied to the last two choices."""
    inner, link = rng.integers(0, 9, (4, 4, 3, 3)).astype(float), rng.integers(0, 9, (4, 4)).astype(float)
    inner += 20.0 * np.arange(3)[:, None] + 50.0 * np.arange(3)
    ends = 2 * layers, 2 * layers + 1
    terms: list[tuple[tuple[int, ...], Floats]] = []
    for k in range(layers):
        terms.append(((2 * k, 2 * k + 1, *ends), inner))
        if k:
            terms.append(((2 * k - 1, 2 * k), link))
    return Problem((*(4,) * (2 * layers), 3, 3), tuple(terms))


@pytest.mark.parametrize("seed", range(3))
def test_layers_that_a_choice_is_tied_to_repeat(seed: int) -> None:
    """What it costs grows with every layer; the messages beside it do not change."""

    def cells(layers: int, later: int) -> int:
        problem = tied(layers, np.random.default_rng(seed))
        folded = problem.folded()
        sizes = [problem.sizes[members[0]] for members in folded.classes]
        kept = Kept(folded, sizes, cook(folded, problem.tables))
        with loosening(later):
            tape = record(folded, sizes, sizes, range(len(problem.sizes)), 10**6)
            found = eliminate.eliminate(tape, kept)
        assert not tape.split and found.constant == problem.solver(10**6, ()).least(problem.tables)
        return found.cells

    assert cells(60, later=8) <= 1.2 * cells(30, later=8)
    assert cells(60, later=1000) > 1.8 * cells(30, later=1000)
