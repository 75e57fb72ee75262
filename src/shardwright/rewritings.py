"""How a plan changes the step, jointly with placements and ratios: recomputation, host memory, pieces.

Where the plan of the step as it is fits into memory and memory made it no dearer, that is the plan, and no
other is looked for: computing twice takes more arithmetic, though less traffic if it was cheap. Otherwise
rewritings are planned, placements, ratios and all, on a ladder on which each keeps less for the backward part
than the one before (`shardwright.synth.stretches.ladder`): first the rung that keeps least, then the lowest
that should fit on the devices which that plan uses. Beside it 2, 4, 8, … micro-batches are planned as long as
they do not fit or become cheaper. The cheapest of these plans is taken.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Literal, TypeAlias

from shardwright.cost.fleet import Fleet
from shardwright.cost.model import CostModel
from shardwright.cost.topology import without_host
from shardwright.ir.errors import InputError
from shardwright.ir.graph import Graph
from shardwright.ir.pieces import NotInPiecesError
from shardwright.ir.recompute import Stretch, gains
from shardwright.ir.rewriting import Rewriting, differentiated, rewritten
from shardwright.ir.trace import Traced
from shardwright.plan import Plan
from shardwright.synth.pricing import Prices
from shardwright.synth.rent import too_small
from shardwright.synth.solve import bound
from shardwright.synth.space import Space
from shardwright.synth.stretches import BOTH, OFFLOADING, RECOMPUTING, Policy
from shardwright.synth.stretches import ladder as ladder_of

#: What may be computed again: whatever makes the plan better, nothing, everything; or what exactly is.
Recompute: TypeAlias = Literal["auto", "off", "all"] | Rewriting

#: What may wait in host memory: whatever makes the plan better, nothing, everything that is kept.
Offload: TypeAlias = Literal["auto", "off", "all"]

#: A device that uses less than this part of its memory is taken not to have made the plan dearer.
_BINDING = 0.8

#: A plan this near its bound is not planned again in other ways; with memory to spare, one within the second.
_NEAR, _WIDE = 0.03, 0.25


#: In how many pieces the batch may come: as many as need be, or so many.
Microbatches: TypeAlias = Literal["auto"] | int

#: Plans a step; None where no plan costs less than a rival that fits.
PlanOf: TypeAlias = Callable[[Traced, float], Plan | None]

#: Rungs of a ladder that are all tried.
_FEW = 8

#: Micro-batches tried at most.
_MOST_PIECES = 64

#: Rungs of a longer one that are tried below the one that keeps least.
_TRIES = 3


def check_rewriting(recompute: object, microbatches: object, offload: object, fleet: Fleet) -> None:
    """Raises InputError if that is no way to say what is computed again, waits in host memory or is cut."""
    whole = isinstance(microbatches, int) and not isinstance(microbatches, bool) and microbatches >= 1
    if microbatches != "auto" and not whole:
        raise InputError(
            place="microbatches", reason=f"is {microbatches!r}", remedy="Pass 'auto', or a number from 1 on"
        )
    if not isinstance(recompute, Rewriting) and recompute not in ("auto", "off", "all"):
        raise InputError(place="recompute", reason=f"is {recompute!r}", remedy="Pass 'auto', 'off' or 'all'")
    if offload not in ("auto", "off", "all"):
        raise InputError(place="offload", reason=f"is {offload!r}", remedy="Pass 'auto', 'off' or 'all'")
    spills = isinstance(recompute, Rewriting) and any(stretch.host for stretch in recompute.recompute)
    lacking = without_host(fleet) if offload == "all" or spills else ()
    if lacking:
        raise InputError(
            place=f"fleet {fleet.name}",
            reason=f"gives no host link for {', '.join(lacking[:3])}{' …' if lacking[3:] else ''}: "
            "its memory is the host's, and nothing can be moved out of it",
            remedy="Add host_link: {bandwidth: 16 GB/s, latency: 10 us}, with your numbers, or plan with "
            "offload='off'",
        )


def best_plan(
    traced: Traced,
    fleet: Fleet,
    recompute: Recompute,
    microbatches: Microbatches,
    offload: Offload,
    plan_of: PlanOf,
    late: Callable[[], bool],
) -> Plan:
    """The best plan of a step over its rewritings.

    Args:
        traced: the step as it was traced.
        fleet: the devices.
        recompute: what may be computed again.
        microbatches: in how many pieces the batch may come.
        offload: what may wait in host memory.
        plan_of: plans a step, within a rival's cost.
        late: whether no further plan may be made.

    Raises:
        InputError: the step cannot be run in so many micro-batches, or is to be changed in both ways.
    """
    if isinstance(recompute, Rewriting):
        return _some(plan_of(rewritten(traced, recompute), math.inf))
    pieces = 1 if microbatches == "auto" else microbatches
    policies = _policies(recompute, offload, fleet)
    ladder = _Ladder(traced, fleet, policies, pieces, plan_of)
    if "all" in (recompute, offload):
        return ladder.top()
    base = _some(plan_of(rewritten(traced, Rewriting(microbatches=pieces)), math.inf))
    if late() or not _binds(base):
        return base
    plans = [base]
    if base.fits:
        # Memory is enough, but it may be cheaper to need less of it.
        ladder.rival_s = base.cost_s
        plans += ladder.some(late)
        if microbatches == "auto" and not late():
            plans += _in_pieces(traced, fleet, (), plan_of, late)
    else:
        plans += ladder.that_fit(late)
        plans += _in_pieces(traced, fleet, policies, plan_of, late) if microbatches == "auto" else []
    best = min(plans, key=lambda plan: (not plan.fits, plan.cost_s))
    return best if best is base else replace(best, assumptions=(*best.assumptions, _compared(base)))


def _some(plan: Plan | None) -> Plan:
    assert plan is not None, "without a rival there is always a plan"
    return plan


def _policies(recompute: Recompute, offload: Offload, fleet: Fleet) -> tuple[Policy, ...]:
    """What may be done with a layer."""
    if offload == "all":
        # With everything computed again, only what layers are handed is left to wait there.
        return (("nothing", True),) if recompute == "all" else OFFLOADING
    if offload == "off" or recompute == "all" or without_host(fleet):
        return () if recompute == "off" else RECOMPUTING
    return OFFLOADING if recompute == "off" else BOTH


def _compared(base: Plan) -> str:
    """What changing the step was for."""
    found = (
        f"the best plan found costs {1e3 * base.cost_s:.4g} ms"
        if base.fits
        else "no plan was found that fits"
    )
    return f"as traced, {found}; the bound is that of the step as it is changed"


def _in_pieces(
    traced: Traced,
    fleet: Fleet,
    policies: Sequence[Policy],
    plan_of: PlanOf,
    late: Callable[[], bool],
) -> list[Plan]:
    """The cheapest plan of 2, 4, 8, … micro-batches that fits; or of the fewest, with layers computed again.

    More pieces take longer, but may fit on fewer or faster devices.
    """
    limits = [device.type.memory_bytes for device in fleet.devices]
    tried: list[int] = []
    best: Plan | None = None
    pieces = 2
    while pieces <= _MOST_PIECES and not late():
        try:
            step = rewritten(traced, Rewriting(microbatches=pieces))
        except NotInPiecesError:
            break
        tried.append(pieces)
        rival_s = math.inf if best is None else best.cost_s
        plan = None if too_small(step.graph, limits) else plan_of(step, rival_s)
        if best is not None and (plan is None or (plan.fits and plan.cost_s >= best.cost_s)):
            break
        if plan is not None and plan.fits:
            best = plan
        pieces *= 2
    if best is not None:
        return [best]
    # Pieces alone are not enough, however small.
    for pieces in tried:
        found = [] if late() else _Ladder(traced, fleet, policies, pieces, plan_of).that_fit(late)
        if found:
            return found
    return []


def _binds(plan: Plan) -> bool:
    """Whether a plan might be cheaper with more memory."""
    if not plan.fits:
        return True
    graph = plan.step().graph
    limits = [device.type.memory_bytes for device in plan.fleet.devices]
    if 2 * sum(value.type.nbytes for value in graph.values()) <= min(limits):
        return False  # any device could hold all there is
    full = not plan.ample and any(
        have > _BINDING * limit for have, limit in zip(plan.memory_bytes, limits, strict=True)
    )
    if plan.search_gap > _NEAR / 10 or (full and plan.gap > _NEAR):
        return True  # at these ratios there is a cheaper program, which does not fit
    # Its own bound is that of plans within memory, on any part of the fleet; without, there may be others.
    free_s = plan.free_s
    if free_s is None:
        free_s = bound(Space(graph), Prices.floors(CostModel(plan.part)))
    free_s = min(free_s, plan.bound_s)
    return plan.cost_s > free_s * (1 + (_NEAR if full else _WIDE))


class _Ladder:
    """Plans of rewritings that keep less and less, in so many pieces."""

    def __init__(
        self,
        traced: Traced,
        fleet: Fleet,
        policies: Sequence[Policy],
        pieces: int,
        plan_of: PlanOf,
    ) -> None:
        self.traced, self.pieces, self.plan_of = traced, pieces, plan_of
        self.fleet, self.policies = fleet, policies
        self.rival_s = math.inf
        self.limits = [device.type.memory_bytes for device in fleet.devices]
        self.known: dict[int, Plan | None] = {}

    @cached_property
    def graph(self) -> Graph:
        """The step in so many pieces, as far as it tells forward from backward."""
        return differentiated(rewritten(self.traced, Rewriting(microbatches=self.pieces)))

    @cached_property
    def rungs(self) -> Sequence[tuple[Stretch, ...]]:
        """What is done with which layers, from rung to rung more; none where nothing may be."""
        return ladder_of(self.graph, CostModel(self.fleet), self.policies) if self.policies else ()

    def top(self) -> Plan:
        """The plan of the rung that keeps least."""
        again = self.rungs[-1] if self.rungs else ()
        return _some(self.plan_of(rewritten(self.traced, Rewriting(again, self.pieces)), math.inf))

    def plan(self, rung: int) -> Plan | None:
        """The plan of a rung; None where none can fit, or be cheaper than one that is known and fits."""
        if rung not in self.known:
            step = rewritten(self.traced, Rewriting(self.rungs[rung], self.pieces))
            small = too_small(step.graph, self.limits)
            self.known[rung] = None if small else self.plan_of(step, self._rival_s())
        return self.known[rung]

    def _rival_s(self) -> float:
        """What the best plan known costs that fits."""
        fitting = [plan.cost_s for plan in self.known.values() if plan is not None and plan.fits]
        return min((self.rival_s, *fitting))

    def fits(self, rung: int) -> bool:
        """Whether the plan of a rung fits."""
        plan = self.plan(rung)
        return plan is not None and plan.fits

    def that_fit(self, late: Callable[[], bool]) -> list[Plan]:
        """Plans that fit: of the rung that keeps least, and of lower ones that should fit on its devices."""
        high = len(self.rungs) - 1
        least = self.plan(high) if high >= 0 else None
        if least is None or not least.fits:
            return []
        if len(self.rungs) <= _FEW:
            return self._every(late)
        lowest = self._lowest_beside(least)
        for rung in range(lowest, high, max(1, (high - lowest) // _TRIES)):
            if late() or self.fits(rung):
                break
        return [plan for plan in self.known.values() if plan is not None and plan.fits]

    def _every(self, late: Callable[[], bool]) -> list[Plan]:
        """Plans that fit of all rungs, and beside the best of them."""
        found = [self.known[rung] for rung in range(len(self.rungs)) if not late() and self.fits(rung)]
        plans = [plan for plan in found if plan is not None]
        if plans:
            plans += self._without_one(min(plans, key=lambda plan: plan.cost_s), late)
        return plans

    def _without_one(self, best: Plan, late: Callable[[], bool]) -> list[Plan]:
        """Plans that fit and compute one stretch less again than the best of a ladder."""
        again = best.rewriting.recompute
        others = [(*again[:i], *again[i + 1 :]) for i in range(len(again)) if len(again) > 1]
        plans = [
            self.plan_of(rewritten(self.traced, Rewriting(other, self.pieces)), best.cost_s)
            for other in others
            if not late()
        ]
        return [plan for plan in plans if plan is not None and plan.fits]

    def _lowest_beside(self, least: Plan) -> int:
        """The lowest rung for whose additional bytes the devices of a plan have room, each for its share."""
        room = min(
            (self.limits[d] - least.memory_bytes[d]) / least.ratios[d]
            for d in least.used
            if least.ratios[d] > 0
        )
        every = list(dict.fromkeys(stretch for rung in self.rungs for stretch in rung))
        freed = dict(zip(every, (gain.freed_bytes for gain in gains(self.graph, every)), strict=True))
        kept = [sum(freed[stretch] for stretch in rung) for rung in self.rungs]
        return next(number for number, amount in enumerate(kept) if kept[-1] - amount <= room)

    def some(self, late: Callable[[], bool]) -> list[Plan]:
        """Plans that fit, of a few rungs."""
        count = len(self.rungs)
        if count <= _FEW:
            return self._every(late)
        few = [count * part // 4 - 1 for part in (4, 2, 1)]
        found = [self.known[rung] for rung in few if not late() and self.fits(rung)]
        return [plan for plan in found if plan is not None]
