"""How a plan changes the step, jointly with placements and ratios: recomputation, host memory, pieces.

Where the plan of the step as it is fits into memory and memory made it no dearer, that is the plan: computing
twice takes more arithmetic, though less traffic if it was cheap, which is looked for in small steps alone.
Otherwise the cheapest of these is taken, quick ones first, so that they are rivals for the rest:

    briefly     the step as it is, and in 2, 4, 8, … micro-batches, without a search for smaller programs;
                on two mesh axes, where such searches take long, a rung of the ladder that should fit, first
    within      the same, searched for what fits, as long as something may be cheaper than what fits already
    a ladder    rewritings, placements, ratios and all, each of which keeps less for the backward part than
                the one before (`shardwright.synth.stretches.rungs_of`): those that may fit, or be cheaper;
                of small steps, all combinations (`shardwright.synth.combinations`)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal, TypeAlias

from shardwright.cost.fleet import Fleet
from shardwright.cost.memory.liveness import all_bytes
from shardwright.cost.topology import without_host
from shardwright.ir.errors import InputError
from shardwright.ir.graph import Graph
from shardwright.ir.placement import Shard
from shardwright.ir.rewrites.pieces import NotInPiecesError, batch_of
from shardwright.ir.rewrites.rewriting import Rewriting, rewritten
from shardwright.ir.trace import Traced
from shardwright.memory.ladder import Ladder, Planning, better, cost_of, existing, unlimited_s
from shardwright.plan import Plan
from shardwright.synth.memory.rent import most_alive, too_small
from shardwright.synth.parts import candidates
from shardwright.synth.stretches import BOTH, OFFLOADING, RECOMPUTING, Policy

#: What may be computed again: whatever makes the plan better, nothing, everything; or what exactly is.
Recompute: TypeAlias = Literal["auto", "off", "all"] | Rewriting

#: What may wait in host memory: whatever makes the plan better, nothing, everything that is kept.
Offload: TypeAlias = Literal["auto", "off", "all"]

#: A plan this near what it costs without a limit of memory is not planned again in other ways.
_NEAR = 0.03


#: Pieces in which a step should take more than so many times the memory are not planned beside more that fit.
_HARDLY = 1.1


#: In how many pieces the batch may come: as many as need be, or so many.
Microbatches: TypeAlias = Literal["auto"] | int


#: Micro-batches tried at most.
_MOST_PIECES = 64


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
    planner: Planning,
    late: Callable[[], bool],
) -> Plan:
    """The best plan of a step over its rewritings.

    Args:
        traced: the step as it was traced.
        fleet: the devices.
        recompute: what may be computed again.
        microbatches: in how many pieces the batch may come.
        offload: what may wait in host memory.
        planner: plans a step, within a rival's cost.
        late: whether no further plan may be made.

    Raises:
        InputError: the step cannot be run in so many micro-batches, or is to be changed in both ways.
    """
    if isinstance(recompute, Rewriting):
        return existing(planner.plan(rewritten(traced, recompute)))
    pieces = 1 if microbatches == "auto" else microbatches
    policies = _policies(recompute, offload, fleet)
    ladder = Ladder(traced, fleet, policies, pieces, planner, late)
    if "all" in (recompute, offload):
        return ladder.top()
    step = rewritten(traced, Rewriting(microbatches=pieces))
    cut = _Pieces(traced, fleet, planner, late) if microbatches == "auto" else None
    # What can fit in no way as it is needs no plan: what is changed about it does. But of a fleet of several
    # parts that plan says which devices are worth using, and thus how small pieces may be.
    alike = cut is None or len(candidates(fleet)) == 1
    impossible = alike and bool(policies or cut) and not late() and _impossible(step.graph, ladder.limits)
    base = None if impossible else existing(planner.plan(step, briefly=True))
    whole = impossible or not planner.unfinished(step)
    if base is not None and base.fits:
        if late():
            return base
        if whole and not _binds(base):
            return _compared(better(base, ladder.that_saves(base)) or base, base)
    # What fits in pieces without further ado is found quickly, and a rival for all that takes longer.
    best = better(None, base)
    crowded, devices = planner.crowded(step)
    if impossible:
        crowded, devices = most_alive(step.graph) / sum(ladder.limits), len(fleet.devices)
    if best is None and planner.thorough and not ladder.every:
        best = ladder.briefly(base)
        if best is not None and best.cost_s <= _free_s(base, best) * (1 + _NEAR):
            return _noted(_compared(best, base), ladder.untried)
    # Pieces of fewer rows than there are devices leave some without: they are for what fits no other way.
    last = cut is not None and cut.scarce(crowded, devices)
    if cut is not None and not last:
        best = better(best, cut.briefly(cost_of(best), crowded))
    if not whole and not too_small(step.graph, ladder.limits):
        within = planner.plan(step, cost_of(best))
        base = base if within is None else within
        best = better(best, base)
    if best is not None and base is not None and best.cost_s <= unlimited_s(base) * (1 + _NEAR):
        saves = ladder.that_saves(best) if best.rewriting.microbatches == pieces else None
        return _compared(better(best, saves) or best, base)  # whatever else there is saves less
    if ladder.every:
        best = better(best, ladder.best_of_all(cost_of(best)))
    elif best is None:
        best = better(None, ladder.that_fits(base))
    if cut is not None:
        if last and best is None:
            best = better(best, cut.briefly(cost_of(best), crowded))
        best = better(best, cut.within(cost_of(best)))
        if best is None:
            best = cut.and_again(policies)
    if best is not None and best.rewriting.microbatches == pieces and not ladder.every:
        best = better(best, ladder.below(best, _free_s(base, best)))
    if best is None:
        return _noted(_least_lacking(base, step, ladder, cut, planner, late), ladder.untried)
    pieces_too = "micro-batches of fewer rows than there are devices were not searched" if last else ""
    return _noted(_compared(best, base), ladder.untried, "" if cut is None or cut.tried else pieces_too)


def _impossible(graph: Graph, limits: Sequence[float]) -> bool:
    """Whether it is plain from its tensors that no program of a step as it is can fit."""
    return all_bytes(graph) > 2 * sum(limits) and too_small(graph, limits)


def _free_s(base: Plan | None, best: Plan) -> float:
    """About what the step as it is costs without a limit of memory, if need be by a plan of it changed."""
    return unlimited_s(best) - best.again_s - best.host_s if base is None else unlimited_s(base)


def _least_lacking(
    base: Plan | None,
    step: Traced,
    ladder: Ladder,
    cut: _Pieces | None,
    planner: Planning,
    late: Callable[[], bool],
) -> Plan:
    """Where nothing fits: what lacks least says most about what would."""
    found = [*ladder.too_large, *([] if cut is None else cut.too_large)]
    found += [] if base is None else [base]
    if not found or (not ladder.too_large and not late()):
        found.append(ladder.top() if ladder.rungs else existing(planner.plan(step)))
    return min(found, key=_over)


def _noted(plan: Plan, *untried: str) -> Plan:
    """A plan that says what was not searched."""
    return replace(plan, assumptions=(*plan.assumptions, *filter(None, untried)))


def _over(plan: Plan) -> float:
    """The largest part of its memory that a device would need."""
    devices = plan.fleet.devices
    return max(need / devices[d].type.memory_bytes for d, need in enumerate(plan.memory_bytes))


def _policies(recompute: Recompute, offload: Offload, fleet: Fleet) -> tuple[Policy, ...]:
    """What may be done with a layer."""
    if offload == "all":
        # With everything computed again, only what layers are handed is left to wait there.
        return (("nothing", True),) if recompute == "all" else OFFLOADING
    if offload == "off" or recompute == "all" or without_host(fleet):
        return () if recompute == "off" else RECOMPUTING
    return OFFLOADING if recompute == "off" else BOTH


def _compared(best: Plan, base: Plan | None) -> Plan:
    """The best plan; it says what changing the step was for.

    `base` is None where no program of the step can fit.
    """
    if base is None:
        found = "no program fits"
    elif best.rewriting == base.rewriting:
        return best
    elif base.fits:
        found = f"the best plan found costs {1e3 * base.cost_s:.4g} ms"
    else:
        found = "no plan was found that fits and costs less"
    note = f"as traced, {found}; the bound is that of the step as it is changed"
    return replace(best, assumptions=(*best.assumptions, note))


class _Pieces:
    """Plans of 2, 4, 8, … micro-batches."""

    def __init__(self, traced: Traced, fleet: Fleet, planner: Planning, late: Callable[[], bool]) -> None:
        self.traced, self.fleet, self.planner, self.late = traced, fleet, planner, late
        #: Steps that memory was in the way of, and what no plan of each costs less than.
        self.open: list[tuple[Traced, float]] = []
        self.tried: list[int] = []
        #: Plans of what did not fit.
        self.too_large: list[Plan] = []
        #: See `Planning.crowded`, of the last step.
        self.crowded = 0.0

    def scarce(self, crowded: float, devices: int) -> bool:
        """Whether as many pieces as should fit have fewer rows than there are devices."""
        try:
            batch = batch_of(self.traced.graph, 1)
        except NotInPiecesError:
            return False
        pairs = zip(self.traced.graph.inputs, batch, strict=True)
        rows = next(value.type.shape[0] for value, kind in pairs if isinstance(kind, Shard))
        return rows < devices * self._first(crowded)

    @staticmethod
    def _first(crowded: float) -> int:
        """As many pieces as should fit."""
        return min(2 ** max(1, math.ceil(math.log2(max(crowded, 1.0)))), _MOST_PIECES)

    def briefly(self, rival_s: float, crowded: float) -> Plan | None:
        """The cheapest plan that fits without a search for what does.

        First as many pieces as should fit, and more of them until they do; then fewer, which take less time.

        Args:
            rival_s: what a plan that fits costs.
            crowded: the part of a device's memory that the step in one piece takes without a limit.
        """
        first = self._first(crowded)
        best: Plan | None = None
        stays = 0.0
        pieces = first
        while pieces <= _MOST_PIECES and not self.late():
            plan = self._brief(pieces, min(rival_s, cost_of(best)))
            if plan is None or (best is not None and not plan.fits):
                break
            best = better(best, plan)
            # Of what is there in one piece, so much is there in however many.
            stays = (pieces * self.crowded - crowded) / (pieces - 1)
            if best is not None and best.cost_s <= best.bound_s * (1 + _NEAR):
                break  # the bound of more pieces is no less than that of these
            if best is None and stays > 1:
                break
            pieces *= 2
        pieces = first // 2
        while pieces > 1 and best is not None and not self.late():
            if max(stays, 0.0) + (crowded - max(stays, 0.0)) / pieces > _HARDLY:
                break
            plan = self._brief(pieces, min(rival_s, cost_of(best)))
            if plan is None or not plan.fits:
                break
            best = better(best, plan)
            pieces //= 2
        return best

    def _brief(self, pieces: int, rival_s: float) -> Plan | None:
        try:
            step = rewritten(self.traced, Rewriting(microbatches=pieces))
        except NotInPiecesError:
            return None
        self.tried.append(pieces)
        plan = self.planner.plan(step, rival_s, briefly=True, baselines=False)
        self.crowded, _ = self.planner.crowded(step)
        self.too_large += [] if plan is None or plan.fits else [plan]
        if plan is not None and self.planner.unfinished(step):
            self.open.append((step, plan.bound_s))
        return plan

    def within(self, rival_s: float) -> Plan | None:
        """The cheapest plan within memory of those that did not fit, the fewest pieces first."""
        best: Plan | None = None
        for step, bound_s in sorted(self.open, key=lambda each: each[1]):
            if self.late():
                break
            if bound_s >= min(rival_s, cost_of(best)) * (1 - _NEAR):
                continue
            plan = self.planner.plan(step, min(rival_s, cost_of(best)), baselines=False)
            if best is not None and plan is None:
                break
            self.too_large += [] if plan is None or plan.fits else [plan]
            best = better(best, plan)
        return best

    def and_again(self, policies: Sequence[Policy]) -> Plan | None:
        """A plan of the fewest pieces that fits with layers computed again: pieces alone are not enough."""
        for pieces in sorted(self.tried):
            if self.late():
                break
            found = Ladder(self.traced, self.fleet, policies, pieces, self.planner, self.late).least()
            if found is not None and found.fits:
                return found
            self.too_large += [] if found is None else [found]
        return None


def _binds(plan: Plan) -> bool:
    """Whether a plan might be cheaper with more memory."""
    return not plan.fits or plan.cost_s > unlimited_s(plan) * (1 + _NEAR)
