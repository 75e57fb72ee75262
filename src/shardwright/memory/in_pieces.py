"""The search for the best plan of a step in so many pieces: what is quick first; for `rewritings.py`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

from shardwright.cost.memory.liveness import all_bytes
from shardwright.ir.graph import Graph
from shardwright.ir.trace import Traced
from shardwright.memory.ladder import Ladder
from shardwright.memory.microbatches import NEAR, Pieces
from shardwright.memory.rivals import (
    FAR,
    OPEN,
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
from shardwright.synth.memory.rent import too_small
from shardwright.synth.parts import candidates

#: Programs take so many times as much memory at least as is alive in the order as traced, each tensor held
#: once: those of language models were seen to take 1.3 to 1.8 times as much.
_TAKEN = 1.3

#: Fewer pieces are no longer tried after so many that were no cheaper.
_IN_VAIN = 2

_ELSEWHERE = (
    "on fewer devices, where the step has no room as it is, it was not searched for in pieces, "
    "or with less kept: axes='auto' does that"
)


class InPieces:
    """The search for the best plan in so many pieces: what is quick first, a rival for what comes after."""

    def __init__(self, ladder: Ladder, cut: Pieces | None, rival_s: float) -> None:
        self.planner, self.late = ladder.planner, ladder.late
        self.rival_s = rival_s
        self.pieces, self.ladder, self.cut = ladder.pieces, ladder, cut
        self.step = ladder.step()
        self.near = tolerance(ladder.traced, ladder.fleet, NEAR)
        # What can fit in no way as it is needs no plan: what is changed about it does. But of a fleet of
        # several parts that plan says which devices are worth using, and thus how small pieces may be.
        alike = cut is None or len(candidates(ladder.fleet)) == 1
        self.changes = bool(ladder.policies or cut)
        possible = self.late() or not (alike and self.changes)
        self.impossible = not possible and _impossible(self.step.graph, ladder.limits)
        #: The plan of the step as it is, None where no program of it can fit; and the best that fits so far.
        self.base: Plan | None = None
        self.found: Plan | None = None
        #: Whether the step as it is was planned with all that there is to make it fit.
        self.whole = self.impossible
        #: Without a limit of memory, the largest part of its own that a device takes; of so many devices.
        self.crowded = 0.0, 1
        #: Whether pieces have fewer rows than there are devices, some of which have none: they come last.
        self.last = False

    def best(self) -> Plan:
        """The best plan; where nothing fits, the one that lacks least."""
        early, enough = self._at_once()
        if early is not None and enough:
            return early
        found = self._as_it_is() or self._quickly() or self._within() or self._changed()
        if early is None or better(early, found) is found:
            return found
        return noted(_compared(early, self.base), self.ladder.untried)

    def _at_once(self) -> tuple[Plan | None, bool]:
        """What keeps less, without a plan of the step as it is, where hardly any program of that would fit.

        And whether it is the plan: if it takes hardly longer but for what is computed again. Else all is as
        if there were none, unless it turns out to be cheaper than that: what the best program of the step as
        it is lacks says better what should keep less.
        """
        hardly = not self.impossible and hardly_fits(self.ladder)
        found = self.ladder.briefly(None) if hardly else None
        if found is None or found.cost_s > _free_s(None, found) * (1 + self.near / 2):
            self.ladder.known.clear()
            return found, False
        found = _compared(found, None, "no program was searched, since hardly any would fit")
        return noted(found, self.ladder.untried), True

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
        untried = ""
        if not self.planner.content:
            least_s = min(least_s, self._elsewhere_s)
        elif self.changes and self.planner.outside_s(self.step, 0.0) < (1 - FAR) * cost_of(self.found):
            untried = _ELSEWHERE
        # Whether a plan might be cheaper with more memory.
        found = self._enough(least_s) if self.whole and self.base.fits else None
        return None if found is None else noted(found, untried)

    def _quickly(self) -> Plan | None:
        """What fits without further ado is found quickly, and a rival for all that takes longer.

        It is the plan itself where it costs no more than the step does without a limit, and looking closer
        takes far longer.
        """
        ladder, cut = self.ladder, self.cut
        self.crowded = self.planner.crowded(self._saving)
        if self.impossible:
            self.crowded = most_alive(self.step.graph) / sum(ladder.limits), len(ladder.limits)
        scarce = cut is not None and cut.scarce(*self.crowded)
        # Fewer devices, on which the step has no room as it is, may have enough rows of each piece.
        fewer = few_equations(self.step.graph) and self.planner.outgrown(self._saving)
        self.last = scarce and not fewer
        if self.planner.thorough and not (self._small or ladder.every):
            found = self.found = self.found or ladder.briefly(self.base)
            if found is not None and self._costs(min(self._elsewhere_s, _free_s(self.base, found))):
                return noted(_compared(found, self.base), ladder.untried)
        elif ladder.mixed and not ladder.every:
            if self.planner.outgrown(self.step) or ladder.falls_short(self.base):
                # Pieces may fit where the step might be cheapest, or where keeping less will hardly do: a
                # rival for what keeps less.
                self._cut()
            self.found = better(self.found, ladder.freely(self._least_s))
        elif self.impossible and not (few_equations(self.step.graph) or ladder.every):
            # A rival for pieces, which by themselves may have to be many; of few equations, searched in full.
            self.found = better(self.found, ladder.briefly(None, self._least_s))
        if self._small or not self._costs(self._free_s):
            self._cut()
        return None

    def _cut(self) -> None:
        """What fits in more pieces without further ado, unless those come last."""
        if self.cut is not None and not (self.cut.tried or self.last):
            self.found = better(self.found, self._in_more(self.cut))

    def _in_more(self, cut: Pieces) -> Plan | None:
        """The cheapest plan in more pieces, with what makes them quicker, or one alone."""
        found: Plan | None = None
        for saving in dict.fromkeys((self.ladder.saving_in_pieces, self.ladder.saving)):
            if found is None:
                cut.saving = saving
                found = cut.briefly(self._least_s, self.crowded, self.impossible)
        return found

    @property
    def _free_s(self) -> float:
        """About what the step costs without a limit of memory, perhaps with less kept or in more pieces."""
        ladder, free_s = self.ladder, 0.0 if self.base is None else unlimited_s(self.base)
        far_s = cost_of(self.found) * (1 - 2 * self.near)
        fewer = [cost_s for brief in self._squeezed if (cost_s := unlimited_s(brief)) < far_s]
        return min([free_s, self._elsewhere_s, ladder.saving_s, *ladder.free_s.values(), *fewer])

    @property
    def _squeezed(self) -> list[Plan]:
        """Plans in numbers of pieces that may do where less is kept of each, see `_keep_less`."""
        return [] if self.cut is None or self._small else self.cut.squeezed

    @property
    def _saving(self) -> Traced:
        """The step, a scan of which keeps less if that makes pieces of it quicker."""
        saving = self.ladder.saving_in_pieces
        return self.step if saving is None else self.ladder.step(saving)

    @property
    def _small(self) -> bool:
        """Whether plans of the step take a moment each."""
        return len(self.step.graph.equations) <= SMALL

    @property
    def _elsewhere_s(self) -> float:
        """About what the step costs on devices without room for it as it is, where that is far less.

        In more pieces, or with less kept, it may fit there.
        """
        far_s = (1 - FAR) * cost_of(self.found)
        outside_s = self.planner.outside_s(self._saving, far_s) if self.changes else math.inf
        return outside_s if outside_s < far_s else math.inf

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
            if cut is not None and cut.nearly:  # a rival for what keeps less, and found sooner
                self.found = cut.within(rival_s)
            self.found = better(self.found, ladder.that_fits(self.base, self._least_s))
        self._cut()
        if cut is not None:
            if self.last and self._dear:
                self.found = better(self.found, self._in_more(cut))
            done = self._as_many or ladder.every or ladder.mixed or self._small
            if self.found is not None and cut.open and not done:
                # Fewer pieces are searched around: what keeps less is a rival for that, and found sooner.
                self.found = better(self.found, ladder.briefly(self.base, self._least_s))
            self.found = better(self.found, cut.within(self._least_s))
            self._keep_less()
            self.found = better(self.found, cut.passed(self._least_s))
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

    def _keep_less(self) -> None:
        """Fewer pieces than fit may do where less is kept of each: of large steps, the most of them first.

        Of a small one every number of pieces is planned as if it had been asked for, see `_Asked.in_more`.
        """
        asked, in_vain = self.ladder, 0
        #: That of the best plan, and about what the step costs in as many pieces, memory aside.
        its: tuple[Ladder, float] | None = None
        for brief in self._fewer():
            least_s = self._least_s
            if self.found is None or self.late() or in_vain == _IN_VAIN:
                break
            self.found = better(self.found, brief)
            # What is computed again takes its time, too.
            if brief.bound_s >= least_s * (1 - 2 * self.near):
                continue
            pieces = brief.rewriting.microbatches
            ladder = Ladder(asked.traced, asked.fleet, asked.policies, pieces, self.planner, self.late)
            ladder.saving = next(iter(brief.rewriting.recompute), None)
            plan = ladder.briefly(brief, least_s) or ladder.made_to_fit(least_s)
            self.found = found = existing(better(self.found, plan))
            if found is plan:
                its, in_vain = (ladder, unlimited_s(brief)), 0
            elif pieces < found.rewriting.microbatches:
                in_vain += 1
        if its is not None and asked.worth < WORTH and not dearer(existing(self.found), unasked=False):
            # Plans take a moment, and this one may free more than need be.
            ladder, free_s = its
            self.found = better(self.found, ladder.below(existing(self.found), free_s, self.rival_s))

    def _fewer(self) -> Iterator[Plan]:
        """Plans in as many pieces as memory made dearer, the most first, and in fewer than were tried."""
        squeezed, cut = sorted(self._squeezed, key=lambda each: -each.rewriting.microbatches), self.cut
        yield from squeezed
        if cut is None or not cut.tried or not (squeezed or self._dear):
            return
        pieces = min(cut.tried) // 2
        while pieces > self.pieces:
            brief = cut.brief(pieces, self._least_s)
            if brief is not None:
                yield brief
            elif squeezed:
                return
            pieces //= 2

    @property
    def _dear(self) -> bool:
        """Whether what was found costs far more than the step does without a limit of memory."""
        return self.found is None or self.found.cost_s > OPEN * unlimited_s(self.base or self.found)

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


def hardly_fits(ladder: Ladder) -> bool:
    """Whether hardly any program of the step as it is would fit, and something else might soon.

    Of steps of few equations: in vain it takes as long as all the rest of some others.
    """
    graph = ladder.step().graph
    some = len(graph.equations) > SMALL and few_equations(graph)
    if not ladder.planner.thorough or not some or ladder.late():
        return False
    few = crowded(graph, sum(ladder.limits) / _TAKEN) and not ladder.every
    return few and bool(ladder.rungs)


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
