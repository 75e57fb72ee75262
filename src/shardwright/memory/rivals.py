"""Plans beside one another: which is better, and what memory made dearer; for `rewritings.py`."""

from __future__ import annotations

import math
from typing import Protocol

from shardwright.cost.fleet import Fleet
from shardwright.ir.rewrites.rewriting import rewriting_of
from shardwright.ir.trace import Traced
from shardwright.plan import Plan
from shardwright.synth.combinations import few_equations, in_a_moment

#: Part of its cost that a rewriting should promise to save to be planned beside a plan that fits.
WORTH = 0.01

#: Part of its cost that a step should save on fewer devices, memory aside, to be changed to fit there.
FAR = 0.1

#: Beside a plan that costs more than so many times what another step does, memory aside, that is made to fit.
OPEN = 1.2

#: A step whose scans keep less takes up to so many times less time: 1.05 was seen.
GAIN = 1.1

#: Costs of steps that are planned in a moment are the same if they differ by less than this part.
SAME = 1e-6


def tolerance(traced: Traced, fleet: Fleet, usual: float) -> float:
    """The part of a step's cost for which nothing more is planned: next to none where that takes a moment."""
    return SAME if in_a_moment(traced.graph, fleet) else usual


class Planning(Protocol):
    """Plans steps, see `shardwright.planning.Planner`."""

    def plan(
        self,
        traced: Traced,
        rival_s: float = ...,
        *,
        briefly: bool = ...,
        glance: bool = ...,
        baselines: bool = ...,
    ) -> Plan | None:
        """The plan of a step, None where none costs less than a rival that fits."""
        ...

    def settled(self, plan: Plan) -> Plan:
        """A plan that was found, with a bound as close as it is exact."""
        ...

    @property
    def thorough(self) -> bool:
        """Whether looking around a program that does not fit takes far longer than planning another step."""
        ...

    @property
    def content(self) -> bool:
        """Whether no large step is changed to fit on fewer devices where it fits on more as it is."""
        ...

    def unfinished(self, traced: Traced) -> bool:
        """Whether a step was planned briefly and memory was in the way."""
        ...

    def crowded(self, traced: Traced) -> tuple[float, int]:
        """Of the best program without a limit: the largest part of its memory a device takes; its devices."""
        ...

    def outgrown(self, traced: Traced) -> bool:
        """Whether a part of the fleet into which a step fits in no way may be the best for it in pieces."""
        ...

    def room(self, traced: Traced, below_s: float) -> float:
        """Bytes of the smallest part of the fleet on which a step may cost less than so much; inf if none."""
        ...

    def outside_s(self, traced: Traced, wanted_s: float) -> float:
        """What a step costs at least on parts of the fleet into which it fits in no way, up to so much."""
        ...


def better(best: Plan | None, plan: Plan | None) -> Plan | None:
    """The cheaper one of those that fit; of equals the later, which is bounded better."""
    if plan is None or not plan.fits:
        return best
    return plan if best is None or plan.cost_s <= best.cost_s * (1 + 1e-9) else best


def cost_of(plan: Plan | None) -> float:
    """Seconds of a step; infinite without a plan, which every plan beats."""
    return math.inf if plan is None else plan.cost_s


def overfill(plan: Plan, fleet: Fleet | None = None) -> float:
    """The largest part of its memory that a device would need, of the plan's fleet or another one like it."""
    devices = (fleet or plan.fleet).devices
    return max(
        need / device.type.memory_bytes for need, device in zip(plan.memory_bytes, devices, strict=True)
    )


def unlimited_s(plan: Plan) -> float:
    """About what a step costs whatever the memory: the best program found.

    The bound is no guide to what memory costs: it may be far below for other reasons.
    """
    return plan.bound_s if plan.free_s is None else min(plan.free_s, plan.cost_s)


def existing(plan: Plan | None) -> Plan:
    """The plan of a step that was planned without a rival."""
    assert plan is not None, "without a rival there is always a plan"
    return plan


def dearer(plan: Plan, *, unasked: bool) -> bool:
    """Whether memory made a plan dearer, or what was done about it unasked."""
    return (unasked and bool(plan.rewriting)) or plan.cost_s > unlimited_s(plan) * (1 + 1e-6)


def noted(plan: Plan, *untried: str) -> Plan:
    """A plan that says what was not searched."""
    return plan.but(assumptions=(*plan.assumptions, *filter(None, untried)))


def does_more(step: Traced, like: Traced) -> bool:
    """Whether a large step has all to do that another has, and more: what that keeps is computed again.

    In as many pieces; of few equations, and what a scan keeps, that may save time.
    """
    if rewriting_of(like).recompute:
        return False
    pieces = [(found.microbatches, found.stages) for found in map(rewriting_of, (step, like))]
    looped = any(equation.regions for equation in step.graph.equations)
    return pieces[0] == pieces[1] and not looped and not few_equations(step.graph)
