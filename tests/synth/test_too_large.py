"""Problems whose exact tables would not fit are narrowed down, on one mesh axis as on two."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_search import STAGINGS, Problem, problems

from shardwright.cost.fleet import Fleet
from shardwright.cost.model import CostModel
from shardwright.factory import load_factory
from shardwright.ir.rewrites.rewriting import Rewriting, rewritten
from shardwright.ir.trace import trace
from shardwright.synth.prices.tables import Prices
from shardwright.synth.programs.ledger import Ledger
from shardwright.synth.search import solve
from shardwright.synth.search.narrow.narrowing import Narrowing
from shardwright.synth.search.priced import SpaceSolver
from shardwright.synth.search.solution import Rival
from shardwright.synth.space.space import Space
from shardwright.synth.stretches import ladder


@contextmanager
def all_are_too_large(tried: int = 0) -> Iterator[None]:
    """Whatever has to be split is narrowed down, however few its cells; A* may be tried by such tables."""
    with (
        mock.patch.object(solve, "AT_ONCE", -1),
        mock.patch.object(solve, "_EXACT", 1 << 27 if tried else -1),
        mock.patch.object(solve, "_A_TRY", tried),
        mock.patch.object(solve, "_STRAYED", 0),
    ):
        yield


@given(
    problems(),
    st.integers(1, 8),
    st.sampled_from(STAGINGS),
    st.sampled_from([0, 1, 4]),
    st.booleans(),
    st.data(),
)
def test_what_is_best_is_found_at_prices_after_prices(
    problem: Problem,
    most_cells: int,
    stages: tuple[tuple[int, int], ...],
    tried: int,
    guess: bool,
    data: st.DataObject,
) -> None:
    solver = problem.solver(most_cells, stages)
    for _ in range(2):
        times = [data.draw(st.integers(1, 3)) for _ in problem.tables]
        tables = [table * k for table, k in zip(problem.tables, times, strict=True)]
        priced = Problem(problem.sizes, tuple([(scope, tables[number]) for number, scope in problem.uses]))
        best = priced.best()
        with all_are_too_large(tried):
            found = solver.solve(tables, 1 if guess else solve.MOST_NODES)
        assert (found is None) == np.isinf(best)
        if found is not None:
            assert found.seconds == pytest.approx(priced.cost(found.assignment), abs=1e-6)
            assert found.bound_s <= best + 1e-6 <= found.seconds + 2e-6
            assert guess or found.bound_s == pytest.approx(best, abs=1e-6)


@given(problems(), st.integers(1, 8), st.floats(0.0, 1.5))
def test_a_bound_that_is_enough_ends_the_search(problem: Problem, most_cells: int, part: float) -> None:
    best = problem.best()
    with all_are_too_large():
        found = problem.solver(most_cells).least(problem.tables, enough=part * best if best < np.inf else 1.0)
    assert found <= best + 1e-6
    assert best == np.inf or found >= min(part * best, best) - 1e-6


@given(problems(impossible=False), st.integers(1, 8), st.data())
def test_what_there_is_stays_where_nothing_costs_less(
    problem: Problem, most_cells: int, data: st.DataObject
) -> None:
    known = tuple([data.draw(st.integers(0, size - 1)) for size in problem.sizes])
    with all_are_too_large():
        found = problem.solver(most_cells, ()).solve(problem.tables, rival=Rival(known, problem.cost(known)))
    best = problem.best()
    assert found is not None and found.seconds == pytest.approx(best, abs=1e-6)
    assert problem.cost(found.assignment) == best


def test_the_best_program_of_a_mixture_of_experts_on_two_generations_is_proven() -> None:
    """Slow networks make so many placements worth a thought that exact tables do not fit.

    Of a step, that is, which computes layers again.
    """
    step, args = load_factory("examples/bert_moe.py:base")
    traced = trace(step, *args)
    link = {"bandwidth": "16 GB/s", "latency": "10 us"}
    nodes = [
        {"count": 2, "devices": [{"type": card, "count": 4}], "link": link}
        for card in ("V100-16GB", "P100-16GB")
    ]
    network = {"bandwidth": "10 Gbit/s", "latency": "30 us"}
    model = CostModel(Fleet.from_dict({"name": "two generations", "nodes": nodes, "network": network}))
    again = ladder(traced.graph, model)[-1]
    space = Space(rewritten(traced, Rewriting(again)).graph)
    solver, floors = SpaceSolver(space), Prices.floors(model)
    with mock.patch.object(Narrowing, "solve", autospec=True, side_effect=Narrowing.solve) as narrowed:
        found = solver.solve(floors)
    assert narrowed.call_count == 1
    assert found.bound_s == found.seconds
    lines = Ledger(space.uses).lines(found.assignment, floors)
    paid = sum(weight * float(floors.seconds[line]) for (line, _, _), weight in lines.items())
    assert found.seconds == pytest.approx(paid, rel=1e-9)
    # Its bound says so as well, and as much as is wanted sooner.
    assert solver.bound(floors) == found.seconds
    assert (
        0.9 * found.seconds <= SpaceSolver(space).bound(floors, enough=0.9 * found.seconds) <= found.seconds
    )
