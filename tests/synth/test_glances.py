"""Smaller tables say first whether a bound is enough: a bound then, and else the least cost."""

from __future__ import annotations

from unittest import mock

from hypothesis import given
from hypothesis import strategies as st
from test_search import Problem, problems

from shardwright.synth.search import solve


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
