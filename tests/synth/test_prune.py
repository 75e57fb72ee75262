"""Values that are dropped before a search: impossible, dominated, or equal to others."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_search import Problem, problems

from shardwright.synth.search.fold import cook
from shardwright.synth.search.narrow.dominated import Dominated
from shardwright.synth.search.prune import Kept, prune, supported


@given(problems())
def test_pruning_keeps_an_optimum(problem: Problem) -> None:
    folded = problem.folded()
    sizes = [problem.sizes[members[0]] for members in folded.classes]
    kept = prune(folded, sizes, cook(folded, problem.tables))
    left = [kept.values[kind].tolist() for kind in folded.class_of]
    assert min(map(problem.cost, itertools.product(*left))) == problem.best()


@given(st.integers(0, 2**32 - 1), st.integers(1, 5), st.sampled_from([0.3, 0.5, 0.7]))
def test_what_is_impossible_beside_all_that_is_left_goes(seed: int, layers: int, holes: float) -> None:
    """Nothing else: layers in one class have unlike neighbours, since the first and the last have fewer."""
    rng = np.random.default_rng(seed)
    inside, across = (np.where(rng.random((3, 3)) < holes, np.inf, 1.0) for _ in range(2))
    terms = [((v, v + 1), (inside, across)[v % 2]) for v in range(2 * layers - 1)]
    problem = Problem((3,) * (2 * layers), tuple(terms))
    folded = problem.folded()
    kept = Kept(folded, [3] * len(folded.classes), cook(folded, problem.tables))
    some = supported(kept)
    # Of a chain: what can be so on both sides of a choice.
    onward, back = np.ones((2, len(problem.sizes), 3), dtype=np.bool_)
    for v, (_, table) in enumerate(terms):
        onward[v + 1] = np.isfinite(table)[onward[v]].any(axis=0)
    for v, (_, table) in reversed(list(enumerate(terms))):
        back[v] = np.isfinite(table)[:, back[v + 1]].any(axis=1)
    can = onward & back
    assert some or not can.any()
    for kind, members in enumerate(folded.classes):
        needed = np.flatnonzero(can[list(members)].any(axis=0))
        assert np.isin(needed, kept.values[kind]).all()
        if some and len(folded.classes) == len(problem.sizes):
            assert kept.values[kind].tolist() == needed.tolist()


@given(problems(), st.integers(0, 2**32 - 1))
def test_what_was_dominated_is_dropped_at_other_prices_only_where_it_still_is(
    problem: Problem, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    folded = problem.folded()
    sizes = [problem.sizes[members[0]] for members in folded.classes]
    dominated = Dominated()
    for spread in (0.0, 0.01, 1.0, 0.1):
        # By table, as everywhere: equal tables are the prices of equal factors.
        priced = {
            id(table): table + spread * rng.uniform(0, 1, np.shape(table)) for _, table in problem.terms
        }
        now = Problem(problem.sizes, tuple((scope, priced[id(table)]) for scope, table in problem.terms))
        kept = dominated.prune(folded, sizes, cook(folded, now.tables))
        left = [kept.values[kind].tolist() for kind in folded.class_of]
        assert min(map(now.cost, itertools.product(*left))) == pytest.approx(now.best(), rel=1e-12)


def test_the_same_values_are_left_at_other_prices_where_hardly_more_could_go() -> None:
    many = 60
    problem = Problem((many + 2, many), (((0, 1), np.zeros((many + 2, many))),))
    folded = problem.folded()
    dominated = Dominated()

    def left(dear: float, other: float) -> int:
        """How many values are left if the last two of a choice cost so much beside any of the other."""
        last = np.repeat([[dear], [other]], many, axis=1)
        table = np.concatenate([1 - np.eye(many), last])
        kept = dominated.prune(folded, [many + 2, many], cook(folded, [table]))
        return len(kept.values[folded.class_of[0]])

    assert left(2.0, 2.0) == many
    assert left(2.0, 0.5) == many + 1  # the last one is good for something
    assert left(2.0, 2.0) == many + 1  # and stays, so that what is left is the same
    assert left(0.5, 2.0) == many + 1  # another one is good for something: the last one goes
    assert left(0.5, 0.5) == many + 2


def test_pruning_drops_the_impossible_and_the_dominated_and_one_of_equals() -> None:
    own = np.array([1.0, np.inf, 2.0, 1.0])
    shared = np.array([[0.0, 5.0], [0.0, 0.0], [1.0, 5.0], [0.0, 5.0]])
    problem = Problem((4, 2), (((0,), own), ((0, 1), shared)))
    folded = problem.folded()
    sizes = [problem.sizes[members[0]] for members in folded.classes]
    kept = prune(folded, sizes, cook(folded, problem.tables))
    assert list(kept.values[folded.class_of[0]]) == [0]
    # Values of the other choice are compared where the impossible one is still in sight.
    assert problem.solver(10**6).solve(problem.tables).assignment == (0, 0)
