"""Messages between classes and between finer colours, forgotten and said again."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_dual import layers_of, never
from test_search import Problem, as_milp

from shardwright.synth.grid.solve import DualSolver
from shardwright.synth.search.fold import Folded, cook, fold, refined
from shardwright.synth.search.narrow.messages import Messages, Talk
from shardwright.synth.search.narrow.search import MOST_SWEEPS, Memory, Search
from shardwright.synth.search.prune import Kept
from shardwright.synth.search.stages import Core, Stage


def folded_of(problem: Problem) -> tuple[Folded, Kept]:
    """With the choices of all layers in one position in few classes."""
    folded = fold([problem.sizes[v] * 3 + v % 3 for v in range(len(problem.sizes))], problem.uses)
    sizes = [problem.sizes[members[0]] for members in folded.classes]
    return folded, Kept(folded, sizes, cook(folded, problem.tables))


def risen(problem: Problem) -> tuple[Talk, Talk]:
    """Messages between classes, and between colours told apart for two rounds more that begin with these."""
    folded, kept = folded_of(problem)
    classes = Talk(folded, kept)
    classes.dual.rise(80, 1e-5, never)
    said: Messages = {}
    classes.note(said, [kept.size(kind) for kind in range(len(folded.classes))])
    colours = refined(folded.class_of, folded.scopes, folded.recipe_of, 2)
    finer = Talk(folded, kept, colours)
    finer.say(finer.of_classes(said))
    return classes, finer


@settings(max_examples=40)
@given(seed=st.integers(0, 1 << 20), layers=st.integers(1, 9))
def test_finer_messages_begin_with_those_of_classes_and_never_say_too_much(seed: int, layers: int) -> None:
    problem = layers_of(seed, layers)
    classes, finer = risen(problem)
    before = classes.dual.bound()
    assert finer.dual.bound() == pytest.approx(before, rel=1e-9, abs=1e-9)
    assert len(finer.dual.kinds) >= len(classes.dual.kinds)
    assert before - 1e-9 <= finer.dual.rise(80, 1e-5, never) <= as_milp(problem.sizes, problem.terms) + 1e-6


def test_layers_that_have_different_things_to_say_are_told_apart() -> None:
    """Six equal layers, of which the first and the last have fewer neighbours."""
    missing: list[tuple[float, float]] = []
    for seed in range(20):
        problem = layers_of(seed, 6)
        classes, finer = risen(problem)
        assert not classes.dual.alike
        best = as_milp(problem.sizes, problem.terms)
        missing.append((1 - classes.dual.bound() / best, 1 - finer.dual.rise(160, 1e-6, never) / best))
    assert sum(told_apart < shared - 1e-4 for shared, told_apart in missing) >= 6
    assert any(told_apart < 1e-6 and shared > 1e-3 for shared, told_apart in missing)


@settings(max_examples=40)
@given(seed=st.integers(0, 1 << 20), layers=st.integers(1, 6), rounds=st.integers(0, 6))
def test_what_was_forgotten_can_be_said_again(seed: int, layers: int, rounds: int) -> None:
    folded, kept = folded_of(layers_of(seed, layers))
    dual, fresh = Talk(folded, kept).dual, Talk(folded, kept).dual
    dual.move(rounds, never)
    bound, excess = dual.bound(), dual.excess()
    said = dual.forget()
    assert dual.bound() == fresh.bound() and dual.sweeps == 0
    dual.move(2, never)
    dual.remember(said)
    assert dual.bound() == bound and all(map(np.array_equal, dual.excess(), excess))


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
@pytest.mark.parametrize("seed", range(6))
def test_prices_that_are_quite_different_are_solved_as_if_they_were_the_first(
    seed: int, scale: float
) -> None:
    """Whatever was said at others: the best assignment, and a bound that meets it."""
    problem, rng = layers_of(seed, 8), np.random.default_rng(seed)
    solver = DualSolver(problem.sizes, problem.sizes, problem.uses, ())
    assert solver.solve(problem.tables) is not None
    tables = [scale * rng.exponential(size=table.shape) for table in problem.tables]
    terms = [(scope, tables[number]) for number, scope in problem.uses]
    best = as_milp(problem.sizes, terms)
    found = solver.solve(tables)
    assert found is not None and found.bound_s == pytest.approx(found.seconds, rel=1e-8)
    assert found.seconds == pytest.approx(best, rel=1e-8)


@pytest.mark.parametrize("seed", range(4))
def test_messages_that_lead_nowhere_are_begun_anew(seed: int) -> None:
    """Beside those of prices a million times as high, as good a bound as with none that were known."""
    problem, rng = layers_of(seed, 8), np.random.default_rng(seed)
    folded, kept = folded_of(problem)
    sizes = [kept.size(kind) for kind in range(len(folded.classes))]
    core = Core((), Stage(folded, sizes), cook(folded, problem.tables))
    fresh, known = Memory(), Memory()
    Talk(folded, kept).note(known.messages, sizes)
    for full in known.messages.values():
        for message in full:
            message += 1e6 * rng.normal(size=message.shape)
    searches = [Search(core, kept, memory, never) for memory in (fresh, known)]
    bounds = [search._swept(MOST_SWEEPS).bound() for search in searches]  # pyright: ignore[reportPrivateUsage]
    assert bounds[1] >= bounds[0] * (1 - 1e-4)
