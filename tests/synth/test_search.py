"""Elimination and A* on problems that can be enumerated, and against another solver."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import lil_matrix
from synth_cases import FLEETS, model, normalised, space

from shardwright.cost.share_cost import Floats
from shardwright.synth.prices.tables import Prices
from shardwright.synth.search import astar as search
from shardwright.synth.search import minimum
from shardwright.synth.search.astar import a_star
from shardwright.synth.search.eliminate import record
from shardwright.synth.search.fold import ROUNDS, Folded, cook, fold, rounded
from shardwright.synth.search.order import full_order, simple_order
from shardwright.synth.search.priced import SpaceSolver, bound, solve
from shardwright.synth.search.prune import prune
from shardwright.synth.search.solve import STAGES, Solver


@dataclass(frozen=True)
class Problem:
    """Choices by number of values, and tables over them; repeated layers share tables."""

    sizes: tuple[int, ...]
    terms: tuple[tuple[tuple[int, ...], Floats], ...]

    def cost(self, assignment: tuple[int, ...]) -> float:
        return float(sum(table[tuple(assignment[v] for v in scope)] for scope, table in self.terms))

    def best(self) -> float:
        """The least cost, by trying everything."""
        return min(map(self.cost, itertools.product(*map(range, self.sizes))))

    @property
    def tables(self) -> list[Floats]:
        return list({id(table): table for _, table in self.terms}.values())

    @property
    def uses(self) -> list[tuple[int, tuple[int, ...]]]:
        number = {id(table): k for k, table in enumerate(self.tables)}
        return [(number[id(table)], scope) for scope, table in self.terms]

    def folded(self) -> Folded:
        return fold(self.sizes, self.uses)

    def solver(self, most_cells: int, stages: tuple[tuple[int, int], ...] = STAGES) -> Solver:
        return Solver(self.sizes, self.sizes, self.uses, most_cells, stages)


STAGINGS = [STAGES, (), ((1, 16),), ((2, 64), (2, 64), (3, 64))]


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
    terms: list[tuple[tuple[int, ...], Floats]] = []
    for scope in scopes:
        table = rng.integers(0, 6, [sizes[v] for v in scope]).astype(float)
        if scope and terms and rng.random() < 0.3:
            same = [t for _, t in terms if t.shape == table.shape]
            table = same[0] if same else table
        elif scope:
            table[rng.random(table.shape) < holes] = np.inf
        terms.append((scope, table))
    return Problem(sizes, tuple(terms))


#: Tables of so many cells are worked out value by value, larger ones for values that are not alike.
LARGE = st.sampled_from([0, 8, 1 << 16])


def merging(large: int) -> Any:
    return mock.patch.object(minimum, "_MERGED", large)


@given(problems(), st.sampled_from(STAGINGS), LARGE)
def test_a_star_finds_what_enumeration_finds(
    problem: Problem, stages: tuple[tuple[int, int], ...], large: int
) -> None:
    with merging(large):
        layers = problem.solver(10**6, stages).layers(problem.tables)
    found = a_star(layers)
    best = problem.best()
    assert not any(layer.elimination.tape.split for layer in layers)
    assert sum(layer.elimination.constant for layer in layers) == best
    if np.isinf(best):
        assert found is None
        return
    assert found is not None
    assert found.cost == problem.cost(found.assignment) == best
    # A perfect heuristic expands the best path alone.
    assert found.expanded == sum(len(layer.elimination.tape.buckets) for layer in layers)


@given(problems(), st.integers(1, 12), st.sampled_from(STAGINGS), LARGE)
def test_mini_buckets_stay_below_and_a_star_stays_exact(
    problem: Problem, most_cells: int, stages: tuple[tuple[int, int], ...], large: int
) -> None:
    with merging(large):
        layers = problem.solver(most_cells, stages).layers(problem.tables)
    best = problem.best()
    assert sum(layer.elimination.constant for layer in layers) <= best
    found = a_star(layers)
    assert (found is None) == np.isinf(best)
    if found is not None:
        assert found.cost == problem.cost(found.assignment) == best


@given(problems(), st.integers(1, 12), st.integers(0, 4))
def test_a_search_that_stops_early_says_how_good_it_is(
    problem: Problem, most_cells: int, most_nodes: int
) -> None:
    found = a_star(problem.solver(most_cells).layers(problem.tables), most_nodes)
    best = problem.best()
    assert (found is None) == np.isinf(best)
    if found is not None:
        assert found.bound <= best <= found.cost == problem.cost(found.assignment)


@given(problems(), st.integers(1, 12), st.integers(0, 4), st.sampled_from([0, 0.5, 1, 2]))
def test_a_dive_that_is_given_up_leaves_the_bound(
    problem: Problem, most_cells: int, most_nodes: int, steps: float
) -> None:
    """In a step for each choice it gets to the end where nothing turns out to be impossible."""
    layers = problem.solver(most_cells).layers(problem.tables)
    found, patient = a_star(layers, most_nodes, steps=steps), a_star(layers, most_nodes)
    best = problem.best()
    if found is None or (found.assignment and patient is not None):
        assert found == patient or (found is not None and found.cost == problem.cost(found.assignment))
        return
    assert steps == 0 or any(np.isinf(table).any() for table in problem.tables)
    assert not found.assignment and np.isinf(found.cost) and found.bound <= best


@given(st.data())
def test_the_heuristic_never_exceeds_what_is_missing(data: st.DataObject) -> None:
    """f of every partial assignment is at most the cost of its best completion."""
    problem = data.draw(problems())
    layers = problem.solver(data.draw(st.integers(1, 30))).layers(problem.tables)
    order = [b.choice for layer in reversed(layers) for b in reversed(layer.elimination.tape.buckets)]
    seen = expansions(layers)
    everything = list(itertools.product(*map(range, problem.sizes)))
    for f, decided in seen:
        fixed = {order[k]: value for k, value in enumerate(decided)}
        rest = [a for a in everything if all(a[v] == value for v, value in fixed.items())]
        assert f <= min(map(problem.cost, rest))


def expansions(layers: Any) -> list[tuple[float, list[int]]]:
    """f and the decisions of every node that A* expands."""
    seen: list[tuple[float, list[int]]] = []
    original = search._Tree.successors

    def watched(tree: Any, node: Any) -> Any:
        decided = [tree.values(node)[bucket.choice] for _, bucket in tree.decide[: node.depth]]
        seen.append((node.f, decided))
        return original(tree, node)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(search._Tree, "successors", watched)
        a_star(layers)
    return seen


def test_mini_buckets_are_used_at_all() -> None:
    rng = np.random.default_rng(3)
    pairs = list(itertools.combinations(range(5), 2))
    problem = Problem((3,) * 5, tuple((pair, rng.integers(0, 9, (3, 3)).astype(float)) for pair in pairs))
    (loose,), (exact,) = (problem.solver(cells, ()).layers(problem.tables) for cells in (9, 10**6))
    assert loose.elimination.tape.split and not exact.elimination.tape.split
    assert loose.elimination.constant < exact.elimination.constant == problem.best()
    searched, straight = a_star([loose]), a_star([exact])
    assert searched is not None and straight is not None
    open_choices = len(exact.elimination.tape.buckets)
    assert searched.cost == straight.cost and searched.expanded > straight.expanded == open_choices


@given(problems(), problems())
def test_a_solver_serves_any_prices(one: Problem, other: Problem) -> None:
    """What was recorded at some prices is right at others, whatever values they leave."""
    rng = np.random.default_rng(len(other.terms))
    solver = one.solver(10**6)
    for _ in range(4):
        shuffled = [rng.permuted(t) if t.ndim else t for t in one.tables]
        tables = [np.where(rng.random(t.shape) < 0.2, np.inf, t) if t.ndim else t for t in shuffled]
        scope_of = [scope for scope, _ in one.terms]
        number = [factor for factor, _ in one.uses]
        repriced = Problem(one.sizes, tuple((s, tables[n]) for s, n in zip(scope_of, number, strict=True)))
        found = solver.solve(tables)
        best = repriced.best()
        assert (found is None) == np.isinf(best)
        if found is not None:
            assert found.seconds == repriced.cost(found.assignment) == best


# ---------------------------------------------------------------------------------------------------
# Folding and pruning


@given(problems(), st.randoms())
def test_recipes_are_the_same_problem(problem: Problem, rng: random.Random) -> None:
    folded = problem.folded()
    cooked = cook(folded, problem.tables)
    assert len(set(folded.scopes)) == len(folded.scopes)
    assert all(list(scope) == sorted(scope) for scope in folded.scopes)
    for _ in range(5):
        assignment = tuple(rng.randrange(size) for size in problem.sizes)
        terms = zip(folded.scopes, folded.recipe_of, strict=True)
        total = sum(float(cooked[r][tuple(assignment[v] for v in scope)]) for scope, r in terms)
        assert total == problem.cost(assignment)


def chain(layers: int, rng: np.random.Generator) -> Problem:
    """Equal layers of three choices, one after another."""
    inner, link = rng.integers(0, 9, (4, 4, 4)).astype(float), rng.integers(0, 9, (4, 4)).astype(float)
    terms: list[tuple[tuple[int, ...], Floats]] = []
    for k in range(layers):
        terms.append(((3 * k, 3 * k + 1, 3 * k + 2), inner))
        if k:
            terms.append(((3 * k - 1, 3 * k), link))
    return Problem((4,) * (3 * layers), tuple(terms))


def test_equal_layers_are_one_class_and_worked_out_once() -> None:
    problem = chain(60, np.random.default_rng(0))
    folded = problem.folded()
    assert len(folded.recipes) == 2
    # The middles of all layers are alike; the ends of the chain differ as far as refinement looks.
    assert len(folded.classes) <= 3 * (1 + 2 * ROUNDS)
    short, long = (chain(n, np.random.default_rng(0)) for n in (30, 60))
    cells = [sum(x.elimination.cells for x in p.solver(10**6).layers(p.tables)) for p in (short, long)]
    assert cells[1] <= 1.1 * cells[0]


@given(st.lists(st.floats(1e-9, 1.0), min_size=1, max_size=200), st.randoms())
def test_rounded_sums_are_exact_in_any_order(seconds: list[float], rng: random.Random) -> None:
    problem = Problem((2,) * len(seconds), tuple(((k,), np.full(2, s)) for k, s in enumerate(seconds)))
    folded = problem.folded()
    values = [float(t[0]) for t in rounded(folded, cook(folded, problem.tables))]
    shuffled = rng.sample(values, len(values))
    assert sum(values) == sum(shuffled)
    assert sum(values) == pytest.approx(sum(seconds), rel=1e-9)


def test_rounding_keeps_infinities() -> None:
    problem = Problem((2,), (((0,), np.array([0.1, np.inf])),))
    folded = problem.folded()
    (table,) = rounded(folded, cook(folded, problem.tables))
    assert np.isinf(table[1])
    assert table[0] == pytest.approx(0.1, rel=1e-12)


@given(problems(impossible=False))
def test_elimination_orders_are_as_good_as_any_on_trees(problem: Problem) -> None:
    # On a tree nothing is filled in: no table is wider than a factor.
    rng = np.random.default_rng(len(problem.terms))
    n = len(problem.sizes)
    sizes = [max(2, size) for size in problem.sizes]
    tree = [(int(rng.integers(0, v)), v) for v in range(1, n)]
    uses = list(enumerate(tree))
    folded = fold(sizes, uses)
    by_class = [sizes[members[0]] for members in folded.classes]
    tables = [np.zeros((sizes[a], sizes[b])) for a, b in tree]
    kept = prune(fold([(k,) for k in range(n)], uses), sizes, cook(fold(list(range(n)), uses), tables))
    assert all(len(values) == 1 for values in kept.values)  # all values are equal
    for found, width in ((full_order(sizes, tree), 2), (simple_order(sizes, tree, 2, 64), 3)):
        assert sorted(found) == (list(range(n)) if tree else [])
        assert record(folded, by_class, by_class, found, 10**6).width <= width


# ---------------------------------------------------------------------------------------------------
# A real step as a mixed-integer program


def as_milp(
    sizes: Sequence[int],
    terms: Sequence[tuple[tuple[int, ...], Floats]],
    at_most: Sequence[tuple[Floats, float]] = (),
) -> float:
    """A 0/1 variable per value of a choice and per entry of a table, whose marginals equal the choices.

    What all values that are chosen weigh, of one choice after the other, is `at_most` so much.
    """
    starts = np.concatenate([[0], np.cumsum(sizes)])
    cost: list[float] = [0.0] * int(starts[-1])
    upper: list[float] = [1.0] * int(starts[-1])
    rows: list[tuple[list[int], list[float], float]] = [
        (list(range(starts[v], starts[v + 1])), [1.0] * size, 1.0) for v, size in enumerate(sizes)
    ]
    for scope, table in terms:
        first = len(cost)
        flat = table.reshape(-1)
        cost.extend(0.0 if np.isinf(x) else float(x) for x in flat)
        upper.extend(0.0 if np.isinf(x) else 1.0 for x in flat)
        number = np.arange(first, first + flat.size).reshape(table.shape)
        for axis, v in enumerate(scope):
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
    limits = [
        LinearConstraint(np.append(weights, np.zeros(len(cost) - len(weights))) / limit, -np.inf, 1.0)
        for weights, limit in at_most
    ]
    found = milp(
        np.array(cost) / scale,
        constraints=[LinearConstraint(matrix.tocsr(), right, right), *limits],
        bounds=Bounds(0, np.array(upper)),
        integrality=integral,
        options={"mip_rel_gap": 0.0},
    )
    assert found.status == 0, found.message
    return scale * float(found.fun)


@pytest.mark.parametrize("part", range(6))
def test_highs_agrees_on_random_instances(part: int) -> None:
    """Fifty problems each, of real-valued tables."""
    for seed in range(50 * part, 50 * part + 50):
        rng = np.random.default_rng(seed)
        sizes = tuple(int(size) for size in rng.integers(2, 5, rng.integers(3, 9)))
        terms: list[tuple[tuple[int, ...], Floats]] = []
        for _ in range(int(rng.integers(4, 12))):
            scope = tuple(int(v) for v in rng.choice(len(sizes), int(rng.integers(1, 4)), replace=False))
            terms.append((scope, rng.exponential(size=[sizes[v] for v in scope])))
        problem = Problem(sizes, tuple(terms))
        found = problem.solver(int(rng.choice([8, 10**6]))).solve(problem.tables, 10**6)
        assert found is not None and found.bound_s == found.seconds
        assert found.seconds == pytest.approx(problem.cost(found.assignment), rel=1e-12)
        assert found.seconds == pytest.approx(as_milp(list(sizes), terms), rel=1e-9)


@pytest.mark.parametrize("step", ["mlp", "attention", "labelled", "scanned"])
@pytest.mark.parametrize("name", ["three", "slow-links"])
def test_highs_finds_the_same_optimum(step: str, name: str) -> None:
    steps = space(step)
    prices = Prices.at(model(name), normalised((4, 2, 1)))
    solver = SpaceSolver(steps)
    folded = solver.solver.first
    cooked = cook(folded, prices.tables(solver.factors))
    terms = [(scope, cooked[r]) for scope, r in zip(folded.scopes, folded.recipe_of, strict=True)]
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
