"""Which devices take part: whole nodes or classes of devices may be left out (`shardwright.synth.parts`).

Branch and bound over parts of a fleet, one full synthesis for each that a bound cannot rule out. All parts
with room are priced and bounded together first (`bounding.py`), and wait in a queue by their bounds. The
least one is planned; once there is a plan, those that it does not rule out are bounded together more closely,
and each that is left is bounded exactly first, and planned if that does not rule it out. When the least bound
is no less than the cost of the best plan, nothing is left to find. Bounds are not carried over between parts
of unequally many devices: the rate of a kernel is taken at the even share.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from functools import cached_property

from shardwright.cost.fleet import Fleet
from shardwright.ir.graph import Graph
from shardwright.synth.alternate import within_memory
from shardwright.synth.bounding import Bounding
from shardwright.synth.chosen import Choice, choice_of, settle
from shardwright.synth.combinations import SMALL, few_equations, in_a_moment
from shardwright.synth.fallback import fits, fitting
from shardwright.synth.freely import Free, freely
from shardwright.synth.memory.budgets import Limits
from shardwright.synth.part import FAR_ABOVE, Part, Promising, parts_of, starts_agree
from shardwright.synth.parts import Members, outgrown, products_s, raised_in_turn
from shardwright.synth.programs.judge import Look
from shardwright.synth.search.priced import SpaceSolver
from shardwright.synth.segments import SEVERAL, WORTH
from shardwright.synth.shares.bounds import ENOUGH
from shardwright.synth.shares.labelled import LabelledSolver
from shardwright.synth.space.factors import Use
from shardwright.synth.space.space import Space
from shardwright.synth.timer import Timer

#: Gap, as a fraction of the cost, beyond which parts that do not fit are bounded within memory.
_WIDE = 0.1

#: Rents of which the search may say nothing where that bound is wanted: the second of four was seen to be.
_PATIENCE = 3


class Choosing:
    """The search for the best plan of a step on the whole fleet or a part of it; it can be taken up again.

    Args:
        graph: the step.
        space: its programs.
        fleet: all devices.
        timer: is told where time goes, and says when it is over.
        extra: factors that pin choices.
        parts: the parts to consider, the whole fleet first if it is one; `candidates(fleet)` by default.
        first: a share per device of the fleet that the search for ratios starts from.
        look: see `shardwright.synth.alternate.synthesize`.
        solver: of the space with these factors, where there is one already.
        like: of a similar step; its favourite is planned first whatever its bound.
    """

    def __init__(
        self,
        graph: Graph,
        space: Space,
        fleet: Fleet,
        timer: Timer,
        extra: Sequence[Use] = (),
        parts: Sequence[Members] | None = None,
        first: Sequence[float] | None = None,
        look: Look | None = None,
        solver: SpaceSolver | None = None,
        like: Promising | None = None,
    ) -> None:
        self._graph, self._space, self._fleet, self._timer = graph, space, fleet, timer
        self._favourite = None if like is None else like.favourite
        self._least_s = {} if like is None else like.free_s
        self._agreed = frozenset[Members]() if like is None else like.agreed
        self._extra, self._first, self._look = extra, first, look
        with timer.search():
            self._solver = solver or SpaceSolver(space, extra)
            self._parts = parts_of(fleet, parts)
            self._bounding = Bounding(self._parts, graph, space, fleet, self._solver, timer, self._favourite)
            self._bounding.begin(even=first is None)

    def below(
        self, rival_s: float, *, briefly: bool = False, glance: bool = False, baselines: bool = True
    ) -> Choice | None:
        """The best plan, None where none can cost less than a rival.

        Args:
            rival_s: what a plan that fits costs already; parts whose bound is no less are not planned.
            briefly: what does not fit is not searched around, and of the other parts only the whole fleet is
                tried then, unless its bound is far higher: they may be later.
            glance: see `within_memory`; and of a large step, briefly, only the part is made to fit on which
                its best program costs least memory aside.
            baselines: whether a baseline may be the plan.

        Raises:
            PlanError: no program keeps to the pins.
        """
        made, timer = self._parts, self._timer
        done = [part for part in made if (part.fits and not part.unfinished) or part.hopeless]
        first = all(part.free is None for part in made)
        waits = [number for number, part in enumerate(made) if part not in done and not part.outside]
        queue = [made[number].turn(number) for number in waits]
        if first:
            # The first one has a bound under its own prices; it is the favourite if there is one.
            queue = [(math.inf, *turn[1:]) if made[turn[2]].by_others else turn for turn in queue]
            queue = [(0.0, *turn[1:]) if made[turn[2]].members == self._favourite else turn for turn in queue]
        looked: list[Part] = []
        # What is planned beside others may be no plan: `settled` bounds what is.
        roughly = briefly or rival_s < math.inf
        # What is not made to fit on the part that it likes best may be changed there, which comes first.
        postponed = glance and briefly and not few_equations(self._graph) and not timer.limited
        best: Part | None = None
        for part in done:
            best = part if best is None or part.beats(best) else best
        if timer.limited and made[0].whole and made[0].found is None:
            # Whatever happens, there is a plan for the fleet that was asked for.
            best = made[0]
            self._plan(best, math.inf, briefly=briefly, glance=glance)
            queue = queue[1:]
        heapq.heapify(queue)
        while queue and not (best is not None and timer.late()):
            number = heapq.heappop(queue)[-1]
            part = made[number]
            part.follow()
            least_s = min(rival_s, best.cost_s if best is not None and best.fits else math.inf)
            if postponed:
                least_s = min(least_s, self.free_s)
            if part.bound_s >= least_s * (1 - 1e-9):
                continue  # others may not be ruled out: it came before its turn, or has a better bound by now
            if briefly and looked and not looked[0].fits and not looked[0].gives_way(part):
                continue  # what to do about memory on that part comes first
            if not (briefly or self._small) and any(part.in_vain(each, rival_s) for each in (*done, *looked)):
                continue
            if part.bounded or part.free is not None or (first and rival_s == math.inf):
                if not (self._beaten(part, least_s, roughly=roughly) or postponed):
                    self._plan(part, least_s, briefly=briefly, glance=glance)
                    looked.append(part)
                    best = part if best is None or part.beats(best) else best
                if first:
                    first, queue = False, [made[k].turn(k) for *_, k in queue]
                    heapq.heapify(queue)
            else:
                waiting = [made[k] for *_, k in queue if made[k].bound_s < least_s * (1 - 1e-9)]
                self._bounding.closer([part, *waiting], least_s)
                queue = [part.turn(number), *[made[k].turn(k) for *_, k in queue]]
                heapq.heapify(queue)
        if postponed and best is None and self.free_s < math.inf:
            best = min(made, key=lambda part: part.free_s)
            self._plan(best, rival_s, briefly=True, glance=True)
        if best is None:
            return None
        if baselines and not self._extra and (best.fits or not briefly):
            best = self._or_baseline(best, rival_s)
        if rival_s < math.inf and not best.fits and not briefly:
            return None
        for part in made:
            part.follow()
        return choice_of(best, self.parts, ended=bool(queue) and timer.late())

    @property
    def _small(self) -> bool:
        """Whether the step is planned in a moment on any fleet."""
        return len(self._graph.equations) <= SMALL

    def settle(self, cost_s: float, *, fitting: bool) -> None:
        """Raise the bounds of the parts as far as that matters to a plan; see `chosen.settle`."""
        if not fitting:
            self._bounding.outside()
        with self._timer.search():
            settle(self._bounding.strong, cost_s, fitting=fitting)
        for part in self._parts:
            part.follow()

    def sharpened(self, cost_s: float) -> float:
        """What no plan that fits costs less than, found with more effort where that is far below `cost_s`.

        Args:
            cost_s: of a plan that fits.
        """
        return raised_in_turn(
            self._bounding.strong, cost_s * (1 - ENOUGH), cost_s, lambda part: self._raised(part, cost_s)
        )

    def _raised(self, part: Part, cost_s: float) -> float:
        """A part's bound of plans that fit, raised if that can be."""
        raised = part.bound_s
        part.impossible = part.lacks_room(sure=True)
        if part.impossible or part.free is None:
            return raised
        turns, free_s, enough_s = part.free.turns, part.free.found.cost_s, (1 - ENOUGH) * cost_s
        with self._timer.search():
            # Memory aside, nothing is bounded above what costs least without a limit of it.
            if len(part.model.counts) > 1 and raised < (1 - ENOUGH) * free_s:
                wanted = min(enough_s, (1 - ENOUGH) * free_s)
                raised = max(raised, part.free.certificate.sharpen(self._labelled, wanted))
            if raised < (1 - _WIDE) * cost_s and free_s < cost_s:
                renting = part.free.renting(Limits.of(part.model))
                within = renting.bound_within(turns.listed, raised, cost_s, turns.stop, patience=_PATIENCE)
                raised = max(raised, within)
        return raised

    @cached_property
    def _labelled(self) -> LabelledSolver:
        """What bounds programs at prices with labels."""
        domains = [choice.domain for choice in self._space.choices]
        return LabelledSolver((*self._space.uses, *self._extra), domains)

    @property
    def parts(self) -> Sequence[Part]:
        """All that are considered; without a plan that fits, those without room are bounded as well."""
        if not any(part.fits for part in self._parts):
            self._bounding.outside()
        return self._parts

    @property
    def bound_s(self) -> float:
        """What no plan that fits costs less than, on any of the parts; infinite where none fits."""
        return min((part.bound_s for part in self._parts if not part.impossible), default=math.inf)

    @property
    def unfinished(self) -> bool:
        """Whether a part was planned briefly and memory was in the way."""
        return any(part.unfinished for part in self._parts)

    @property
    def outgrown(self) -> bool:
        """See `shardwright.synth.parts.outgrown`."""
        self._bounding.outside()
        return outgrown(self._parts)

    def outside_s(self, wanted_s: float) -> float:
        """What no program costs less than, memory aside, on the parts into which the step fits in no way.

        Args:
            wanted_s: a bound that is this high is not raised.
        """
        outside = [part for part in self._parts if part.impossible]
        # What products take at least is known without prices.
        products = [products_s(self._space, p.model, [range(len(p.members))])[0] for p in outside]
        known_s = min((max(p.bound_s, s) for p, s in zip(outside, products, strict=True)), default=math.inf)
        if known_s >= wanted_s:
            return known_s
        self._bounding.outside()
        while outside:
            least = min(outside, key=lambda part: part.bound_s)
            if least.bound_s >= wanted_s or least.bounded or least.free is not None or self._timer.late():
                return least.bound_s
            self._bounding.closer([least], wanted_s)
            for part in outside:
                part.follow()
        return math.inf

    @property
    def promising(self) -> Promising:
        """Parts that a similar step may like: all that are not bounded far above the best; and the best.

        That is one that has no room for this step, if it might cost least there.
        """
        best = min(self._parts, key=lambda part: (not part.fits, part.cost_s))
        if self.outgrown:
            # What keeps less may fit there.
            best = min(self._parts, key=lambda part: part.bound_s if part.impossible else part.free_s)
        most_s = FAR_ABOVE * (self.free_s if best.found is None else best.cost_s)
        likely = [part for part in self._bounding.strong if part.whole or part.bound_s <= most_s]
        return Promising(
            tuple(part.members for part in likely),
            best.members if best.found is not None or best.impossible else None,
            {part.members: part.free_s for part in likely if part.free is not None},
            frozenset(part.members for part in likely if part.free is not None and part.free.agree),
        )

    @property
    def crowded(self) -> tuple[float, int]:
        """Of the best program without a limit: the largest part of its memory a device takes; devices."""
        least = min(self._parts, key=lambda part: part.free_s)
        return (0.0, 1) if least.free is None else (least.free.over, len(least.members))

    @property
    def free_s(self) -> float:
        """What the best program found costs if memory were no limit; infinite if none was looked for.

        Parts into whose memory nothing fits were not planned: they count by their bounds, of steps that are
        planned in a moment.
        """
        free = [part.free.found.cost_s for part in self._parts if part.free is not None]
        if in_a_moment(self._graph, self._fleet):
            self._bounding.outside()
            free += [part.bound_s for part in self._parts if part.impossible]
        return min(free, default=math.inf)

    def _beaten(self, part: Part, least_s: float, *, roughly: bool) -> bool:
        """Whether the best program found for a part costs so much that nothing on it beats a plan that fits.

        Memory makes it no cheaper; ratios of their own for stretches of it may, where they save enough beside
        that plan, memory aside. Of a small step, what is found within memory may be, too (`Free.pool`). Where
        a step that has less to do is no cheaper, none is looked for.
        """
        if part.free is None and self._least_s.get(part.members, 0.0) >= least_s:
            return True
        free = self._free(part, roughly=roughly)
        part.bound_s = max(part.bound_s, free.certificate.bound_s)
        if free.pool is not None or part.free_s < least_s * (1 - 1e-9):
            return False
        several = len(part.model.types) > 1 and part.free_s < SEVERAL * least_s
        return not (several and free.apart_s < least_s * (1 - WORTH))

    def _free(self, part: Part, *, roughly: bool = False) -> Free:
        """The best program for a part, memory aside; searched for once. For `roughly` see `freely`."""
        if part.free is None:
            shares = [] if self._first is None else [self._first[d] for d in part.members]
            # On one device every placement is the same: all programs keep to pins, with nothing to gather.
            kept = bool(self._extra) and len(part.members) == 1
            part.free = freely(
                self._graph,
                self._space,
                part.model,
                self._timer,
                () if kept else self._extra,
                solver=None if kept else self._solver,
                floors=part.floors,
                known=part.known,
                first=tuple(x / sum(shares) for x in shares) if sum(shares) > 0 else None,
                look=self._look,
                roughly=roughly,
                starts_agree=part.members in self._agreed or (not self._small and starts_agree(self._parts)),
            )
        return part.free

    def _plan(self, part: Part, least_s: float, *, briefly: bool, glance: bool) -> None:
        free = self._free(part)
        found = within_memory(free, least_s, briefly=briefly, glance=glance)
        part.found, part.fits = found, fits(found, part.model)
        part.unfinished = briefly and found.dearer
        part.hopeless = not (part.fits or briefly or self._timer.late()) and least_s == math.inf
        part.impossible = part.lacks_room()
        part.bound_s = max(part.bound_s, found.bound_s)

    def _or_baseline(self, best: Part, rival_s: float) -> Part:
        """The best part; the whole fleet with a baseline where that is better and fits.

        Of a small step, so is a node or a class of devices alone on which nothing that was searched fits.
        """
        for part in self._parts:
            least_s = min(rival_s, best.cost_s if best.fits else math.inf)
            missed = self._small and part.alone and not part.fits
            if part.found is None or not (part.whole or missed) or part.bound_s >= least_s * (1 - 1e-9):
                continue
            found = fitting(
                self._graph, self._space, part.model, part.found, self._timer, self._look, below_s=least_s
            )
            part.found, part.fits = found, fits(found, part.model)
            if part.fits:
                part.impossible = part.hopeless = False
            best = part if part.beats(best) else best
        return best
