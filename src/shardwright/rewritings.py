"""How a plan changes the step, jointly with placements and ratios: recomputation, host memory, pieces.

Where the plan of the step as it is fits into memory and memory made it no dearer, that is the plan, and no
other is looked for: computing twice takes more arithmetic, though less traffic if it was cheap. Otherwise the
cheapest of these is taken, quick ones first, so that they are rivals for the rest:

    briefly     the step as it is, and in 2, 4, 8, … micro-batches, without a search for smaller programs
    within      the same, searched for what fits, as long as something may be cheaper than what fits already
    a ladder    rewritings, placements, ratios and all, each of which keeps less for the backward part than
                the one before (`shardwright.synth.stretches.rungs_of`): those that may fit, or be cheaper;
                of small steps, all combinations (`shardwright.synth.combinations`)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Literal, Protocol, TypeAlias

from shardwright.cost.fleet import Fleet
from shardwright.cost.model import CostModel
from shardwright.cost.topology import without_host
from shardwright.ir.errors import InputError
from shardwright.ir.graph import Graph
from shardwright.ir.pieces import NotInPiecesError
from shardwright.ir.recompute import Stretch
from shardwright.ir.rewriting import Rewriting, differentiated, rewritten
from shardwright.ir.trace import Traced
from shardwright.plan import Plan
from shardwright.synth.combinations import combinations
from shardwright.synth.pricing import Prices
from shardwright.synth.rent import too_small
from shardwright.synth.solve import bound
from shardwright.synth.space import Space
from shardwright.synth.stretches import BOTH, OFFLOADING, RECOMPUTING, Policy, Rung, rungs_of, seconds_of

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


class Planning(Protocol):
    """Plans steps, see `shardwright.planning.Planner`."""

    def plan(
        self, traced: Traced, rival_s: float = ..., *, briefly: bool = ..., baselines: bool = ...
    ) -> Plan | None:
        """The plan of a step, None where none costs less than a rival that fits."""
        ...

    def unfinished(self, traced: Traced) -> bool:
        """Whether a step was planned briefly and memory was in the way."""
        ...

    def crowded(self, traced: Traced) -> float:
        """The largest part of its memory that a device takes for the best program without a limit."""
        ...


#: Rungs of a ladder that are all tried.
_FEW = 8

#: Micro-batches tried at most.
_MOST_PIECES = 64

#: Rungs of a longer one that are tried at most, each time.
_TRIES = 3

#: Part of its cost that a rewriting should promise to save to be planned beside a plan that fits.
_WORTH = 0.01


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
        return _some(planner.plan(rewritten(traced, recompute)))
    pieces = 1 if microbatches == "auto" else microbatches
    policies = _policies(recompute, offload, fleet)
    ladder = _Ladder(traced, fleet, policies, pieces, planner, late)
    if "all" in (recompute, offload):
        return ladder.top()
    step = rewritten(traced, Rewriting(microbatches=pieces))
    base = _some(planner.plan(step, briefly=True))
    if base.fits and late():
        return base
    whole = not planner.unfinished(step)
    if base.fits and whole and not _binds(base):
        return base
    cut = _Pieces(traced, fleet, planner, late) if microbatches == "auto" else None
    # What fits in pieces without further ado is found quickly, and a rival for all that takes longer.
    best = _better(None, base)
    if cut is not None:
        best = _better(best, cut.briefly(_cost_of(best), planner.crowded(step)))
    if not whole:
        within = planner.plan(step, _cost_of(best))
        base = base if within is None else within
        best = _better(best, base)
    if best is not None and best.cost_s <= _free_s(base) * (1 + _NEAR):
        return _compared(best, base)
    if ladder.every:
        best = _better(best, ladder.best_of_all(_cost_of(best)))
    elif best is None:
        best = _better(None, ladder.that_fits(base))
    if cut is not None:
        best = _better(best, cut.within(_cost_of(best)))
        if best is None:
            best = cut.and_again(policies)
    if best is not None and best.rewriting.microbatches == pieces and not ladder.every:
        best = _better(best, ladder.below(best, base))
    if best is None:
        # Nothing fits: what lacks least says most about what would.
        return min((base, *ladder.too_large), key=_over)
    return _compared(best, base)


def _over(plan: Plan) -> float:
    """The largest part of its memory that a device would need."""
    devices = plan.fleet.devices
    return max(need / devices[d].type.memory_bytes for d, need in enumerate(plan.memory_bytes))


def _better(best: Plan | None, plan: Plan | None) -> Plan | None:
    """The cheaper one of those that fit; of equals the later, which is bounded better."""
    if plan is None or not plan.fits:
        return best
    return plan if best is None or plan.cost_s <= best.cost_s * (1 + 1e-9) else best


def _cost_of(plan: Plan | None) -> float:
    return math.inf if plan is None else plan.cost_s


def _free_s(plan: Plan) -> float:
    """What no plan of a step costs less than, whatever the memory."""
    return plan.bound_s if plan.free_s is None else min(plan.free_s, plan.bound_s)


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


def _compared(best: Plan, base: Plan) -> Plan:
    """The best plan; it says what changing the step was for."""
    if best.rewriting == base.rewriting:
        return best
    found = (
        f"the best plan found costs {1e3 * base.cost_s:.4g} ms"
        if base.fits
        else "no plan was found that fits and costs less"
    )
    note = f"as traced, {found}; the bound is that of the step as it is changed"
    return replace(best, assumptions=(*best.assumptions, note))


class _Pieces:
    """Plans of 2, 4, 8, … micro-batches."""

    def __init__(self, traced: Traced, fleet: Fleet, planner: Planning, late: Callable[[], bool]) -> None:
        self.traced, self.fleet, self.planner, self.late = traced, fleet, planner, late
        #: Steps that memory was in the way of, and what no plan of each costs less than.
        self.open: list[tuple[Traced, float]] = []
        self.tried: list[int] = []
        #: See `Planning.crowded`, of the last step.
        self.crowded = 0.0

    def briefly(self, rival_s: float, crowded: float) -> Plan | None:
        """The cheapest plan that fits without a search for what does.

        First as many pieces as should fit, and more of them until they do; then fewer, which take less time.

        Args:
            rival_s: what a plan that fits costs.
            crowded: the part of a device's memory that the step in one piece takes without a limit.
        """
        first = min(2 ** max(1, math.ceil(math.log2(max(crowded, 1.0)))), _MOST_PIECES)
        best: Plan | None = None
        pieces = first
        while pieces <= _MOST_PIECES and not self.late():
            plan = self._brief(pieces, min(rival_s, _cost_of(best)))
            if plan is None or (best is not None and not plan.fits):
                break
            best = _better(best, plan)
            if best is not None and best.cost_s <= best.bound_s * (1 + _NEAR):
                break  # the bound of more pieces is no less than that of these
            # Of what is there in one piece, so much is there in however many.
            stays = (pieces * self.crowded - crowded) / (pieces - 1)
            if best is None and stays > 1:
                break
            pieces *= 2
        pieces = first // 2
        while pieces > 1 and best is not None and not self.late():
            plan = self._brief(pieces, min(rival_s, _cost_of(best)))
            if plan is None or not plan.fits:
                break
            best = _better(best, plan)
            pieces //= 2
        return best

    def _brief(self, pieces: int, rival_s: float) -> Plan | None:
        try:
            step = rewritten(self.traced, Rewriting(microbatches=pieces))
        except NotInPiecesError:
            return None
        self.tried.append(pieces)
        plan = self.planner.plan(step, rival_s, briefly=True, baselines=False)
        self.crowded = self.planner.crowded(step)
        if plan is not None and self.planner.unfinished(step):
            self.open.append((step, plan.bound_s))
        return plan

    def within(self, rival_s: float) -> Plan | None:
        """The cheapest plan within memory of those that did not fit, the fewest pieces first."""
        best: Plan | None = None
        for step, bound_s in sorted(self.open, key=lambda each: each[1]):
            if self.late():
                break
            if bound_s >= min(rival_s, _cost_of(best)) * (1 - _NEAR):
                continue
            plan = self.planner.plan(step, min(rival_s, _cost_of(best)), baselines=False)
            if best is not None and plan is None:
                break
            best = _better(best, plan)
        return best

    def and_again(self, policies: Sequence[Policy]) -> Plan | None:
        """A plan of the fewest pieces that fits with layers computed again: pieces alone are not enough."""
        for pieces in sorted(self.tried):
            if self.late():
                break
            found = _Ladder(self.traced, self.fleet, policies, pieces, self.planner, self.late).least()
            if found is not None and found.fits:
                return found
        return None


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
        planner: Planning,
        late: Callable[[], bool],
    ) -> None:
        self.traced, self.pieces, self.planner, self.late = traced, pieces, planner, late
        self.fleet, self.policies = fleet, policies
        self.limits = [device.type.memory_bytes for device in fleet.devices]
        self.known: dict[int, Plan | None] = {}
        self.too_large: list[Plan] = []

    @cached_property
    def graph(self) -> Graph:
        """The step in so many pieces, as far as it tells forward from backward."""
        return differentiated(rewritten(self.traced, Rewriting(microbatches=self.pieces)))

    @cached_property
    def rungs(self) -> Sequence[Rung]:
        """What is done with which layers, from rung to rung more; none where nothing may be."""
        if not self.policies:
            return ()
        return rungs_of(self.graph, CostModel(self.fleet), self.policies)

    @cached_property
    def every(self) -> Sequence[tuple[Stretch, ...]]:
        """All combinations of what may be done with the layers; none where they are too many to be tried."""
        if not self.policies:
            return ()
        return combinations(self.graph, CostModel(self.fleet), self.policies) or ()

    def best_of_all(self, rival_s: float) -> Plan | None:
        """The best plan that fits of all combinations; None where none does at less than a rival costs."""
        found: Plan | None = None
        for again in self.every:
            if self.late():
                break
            step = rewritten(self.traced, Rewriting(again, self.pieces))
            if not too_small(step.graph, self.limits):
                plan = self.planner.plan(step, min(rival_s, _cost_of(found)), baselines=False)
                found = _better(found, plan)
                self.too_large += [] if plan is None or plan.fits else [plan]
        return found

    def top(self) -> Plan:
        """The plan of the rung that keeps least."""
        again = self.rungs[-1].stretches if self.rungs else ()
        return _some(self.planner.plan(rewritten(self.traced, Rewriting(again, self.pieces))))

    def least(self) -> Plan | None:
        """The same, None where nothing can be computed again or nothing can fit."""
        return self.plan(len(self.rungs) - 1, math.inf) if self.rungs else None

    def plan(self, rung: int, rival_s: float) -> Plan | None:
        """The plan of a rung; None where none can fit, or be cheaper than a rival."""
        if rung not in self.known:
            step = rewritten(self.traced, Rewriting(self.rungs[rung].stretches, self.pieces))
            small = too_small(step.graph, self.limits)
            self.known[rung] = None if small else self.planner.plan(step, rival_s, baselines=False)
        return self.known[rung]

    def that_fits(self, base: Plan) -> Plan | None:
        """The plan of a rung that fits: the first that frees what the smallest program lacks, or higher."""
        last = len(self.rungs) - 1
        rung, smallest = -1, base
        for left in range(_TRIES, 0, -1):
            if rung >= last or self.late():
                break
            lacks = self._lacks(smallest) + (self.rungs[rung].freed_bytes if rung >= 0 else 0)
            enough = (n for n in range(rung + 1, last) if self.rungs[n].freed_bytes >= lacks)
            rung = last if left == 1 else next(enough, last)
            plan = self.plan(rung, math.inf)
            if plan is not None and plan.fits:
                return plan
            if plan is not None:
                smallest = plan
                self.too_large.append(plan)
        return None

    def _lacks(self, plan: Plan) -> float:
        """Bytes, each tensor whole, that a plan would have to keep less."""
        lacking = (
            (plan.memory_bytes[d] - self.limits[d]) / plan.ratios[d] for d in plan.used if plan.ratios[d] > 0
        )
        return max(0.0, *lacking)

    def below(self, best: Plan, base: Plan) -> Plan | None:
        """A plan that fits and is cheaper than one that does.

        A rung is worth a plan where what the step costs without a limit of memory, and what the rung computes
        again, are less: from the highest of them downwards, which has the best chance to fit. A rung that was
        planned says how much more that is than was thought.
        """
        free_s, worth_s = _free_s(base), best.cost_s * (1 - _WORTH)
        known = [(plan.bound_s, self.rungs[n].seconds) for n, plan in self.known.items() if plan is not None]
        more = min(((bound_s - free_s) / max(s, 1e-12) for bound_s, s in known), default=1.0)
        worth = [n for n, rung in enumerate(self.rungs) if free_s + max(more, 1.0) * rung.seconds < worth_s]
        if not worth:
            return None
        few = len(self.rungs) <= _FEW
        tries = worth[::-1] if few else [worth[len(worth) * part // _TRIES - 1] for part in (3, 2, 1)]
        found: Plan | None = None
        for rung in dict.fromkeys(tries):
            if self.late():
                break
            if rung in self.known:
                continue
            plan = self.plan(rung, min(best.cost_s, _cost_of(found)))
            found = _better(found, plan)
        if few:
            found = _better(found, self._without_one(best if found is None else found))
        return found

    def _parts(self, again: Sequence[Stretch]) -> list[float]:
        """About what part of the time that stretches take again each of them has."""
        seconds = seconds_of(self.graph, CostModel(self.fleet), again)
        return [each / max(sum(seconds), 1e-12) for each in seconds]

    def _without_one(self, best: Plan) -> Plan | None:
        """A plan that fits, is cheaper, and computes one stretch less again than another."""
        again = best.rewriting.recompute
        took_s = best.again_s + best.host_s
        found: Plan | None = None
        for i, part in enumerate(self._parts(again)):
            # It saves what it took, and needs more memory.
            if len(again) > 1 and part * took_s > _WORTH * best.cost_s and not self.late():
                other = (*again[:i], *again[i + 1 :])
                step = rewritten(self.traced, Rewriting(other, self.pieces))
                found = _better(
                    found, self.planner.plan(step, min(best.cost_s, _cost_of(found)), baselines=False)
                )
        return found
