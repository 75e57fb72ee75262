"""Smaller tables say first whether a bound is enough, or nothing costs less than what there is already."""

from __future__ import annotations

import math
from unittest import mock

from hypothesis import given
from hypothesis import strategies as st
from test_search import STAGINGS, Problem, problems

from shardwright.synth.search import solve
from shardwright.synth.search.solution import Rival


@given(problems(), st.integers(0, 30), st.sampled_from([0, 1 << 24]))
def test_smaller_tables_say_whether_a_bound_is_enough(problem: Problem, enough: int, at_once: int) -> None:
    with (
        mock.patch.object(solve, "_SMALLER", (2, 6, 20)),
        mock.patch.object(solve, "_A_GLANCE", 0),
        mock.patch.object(solve, "AT_ONCE", at_once),
    ):
        found = problem.solver(100, ()).least(problem.tables, enough=float(enough))
    best = problem.best()
    assert found <= best
    assert found == best or found >= enough


@given(problems(impossible=False), st.sampled_from(STAGINGS), st.sampled_from([2, 8, 1 << 18]), st.data())
def test_an_assignment_that_there_is_stays_only_where_nothing_costs_less(
    problem: Problem, stages: tuple[tuple[int, int], ...], smallest: int, data: st.DataObject
) -> None:
    known = tuple([data.draw(st.integers(0, size - 1)) for size in problem.sizes])
    rival, best = Rival(known, problem.cost(known)), problem.best()
    with mock.patch.object(solve, "_A_GLANCE", -1), mock.patch.object(solve, "_A_RIVAL", smallest):
        found = problem.solver(1 << 20, stages).solve(problem.tables, rival=rival)
    assert found is not None
    assert problem.cost(found.assignment) == found.seconds == found.bound_s == best
    if rival.seconds == best:
        assert found.assignment == known and found.expanded == 0


@given(problems(), st.sampled_from(STAGINGS), st.sampled_from([2, 8, 1 << 18]), st.sampled_from([0, 2, 1000]))
def test_what_is_found_by_a_try_is_the_best_however_far_it_may_stray(
    problem: Problem, stages: tuple[tuple[int, int], ...], tried: int, strayed: int
) -> None:
    with (
        mock.patch.object(solve, "AT_ONCE", -1),
        mock.patch.object(solve, "_A_TRY", tried),
        mock.patch.object(solve, "_STRAYED", strayed),
        mock.patch.object(solve.Core, "finish", autospec=True, side_effect=solve.Core.finish) as finish,
    ):
        found = problem.solver(1 << 20, stages).solve(problem.tables)
    best = problem.best()
    assert math.inf == best if found is None else found.seconds == found.bound_s == best
    assert found is None or problem.cost(found.assignment) == best
    sizes = [call.args[2] for call in finish.call_args_list]
    assert sizes[0] == tried and set(sizes[1:]) <= {1 << 20}
