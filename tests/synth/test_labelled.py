"""Prices with labels: bounds that know what is tied to the plan's ratios hold, and say more."""

from __future__ import annotations

import itertools
import random
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exhaustive import cheapest
from hypothesis import given, settings
from hypothesis import strategies as st
from synth_cases import FLEETS, STEPS, model, normalised, ratios, sgd, shape, space
from test_random_graphs import case

from shardwright.api import synthesize_traced
from shardwright.cost.bill import bill, seconds
from shardwright.cost.fleet import Fleet
from shardwright.cost.model import CostModel
from shardwright.ir.placement import OwnRatios
from shardwright.ir.program import verify
from shardwright.ir.ties import cut_by, stretches
from shardwright.ir.trace import Traced, trace
from shardwright.planning import Planner
from shardwright.request import Request
from shardwright.synth import freely
from shardwright.synth.prices.lists import PriceList
from shardwright.synth.prices.tables import Prices
from shardwright.synth.programs.emit import emit
from shardwright.synth.search.priced import SpaceSolver, solve
from shardwright.synth.segments import kinds_of
from shardwright.synth.shares.bounds import Certificate
from shardwright.synth.shares.labelled import LabelledSolver
from shardwright.synth.space.space import Space
from shardwright.synth.subfleets import Choosing
from shardwright.synth.timer import Timer


def labelled(space: Space) -> LabelledSolver:
    return LabelledSolver(space.uses, [choice.domain for choice in space.choices])


def crossed(bandwidth: str, latency: str = "1 us") -> Fleet:
    """Two devices, one fast at products and slow at memory, the other one the other way round."""
    devices = [
        {
            "type": {
                "name": f"cross-{flops}",
                "flops": f"{flops} GFLOP/s",
                "memory_bandwidth": f"{memory} GB/s",
                "memory": "4 GB",
                "launch": "0.1 us",
            }
        }
        for flops, memory in ((80, 10), (20, 40))
    ]
    link = {"bandwidth": bandwidth, "latency": latency}
    return Fleet.from_dict({"name": "crossed", "nodes": [{"devices": devices, "link": link}]})


def never() -> bool:
    return False


def sharpest(space: Space, costs: CostModel) -> tuple[float, float]:
    """The bounds of certificates that are never content, without labels and with them."""
    listed, solver = PriceList(costs), SpaceSolver(space)
    certificate = Certificate(solver, listed, solver.bound(Prices.floors(listed)))
    certificate.reach(np.inf)
    return certificate.settle(np.inf), certificate.sharpen(labelled(space), np.inf)


@cache
def solver_of(step: str) -> LabelledSolver:
    return labelled(space(step))


@cache
def range_bound(step: str, name: str, low: float, high: float) -> tuple[float, float]:
    """Bounds within a range of the largest ratio, without labels and with them."""
    listed = PriceList(model(name))
    plain = SpaceSolver(space(step)).bound(Prices.floors(listed, (low, high)))
    return plain, solver_of(step).bound(listed, (low, high), never, np.inf)


@pytest.mark.parametrize("step", STEPS)
@settings(max_examples=15)
@given(data=st.data(), name=st.sampled_from(sorted(FLEETS)))
def test_no_program_with_its_largest_ratio_in_a_range_is_below_its_bound(
    step: str, data: st.DataObject, name: str
) -> None:
    at = data.draw(ratios(len(model(name).class_of)))
    ends = (0.0, 0.4, 0.6, 0.8, 1.0)
    number = next(k for k in range(1, 5) if max(at) <= ends[k])
    plain, bound_s = range_bound(step, name, ends[number - 1], ends[number])
    assert plain * (1 - 1e-9) <= bound_s
    assert bound_s <= solve(space(step), Prices.at(model(name), at)).seconds * (1 + 1e-9)


def state_apart(w: Any, m: Any, x: Any) -> Any:
    gradient = x.T @ (x @ w)
    return w - 0.1 * (0.9 * m + gradient), 0.9 * m + gradient


def elementwise_apart(w: Any, v: Any, x: Any) -> Any:
    """What is elementwise between the products may be done on whole tensors, or on stretches of any cut."""
    h = jnp.exp(x @ w)
    return jnp.tanh(h / jnp.sum(h, axis=0)) @ v


STEPS_APART = {
    "state": (state_apart, (shape(512, 512), shape(512, 512), shape(16, 512))),
    "elementwise": (elementwise_apart, (shape(8, 2048), shape(2048, 8), shape(512, 8))),
}


@pytest.mark.parametrize("bandwidth", ["400 GB/s", "40 GB/s"])
@pytest.mark.parametrize("step", STEPS_APART)
def test_no_pair_of_ratios_is_cheaper_than_the_bound_there(step: str, bandwidth: str) -> None:
    """Many programs of a small step, stretches that are tied to no contraction cut by ratios of their own."""
    function, args = STEPS_APART[step]
    graph, costs = trace(function, *args).graph, CostModel(crossed(bandwidth))
    space, listed = Space(graph), PriceList(costs)
    solver, saved = labelled(space), 0
    for at in ((0.5, 0.5), (0.6, 0.4), (0.8, 0.2), (1.0, 0.0)):
        prices = Prices.at(listed, at)
        one = least = np.inf
        for assignment, _ in itertools.islice(SpaceSolver(space, stages=()).in_order(prices), 80):
            program = emit(space, assignment, prices)
            one = min(one, seconds(bill(program, graph, costs), costs, at))
            found = stretches(program, graph)
            kinds = kinds_of(found, program, graph, bill(program, graph, costs))
            for share in (0.0, 0.3, 0.5, 0.7, 1.0):
                other = (share, 1 - share)
                own = {cut: OwnRatios(1, other) for cut, number in found.of.items() if kinds[number]}
                split = cut_by(program, graph, own)
                verify(split, graph)
                least = min(least, seconds(bill(split, graph, costs), costs, at))
        bound_s = solver.bound(listed, (max(at), max(at)), never, np.inf)
        assert 0 < bound_s <= least * (1 + 1e-9)
        saved += least < one * 0.999
    assert saved or step != "state" or bandwidth != "400 GB/s", "ratios of their own pay somewhere"


@pytest.mark.parametrize(
    "seeds", [range(4), pytest.param(range(4, 40), marks=pytest.mark.full)], ids=["some", "many"]
)
def test_no_program_at_any_ratios_of_a_grid_is_below_the_bound(seeds: range) -> None:
    """All programs of some graphs, unfused, at every multiple of a tenth as ratios."""
    for seed in seeds:
        graph, space, costs = case(random.Random(seed), 4)
        devices = len(costs.class_of)
        grid = [cut for cut in itertools.product(range(11), repeat=devices) if sum(cut) == 10]
        least = min(cheapest(graph, space, Prices.at(costs, normalised(cut))) for cut in grid)
        plain, bound_s = sharpest(space, costs)
        assert plain <= bound_s <= least * (1 + 1e-9), seed


def attention() -> Traced:
    """Products with the batch, and much elementwise work between them that is bound by memory."""

    def loss(params: Any, x: Any) -> Any:
        for w in params:
            q = jnp.einsum("bld,df->blf", x, w)
            s = jax.nn.softmax(jnp.einsum("bld,bmd->blm", q, x))
            x = x + jnp.einsum("blm,bmd->bld", s, x)
        return jnp.mean(x**2)

    return trace(sgd(loss), [shape(64, 64)] * 2, shape(32, 128, 64))


def test_what_is_tied_to_a_contraction_is_paid_for_at_its_ratios() -> None:
    space, listed = Space(attention().graph), PriceList(CostModel(crossed("10 GB/s")))
    for ends in ((0.5, 0.6), (0.6, 0.65)):
        plain = SpaceSolver(space).bound(Prices.floors(listed, ends))
        assert labelled(space).bound(listed, ends, never, np.inf) > plain * 1.02


def test_a_plan_far_above_its_bound_is_bounded_with_labels(monkeypatch: pytest.MonkeyPatch) -> None:
    options: Any = {"fleet": crossed("10 GB/s"), "axes": 1, "devices": "all"}
    plan = synthesize_traced(attention(), **options)
    monkeypatch.setattr(Planner, "certified", lambda self, plan: plan)
    plain = synthesize_traced(attention(), **options)
    assert plan.cost_s == plain.cost_s
    assert plain.bound_s < plan.bound_s <= plan.cost_s


def test_a_better_bound_of_all_ratios_is_one_of_the_plans_own() -> None:
    fleet = crossed("10 GB/s")
    planner = Planner(Request(fleet, devices="all", axes=1), Timer())
    plan = planner.plan(attention())
    assert plan is not None
    # As if the search at the plan's ratios had been given up.
    raised = planner.certified(plan.but(search_gap=plan.gap))
    assert raised.bound_s > plan.bound_s and raised.search_gap == raised.gap < plan.gap


def test_bounds_of_what_may_be_no_plan_stay_rough_until_it_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(freely, "FEW_CHOICES", 0)
    graph = attention().graph
    space = Space(graph)

    def bounds(*, briefly: bool) -> tuple[float, float, float]:
        """Of what was searched, and of it settled; and the plan's cost."""
        search = Choosing(graph, space, crossed("10 GB/s"), Timer(), parts=[(0, 1)])
        found = search.below(np.inf, briefly=briefly)
        assert found is not None and found.found.bound_s == search.bound_s
        rough_s = search.bound_s
        search.settle(found.found.cost_s, fitting=True)
        return rough_s, search.bound_s, found.found.cost_s

    rough_s, exact_s, cost_s = bounds(briefly=True)
    closer_s, settled_s, same_s = bounds(briefly=False)
    assert rough_s < closer_s <= exact_s < cost_s and cost_s == same_s
    assert exact_s == pytest.approx(settled_s, rel=1e-12)
