"""The search against every sequence of instructions of random small graphs, nothing fused; and its bound.

The graphs of `test_exhaustive.py` are chosen; these are drawn: products, elementwise equations, sums and
maxima, transposes, running sums, values with several readers, two to seven equations.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from exhaustive import cheapest, kernels
from jax import lax
from synth_cases import fleet, normalised, shape

from shardwright.cost.bill import bill, seconds
from shardwright.cost.model import CostModel
from shardwright.ir.graph import Graph
from shardwright.ir.program import verify
from shardwright.ir.trace import trace
from shardwright.synth.alternate import synthesize
from shardwright.synth.prices.tables import Prices
from shardwright.synth.programs.emit import emit
from shardwright.synth.search.priced import bound, solve
from shardwright.synth.space.space import Space
from shardwright.synth.timer import Timer

#: Combinations of signatures that are gone through for one graph at most.
MOST = 20_000

FLEETS = {
    "two": lambda: fleet((4, 1)),
    "slow links": lambda: fleet((4, 2), bandwidth="2 GB/s", latency="20 us"),
    "far": lambda: fleet((4, 1), bandwidth="20 MB/s", latency="1 ms"),
    "three": lambda: fleet((4, 2, 1), bandwidth="5 GB/s", latency="2 us"),
}

ELEMENTWISE: tuple[Callable[[Any], Any], ...] = (lax.tanh, lax.exp, lax.neg)


def drawn(chance: random.Random, equations: int) -> Graph:
    """A graph of so many equations; what nobody reads is an output."""
    sizes = [chance.choice((32, 48, 96)) for _ in range(3)]
    inputs = [shape(chance.choice(sizes), chance.choice(sizes)) for _ in range(chance.randint(2, 3))]

    def step(*values: Any) -> list[Any]:
        there, read = list(values), set[int]()
        while len(there) < len(values) + equations:
            used = set[int]()
            more = grown(chance, there, used)
            if more is not None:
                there.append(more)
                read |= used
        return [x for n, x in enumerate(there) if n >= len(values) and n not in read]

    return trace(step, *inputs).graph


def grown(chance: random.Random, there: list[Any], used: set[int]) -> Any | None:
    """One more value made of some of those there are, which then are read; None: not this time."""

    def some(wanted: list[int]) -> Any:
        at = chance.choice(wanted)
        used.add(at)
        return there[at]

    matrices = [n for n, x in enumerate(there) if x.ndim == 2]
    kind = chance.choice(("map", "join", "fold", "turn", "run", "product", "product"))
    if kind == "map":
        return chance.choice(ELEMENTWISE)(some([*range(len(there))]))
    if kind == "join":
        x = some([*range(len(there))])
        y = some([n for n, other in enumerate(there) if other.shape == x.shape])
        return chance.choice((lax.add, lax.mul))(x, y)
    x, axis = some(matrices), chance.randrange(2)
    if kind == "fold":
        return chance.choice((lax.reduce_sum, lax.reduce_max))(x, [axis])
    if kind == "turn":
        return lax.transpose(x, (1, 0))
    if kind == "run":
        return lax.cumsum(x, axis)
    its = chance.randrange(2)
    fitting = [n for n in matrices if there[n].shape[its] == x.shape[axis]]
    return lax.dot_general(x, some(fitting), (((axis,), (its,)), ((), ()))) if fitting else None


def case(chance: random.Random, most_equations: int) -> tuple[Graph, Space, CostModel]:
    """A graph whose programs can be gone through, on one of the fleets."""
    costs = CostModel(FLEETS[chance.choice(sorted(FLEETS))]())
    prices = Prices.at(costs, (1 / len(costs.class_of),) * len(costs.class_of))
    while True:
        graph = drawn(chance, chance.randint(2, most_equations))
        space = Space(graph)
        every = kernels(graph, space, prices).values()
        if len(graph.equations) <= most_equations and np.prod([len(options) for options in every]) <= MOST:
            return graph, space, costs


def check(seed: int, most_equations: int) -> bool:
    """Whether the search loses nothing to its naive twin on a graph, which is never below the bound."""
    chance = random.Random(seed)
    graph, space, costs = case(chance, most_equations)
    at = normalised([chance.choice((0.0, 1.0, 1.0)) * chance.random() + 1e-3 for _ in costs.class_of])
    prices = Prices.at(costs, at)
    solution = solve(space, prices)
    program = emit(space, solution.assignment, prices)
    verify(program, graph)
    paid = seconds(bill(program, graph, costs), costs, at)
    least = cheapest(graph, space, prices)
    assert solution.bound_s == solution.seconds
    assert least <= paid * (1 + 1e-9), "the naive twin tries this program, too"
    assert bound(space, Prices.floors(costs)) <= least * (1 + 1e-9), "no ratios are below the bound"
    return paid <= least * (1 + 1e-9)


@pytest.mark.parametrize("part", range(2))
def test_a_hundred_random_graphs_lose_nothing_to_fusion(part: int) -> None:
    """Up to seven equations. Where fusion loses something (`test_exhaustive.py` says when), it is rare."""
    lost = [seed for seed in range(50 * part, 50 * part + 50) if not check(seed, 7)]
    assert len(lost) <= 1, lost


#: Numbers of the graphs of every part.
PARTS = (range(2), *(range(first, first + 8) for first in range(2, 42, 8)))


@pytest.mark.parametrize("seeds", [PARTS[0], *(pytest.param(p, marks=pytest.mark.full) for p in PARTS[1:])])
def test_no_program_at_any_ratios_of_a_grid_is_below_the_certified_bound(seeds: range) -> None:
    """All programs of some graphs, unfused, at every multiple of a tenth as ratios."""
    for seed in seeds:
        graph, space, costs = case(random.Random(seed), 4)
        found = synthesize(graph, space, costs, Timer())
        devices = len(costs.class_of)
        grid = [cut for cut in itertools.product(range(11), repeat=devices) if sum(cut) == 10]
        least = min(cheapest(graph, space, Prices.at(costs, normalised(cut))) for cut in grid)
        assert found.bound_s <= least * (1 + 1e-9), seed
