"""The bound within budgets against every program of random small graphs, on a grid of ratios."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
from test_budgets import every_program, limited
from test_random_graphs import drawn

from shardwright.cost.model import CostModel
from shardwright.ir.graph import Graph
from shardwright.synth.memory.budgets import Limits, Renting
from shardwright.synth.prices.lists import PriceList
from shardwright.synth.space.space import Space

#: Assignments that are gone through for one graph at most, at each ratios.
MOST = 400

RATIOS = ((0.5, 0.5), (0.8, 0.2), (1.0, 0.0))
PARTS = (0.95, 0.8, 0.7, 0.6, 0.5)


def case(chance: random.Random) -> tuple[Graph, Space]:
    while True:
        graph = drawn(chance, 3)
        space = Space(graph)
        if 20 < math.prod(len(choice.domain) for choice in space.choices) <= MOST:
            return graph, space


def excess(seed: int, counted: float = 1.0) -> list[float]:
    """Of several budgets, the bound over the cost of the cheapest program that fits.

    `counted` is the part of the memory that the bound is told of.
    """
    graph, space = case(random.Random(seed))
    programs = list(every_program(graph, space, RATIOS))
    costs = np.array([cost for cost, _, _ in programs])
    peaks = np.array([peak for _, peak, _ in programs])
    found: list[float] = []
    for part in PARTS:
        limits = part * peaks[costs.argmin()].max() * np.ones(2)
        fitting = (peaks <= np.floor(limits)).all(axis=1)
        if fitting.any():
            model = CostModel(limited((counted * float(limits[0]), counted * float(limits[1]))))
            renting = Renting(graph, space, Limits.of(model))
            # As if nothing were known of a plan but that it costs far more.
            bound_s = renting.bound_within(PriceList(model), 0.0, 10 * costs[fitting].min(), lambda: False)
            found.append(bound_s / costs[fitting].min())
    return found


@pytest.mark.parametrize("seeds", [range(4), pytest.param(range(4, 60), marks=pytest.mark.full)])
def test_no_program_that_fits_is_below_the_bound(seeds: range) -> None:
    several = [excess(seed) for seed in seeds]
    assert sum(map(len, several)) >= len(seeds)
    assert max(max(some, default=0.0) for some in several) <= 1 + 1e-9


def test_a_bound_of_less_memory_than_there_is_would_be_found_out() -> None:
    assert any(each > 1 + 1e-9 for seed in range(4) for each in excess(seed, counted=0.6))
