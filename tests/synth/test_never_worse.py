"""No plan is worse than a baseline that fits."""

from __future__ import annotations

import pytest
from baseline_cases import STEPS, slow

from shardwright import baselines, synthesize

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
