"""Memory in search and bound: brute force on small graphs, random budgets on larger ones."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from synth_cases import attention, fleet, mlp, shape

from shardwright.cost.bill import bill, seconds
from shardwright.cost.fleet import Fleet
from shardwright.cost.memory.liveness import footprint, peak_bytes
from shardwright.cost.model import CostModel
from shardwright.ir.donation import donating
from shardwright.ir.graph import Graph
from shardwright.ir.trace import trace
from shardwright.synth.alternate import synthesize
from shardwright.synth.fallback import fits
from shardwright.synth.memory.alive import must_live
from shardwright.synth.memory.budgets import Limits, Renting
from shardwright.synth.memory.rent import most_shares
from shardwright.synth.prices.lists import PriceList
from shardwright.synth.prices.tables import Prices
from shardwright.synth.programs.emit import emit
from shardwright.synth.space.space import Space
from shardwright.synth.timer import Timer

GRAPHS: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "two products": (lambda x, a, b: (x @ a) @ b, (shape(96, 48), shape(48, 64), shape(64, 32))),
    "descent": (lambda w, x: w - 0.1 * (x.T @ lax.tanh(x @ w)), (shape(96, 96), shape(64, 96))),
    "momentum": (
        lambda w, m, g: (w - (0.9 * m + g), 0.9 * m + g),
        (shape(48, 48), shape(48, 48), shape(48, 48)),
    ),
}
RATIOS = ((0.5, 0.5), (0.8, 0.2), (0.25, 0.75), (1.0, 0.0))


def limited(nbytes: tuple[float, ...]) -> Fleet:
    """Two unlike devices with so much memory."""
    whole = fleet((4, 1))
    (node,) = whole.nodes
    devices = tuple(
        replace(kind, memory_bytes=int(limit)) for kind, limit in zip(node.devices, nbytes, strict=True)
    )
    return replace(whole, nodes=(replace(node, devices=devices),))


def every_program(
    graph: Graph, space: Space, vectors: Sequence[tuple[float, ...]]
) -> Iterator[tuple[float, np.ndarray, tuple[float, ...]]]:
    """Cost and peak bytes of every program of the space at some ratios."""
    model = CostModel(limited((4e9, 4e9)))
    for ratios in vectors:
        prices = Prices.at(model, ratios)
        tables = prices.tables([use.factor for use in space.uses])
        for assignment in itertools.product(*(range(len(choice.domain)) for choice in space.choices)):
            if any(
                not np.isfinite(table[tuple(assignment[c] for c in use.scope)])
                for use, table in zip(space.uses, tables, strict=True)
            ):
                continue
            program = emit(space, assignment, prices)
            peak = footprint(program, graph).peak(np.array(ratios))
            yield seconds(bill(program, graph, model), model, ratios), peak, ratios


def test_budgets_against_every_program() -> None:
    check("two products", RATIOS[:2])


def test_budgets_against_every_program_of_a_step_whose_state_is_donated() -> None:
    check("descent", RATIOS[:1], donated=True)


@pytest.mark.full
@pytest.mark.parametrize("donated", [False, True])
@pytest.mark.parametrize("name", GRAPHS)
def test_budgets_against_every_program_of_all_graphs(name: str, donated: bool) -> None:
    check(name, RATIOS, donated=donated)


def check(name: str, vectors: Sequence[tuple[float, ...]], *, donated: bool = False) -> None:
    step, args = GRAPHS[name]
    graph = donating(trace(step, *args), donated).graph
    space = Space(graph)
    programs = list(every_program(graph, space, vectors))
    assert len(programs) > 100
    certain = sum(v.type.nbytes for v in (*graph.inputs, *must_live(graph)))
    for _, peak, ratios in programs:
        assert (peak >= certain * np.array(ratios) - 1e-6).all()
    peaks = np.array([peak for _, peak, _ in programs])
    costs = np.array([cost for cost, _, _ in programs])
    tightened: list[float] = []
    for part in (1.0, 0.8, 0.6, 0.5, 0.4, 0.2):
        limits = (part * peaks[:, 0].max(), part * peaks[:, 1].max())
        model = CostModel(limited(limits))
        fitting = (peaks <= np.floor(limits)).all(axis=1)
        renting = Renting(graph, space, Limits.of(model))
        best = float(costs[fitting].min()) if fitting.any() else np.inf
        bound_s = renting.bound_within(PriceList(model), 0.0, best if fitting.any() else 1.0, lambda: False)
        if fitting.any():
            assert bound_s <= best * (1 + 1e-9), part
        found = synthesize(graph, space, model, Timer())
        within = bool((found.memory.peak(np.array(found.ratios)) <= np.floor(limits)).all())
        if within:
            assert found.bound_s <= min(best, found.cost_s) * (1 + 1e-9), part
            tightened.append(found.cost_s)
        # Rent does not see copies that live for a moment: the tightest tenth may be missed.
        if (peaks <= np.multiply(0.9, limits)).all(axis=1).any():
            assert within, part
            assert found.cost_s <= best * (1 + 1e-9), part
        if most_shares(graph, limits).sum() < 1:
            assert not within
            assert not fitting.any()
    assert len(tightened) >= 3
    assert all(a <= b * (1 + 1e-9) for a, b in itertools.pairwise(tightened)), tightened


STEPS = {"mlp": mlp, "attention": attention}


@cache
def planned(name: str) -> tuple[Graph, Space, float]:
    """A step, its space, and the peak of the largest device with room to spare."""
    step, args = STEPS[name]()
    graph = trace(step, *args).graph
    space = Space(graph)
    found = synthesize(graph, space, CostModel(fleet((4, 2, 1))), Timer())
    return graph, space, float(found.memory.peak(np.array(found.ratios)).max())


@given(st.sampled_from(sorted(STEPS)), st.lists(st.floats(0.05, 1.3), min_size=3, max_size=3))
@settings(max_examples=5 if settings().max_examples <= 100 else 500)
def test_no_plan_exceeds_a_budget_that_it_says_it_keeps(name: str, parts: list[float]) -> None:
    graph, space, most = planned(name)
    whole = fleet((4, 2, 1))
    (node,) = whole.nodes
    limits = [int(part * most) for part in parts]
    kinds = tuple(replace(k, memory_bytes=limit) for k, limit in zip(node.devices, limits, strict=True))
    model = CostModel(replace(whole, nodes=(replace(node, devices=kinds),)))
    found = synthesize(graph, space, model, Timer())
    assert 0 <= found.bound_s <= found.cost_s
    peaks = peak_bytes(found.program, graph, found.ratios)
    within = all(peak <= limit for peak, limit in zip(peaks, limits, strict=True))
    assert within == fits(found, model)
    said = any("fits into every device" in note for note in found.notes)
    assert within != said
    if most_shares(graph, limits).sum() < 1:
        assert not within
