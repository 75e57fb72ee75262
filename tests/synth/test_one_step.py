"""Two mesh axes and one, of a large step: what takes long waits for what says whether it is needed."""

from __future__ import annotations

import math
from typing import Any

import jax
import pytest
from grid_cases import FLEETS, arguments, train_step

from shardwright import Plan, one_step
from shardwright.ir.trace import trace
from shardwright.one_step import OneStep
from shardwright.request import Request
from shardwright.synth.grid.choice import GridChoosing
from shardwright.synth.grid.common import Common
from shardwright.synth.subfleets import Choosing
from shardwright.synth.timer import Timer


@pytest.fixture
def step(monkeypatch: pytest.MonkeyPatch) -> OneStep:
    """A step that counts as large, on two nodes; one mesh axis or two."""
    monkeypatch.setattr(one_step, "SMALL", 0)
    traced = trace(train_step, *jax.eval_shape(arguments))
    return OneStep(traced, Request(FLEETS["2 + 2"], devices="all"), Timer(), Common())


def planned(step: OneStep, rival_s: float = math.inf, *, briefly: bool = False, glance: bool = False) -> Plan:
    plan = step.plan(rival_s, briefly=briefly, glance=glance, baselines=False)
    assert plan is not None
    return plan


@pytest.mark.parametrize("part", [0.5, 0.95])
def test_two_axes_wait_where_a_step_may_be_far_cheaper_on_devices_without_room(
    part: float, step: OneStep, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Choosing, "outside_s", lambda self, wanted_s: part * self.free_s)
    brief = planned(step, briefly=True, glance=True)
    flat = any("two mesh axes were not searched" in said for said in brief.assumptions)
    assert flat == step.unfinished == (part < 0.9)
    whole = planned(step)
    assert not step.unfinished and "on_grid" in vars(step)
    assert not any("two mesh axes were not searched" in said for said in whole.assumptions)
    assert whole.bound_s <= brief.cost_s * (1 + 1e-9)


@pytest.mark.parametrize("unfinished", [False, True])
def test_what_fits_on_two_axes_spares_a_search_around_what_does_not_on_one(
    unfinished: bool, step: OneStep, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned(step, briefly=True)
    rivals: list[float] = []
    below = Choosing.below

    def noted(self: Choosing, rival_s: float, **options: Any) -> Any:
        rivals.append(rival_s)
        return below(self, rival_s, **options)

    monkeypatch.setattr(Choosing, "below", noted)
    monkeypatch.setattr(Choosing, "unfinished", unfinished)
    plan = planned(step)
    assert rivals == ([pytest.approx(step.on_grid.free_s)] if unfinished else [math.inf])
    assert plan.bound_s <= step.choosing.bound_s * (1 + 1e-9) and plan.bound_s <= step.on_grid.bound_s


def test_a_bound_of_a_plan_on_two_axes_covers_one_on_which_nothing_was_found(
    step: OneStep, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Choosing, "below", lambda *_, **options: None)
    plan = planned(step)
    assert plan.axes == 2 and plan.bound_s <= step.choosing.bound_s < plan.cost_s
    alone = GridChoosing.below(step.on_grid, math.inf)
    assert alone is not None and alone.found.cost_s == pytest.approx(plan.cost_s)


@pytest.mark.parametrize("late", [False, True])
def test_no_search_on_two_axes_begins_when_time_is_over(
    late: bool, step: OneStep, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned(step, briefly=True)
    vars(step).pop("on_two", None)
    vars(step).pop("on_grid", None)
    monkeypatch.setattr(Choosing, "unfinished", True)
    monkeypatch.setattr(Timer, "late", lambda self: late)
    assert (step._on_two_s(math.inf) == math.inf) == late
    assert ("on_grid" in vars(step)) != late
