"""No plan is worse than a baseline that fits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
import pytest
from baseline_cases import STEPS, slow
from synth_cases import fleet as one
from synth_cases import normed, sgd, shape

from shardwright import baselines, synthesize
from shardwright.cost.fleet import Fleet
from shardwright.cost.model import CostModel
from shardwright.ir.trace import trace
from shardwright.synth import alternate
from shardwright.synth.fallback import fitting
from shardwright.synth.space.space import Space
from shardwright.synth.timer import Timer
from shardwright.synth.unsearched import NONE_FITS

FLEETS = {
    "two unequal": lambda: slow(3, 1),
    "four alike": lambda: slow(5, 5, 5, 5),
    "two nodes": lambda: slow(20, 10, nodes=2, network="100 MB/s"),
    "slow network": lambda: slow(2000, 1000, nodes=2, network="1 MB/s"),
}


@pytest.mark.parametrize("where", FLEETS)
@pytest.mark.parametrize("name", STEPS)
def test_no_plan_is_worse_than_a_baseline(name: str, where: str) -> None:
    step, args = STEPS[name]()
    fleet = FLEETS[where]()
    plan = synthesize(step, *args, fleet=fleet, axes=1)
    found = baselines(step, *args, fleet=fleet, plan=plan)
    best = found.best_fitting()
    assert best is not None and plan.fits
    assert plan.cost_s <= best.cost_s * (1 + 1e-9), (best.name, plan.cost_s / best.cost_s)


@pytest.mark.parametrize("time_limit_s", [None, 0.0])
def test_on_one_device_a_baseline_may_fit_where_the_plain_program_does_not(
    time_limit_s: float | None,
) -> None:
    """Exchanges with nobody cut it into compiled segments, which may take less memory."""
    step, args = normed()
    roomy = baselines(step, *args, fleet=one((1,)))
    least = min(each.memory_bytes[0] for each in roomy)
    options: Any = {"recompute": "off", "microbatches": 1}
    plain = synthesize(step, *args, fleet=one((1,)), **options)
    assert least < plain.memory_bytes[0]
    options |= {"fleet": one((1,), memory=f"{least} B"), "time_limit_s": time_limit_s}
    plan = synthesize(step, *args, **options)
    assert plan.fits and plan.memory_bytes == (least,)
    assert plan.cost_s == pytest.approx(plain.cost_s)


#: Planned for a minute where memory is tight.
SLOW = ("layers", "mixture")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.full if name in SLOW else ()) for name in STEPS]
)
def test_where_memory_is_tight_no_baseline_that_fits_is_better_than_the_plan(name: str) -> None:
    step, args = STEPS[name]()
    roomy = baselines(step, *args, fleet=slow(2000, 1000, nodes=2, network="1 MB/s"))
    limit = min(max(b.memory_bytes) for b in roomy if len(b.devices) == 4)
    tight = slow(2000, 1000, nodes=2, network="1 MB/s", memory=f"{limit} B")
    plan = synthesize(step, *args, fleet=tight, axes=1)
    best = baselines(step, *args, fleet=tight, plan=plan).best_fitting()
    assert best is not None and plan.fits
    assert plan.cost_s <= best.cost_s
    assert plan.bound_s <= plan.cost_s
    assert plan.verify(step, *args).ok


def test_a_node_alone_has_its_baselines_where_nothing_that_was_searched_fits_there() -> None:
    """A second node made the plan dearer: only baselines on all devices were made."""

    def loss(w: dict[str, Any], x: Any, y: Any) -> Any:
        q, k, v = ((x @ w[name]).reshape(4, 64, 2, 8).transpose(0, 2, 1, 3) for name in "qkv")
        seen = jax.nn.softmax(q @ k.transpose(0, 1, 3, 2) / 8**0.5) @ v
        return jnp.mean((seen.transpose(0, 2, 1, 3).reshape(4, 64, 16) @ w["o"] - y) ** 2)

    rates = {"flops": "10 GFLOP/s", "memory_bandwidth": "10 GB/s", "launch": "20 us"}
    kind = {"name": "a", "memory": "241667 B", **rates}
    nodes = [
        {"devices": {"type": kind, "count": 2}, "link": {"bandwidth": "10 GB/s", "latency": "5 us"}},
        {"devices": {"type": kind, "count": 3}, "link": {"bandwidth": "10 GB/s", "latency": "10 us"}},
    ]
    network = {"bandwidth": "0.1 GB/s", "latency": "100 us"}
    where = Fleet.from_dict({"name": "nodes", "nodes": nodes, "network": network})
    args = dict.fromkeys("qkvo", shape(16, 16)), shape(4, 64, 16), shape(4, 64, 16)
    options: Any = {"fleet": where, "axes": 1, "recompute": "off", "microbatches": 1}
    unsearched = synthesize(sgd(loss), *args, time_limit_s=0, **options)
    assert unsearched.fits and len(unsearched.used) == 2
    plan = synthesize(sgd(loss), *args, **options)
    assert plan.fits and plan.cost_s <= unsearched.cost_s * (1 + 1e-9)


@pytest.mark.parametrize(
    ("name", "axes", "where"),
    [
        ("mlp", 1, lambda **kw: slow(5, 5, 5, 5, **kw)),
        # Baselines of two axes take ten seconds.
        pytest.param(
            "mixture",
            2,
            lambda **kw: slow(2000, 1000, nodes=2, network="1 MB/s", **kw),
            marks=pytest.mark.full,
        ),
    ],
)
def test_without_time_the_plan_is_the_best_baseline_that_fits_as_it_will_run(
    name: str, axes: Literal[1, 2], where: Callable[..., Fleet]
) -> None:
    step, args = STEPS[name]()
    on_all = [b for b in baselines(step, *args, fleet=where(), axes=axes) if len(b.devices) == 4]
    for limit in sorted({max(b.memory_bytes) for b in on_all})[:2]:
        options: Any = {"axes": axes, "devices": "all", "recompute": "off", "microbatches": 1}
        plan = synthesize(step, *args, fleet=where(memory=f"{limit} B"), time_limit_s=0, **options)
        best_s = min(b.cost_s for b in on_all if max(b.memory_bytes) <= limit)
        # With axes=2 baselines on one axis are considered, too.
        assert plan.fits and plan.cost_s <= best_s * (1 + 1e-9), (limit, plan.cost_s / best_s)
        assert NONE_FITS not in plan.assumptions


def test_the_search_gap_of_a_baseline_in_place_of_a_plan_is_that_of_the_baseline() -> None:
    step, args = STEPS["mlp"]()
    graph, model = trace(step, *args).graph, CostModel(slow(3, 1))
    space = Space(graph)
    found = alternate.synthesize(graph, space, model, Timer())
    dear_s, least_s, bound_s = found.cost_s * 4, found.cost_s / 2, found.cost_s / 4

    def chosen(ratios: tuple[float, ...]) -> alternate.Synthesis:
        gap = 1 - least_s / dear_s
        dear = replace(found, ratios=ratios, cost_s=dear_s, bound_s=bound_s, search_gap=gap)
        return fitting(graph, space, model, dear, Timer())

    other = chosen((0.125, 0.875))
    assert other.cost_s < dear_s and other.ratios != (0.125, 0.875)
    # Where the search was at other ratios, the bound over all of them is what is known.
    assert other.search_gap == pytest.approx(1 - bound_s / other.cost_s)
    same = chosen(other.ratios)
    assert same.search_gap == pytest.approx(1 - least_s / same.cost_s)
