"""Small steps within memory: no worse than larger ones, whose programs rents find; which ways are planned."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from rewriting_cases import fleet, momentum, perceptron

from shardwright import Fleet, Plan
from shardwright.api import synthesize_traced
from shardwright.cost.model import CostModel
from shardwright.ir.rewrites.recompute import Stretch
from shardwright.ir.rewrites.rewriting import Rewriting, differentiated, rewriting_of, rewritten
from shardwright.ir.trace import Traced, trace
from shardwright.memory.every_way import EveryWay
from shardwright.memory.ladder import Ladder
from shardwright.planning import Planner
from shardwright.request import Request
from shardwright.synth import freely
from shardwright.synth.combinations import SMALL, combinations
from shardwright.synth.memory import pool
from shardwright.synth.stretches import RECOMPUTING, options
from shardwright.synth.timer import Timer

AS_IT_IS: Any = {"recompute": "off", "microbatches": 1}


@pytest.mark.parametrize(
    ("step", "speeds", "part"),
    [
        # Best where the second device takes what the first has no room for: 3 % dearer at other ratios.
        pytest.param(lambda: perceptron([16, 8, 8, 16], 512), (5, 3, 1), 0.75, marks=pytest.mark.full),
        # Best with ratios of its own for the weights: 7 % dearer with one vector.
        (lambda: perceptron([16, 32, 16, 32, 8], 64), (5, 3, 1), 0.6),
        # Best with less handed on between segments: 2 % dearer at the ratios at which it fits as it stands.
        (momentum, (2, 2, 1, 1), 0.95),
    ],
)
def test_a_small_step_is_planned_no_worse_than_a_larger_one(
    monkeypatch: pytest.MonkeyPatch, step: Callable[[], Traced], speeds: tuple[int, ...], part: float
) -> None:
    traced = step()
    roomy = synthesize_traced(traced, fleet=fleet(speeds=speeds), **AS_IT_IS)
    small = fleet(f"{int(part * max(roomy.memory_bytes))} B", speeds)
    found = synthesize_traced(traced, fleet=small, **AS_IT_IS)
    assert found.fits and found.cost_s > roomy.cost_s
    for module in (freely, pool):
        monkeypatch.setattr(module, "FEW_CHOICES", 0)
    as_larger = synthesize_traced(traced, fleet=small, **AS_IT_IS)
    assert as_larger.fits and found.cost_s <= as_larger.cost_s * (1 + 1e-3)


def test_beside_a_plan_that_fits_nothing_is_searched_for_that_costs_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nor are pieces that their bound rules out: planned in every way, they would take as long again."""
    calls: list[tuple[float, bool, Plan | None]] = []
    plan_of = Planner.plan

    def watched(self: Planner, traced: Traced, rival_s: float = math.inf, **options: bool) -> Plan | None:
        plan = plan_of(self, traced, rival_s, **options)
        calls.append((rival_s, options.get("briefly", False), plan))
        return plan

    traced, speeds = perceptron([16, 32, 8], 64), (3, 1)
    roomy = synthesize_traced(traced, fleet=fleet(speeds=speeds), **AS_IT_IS)
    small = fleet(f"{int(0.6 * max(roomy.memory_bytes))} B", speeds)
    monkeypatch.setattr(Planner, "plan", watched)
    found = synthesize_traced(traced, fleet=small)
    assert found.fits and found.cost_s > roomy.cost_s
    least_s = math.inf
    for rival_s, briefly, plan in calls:
        assert briefly or rival_s <= least_s
        if plan is not None and plan.fits:
            least_s = min(least_s, plan.cost_s)
    assert least_s == found.cost_s


def test_a_scan_that_gains_by_keeping_less_is_planned_in_more_pieces_too() -> None:
    """As it is, in two pieces it costs more than in one that keeps nothing; with products kept, less."""

    def loss_of(params: Any, x: jax.Array) -> jax.Array:
        h, _ = jax.lax.scan(lambda h, w: (jax.nn.swish(h @ w), None), x, params["w"])
        return jnp.mean((h @ params["o"]) ** 2)

    def step(params: Any, momenta: Any, x: jax.Array) -> Any:
        loss, gradients = jax.value_and_grad(loss_of)(params, x)
        momenta = jax.tree.map(lambda m, g: 0.9 * m + g, momenta, gradients)
        return jax.tree.map(lambda p, m: p - 0.1 * m, params, momenta), momenta, loss

    params = {"w": jnp.zeros((5, 40, 40)), "o": jnp.zeros((40, 8))}
    traced = trace(step, params, params, jnp.zeros((64, 40)))
    kind = {"name": "z", "flops": "10 GFLOP/s", "memory_bandwidth": "8 GB/s", "memory": "250832 B"}
    one = Fleet.from_dict({"name": "one", "nodes": [{"devices": {"type": kind | {"launch": "1 us"}}}]})
    whole, halves = (synthesize_traced(traced, fleet=one, microbatches=n) for n in (1, 2))
    assert whole.fits and halves.fits and halves.cost_s < 0.96 * whole.cost_s
    assert synthesize_traced(traced, fleet=one).cost_s <= halves.cost_s


def test_ways_to_keep_less_that_come_to_the_same_are_one() -> None:
    """Of a stretch that keeps no product, to keep products is to keep nothing."""
    traced = perceptron([16, 32, 32, 8], 64)
    every, complete = combinations(differentiated(traced), CostModel(fleet()), RECOMPUTING)
    assert complete and len(every) > 4
    texts = ["\n".join(map(str, rewritten(traced, Rewriting(some, 1)).graph.equations)) for some in every]
    assert len(set(texts)) == len(texts)


def test_where_what_keeps_least_is_far_too_large_nothing_else_is_searched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    traced, speeds = perceptron([16, 32, 8], 64), (3, 1)
    roomy = synthesize_traced(traced, fleet=fleet(speeds=speeds), **AS_IT_IS)

    def every(part: float) -> tuple[EveryWay, Planner]:
        small = fleet(f"{int(part * max(roomy.memory_bytes))} B", speeds)
        planner = Planner(Request(small), Timer())
        return Ladder(traced, small, RECOMPUTING, 1, planner, lambda: False).ways, planner

    ways, _ = every(0.7)
    assert ways.best(math.inf) is not None and not (ways.far or ways.untried)
    ways, planner = every(0.4)
    assert ways.best(math.inf) is None and len(ways.too_large) == 1
    assert ways.far > 1.5 and f"which takes {ways.far:.3g} times the memory" in ways.untried
    plans = [planner.plan(rewritten(traced, Rewriting(some, 1))) for some in ways.combinations]
    assert len(plans) > 1 and all(plan is not None and not plan.fits for plan in plans)
    # Of a step with loops of many equations, too large is enough.
    for most, searched in ((SMALL, 2), (len(traced.graph.equations) - 1, 1)):
        monkeypatch.setattr("shardwright.memory.every_way.SMALL", most)
        ways, _ = every(0.5)
        assert ways.best(math.inf) is None and len(ways.too_large) == searched
        assert bool(ways.far) == (searched == 1)


def test_of_a_step_with_loops_of_many_equations_ways_that_free_hardly_anything_are_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    traced, small = perceptron([16, 32, 2, 32, 8], 64), fleet(speeds=(3, 1))
    total = sum(device.type.memory_bytes for device in small.devices)
    each = [o for layer in options(traced.graph, CostModel(small), RECOMPUTING) for o in layer]
    little = min(option.freed_bytes for option in each)
    monkeypatch.setattr("shardwright.memory.ladder._SLIGHT", 1.5 * little / total)
    slight = {option.stretch for option in each if option.freed_bytes < 1.5 * little}
    planned: list[tuple[Stretch, ...]] = []

    def noted(self: Planner, step: Traced, rival_s: float = math.inf, **options: bool) -> None:
        planned.append(rewriting_of(step).recompute)

    monkeypatch.setattr(Planner, "plan", noted)
    for most in (SMALL, len(traced.graph.equations) - 1):
        monkeypatch.setattr("shardwright.memory.every_way.SMALL", most)
        planned.clear()
        ways = Ladder(traced, small, RECOMPUTING, 1, Planner(Request(small), Timer()), lambda: False).ways
        assert ways.best(math.inf) is None
        # What keeps least comes first, whatever it frees.
        others = set(ways.combinations) - {planned[0]}
        if most == SMALL:
            assert set(planned[1:]) == others and not ways.untried
        else:
            worth = {some for some in others if slight.isdisjoint(some)}
            assert set(planned[1:]) == worth != others and worth
            assert "free hardly any memory were not searched" in ways.untried
