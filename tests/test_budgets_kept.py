"""No plan exceeds a budget that it says it keeps: the reference backend counts the arrays themselves."""

from __future__ import annotations

import itertools
import random
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from shardwright.api import synthesize_traced
from shardwright.backends.reference import ReferenceExecutable
from shardwright.cost.fleet import Fleet
from shardwright.ir.program import own_ratios
from shardwright.ir.trace import Traced, trace
from shardwright.memory.device_memory import device_memory, peaks
from shardwright.plan import Plan

Shape = tuple[tuple[int, ...], int, str, bool]
AS_IT_IS: Any = {"recompute": "off", "microbatches": 1}


@cache
def made(shape: Shape) -> tuple[Traced, list[Any]]:
    """A training step: products and an activation in layers, with momentum or not; and its arguments."""
    widths, batch, activation, momentum = shape

    def loss_of(weights: Any, x: Any) -> Any:
        for w in weights:
            x = getattr(jax.nn, activation)(x @ w)
        return jnp.mean(x**2)

    def step(weights: Any, moments: Any, x: Any) -> Any:
        loss, gradients = jax.value_and_grad(loss_of)(weights, x)
        moments = jax.tree.map(lambda m, g: 0.9 * m + g, moments, gradients) if momentum else moments
        updates = moments if momentum else gradients
        return jax.tree.map(lambda w, u: w - 0.1 * u, weights, updates), moments, loss

    rng = np.random.default_rng(0)
    pairs = itertools.pairwise(widths)
    weights = [rng.normal(size=pair).astype(np.float32) for pair in pairs]
    moments = [np.zeros_like(w) for w in weights] if momentum else []
    x = rng.normal(size=(batch, widths[0])).astype(np.float32)
    return trace(step, weights, moments, x), jax.tree.leaves((weights, moments, x))


def fleet_of(speeds: tuple[int, ...], limits: tuple[int, ...]) -> Fleet:
    types = [
        {
            "name": f"d{i}",
            "flops": f"{speed} MFLOP/s",
            "memory_bandwidth": f"{2 * speed} MB/s",
            "memory": f"{limit} B",
        }
        for i, (speed, limit) in enumerate(zip(speeds, limits, strict=True))
    ]
    link = {"bandwidth": "1 GB/s", "latency": "1 us"}
    return Fleet.from_dict({"name": "f", "nodes": [{"devices": [{"type": t} for t in types], "link": link}]})


@cache
def roomy(shape: Shape, speeds: tuple[int, ...]) -> Plan:
    return synthesize_traced(made(shape)[0], fleet=fleet_of(speeds, (10**9,) * len(speeds)), **AS_IT_IS)


SHAPES = st.tuples(
    st.lists(st.sampled_from([16, 40, 96]), min_size=2, max_size=4).map(tuple),
    st.sampled_from([24, 64, 128]),
    st.sampled_from(["relu", "gelu", "tanh"]),
    st.booleans(),
)


def some_shape(chance: random.Random) -> Shape:
    widths = tuple(chance.choice((16, 40, 96)) for _ in range(chance.randint(2, 4)))
    batch, activation = chance.choice((24, 64, 128)), chance.choice(("relu", "gelu", "tanh"))
    return widths, batch, activation, chance.random() < 0.5


FLEETS: tuple[tuple[int, ...], ...] = ((50, 30, 10), (10, 10), (80, 20), (20, 20, 5, 5))
SPEEDS = st.sampled_from(FLEETS)


def check(shape: Shape, speeds: tuple[int, ...], part: float, uneven: float, donated: bool = False) -> None:
    traced, leaves = made(shape)
    most = max(roomy(shape, speeds).memory_bytes)
    limits = tuple(max(int(part * most * uneven**i), 64) for i in range(len(speeds)))
    plan = synthesize_traced(traced, fleet=fleet_of(speeds, limits), donate=donated, **AS_IT_IS)
    assert plan.donate == donated
    traced = plan.step()
    assert plan.fits == all(n <= limit for n, limit in zip(plan.memory_bytes, limits, strict=True))
    assert plan.fits != any("fits into every device" in note for note in plan.assumptions)
    assert 0 <= plan.bound_s <= plan.cost_s
    ratios = plan.used_ratios
    executable = ReferenceExecutable(traced, plan.program, ratios)
    executable(*leaves)
    said = peaks(plan.program, traced.graph, ratios)
    assert tuple(plan.memory_bytes[d] for d in plan.used) == said
    for position, d in enumerate(plan.used):
        found = device_memory(plan.program, traced.graph, ratios, position)
        counted = [held[position] for held in executable.held_bytes]
        assert found.peak_bytes == said[position]
        for held, moment in zip(counted, found.moments, strict=True):
            assert moment.held_bytes <= held <= moment.nbytes
        if plan.fits:
            assert max(counted) <= said[position] <= limits[d]


@pytest.mark.parametrize("seed", [2, *(pytest.param(each, marks=pytest.mark.full) for each in range(3, 11))])
def test_less_memory_never_makes_a_plan_of_one_vector_of_ratios_cheaper(seed: int) -> None:
    """Nor than the plan without a limit, which a pool has nothing cheaper than."""
    chance = random.Random(seed)
    shape, speeds, uneven = some_shape(chance), chance.choice(FLEETS), chance.choice((1.0, 1.0, 0.8))
    free = roomy(shape, speeds)
    most, least_s = max(free.memory_bytes), free.cost_s
    for part in (0.95, 0.9, 0.8, 0.7) if seed == 2 else (0.98, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.62, 0.55):
        limits = tuple(int(part * most * uneven**i) for i in range(len(speeds)))
        plan = synthesize_traced(made(shape)[0], fleet=fleet_of(speeds, limits), **AS_IT_IS)
        cost_s = plan.cost_s if plan.fits else float("inf")
        assert own_ratios(plan.program) or cost_s >= least_s * (1 - 1e-9), (part, cost_s, least_s)
        least_s = max(least_s, cost_s)


@example(((16, 96), 64, "tanh", False), (50, 30, 10), 0.8118970848141451, 0.9484189835211696, False)
@example(((96, 96, 96), 24, "relu", True), (50, 30, 10), 0.7, 1.0, True)
@given(SHAPES, SPEEDS, st.floats(0.2, 1.2), st.floats(0.7, 1.0), st.booleans())
@settings(max_examples=1 if settings().max_examples <= 100 else 40)
def test_no_plan_exceeds_a_budget_that_it_says_it_keeps(
    shape: Shape, speeds: tuple[int, ...], part: float, uneven: float, donated: bool
) -> None:
    check(shape, speeds, part, uneven, donated)


#: Of the five hundred cases; each piece takes about a minute.
PIECES = 25


@pytest.mark.full
@pytest.mark.parametrize("piece", range(PIECES))
def test_no_plan_exceeds_a_budget_in_five_hundred_cases(piece: int) -> None:
    """In pieces that run one by one: `pytest tests/test_budgets_kept.py -m full -k "hundred and [7]"`."""
    chance = random.Random(piece)
    for _ in range(500 // PIECES):
        shape, speeds = some_shape(chance), chance.choice(FLEETS)
        part, uneven = chance.uniform(0.2, 1.2), chance.uniform(0.7, 1.0)
        donated = chance.random() < 0.5
        try:
            check(shape, speeds, part, uneven, donated)
        except AssertionError as error:
            error.add_note(f"case: check({shape}, {speeds}, {part!r}, {uneven!r}, {donated})")
            raise
