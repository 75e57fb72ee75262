"""Plans of rewritings that keep less and less for a step's backward part, for `rewritings.py`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cached_property

from shardwright.cost.fleet import Fleet
from shardwright.cost.model import CostModel
from shardwright.ir.graph import Graph
from shardwright.ir.rewrites.recompute import Stretch
from shardwright.ir.rewrites.rewriting import Rewriting, differentiated, rewritten
from shardwright.ir.trace import Traced
from shardwright.memory.every_way import EveryWay
from shardwright.memory.rivals import (
    OPEN,
    SAME,
    WORTH,
    Planning,
    better,
    cost_of,
    dearer,
    existing,
    tolerance,
    unlimited_s,
)
from shardwright.memory.scans import ROOM, ScanSavings
from shardwright.plan import Plan
from shardwright.synth.combinations import combinations, few_equations
from shardwright.synth.memory.alive import most_alive
from shardwright.synth.memory.rent import too_small
from shardwright.synth.parts import candidates
from shardwright.synth.stretches import (
    Policy,
    Rung,
    in_scans,
    options,
    rungs_of,
    seconds_of,
)

#: Rungs of a ladder that are all tried.
_FEW = 8

#: Rungs of a longer one that are tried at most, each time.
_TRIES = 3

#: Not counting those that leave less than this part of what was lacking.
_LITTLE = 0.3

#: Part of its cost that a plan of a longer ladder has to save for others below it to be tried as well: what
#: goes to host memory may cost many times as much as what is computed again.
_MUCH = 0.1

#: What frees less of a layer than this part of the memory of all devices makes hardly anything fit.
_SLIGHT = 1e-3


class Ladder:
    """Plans of rewritings that keep less and less, in so many pieces, its layers as stages or not."""

    def __init__(
        self,
        traced: Traced,
        fleet: Fleet,
        policies: Sequence[Policy],
        pieces: int,
        planner: Planning,
        late: Callable[[], bool],
        stages: int = 1,
    ) -> None:
        self.traced, self.pieces, self.planner, self.late = traced, pieces, planner, late
        self.stages = stages
        self.fleet, self.policies = fleet, policies
        self.worth = tolerance(traced, fleet, WORTH)
        self.limits = [device.type.memory_bytes for device in fleet.devices]
        #: Whether devices differ: which programs are good then depends on how memory compares with speed.
        self.mixed = len({device.type for device in fleet.devices}) > 1
        self.known: dict[int, Plan | None] = {}
        #: What rungs cost if memory were no limit; infinite where that is no less than a rival.
        self.free_s: dict[int, float] = {}
        #: Rungs up to this one keep more than one of which no program fits.
        self._full = -1
        self.too_large: list[Plan] = []
        #: The last one that was planned briefly and does not fit.
        self.lacking: Plan | None = None
        #: What makes a scan keep less and the step quicker if memory were no limit, and how long that takes.
        self.saving: Stretch | None = None
        self.saving_s = math.inf
        #: The same of more pieces, which may have room on fewer devices than the step has.
        self.saving_in_pieces: Stretch | None = None

    def step(self, *again: Stretch) -> Traced:
        """The step, of which these stretches keep less."""
        return rewritten(self.traced, Rewriting(again, self.pieces, self.stages))

    @cached_property
    def graph(self) -> Graph:
        """The step in so many pieces, as far as it tells forward from backward."""
        return differentiated(rewritten(self.traced, Rewriting(microbatches=self.pieces)))

    @cached_property
    def rungs(self) -> Sequence[Rung]:
        """What is done with which layers, from rung to rung more; none where nothing may be."""
        if not self.policies:
            return ()
        return rungs_of(self.graph, CostModel(self.fleet), self.policies, self.saving)

    @property
    def untried(self) -> str:
        """What was not planned, in words; empty where everything was, or nothing can be done."""
        if not self.policies:
            return ""
        if self.every:
            return self.ways.untried
        if "rungs" not in vars(self):
            return "which layers could keep less for the backward part was not searched"
        if len(self.known) >= len(self.rungs):
            return ""
        return (
            f"of {len(self.rungs)} ways to keep less for the backward part, each less than the one before, "
            f"{len(self.known)} were planned and the others estimated"
        )

    @cached_property
    def ways(self) -> EveryWay:
        """All combinations of what may be done with the layers; none where they are too many to be tried."""
        model = CostModel(self.fleet)
        some, complete, slight = (), True, frozenset[Stretch]()
        if self.policies:
            parts = len(candidates(self.fleet))
            some, complete = combinations(self.graph, model, self.policies, parts)
            little = _SLIGHT * sum(self.limits)
            each = [o for layer in options(self.graph, model, self.policies) for o in layer] if some else []
            slight = frozenset(option.stretch for option in each if option.freed_bytes < little)
        known = self.traced, self.step, some, complete, slight
        return EveryWay(*known, self.limits, self.planner, self.late, self.too_large)

    @property
    def every(self) -> bool:
        """Whether all combinations are tried, which takes the place of rungs."""
        return bool(self.ways.combinations)

    def in_scans(self, base: Plan) -> Plan | None:
        """A plan that fits because a scan keeps less, which may take less time whatever the memory.

        That is what the ladder then begins with. Of steps of few equations only; on fleets of more than a few
        devices a scan keeps less than what saved time alone, where that saved some.
        """
        scans = in_scans(self.graph, self.policies) if few_equations(self.graph) else []
        if not scans or self.every or self.planner.thorough:
            return None
        known = self.graph, self.fleet, self.step, self.planner, self.late
        savings = ScanSavings(*known, every=self.worth < WORTH)
        found = savings.search(scans, base)
        self.saving, self.saving_s = savings.stretch, savings.seconds
        self.saving_in_pieces = savings.in_pieces
        return found

    def top(self) -> Plan:
        """The plan of the rung that keeps least."""
        again = self.rungs[-1].stretches if self.rungs else ()
        return existing(self.planner.plan(self.step(*again)))

    def least(self) -> Plan | None:
        """The same, None where nothing can be computed again or nothing can fit."""
        return self.plan(len(self.rungs) - 1, math.inf) if self.rungs else None

    def plan(self, rung: int, rival_s: float) -> Plan | None:
        """The plan of a rung; None where none can fit, or be cheaper than a rival."""
        if rung not in self.known:
            self.known[rung] = None
            if rung > self._full:
                step = self.step(*self.rungs[rung].stretches)
                if too_small(step.graph, self.limits):
                    self._full = rung
                else:
                    self.known[rung] = self.planner.plan(step, rival_s, baselines=False)
        return self.known[rung]

    def briefly(self, base: Plan | None, rival_s: float = math.inf) -> Plan | None:
        """A plan that fits of a rung that frees what the best program lacks, without a search for what does.

        By the model of memory first, then a little more, as long as little more is lacking each time. What is
        found is a rival for all that takes longer.

        Args:
            base: the plan of the step as it is; None where no program of it can fit.
            rival_s: what another plan that fits costs: a rung that is no cheaper ends the search.
        """
        last = len(self.rungs) - 1
        again = () if base is None else base.rewriting.recompute
        rung, smallest = next((n for n, r in enumerate(self.rungs) if r.stretches == again), -1), base
        tries = _TRIES
        while tries and rung < last and not self.late():
            lacked = math.inf if smallest is None else self._lacks(smallest)
            rung = self._next(rung, smallest)
            step = self.step(*self.rungs[rung].stretches)
            if too_small(step.graph, self.limits):
                tries -= 1
                continue
            smallest = self.planner.plan(step, rival_s, briefly=True, baselines=False)
            if smallest is None:
                return None
            if smallest.fits:
                self.known[rung] = smallest
                return smallest
            self.lacking = smallest
            # What leaves little of what was lacking is not the last try: the next should do.
            tries -= self._lacks(smallest) >= lacked * _LITTLE
        return None

    def made_to_fit(self, rival_s: float) -> Plan | None:
        """The plan of the last rung that `briefly` found too large, if it saves much, memory aside."""
        step = None if self.lacking is None else self.lacking.traced
        if self.lacking is None or step is None or self.late():
            return None
        saves = unlimited_s(self.lacking) * OPEN < rival_s
        return self.planner.plan(step, rival_s, baselines=False) if saves else None

    def freely(self, rival_s: float) -> Plan | None:
        """The cheapest plan that fits of some rungs without a search for what does; None if none is a rival.

        Which rungs does not depend on the memory: all of a short ladder, some of a longer one. What they cost
        without a limit then says which others are worth a search, see `below`.
        """
        found: Plan | None = None
        count = len(self.rungs)
        few = count <= _FEW
        some = range(count) if few else [count * part // _TRIES - 1 for part in range(1, _TRIES + 1)]
        dearer = False
        for rung in some:
            if self.late():
                break
            if dearer and not few:
                # Those above it compute more again.
                self.free_s[rung] = math.inf
                continue
            step = self.step(*self.rungs[rung].stretches)
            if too_small(step.graph, self.limits):
                continue
            least_s = min(rival_s * (1 - self.worth), cost_of(found))
            plan = self.planner.plan(step, least_s, briefly=True, baselines=False, glance=True)
            self.free_s[rung] = math.inf if plan is None else unlimited_s(plan)
            if plan is not None and plan.fits and not self.planner.unfinished(step):
                self.known[rung] = plan
            found = better(found, plan)
            # Nothing on this rung is a rival, wherever; or memory makes what was found no dearer.
            no_rival = plan is None and not self.planner.outgrown(step)
            dearer = no_rival or (found is not None and found.cost_s <= unlimited_s(found) * (1 + SAME))
        return found

    def that_fits(self, base: Plan | None, rival_s: float = math.inf) -> Plan | None:
        """The plan of a rung that fits: the first that frees what the smallest program lacks, or higher.

        Args:
            base: see `briefly`.
            rival_s: what another plan that fits costs: rungs above one that is no cheaper are not tried,
                unless memory aside some of them may be.
        """
        last = len(self.rungs) - 1
        rung, smallest = -1, base
        for left in range(_TRIES, 0, -1):
            if rung >= last or self.late():
                break
            rung = last if left == 1 else self._next(rung, smallest)
            plan = self.plan(rung, rival_s)
            if plan is not None and plan.fits:
                return plan
            if plan is not None:
                smallest = plan
                self.too_large.append(plan)
            elif rung > self._full and not self._promising(rung, base, rival_s):
                break
        return None

    def _promising(self, rung: int, base: Plan | None, rival_s: float) -> bool:
        """Whether rungs above one may be cheaper than a rival, memory aside: it may have freed too little."""
        free_s = self.saving_s if base is None else unlimited_s(base)
        above = range(rung + 1, len(self.rungs))
        return any(self._estimate(n, free_s) < rival_s * (1 - self.worth) for n in above)

    def _next(self, rung: int, smallest: Plan | None) -> int:
        """The first rung above one that frees what the smallest program of that lacks; else the last.

        Where no program of the step can fit, none says what it lacks: what is alive in the order as traced,
        each tensor held once, should then fill no more than half of the memory.
        """
        last = len(self.rungs) - 1
        if smallest is not None:
            lacks = self._lacks(smallest) + (self.rungs[rung].freed_bytes if rung >= 0 else 0)
        else:
            lacks = most_alive(self.graph) - sum(self.limits) * ROOM
        found = next((n for n in range(rung + 1, last) if self.rungs[n].freed_bytes >= lacks), last)
        if smallest is None and found < last:
            # What two stretches share is freed once, which the sums of a ladder do not say.
            step = self.step(*self.rungs[found].stretches)
            found = found if most_alive(step.graph) <= sum(self.limits) * ROOM else last
        return found

    def falls_short(self, base: Plan | None) -> bool:
        """Whether to keep as little as the last rung frees less than the best program of the step lacks.

        Args:
            base: see `briefly`.
        """
        if base is None or base.fits or not self.rungs:
            return False
        return self._lacks(base) > self.rungs[-1].freed_bytes

    def _lacks(self, plan: Plan) -> float:
        """Bytes, each tensor whole, that a plan would have to keep less to fit, or not to be dearer."""
        shares = {d: plan.ratios[d] for d in plan.used if plan.ratios[d] > 0}
        squeezed = plan.fits and dearer(plan, unasked=False)
        if plan.traced is not None and (squeezed or self.planner.unfinished(plan.traced)):
            # By the model: a closer look at a plan that nobody will run takes as long as at any other.
            # The device that lacks most is the one with the largest share for its memory.
            over, _ = self.planner.crowded(plan.traced)
            return max(0.0, over - 1) * min(self.limits[d] / share for d, share in shares.items())
        return max(0.0, *((plan.memory_bytes[d] - self.limits[d]) / share for d, share in shares.items()))

    def below(self, best: Plan, free_s: float, rival_s: float = math.inf) -> Plan | None:
        """A plan that fits and is cheaper than one that does.

        A rung is worth a plan where what the step costs without a limit of memory, and what the rung computes
        again, are less: from the highest of them downwards, which has the best chance to fit. A rung that was
        planned says how much more that is than was thought. Of a longer ladder a few at a time are tried, as
        long as the plan gets much cheaper.

        Args:
            best: the plan that fits.
            free_s: about what the step as it is costs without a limit of memory.
            rival_s: what another plan that fits costs.
        """
        few = len(self.rungs) <= _FEW
        found: Plan | None = None
        while True:
            before_s = min(best.cost_s, cost_of(found))
            worth_s = before_s * (1 - self.worth)
            worth = [n for n in range(len(self.rungs)) if self._estimate(n, free_s) < worth_s]
            if not worth:
                return found
            tries = worth[::-1] if few else [worth[len(worth) * part // _TRIES - 1] for part in (3, 2, 1)]
            for rung in dict.fromkeys(tries):
                if self.late():
                    break
                least_s = min(best.cost_s, rival_s, cost_of(found))
                if rung in self.known or self._estimate(rung, free_s) >= least_s * (1 - self.worth):
                    continue
                plan = self.plan(rung, least_s * (1 - self.worth))
                found = better(found, plan)
            if few or cost_of(found) > before_s * (1 - _MUCH):
                break
        if few:
            # A plan may be dearer than the rival that it was made beside.
            found = better(found, self._without_one(existing(better(best, found))))
        return found

    def _estimate(self, rung: int, free_s: float) -> float:
        """About what a rung costs without a limit of memory, by what those cost that were planned."""
        if rung in self.free_s:
            return self.free_s[rung]
        known = [(cost_s, self.rungs[n].seconds) for n, cost_s in self.free_s.items() if cost_s < math.inf]
        known += [
            (plan.bound_s, self.rungs[n].seconds)
            for n, plan in self.known.items()
            if plan is not None and n not in self.free_s
        ]
        more = min(((cost_s - free_s) / max(s, 1e-12) for cost_s, s in known), default=1.0)
        # On one device a plan costs what its only program does; on several its bound says too little.
        least = 0.0 if self.free_s or len(self.limits) == 1 else 1.0
        return free_s + max(more, least) * self.rungs[rung].seconds

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
            if len(again) > 1 and part * took_s > self.worth * best.cost_s and not self.late():
                other = (*again[:i], *again[i + 1 :])
                step = self.step(*other)
                if too_small(step.graph, self.limits):
                    continue
                plan = self.planner.plan(step, min(best.cost_s, cost_of(found)), baselines=False)
                found = better(found, plan)
        return found
