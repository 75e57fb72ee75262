"""How a plan changes the step, jointly with placements and ratios: recomputation, host memory, pieces.

Where the plan of the step as it is fits into memory and memory made it no dearer, that is the plan: computing
twice takes more arithmetic, though less traffic if it was cheap, which is looked for in small steps alone.
Otherwise the cheapest of these is taken, quick ones first, so that they are rivals for the rest:

    briefly     the step as it is, and in 2, 4, 8, … micro-batches, without a search for smaller programs;
                on two mesh axes, where such searches take long, a rung of the ladder that should fit, first,
                and before the step as it is where hardly any program of that would fit
    within      the same, searched for what fits, as long as something may be cheaper than what fits already
    a ladder    rewritings, placements, ratios and all, each of which keeps less for the backward part than
                the one before (`shardwright.synth.stretches.rungs_of`): those that may fit, or be cheaper;
                of small steps, all combinations (`shardwright.synth.combinations`)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from shardwright.cost.fleet import Fleet
from shardwright.cost.memory.liveness import all_bytes
from shardwright.cost.topology import without_host
from shardwright.ir.arguments import check_choice
from shardwright.ir.errors import InputError
from shardwright.ir.graph import Graph
from shardwright.ir.rewrites.rewriting import Rewriting, differentiated, rewritten
from shardwright.ir.trace import Traced
from shardwright.memory.ladder import Ladder
from shardwright.memory.microbatches import NEAR, Pieces, counts_of
from shardwright.memory.rivals import (
    WORTH,
    Planning,
    better,
    cost_of,
    dearer,
    existing,
    noted,
    overfill,
    tolerance,
    unlimited_s,
)
from shardwright.plan import Plan
from shardwright.synth.combinations import SMALL, few_equations
from shardwright.synth.memory.alive import crowded, most_alive
from shardwright.synth.memory.rent import overfull, too_small
from shardwright.synth.parts import candidates
from shardwright.synth.stretches import BOTH, OFFLOADING, RECOMPUTING, Policy, in_scans

#: What may be computed again: whatever makes the plan better, nothing, everything; or what exactly is.
Recompute: TypeAlias = Literal["auto", "off", "all"] | Rewriting

#: What may wait in host memory: whatever makes the plan better, nothing, everything that is kept.
Offload: TypeAlias = Literal["auto", "off", "all"]

#: In how many pieces the batch may come: as many as need be, or so many.
Microbatches: TypeAlias = Literal["auto"] | int

#: Programs take so many times as much memory at least as is alive in the order as traced, each tensor held
#: once: those of language models were seen to take 1.3 to 1.8 times as much.
_TAKEN = 1.3

#: A step whose scans keep less takes up to so many times less time: 1.05 was seen.
_GAIN = 1.1


def check_rewriting(recompute: object, microbatches: object, offload: object, fleet: Fleet) -> None:
    """Raises InputError if that is no way to say what is computed again, waits in host memory or is cut."""
    whole = isinstance(microbatches, int) and not isinstance(microbatches, bool) and microbatches >= 1
    if microbatches != "auto" and not whole:
        raise InputError(
            place="microbatches", reason=f"is {microbatches!r}", remedy="Pass 'auto', or a number from 1 on"
        )
    if not isinstance(recompute, Rewriting):
        check_choice("recompute", recompute, ("auto", "off", "all"))
    check_choice("offload", offload, ("auto", "off", "all"))
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
    every = "all" in (recompute, offload)
    asked = _Asked(traced, fleet, _policies(recompute, offload, fleet), every, planner, late)
    if microbatches != "auto":
        return asked.plan(microbatches)
    return asked.in_more(asked.plan(1, Pieces(traced, fleet, planner, late)))


@dataclass(frozen=True, slots=True)
class _Asked:
    """What is to be planned: see `best_plan`; `every` layer is computed again, or waits in host memory."""

    traced: Traced
    fleet: Fleet
    policies: tuple[Policy, ...]
    every: bool
    planner: Planning
    late: Callable[[], bool]

    def plan(self, pieces: int, cut: Pieces | None = None, rival_s: float = math.inf) -> Plan:
        """The best plan in so many pieces, or also in those of `cut` that fit sooner or are cheaper.

        Args:
            pieces: of the batch.
            cut: plans it in more pieces.
            rival_s: what a plan costs already that fits: what is cheaper alone is searched for.
        """
        ladder = Ladder(self.traced, self.fleet, self.policies, pieces, self.planner, self.late)
        return ladder.top() if self.every else _InPieces(self, ladder, cut, rival_s).best()

    def in_more(self, found: Plan) -> Plan:
        """The best of a plan and of those in every number of pieces that "auto" knows.

        Where nothing fits yet, each number is planned as if it had been asked for, until something does. Of a
        small step that memory made dearer each is, unless a bound says that nothing in so many pieces is
        cheaper by a hundredth (with scans, which may gain by keeping less, that nothing is nearly as cheap):
        that takes a moment, and the fewest pieces that fit need not be the cheapest.
        """
        small = len(self.traced.graph.equations) <= SMALL
        if found.fits and not (small and dearer(found, unasked=not self.every)):
            return found
        if overfull(self.traced.graph, [device.type.memory_bytes for device in self.fleet.devices]):
            return found
        best, least = better(None, found), found
        worth = tolerance(self.traced, self.fleet, WORTH)
        gain = _GAIN if small and in_scans(differentiated(self.traced), self.policies) else 1.0
        # In one piece it was planned beside a rival, if anything fitted in more.
        for pieces in (*([1] if found.rewriting.microbatches > 1 else []), *counts_of(self.traced)):
            if self.late():
                return noted(
                    best or least, f"{pieces} micro-batches and more were not searched for want of time"
                )
            step = rewritten(self.traced, Rewriting(microbatches=pieces))
            most_s = cost_of(best) * (1 - worth) * gain
            glimpse = self.planner.plan(step, most_s, briefly=True)
            if glimpse is None or glimpse.bound_s >= most_s:
                continue
            plan = self.plan(pieces, rival_s=cost_of(best))
            best = better(best, plan)
            if best is None and overfill(plan) < overfill(least):
                least = plan
            if best is not None and not small:
                break
        return best or least


class _InPieces:
    """The search for the best plan in so many pieces: what is quick first, a rival for what comes after."""

    def __init__(self, asked: _Asked, ladder: Ladder, cut: Pieces | None, rival_s: float) -> None:
        self.planner, self.late = asked.planner, asked.late
        self.rival_s = rival_s
        self.pieces, self.ladder, self.cut = ladder.pieces, ladder, cut
        self.step = rewritten(asked.traced, Rewriting(microbatches=self.pieces))
        self.near = tolerance(asked.traced, asked.fleet, NEAR)
        # What can fit in no way as it is needs no plan: what is changed about it does. But of a fleet of
        # several parts that plan says which devices are worth using, and thus how small pieces may be.
        alike = cut is None or len(candidates(asked.fleet)) == 1
        self.changes = bool(asked.policies or cut)
        possible = self.late() or not (alike and self.changes)
        self.impossible = not possible and _impossible(self.step.graph, ladder.limits)
        #: The plan of the step as it is, None where no program of it can fit; and the best that fits so far.
        self.base: Plan | None = None
        self.found: Plan | None = None
        #: Whether the step as it is was planned with all that there is to make it fit.
        self.whole = self.impossible
        #: Without a limit of memory, the largest part of its own that a device takes.
        self.crowded = 0.0
        #: Whether pieces have fewer rows than there are devices, some of which have none: they come last.
        self.last = False

    def best(self) -> Plan:
        """The best plan; where nothing fits, the one that lacks least."""
        return self._at_once() or self._as_it_is() or self._quickly() or self._within() or self._changed()

    def _at_once(self) -> Plan | None:
        """What keeps less, without a plan of the step as it is, where hardly any program of that would fit.

        It is the plan if it takes hardly longer but for what is computed again; else all is as if there were
        none: what the best program of the step as it is lacks says better what should keep less.
        """
        found = self.ladder.briefly(None) if self._hardly_fits else None
        if found is None or found.cost_s > _free_s(None, found) * (1 + self.near / 2):
            self.ladder.known.clear()
            return None
        found = _compared(found, None, "no program was searched, since hardly any would fit")
        return noted(found, self.ladder.untried)

    @property
    def _hardly_fits(self) -> bool:
        """Whether hardly any program of the step as it is would fit, and something else might soon.

        Of steps of few equations: in vain it takes as long as all the rest of some others.
        """
        ladder, graph = self.ladder, self.step.graph
        some = len(graph.equations) > SMALL and few_equations(graph)
        if self.impossible or not self.planner.thorough or not some or self.late():
            return False
        few = crowded(graph, sum(ladder.limits) / _TAKEN) and not ladder.every
        return few and bool(ladder.rungs)

    def _as_it_is(self) -> Plan | None:
        """The plan of the step as it is, if memory makes it no dearer or no time is left."""
        if self.impossible:
            return None
        # What is far from fitting is looked at once there is a rival, if there is another way than to fit it.
        self.base = existing(self.planner.plan(self.step, briefly=True, glance=self.changes))
        self.whole = not self.planner.unfinished(self.step)
        if self.base.fits and self.late():
            return self.base
        self.found = better(better(None, self.base), self.ladder.in_scans(self.base))
        least_s = min(unlimited_s(self.base), self.ladder.saving_s)
        # Whether a plan might be cheaper with more memory.
        return self._enough(least_s) if self.whole and self.base.fits else None

    def _quickly(self) -> Plan | None:
        """What fits without further ado is found quickly, and a rival for all that takes longer.

        It is the plan itself where it costs no more than the step does without a limit, and looking closer
        takes far longer.
        """
        ladder, cut = self.ladder, self.cut
        self.crowded, devices = self.planner.crowded(self.step)
        if self.impossible:
            devices = len(ladder.limits)
            self.crowded = most_alive(self.step.graph) / sum(ladder.limits)
        self.last = cut is not None and cut.scarce(self.crowded, devices)
        small = len(self.step.graph.equations) <= SMALL
        if self.planner.thorough and not (small or ladder.every):
            self.found = self.found or ladder.briefly(self.base)
            if self.found is not None and self._costs(_free_s(self.base, self.found)):
                return noted(_compared(self.found, self.base), ladder.untried)
        elif ladder.mixed and not ladder.every:
            if self.planner.outgrown(self.step) or ladder.falls_short(self.base):
                # Pieces may fit where the step might be cheapest, or where keeping less will hardly do: a
                # rival for what keeps less.
                self._cut()
            self.found = better(self.found, ladder.freely(cost_of(self.found)))
        if small or not self._costs(self._free_s):
            self._cut()
        return None

    def _cut(self) -> None:
        """What fits in more pieces without further ado, unless those come last."""
        cut = self.cut
        if cut is not None and not (cut.tried or self.last):
            self.found = better(self.found, cut.briefly(cost_of(self.found), self.crowded, self.impossible))

    @property
    def _free_s(self) -> float:
        """About what the step costs without a limit of memory, if need be with less kept."""
        ladder, free_s = self.ladder, 0.0 if self.base is None else unlimited_s(self.base)
        return min([free_s, ladder.saving_s, *ladder.free_s.values()])

    def _within(self) -> Plan | None:
        """The step as it is, searched for what fits: enough if that costs what it does without a limit."""
        ladder = self.ladder
        if not self.whole and not too_small(self.step.graph, ladder.limits):
            within = self.planner.plan(self.step, self._least_s)
            self.base = self.base if within is None else within
            self.found = better(self.found, self.base)
        return self._enough(self._free_s)

    def _changed(self) -> Plan:
        """The best that also keeps less for the backward part, or comes in more pieces."""
        ladder, cut, rival_s = self.ladder, self.cut, self.rival_s
        if ladder.every:
            self.found = better(self.found, ladder.ways.best(self._least_s))
        elif self.found is None:
            self.found = ladder.that_fits(self.base, rival_s)
        self._cut()
        if cut is not None:
            if self.last and self.found is None:
                self.found = cut.briefly(math.inf, self.crowded, self.impossible)
            self.found = better(self.found, cut.within(cost_of(self.found)))
        if self._as_many and not ladder.every:
            best = existing(self.found)
            free_s = min(_free_s(self.base, best), ladder.saving_s)
            self.found = better(best, ladder.below(best, free_s, rival_s))
        elif self.found is not None and not ladder.every:
            # More pieces that fit need not be cheaper than to keep less in as many as were asked for.
            self.found = better(self.found, ladder.that_fits(self.base, min(rival_s, self.found.cost_s)))
        if self.found is None and self.base is not None and rival_s < math.inf:
            return self.base
        if self.found is None:
            lacking = _least_lacking(self.base, self.step, ladder, cut, self.planner, self.late)
            return noted(lacking, ladder.untried)
        scarce = cut is not None and self.last and not cut.tried
        more = "micro-batches of fewer rows than there are devices were not searched" if scarce else ""
        return noted(_compared(self.found, self.base), ladder.untried, more)

    def _enough(self, free_s: float) -> Plan | None:
        """What was found, or saves traffic beside it, if memory makes it no dearer than so many seconds."""
        if self.found is None or not self._costs(free_s):
            return None
        saves = self.ladder.ways.that_saves(self.found) if self._as_many else None
        return _compared(better(self.found, saves) or self.found, self.base)

    def _costs(self, free_s: float) -> bool:
        """Whether what was found costs about so many seconds."""
        return self.found is not None and self.found.cost_s <= free_s * (1 + self.near)

    @property
    def _least_s(self) -> float:
        """What the best plan that fits costs so far, in whatever many pieces."""
        return min(self.rival_s, cost_of(self.found))

    @property
    def _as_many(self) -> bool:
        """Whether what was found comes in as many pieces as were asked for."""
        return self.found is not None and self.found.rewriting.microbatches == self.pieces


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
    cut: Pieces | None,
    planner: Planning,
    late: Callable[[], bool],
) -> Plan:
    """Where nothing fits: what lacks least says most about what would."""
    found = [*ladder.too_large, *([] if cut is None else cut.too_large)]
    found += [] if base is None else [base]
    if not found or (not ladder.too_large and not late()):
        found.append(ladder.top() if ladder.rungs else existing(planner.plan(step)))
    return min(found, key=overfill)


def _policies(recompute: Recompute, offload: Offload, fleet: Fleet) -> tuple[Policy, ...]:
    """What may be done with a layer."""
    if offload == "all":
        # With everything computed again, only what layers are handed is left to wait there.
        return (("nothing", True),) if recompute == "all" else OFFLOADING
    if offload == "off" or recompute == "all" or without_host(fleet):
        return () if recompute == "off" else RECOMPUTING
    return OFFLOADING if recompute == "off" else BOTH


def _compared(best: Plan, base: Plan | None, without: str = "no program fits") -> Plan:
    """The best plan; it says what changing the step was for.

    `base` is None where no program of the step was searched; why not, says `without`.
    """
    if base is None:
        found = without
    elif best.rewriting == base.rewriting:
        return best
    elif base.fits:
        found = f"the best plan found costs {1e3 * base.cost_s:.4g} ms"
    else:
        found = "no plan was found that fits and costs less"
    note = f"as traced, {found}; the bound is that of the step as it is changed"
    return best.but(assumptions=(*best.assumptions, note))
