"""Elimination, pruning and A* on problems that can be enumerated, and against another solver."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import lil_matrix
from synth_cases import FLEETS, model, normalised, space

from shardwright.synth.eliminate import Term, collect, eliminate, min_fill, quantised
from shardwright.synth.factors import Prices
from shardwright.synth.prune import prune
from shardwright.synth.search import a_star
from shardwright.synth.solve import bound, solve


@dataclass(frozen=True)
class Problem:
    """Choices by number of values, and tables over them."""

    sizes: tuple[int, ...]
    terms: tuple[Term, ...]

    def cost(self, assignment: tuple[int, ...]) -> float:
        return float(sum(t.table[tuple(assignment[v] for v in t.scope)] for t in self.terms))

    def best(self) -> float:
        """The least cost, by trying everything."""
        return min(map(self.cost, itertools.product(*map(range, self.sizes))))


@st.composite
def problems(draw: st.DrawFn, impossible: bool = True) -> Problem:
    """Up to seven choices and ten tables of small whole numbers (ties are common), some entries infinite."""
    sizes = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=7)))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    holes = draw(st.sampled_from([0.0, 0.1, 0.5])) if impossible else 0.0
    scopes = draw(
        st.lists(
            st.lists(st.integers(0, len(sizes) - 1), unique=True, max_size=min(3, len(sizes))).map(tuple),
            min_size=1,
            max_size=10,
        )
    )
    terms: list[Term] = []
    for scope in scopes:
        table = rng.integers(0, 6, [sizes[v] for v in scope]).astype(float)
        if scope and terms and rng.random() < 0.3:
            same = [t.table for t in terms if t.table.shape == table.shape]
            table = same[0] if same else table  # repeated layers share tables
        elif scope:
            table[rng.random(table.shape) < holes] = np.inf
        terms.append(Term(scope, table))
    return Problem(sizes, tuple(terms))


def eliminated(problem: Problem, most_cells: int):
    terms = collect(problem.terms)
    order = min_fill(problem.sizes, [t.scope for t in terms])
    assert sorted(order) == list(range(len(problem.sizes)))
    return eliminate(problem.sizes, terms, order, most_cells)


@given(problems())
def test_a_star_finds_what_enumeration_finds(problem: Problem) -> None:
    elimination = eliminated(problem, 10**6)
    found = a_star(problem.sizes, elimination)
    best = problem.best()
    assert elimination.exact
    assert elimination.bound == best
    if np.isinf(best):
        assert found is None
        return
    assert found is not None
    assert found.cost == problem.cost(found.assignment) == best
    assert found.expanded == len(problem.sizes)  # a perfect heuristic expands the best path alone


@given(problems(), st.integers(1, 12))
def test_mini_buckets_stay_below_and_a_star_stays_exact(problem: Problem, most_cells: int) -> None:
    elimination = eliminated(problem, most_cells)
    best = problem.best()
    assert elimination.bound <= best
    found = a_star(problem.sizes, elimination)
    assert (found is None) == np.isinf(best)
    if found is not None:
        assert found.cost == problem.cost(found.assignment) == best


@given(problems(), st.integers(1, 12), st.integers(0, 4))
def test_a_search_that_stops_early_says_how_good_it_is(
    problem: Problem, most_cells: int, most_nodes: int
) -> None:
    found = a_star(problem.sizes, eliminated(problem, most_cells), most_nodes)
    best = problem.best()
    assert (found is None) == np.isinf(best)
    if found is not None:
        assert found.bound <= best <= found.cost == problem.cost(found.assignment)


def test_mini_buckets_are_used_at_all() -> None:
    rng = np.random.default_rng(3)
    pairs = list(itertools.combinations(range(5), 2))
    problem = Problem((3,) * 5, tuple(Term(pair, rng.integers(0, 9, (3, 3)).astype(float)) for pair in pairs))
    loose, exact = eliminated(problem, 9), eliminated(problem, 10**6)
    assert not loose.exact and exact.exact
    assert loose.bound < exact.bound == problem.best()
    searched, straight = a_star(problem.sizes, loose), a_star(problem.sizes, exact)
    assert searched is not None and straight is not None
    assert searched.cost == straight.cost and searched.expanded > straight.expanded == 5


@given(problems())
def test_pruning_keeps_an_optimum(problem: Problem) -> None:
    pruned = prune(problem.sizes, problem.terms)
    small = Problem(pruned.sizes, pruned.terms)
    assert len(small.sizes) <= len(problem.sizes)
    assert all(size > 1 for size in small.sizes)
    best = problem.best()
    assert small.best() == best
    if np.isfinite(best):
        assignments = itertools.product(*map(range, small.sizes))
        cheapest = min(assignments, key=small.cost)
        assert problem.cost(pruned.lift(cheapest)) == best


def test_pruning_drops_the_impossible_and_the_dominated_and_one_of_equals() -> None:
    own = np.array([1.0, np.inf, 2.0, 1.0])
    shared = np.array([[0.0, 5.0], [0.0, 0.0], [1.0, 5.0], [0.0, 5.0]])
    pruned = prune((4, 2), (Term((0,), own), Term((0, 1), shared)))
    assert list(pruned.kept[0]) == [0] and list(pruned.kept[1]) == [0]
    assert pruned.sizes == () and pruned.lift(()) == (0, 0)


@given(problems(), st.randoms())
def test_collected_terms_are_the_same_problem(problem: Problem, rng) -> None:
    collected = Problem(problem.sizes, tuple(collect(problem.terms)))
    assert len({t.scope for t in collected.terms}) == len(collected.terms)
    assert all(list(t.scope) == sorted(t.scope) for t in collected.terms)
    for _ in range(5):
        assignment = tuple(rng.randrange(size) for size in problem.sizes)
        assert collected.cost(assignment) == problem.cost(assignment)


def test_equal_layers_are_one_table() -> None:
    first, second = np.ones((2, 2)), np.arange(4.0).reshape(2, 2)
    terms = [Term((0, 1), first), Term((1, 0), second), Term((2, 3), first), Term((3, 2), second)]
    a, b = collect(terms)
    assert a.table is b.table
    assert (a.table == first + second.T).all()


@given(st.lists(st.floats(1e-9, 1.0), min_size=1, max_size=200), st.randoms())
def test_quantised_sums_are_exact_in_any_order(seconds: list[float], rng) -> None:
    terms = quantised([Term((), np.asarray(s)) for s in seconds])
    values = [float(t.table) for t in terms]
    shuffled = rng.sample(values, len(values))
    assert sum(values) == sum(shuffled)
    assert sum(values) == pytest.approx(sum(seconds), rel=1e-9)


def test_quantised_keeps_infinities_and_shares_tables() -> None:
    table = np.array([0.1, np.inf])
    a, b = quantised([Term((0,), table), Term((1,), table)])
    assert a.table is b.table and np.isinf(a.table[1])
    assert a.table[0] == pytest.approx(0.1, rel=1e-12)


@given(problems(impossible=False))
def test_elimination_orders_are_as_good_as_any_on_trees(problem: Problem) -> None:
    # On a tree min-fill never fills in: no table is wider than a factor.
    rng = np.random.default_rng(len(problem.terms))
    n = len(problem.sizes)
    tree = [(int(rng.integers(0, v)), v) for v in range(1, n)]
    terms = [Term(edge, np.zeros((problem.sizes[edge[0]], problem.sizes[edge[1]]))) for edge in tree]
    order = min_fill(problem.sizes, tree)
    assert eliminate(problem.sizes, terms, order, 10**6).width <= 2


# ---------------------------------------------------------------------------------------------------
# A real step as a mixed-integer program


def as_milp(sizes: list[int], terms: list[Term]) -> float:
    """A 0/1 variable per value of a choice and per entry of a table, whose marginals equal the choices."""
    starts = np.concatenate([[0], np.cumsum(sizes)])
    cost: list[float] = [0.0] * int(starts[-1])
    upper: list[float] = [1.0] * int(starts[-1])
    rows: list[tuple[list[int], list[float], float]] = [
        (list(range(starts[v], starts[v + 1])), [1.0] * size, 1.0) for v, size in enumerate(sizes)
    ]
    fixed = 0.0
    for term in terms:
        if not term.scope:
            fixed += float(term.table)
            continue
        first = len(cost)
        flat = term.table.reshape(-1)
        cost.extend(0.0 if np.isinf(x) else float(x) for x in flat)
        upper.extend(0.0 if np.isinf(x) else 1.0 for x in flat)
        number = np.arange(first, first + flat.size).reshape(term.table.shape)
        for axis, v in enumerate(term.scope):
            for value in range(sizes[v]):
                entries = list(np.take(number, value, axis=axis).reshape(-1))
                rows.append(([*entries, int(starts[v]) + value], [1.0] * len(entries) + [-1.0], 0.0))
    matrix = lil_matrix((len(rows), len(cost)))
    for row, (columns, values, _) in enumerate(rows):
        matrix[row, columns] = values
    right = np.array([r for _, _, r in rows])
    scale = max(cost)
    integral = np.zeros(len(cost))
    integral[: starts[-1]] = 1
    found = milp(
        np.array(cost) / scale,
        constraints=LinearConstraint(matrix.tocsr(), right, right),
        bounds=Bounds(0, np.array(upper)),
        integrality=integral,
        options={"mip_rel_gap": 0.0},
    )
    assert found.status == 0, found.message
    return fixed + scale * float(found.fun)


@pytest.mark.parametrize("step", ["mlp", "attention", "labelled", "scanned"])
@pytest.mark.parametrize("name", ["three", "slow-links"])
def test_highs_finds_the_same_optimum(step: str, name: str) -> None:
    steps = space(step)
    prices = Prices.at(model(name), normalised((4, 2, 1)))
    terms = collect(Term(tuple(c.index for c in f.scope), prices.table(f)) for f in steps.factors)
    sizes = [len(choice.domain.holdings) for choice in steps.choices]
    assert solve(steps, prices).seconds == pytest.approx(as_milp(sizes, terms), rel=1e-6)


@pytest.mark.parametrize("name", FLEETS)
@pytest.mark.parametrize("step", ["mlp", "attention", "scanned", "branched", "looped"])
def test_small_tables_bracket_the_optimum(step: str, name: str) -> None:
    """With tables too small the search may stop early; it says how far from the best it is at most."""
    steps, costs = space(step), model(name)
    prices = Prices.at(costs, (1 / len(costs.class_of),) * len(costs.class_of))
    exact, loose = solve(steps, prices), solve(steps, prices, most_cells=40, most_nodes=2_000)
    assert exact.bound_s == exact.seconds
    assert loose.bound_s <= exact.seconds <= loose.seconds
    if loose.expanded < 2_000:
        assert loose.seconds == exact.seconds
    floors = Prices.floors(costs)
    assert bound(steps, floors, most_cells=40) <= bound(steps, floors) <= exact.seconds * (1 + 1e-9)
