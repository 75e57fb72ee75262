"""Messages, the bound they make and what may be left out for it, on problems that can be enumerated."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_search import Problem, as_milp, problems

from shardwright.synth.grid.solve import DualSolver
from shardwright.synth.search.eliminate import live
from shardwright.synth.search.fold import cook, fold
from shardwright.synth.search.narrow.absorb import absorbed
from shardwright.synth.search.narrow.buckets import Buckets
from shardwright.synth.search.narrow.dual import Dual
from shardwright.synth.search.narrow.tied import repeats, tied, untied
from shardwright.synth.search.narrow.wires import Kind
from shardwright.synth.search.order import full_order
from shardwright.synth.search.prune import Kept


def dual_of(problem: Problem) -> Dual:
    return Dual(problem.sizes, problem.sizes, problem.uses, problem.tables)


def never() -> bool:
    return False


@given(problem=problems(), sweeps=st.integers(0, 24))
def test_every_state_of_the_messages_is_a_bound(problem: Problem, sweeps: int) -> None:
    dual = dual_of(problem)
    for _ in range(sweeps):
        dual.sweep()
    best = problem.best()
    assert dual.bound() <= best + 1e-6


@given(problem=problems(impossible=False))
def test_sweeps_raise_the_bound(problem: Problem) -> None:
    dual = dual_of(problem)
    before = dual.bound()
    assert dual.rise(60, 1e-6, never) >= before
    assert dual.rise(60, 1e-6, never) == pytest.approx(dual.bound())


@given(problem=problems(), part=st.floats(0.0, 1.5))
def test_a_search_for_a_bound_ends_there_and_is_right(problem: Problem, part: float) -> None:
    """Told which bound is enough, it proves that much or finds the best assignment; never more."""
    best = problem.best()
    if not np.isfinite(best):
        return
    solver = DualSolver(problem.sizes, problem.sizes, problem.uses, ())
    found = solver.solve(problem.tables, target_s=part * best)
    assert found is not None and found.bound_s <= best + 1e-6 <= found.seconds + 2e-6
    assert found.bound_s >= min(part * best, best) - 1e-6


@settings(max_examples=40)
@given(problem=problems())
def test_no_value_is_said_to_cost_more_than_it_does(problem: Problem) -> None:
    dual = dual_of(problem)
    bound, excess = dual.rise(40, 1e-4, never), dual.excess()
    for choice, size in enumerate(problem.sizes):
        others = [range(n) for n in problem.sizes]
        for value in range(size):
            others[choice] = range(value, value + 1)
            least = min(map(problem.cost, itertools.product(*others)))
            assert bound + excess[dual.shade_of[choice]][value] <= least + 1e-6


@settings(max_examples=100)
@given(problem=problems(), rounds=st.integers(0, 6), data=st.data())
def test_messages_move_costs_and_change_none(problem: Problem, rounds: int, data: st.DataObject) -> None:
    """Nor do they make impossible what is possible, however much of what is impossible they move."""
    dual = dual_of(problem)
    dual.move(rounds, never)
    uses, tables = dual.reparametrised()
    at = tuple(data.draw(st.integers(0, size - 1)) for size in problem.sizes)
    moved = sum(float(tables[k][tuple(at[v] for v in scope)]) for k, scope in uses)
    assert moved == pytest.approx(problem.cost(at), abs=1e-6)


def test_messages_are_balanced_where_some_are_missing() -> None:
    """Factors at a choice say 8, 1 and -9 of a value, which balances; without the last one it does not."""
    tables = [np.arange(4.0).reshape(2, 2), np.ones((3, 2)), np.zeros((4, 2))]
    dual = Dual(range(4), (2, 2, 3, 4), [(0, (1, 0)), (1, (2, 0)), (2, (3, 0))], tables)
    for number, said in enumerate((8.0, 1.0)):
        kind = dual.kinds[number]
        dual.start_from(number, [kind.messages[0].copy(), np.array([0.0, said])])
    dual.balance()
    assert [kind.messages[1].tolist() for kind in dual.kinds] == [[0.0, 5.0], [0.0, -2.0], [0.0, -3.0]]


@given(one=problems(), seed=st.integers(0, 1 << 20), sweeps=st.integers(0, 9))
def test_messages_renewed_at_other_prices_are_those_made_for_them(
    one: Problem, seed: int, sweeps: int
) -> None:
    rng = np.random.default_rng(seed)
    tables = [table + rng.integers(0, 3, table.shape) for table in one.tables]
    fresh, renewed = Dual(one.sizes, one.sizes, one.uses, tables), dual_of(one)
    renewed.rise(16, 1e-3, never)
    renewed.renew(tables)
    for dual in (fresh, renewed):
        for _ in range(sweeps):
            dual.sweep()
    assert renewed.bound() == fresh.bound()
    assert all(map(np.array_equal, renewed.excess(), fresh.excess()))


@pytest.mark.parametrize("shape", [(9,), (70, 80), (3, 4, 5), (20, 30, 10), (9, 8, 7, 12)])
def test_the_least_of_a_table_without_its_messages(shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(0)
    kind = Kind(rng.normal(size=shape), tuple(range(len(shape))), 1)
    kind.messages = [rng.normal(size=size) for size in shape]
    left = kind.table.copy()
    for axis, message in enumerate(kind.messages):
        left -= message.reshape(-1, *(1,) * (len(shape) - 1 - axis))
    assert kind.least(np.empty(shape)) == pytest.approx(left.min(), abs=1e-12)


@settings(max_examples=60)
@given(problem=problems(), cells=st.sampled_from((4, 16, 4096)))
def test_mini_buckets_never_say_too_much(problem: Problem, cells: int) -> None:
    """Bound and values of one way there and back against enumeration; exact where no bucket was split."""
    best = problem.best()
    if not np.isfinite(best):
        return
    folded = fold([(size, v) for v, size in enumerate(problem.sizes)], problem.uses)
    sizes = [problem.sizes[members[0]] for members in folded.classes]
    kept = Kept(folded, sizes, cook(folded, problem.tables))
    order = full_order(problem.sizes, live(folded, sizes))
    found = Buckets(kept, order, cells, 2.0**14 * (1 + abs(best))).bounds()
    assert found.bound <= best + 1e-6
    if found.exact:
        assert found.bound == pytest.approx(best, abs=1e-6)
    for choice, size in enumerate(problem.sizes):
        excess = found.of_value[folded.class_of[choice]]
        others = [range(n) for n in problem.sizes]
        for value in range(size if excess is not None else 0):
            others[choice] = range(value, value + 1)
            least = min(map(problem.cost, itertools.product(*others)))
            assert excess is not None and found.bound + excess[value] <= least + 1e-6


STAGINGS = ((), ((1, 16),), ((2, 64), (3, 64)))


@given(problem=problems(), stages=st.sampled_from(STAGINGS))
def test_the_best_assignment_is_found(problem: Problem, stages: tuple[tuple[int, int], ...]) -> None:
    best = problem.best()
    found = DualSolver(problem.sizes, problem.sizes, problem.uses, stages).solve(problem.tables)
    if not np.isfinite(best):
        assert found is None
        return
    assert found is not None
    assert found.seconds == pytest.approx(problem.cost(found.assignment), abs=1e-6)
    assert found.seconds == pytest.approx(best, abs=1e-6)
    assert found.bound_s <= best + 1e-6


def layers_of(seed: int, layers: int) -> Problem:
    """A chain of equal layers with loops, of continuous costs."""
    rng = np.random.default_rng(seed)
    sizes = [int(n) for n in rng.integers(2, 5, 3)] * layers
    inside = [((0, 1, 2), sizes[:3]), ((0, 2), [sizes[0], sizes[2]]), ((1,), [sizes[1]])]
    tables = [rng.exponential(size=shape) for _, shape in inside]
    across = rng.exponential(size=(sizes[2], sizes[0]))
    terms = []
    for layer in range(layers):
        terms += [
            (tuple(3 * layer + v for v in scope), table)
            for (scope, _), table in zip(inside, tables, strict=True)
        ]
        if layer:
            terms.append(((3 * layer - 1, 3 * layer), across))
    return Problem(tuple(sizes), tuple(terms))


@pytest.mark.parametrize("layers", [4, 24])
@pytest.mark.parametrize("seed", range(10))
def test_highs_agrees(seed: int, layers: int) -> None:
    """Folded messages, equal layers tied first, and the optimum of a MILP."""
    problem = layers_of(seed, layers)
    found = DualSolver(problem.sizes, problem.sizes, problem.uses, ()).solve(problem.tables)
    assert found is not None and found.bound_s == pytest.approx(found.seconds)
    assert found.seconds == pytest.approx(as_milp(problem.sizes, problem.terms), rel=1e-9)


@settings(max_examples=40)
@given(
    seed=st.integers(0, 1 << 20),
    layers=st.integers(3, 9),
    sweeps=st.integers(0, 12),
    most=st.integers(0, 3),
    data=st.data(),
)
def test_tied_layers_cost_what_they_do_untied(
    seed: int, layers: int, sweeps: int, most: int, data: st.DataObject
) -> None:
    """Of all values, or of the few that messages speak for."""
    problem = layers_of(seed, layers)
    folded = fold([problem.sizes[v] * 3 + v % 3 for v in range(len(problem.sizes))], problem.uses)
    kept = Kept(folded, [problem.sizes[c[0]] for c in folded.classes], cook(folded, problem.tables))
    dual = Dual(folded.class_of, problem.sizes, problem.uses, problem.tables)
    for _ in range(sweeps):
        dual.sweep()
    core, left = tied(folded, kept, dual, most)
    assert not most or max(map(len, left)) <= most
    assert repeats(folded) and len(core.folded.class_of) == len(folded.classes) < len(problem.sizes)
    values = [data.draw(st.integers(0, size - 1)) for size in core.sizes]
    there = sum(
        float(core.cooked[recipe][tuple([values[v] for v in scope])])
        for scope, recipe in zip(core.folded.scopes, core.folded.recipe_of, strict=True)
    )
    assert there == pytest.approx(problem.cost(tuple(untied(folded, left, values))), rel=1e-9)


@settings(max_examples=60)
@given(seed=st.integers(0, 1 << 20), layers=st.integers(1, 6), data=st.data())
def test_what_others_absorb_costs_the_same(seed: int, layers: int, data: st.DataObject) -> None:
    """In fewer terms, of the same choices in the same classes; equal layers too."""
    problem = layers_of(seed, layers)
    folded = fold([problem.sizes[v] * 3 + v % 3 for v in range(len(problem.sizes))], problem.uses)
    cooked = cook(folded, problem.tables)
    fewer = absorbed(folded)
    values = [data.draw(st.integers(0, size - 1)) for size in problem.sizes]
    tables = cook(fewer, cooked)
    cost = sum(
        float(tables[recipe][tuple([values[v] for v in scope])])
        for scope, recipe in zip(fewer.scopes, fewer.recipe_of, strict=True)
    )
    assert cost == pytest.approx(problem.cost(tuple(values)), rel=1e-12)
    assert fewer.class_of == folded.class_of and len(fewer.scopes) <= len(folded.scopes)
    for kind, (recipe, kinds, axis) in ((k, key) for k, found in enumerate(fewer.incident) for key in found):
        assert kinds[axis] == kind and tables[recipe].ndim == len(kinds)


def test_factors_within_others_are_absorbed_layer_by_layer() -> None:
    """Of three layers (a, b), each with a pair, one of its choices alone, and a tie to the next layer."""
    uses = [(0, (2 * k, 2 * k + 1)) for k in range(3)] + [(1, (2 * k + 1,)) for k in range(3)]
    uses += [(2, (2 * k + 1, 2 * k + 2)) for k in range(2)]
    folded = fold([v % 2 for v in range(6)], uses)
    fewer = absorbed(folded)
    assert sorted(fewer.scopes) == [(0, 1), (1, 2), (2, 3), (3, 4), (4, 5)]
    # The last layer's goes to its pair, the others' to their ties, which there are as many of.
    assert sorted(map(len, fewer.recipes)) == [1, 2, 2]
