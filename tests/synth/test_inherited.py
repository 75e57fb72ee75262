"""What the search for a step leaves to that for the step changed: twins, a start, and the same result."""

from __future__ import annotations

import itertools
from functools import cache
from typing import Any

import numpy as np
import pytest
from grid_cases import FLEETS
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import numpy as jnp
from test_search import Problem, problems

from shardwright.cost.grid.model import GridModel
from shardwright.cost.model import CostModel
from shardwright.factory import load_factory
from shardwright.ir.graph import Graph, Literal
from shardwright.ir.rewrites.recompute import Stretch
from shardwright.ir.rewrites.rewriting import Rewriting, rewritten
from shardwright.ir.trace import Traced, trace
from shardwright.synth.grid.inherited import Inherited, completed
from shardwright.synth.grid.pricing import GridPriceList, grid_floors, grid_prices
from shardwright.synth.grid.solve import GridSolver
from shardwright.synth.grid.turns import CLOSE, GridTurns
from shardwright.synth.search.fold import fold
from shardwright.synth.search.narrow.dual import Dual
from shardwright.synth.search.narrow.search import Memory, Search
from shardwright.synth.search.solve import Solver
from shardwright.synth.search.stages import Stage
from shardwright.synth.space.conversions import Domains
from shardwright.synth.space.space import Space
from shardwright.synth.space.twins import twin_values, twins
from shardwright.synth.space.vocabulary import Vocabulary
from shardwright.synth.stretches import stretches
from shardwright.synth.timer import Timer

STEPS = ("examples/gpt2.py:tiny", "examples/llama3.py:tiny_scan")


@cache
def step(name: str) -> Traced:
    function, args = load_factory(name)
    return trace(function, *args)


def changed(traced: Traced, host: bool = False) -> Traced:
    """The step with every other stretch computed again, or waiting in host memory."""
    some = [Stretch(s.name, s.first, s.last, host=host) for s in stretches(traced.graph)]
    return rewritten(traced, Rewriting(tuple(some[:1] if len(some) == 1 else some[::2])))


def numbers(graph: Graph, traced: Traced) -> dict[object, np.ndarray]:
    """Every tensor of a graph without loops, for some arguments."""
    rng = np.random.default_rng(0)
    env: dict[object, object] = dict(graph.constants)
    for value in graph.inputs:
        drawn = (
            rng.integers(0, 2, value.type.shape)
            if not value.type.is_float
            else rng.normal(size=value.type.shape)
        )
        env[value] = jnp.asarray(drawn, dtype=value.type.dtype)
    for equation in graph.equations:
        ins = [
            jnp.asarray(a.value, dtype=a.type.dtype) if isinstance(a, Literal) else env[a]
            for a in equation.inputs
        ]
        primitive = traced.primitives[equation.primitive]
        results = primitive.bind(*ins, **equation.params)
        env.update(zip(equation.outputs, results if primitive.multiple_results else [results], strict=True))
    return {value: np.asarray(array) for value, array in env.items()}


@pytest.mark.parametrize("host", [False, True])
def test_twins_hold_the_same_numbers(host: bool) -> None:
    before, after = step(STEPS[0]), changed(step(STEPS[0]), host)
    twin = twin_values(after.graph, before.graph)
    mine, theirs = numbers(after.graph, after), numbers(before.graph, before)
    assert len(mine) > len(theirs) + 20
    assert set(twin) == set(mine)
    for value, other in twin.items():
        np.testing.assert_array_equal(mine[value], theirs[other])


@pytest.mark.parametrize("name", STEPS)
def test_choices_of_a_step_are_their_own_twins(name: str) -> None:
    graph = step(name).graph
    assert twins(Space(graph), Space(graph)) == list(range(len(Space(graph).choices)))


@pytest.mark.parametrize("name", STEPS)
def test_a_changed_step_begins_with_what_was_good_before(name: str) -> None:
    before, after = step(name), changed(step(name))
    model = GridModel(CostModel(FLEETS["2 + 3, one of them mixed"]))
    words, listed = Vocabulary(Domains(model.mesh.nodes)), GridPriceList(model)
    prices = grid_floors(listed)
    solver = GridSolver(Space(before.graph, model.mesh.nodes, words))
    solver.solve(prices)
    space = Space(after.graph, model.mesh.nodes, words)
    best = GridSolver(space).solve(prices)
    # A bound of nothing is enough: what is handed on is not looked at twice.
    begun = GridSolver(space, before=solver).solve(prices, target_s=0.0)
    assert begun.bound_s <= best.seconds <= begun.seconds <= 1.02 * best.seconds
    found = GridSolver(space, before=solver).solve(prices)
    assert found.seconds == pytest.approx(best.seconds, rel=1e-9)
    assert found.bound_s == pytest.approx(best.bound_s, rel=1e-6)


def test_a_guess_by_messages_from_before_is_enough_where_it_meets_their_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Then there is no way there and back; and only at first are messages those of another step."""
    before, after = step(STEPS[0]), changed(step(STEPS[0]))
    model = GridModel(CostModel(FLEETS["2 + 3, one of them mixed"]))
    words, prices = Vocabulary(Domains(model.mesh.nodes)), grid_floors(GridPriceList(model))
    solver = GridSolver(Space(before.graph, model.mesh.nodes, words))
    solver.solve(prices)
    done: list[str] = []
    for of, name in ((Dual, "balance"), (Search, "_guess"), (Search, "_look_at")):
        was = getattr(of, name)

        def noted(self: object, *args: object, name: str = name, was: Any = was, **how: object) -> object:
            done.append(name)
            return was(self, *args, **how)

        monkeypatch.setattr(of, name, noted)
    changed_solver = GridSolver(Space(after.graph, model.mesh.nodes, words), before=solver)
    found = changed_solver.solve(prices, enough=CLOSE)
    assert found.bound_s >= found.seconds * (1 - CLOSE)
    assert done == ["balance", "_guess"]
    done.clear()
    changed_solver.solve(prices, enough=CLOSE)
    assert "balance" not in done


def test_a_changed_step_has_the_even_prices_of_the_step_as_it_was() -> None:
    model, timer = GridModel(CostModel(FLEETS["2 + 2"])), Timer()
    words, listed = Vocabulary(Domains(model.mesh.nodes)), GridPriceList(model)
    before, after = (
        GridTurns(Space(each.graph, model.mesh.nodes, words), listed, timer, ())
        for each in (step(STEPS[0]), changed(step(STEPS[0])))
    )
    assert before.even is not None
    assert before.prices(before.even) is after.prices(before.even)
    known, factors = before.prices(before.even), after.solver.factors
    known.tables(before.solver.factors)
    fresh = grid_prices(GridPriceList(model), before.even)
    for mine, theirs in zip(known.tables(factors), fresh.tables(factors), strict=True):
        np.testing.assert_array_equal(mine, theirs)


@pytest.mark.parametrize("apart", [False, True])
def test_of_another_step_nothing_is_taken_over(apart: bool) -> None:
    """Few of its choices have twins; all have in the step itself."""
    one, two = (Space(step(name).graph) for name in (STEPS[0], STEPS[apart]))
    nothing = Stage(fold([], []), [])
    found = Inherited.of(one, two, nothing, Memory(), [0] * len(two.choices))
    assert (found is None) == apart


@settings(max_examples=60)
@given(problem=problems(impossible=False), data=st.data())
def test_choices_without_twins_have_what_is_best_beside_the_others(
    problem: Problem, data: st.DataObject
) -> None:
    core = Solver(problem.sizes, problem.sizes, problem.uses, stages=()).core(problem.tables)
    at = [data.draw(st.integers(-1, size - 1)) for size in problem.sizes]
    found = completed(core, at)
    ranges = [range(size) if v < 0 else (v,) for v, size in zip(at, problem.sizes, strict=True)]
    assert all(a == b for a, b in zip(found, at, strict=True) if b >= 0)
    assert problem.cost(found) == pytest.approx(min(map(problem.cost, itertools.product(*ranges))), abs=1e-6)
