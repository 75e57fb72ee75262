"""Which devices take part on two mesh axes, and whether two are better than one.

    GridChoosing   branch and bound over parts of the fleet, as on one axis (`shardwright.synth.subfleets`)
    better         of a plan on one axis and one on two, with one certificate that covers both

A plan on one axis is a rival: a part of the fleet is not planned on two axes where its bound proves that it
cannot beat the rival by more than the gap with which a certificate is content, of a small step at all.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TypeAlias

from shardwright.cost.fleet import Fleet
from shardwright.ir.graph import Graph
from shardwright.synth.alternate import Synthesis
from shardwright.synth.chosen import Choice
from shardwright.synth.combinations import SMALL
from shardwright.synth.fallback import fits
from shardwright.synth.grid.alternate import GridSearch
from shardwright.synth.grid.common import Common
from shardwright.synth.grid.part import GridPart
from shardwright.synth.grid.solve import Solvers
from shardwright.synth.memory.alive import crowded
from shardwright.synth.memory.rent import too_small
from shardwright.synth.parts import Members, Tried, beats, outgrown, products_s, raised_in_turn
from shardwright.synth.programs.judge import Look
from shardwright.synth.shares.bounds import ENOUGH
from shardwright.synth.space.factors import Use
from shardwright.synth.space.space import Space
from shardwright.synth.timer import Timer

#: Alike devices come before others whose bound by arithmetic is less, but not by more than this factor.
_FAR_ABOVE = 1.5

#: Where what is alive in the order as traced, each tensor held once, fills this part of the memory, the best
#: program will hardly fit: those of language models were seen to take 1.3 to 1.8 times as much.
_CROWDED = 0.8

#: Gap, as a part of the cost, beyond which a certificate is wide.
WIDE = 0.1

#: A bound is found with more effort only where that may leave no more than this part of the gap.
_WORTHWHILE = 0.5

#: What the plan says of the space that was searched.
_BOTH = "programs of one mesh axis and of two were searched, and the bound is of both"
_ONE = "the bound is of two mesh axes too, of which no program was worth searching for"
_LATE = "the bound is of two mesh axes too, of which no program was searched for: the time limit came first"

#: What pins choices of a space.
Pinned: TypeAlias = Callable[[Space], Sequence[Use]]


class GridChoosing:
    """The search on two axes for the best plan of a step, on the whole fleet or a part of it.

    It can be taken up again: what is known of the parts stays.

    Args:
        graph: the step.
        fleet: all devices.
        timer: is told where time goes, and says when it is over.
        parts: the parts to consider (see `on_grid`), the whole fleet first.
        pinned: what pins choices.
        look: what says how much memory a program takes.
        known: what other steps may have asked for before.
        least_s: by part, what every program of a step costs at least that has less to do than this one.
    """

    def __init__(
        self,
        graph: Graph,
        fleet: Fleet,
        timer: Timer,
        parts: Sequence[Members],
        pinned: Pinned = lambda space: (),
        look: Look | None = None,
        known: Common | None = None,
        least_s: Mapping[Members, float] | None = None,
    ) -> None:
        self._known = Common() if known is None else known
        self._least_s = least_s or {}
        self._graph, self._fleet, self._timer = graph, fleet, timer
        self._pinned, self._look = pinned, look
        self._made: Space | None = None
        self._pins: tuple[Use, ...] | None = None
        self._solvers: Solvers = {}
        # Small steps are planned alike whatever was planned before.
        self._before = self._known.solver if len(graph.equations) > SMALL else None
        self._parts = [GridPart(fleet, members) for members in parts]
        #: A small step, and every rewriting of it, is planned where it may be any cheaper than a rival.
        self._worth = 1e-9 if len(graph.equations) <= SMALL else ENOUGH

    def below(
        self, below_s: float = math.inf, rival: Choice | None = None, *, briefly: bool = False
    ) -> Choice | None:
        """The best plan on two axes or that of a rival.

        Args:
            below_s: what a plan of the step, changed in another way, costs that fits.
            rival: a plan on one axis.
            briefly: what does not fit is not searched around: it may be later.

        Returns:
            The better of it and the rival; None if there is no rival and none is worth searching for.

        Raises:
            PlanError: no program keeps to the pins.
        """
        made, timer = self._parts, self._timer
        self._bound_by_products()
        target_s = below_s * (1 - self._worth)
        # What does not fit rules nothing out.
        if rival is not None and fits(rival.found, rival.model):
            target_s = min(target_s, rival.found.cost_s * (1 - self._worth))
        best: GridPart | None = None
        queue: list[tuple[float, int]] = []
        for number, part in enumerate(made):
            if (part.found is None or part.unfinished) and not part.impossible:
                if self._least_s.get(part.members, 0.0) < target_s:
                    queue.append((part.bound_s, number))
            elif part.fits and part.beats(best):
                best = part
        heapq.heapify(queue)
        while queue and not (timer.late() and (best is not None or rival is not None or below_s < math.inf)):
            bound_s, number = heapq.heappop(queue)
            part = made[number]
            least_s = best.cost_s if best is not None and best.fits else math.inf
            if bound_s >= target_s or bound_s >= least_s * (1 - 1e-9):
                break
            ahead = self._ahead(queue, part, target_s) if best is None and part.looked == 1 else None
            if ahead is not None:
                heapq.heappush(queue, (bound_s, number))
                queue.remove(ahead)
                heapq.heapify(queue)
                number = ahead[1]
                part = made[number]
            # Beside a plan that fits, what cannot fit says nothing of what would.
            telling = briefly and least_s == math.inf
            if number and not telling and too_small(self._graph, part.limits):
                part.impossible = True
                continue
            wanted_s = min(target_s, least_s)
            if part.looked < 2 or (part.search is not None and part.search.short_of(wanted_s)):
                roughly = briefly and crowded(self._graph, _CROWDED * sum(part.limits))
                self._look_at(part, wanted_s, roughly=roughly)
                heapq.heappush(queue, (part.bound_s, number))
                continue
            self._plan(part, target_s, least_s, briefly=briefly)
            best = part if part.beats(best) else best
            if part.unfinished and rival is None:
                break  # the step changed in another way may fit, which makes other parts' bounds enough
        if best is None or not best.fits:
            if below_s < math.inf and not briefly:
                return self._chosen(None, rival)
            # What costs least without a limit of memory says most about what would fit.
            for part in made:
                best = part if part.found is not None and part.beats(best) else best
        return self._chosen(best, rival)

    def glance(self, *, fitting: bool) -> float:
        """What no plan costs less than, of parts that were hardly looked at; none is planned.

        Args:
            fitting: whether parts too small for any plan have no say.
        """
        self._bound_by_products()
        queue = [(part.bound_s, number) for number, part in enumerate(self._parts)]
        heapq.heapify(queue)
        while queue:
            bound_s, number = heapq.heappop(queue)
            part = self._parts[number]
            part.impossible = part.impossible or too_small(self._graph, part.limits)
            if part.impossible and fitting:
                continue
            if part.looked >= 2:
                return bound_s
            self._look_at(part, math.inf, roughly=True)
            heapq.heappush(queue, (part.bound_s, number))
        return math.inf

    def _ahead(
        self, queue: Sequence[tuple[float, int]], part: GridPart, target_s: float
    ) -> tuple[float, int] | None:
        """What is bounded and planned before a part is bounded better, to know how well it has to be.

        The plan of alike devices is mostly that of its bound, and no other work; that of others is.
        """
        for bound_s, number in sorted(queue):
            other = self._parts[number]
            near = not part.alike and bound_s <= part.bound_s * _FAR_ABOVE
            if bound_s >= target_s or not (other.alike or near):
                continue
            if not other.looked and near:
                return bound_s, number  # whether its devices are alike is not known yet
            if not other.alike:
                continue
            if other.looked >= 2 and not (part.alike and len(other.members) <= len(part.members)):
                return bound_s, number
            if other.looked == 1 and near:
                return bound_s, number
        return None

    @property
    def space(self) -> Space:
        """The programs on the first part, by which all others are searched (see `grid/parts.py`)."""
        if self._made is None:
            nodes = self._parts[0].nodes
            self._made = Space(self._graph, nodes, self._known.vocabulary(nodes))
        return self._made

    @property
    def parts(self) -> Sequence[Tried]:
        """All that are considered."""
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
        return outgrown(self._parts)

    @property
    def least_s(self) -> Mapping[Members, float]:
        """By part, what every program costs at least, memory aside."""
        return {part.members: part.search.bound_s for part in self._parts if part.search is not None}

    @property
    def crowded(self) -> tuple[float, int]:
        """Of the best program without a limit: the largest part of its memory a device takes; its devices."""
        planned = [part for part in self._parts if part.found is not None]
        least = min(planned, key=lambda part: part.free_s, default=None)
        if least is None or least.search is None:
            return 0.0, 1
        return least.search.crowded, len(least.members)

    @property
    def free_s(self) -> float:
        """What the best program found costs if memory were no limit; infinite if none was looked for."""
        return min((part.free_s for part in self._parts), default=math.inf)

    def settle(self, cost_s: float, *, fitting: bool) -> None:
        """Raise the bounds of parts that were planned beside a rival, as far as that matters to a plan.

        Args:
            cost_s: of the plan.
            fitting: whether it fits; of one that does not a better bound is of no use.
        """
        wanted_s = cost_s * (1 - ENOUGH) if fitting else 0.0

        def raised(part: GridPart) -> float:
            if part.found is None or part.search is None or not part.fits or self._timer.late():
                return part.bound_s
            return max(part.bound_s, part.search.sharpened(wanted_s, briefly=True))

        raised_in_turn(self._parts, wanted_s, cost_s, raised)

    def sharpened(self, cost_s: float) -> float:
        """What no plan that fits costs less than, found with more effort where that is far below `cost_s`.

        Args:
            cost_s: of a plan that fits.
        """
        wanted_s = cost_s * (1 - WIDE)
        bound_s = min(self.bound_s, cost_s)
        # Ranges of shares know nothing of memory: they leave what that makes plans dearer.
        if cost_s - self.free_s > _WORTHWHILE * (cost_s - bound_s):
            return bound_s

        def raised(part: GridPart) -> float:
            if self._timer.late():
                return part.bound_s
            while part.looked < 2:
                self._look_at(part, cost_s)
            assert part.search is not None, "it was looked at"
            return max(part.bound_s, part.search.sharpened(wanted_s))

        return raised_in_turn(self._parts, wanted_s, cost_s, raised)

    def products_s(self, members: Members) -> float:
        """What the products of every program take at least on some devices."""
        whole = self._parts[0]
        with self._timer.search():
            model = self._known.listed(whole.members, whole.fleet).model
            (found,) = products_s(self.space, model, [members])
        return found

    def lacks_room(self, members: Members) -> bool:
        """Whether no program of the step can fit on some of the devices."""
        devices = self._fleet.devices
        return too_small(self._graph, [devices[d].type.memory_bytes for d in members])

    def _bound_by_products(self) -> None:
        """First bounds of all parts but the first, for which none of their prices are needed."""
        whole, *others = self._parts
        if others and not any(part.looked or part.bound_s for part in self._parts):
            with self._timer.search():
                model = self._known.listed(whole.members, whole.fleet).model
                known = products_s(self.space, model, [part.members for part in others])
            for part, bound_s in zip(others, known, strict=True):
                part.bound_s = bound_s

    def _look_at(self, part: GridPart, target_s: float, *, roughly: bool = False) -> None:
        """A better bound of a part; for `roughly` see `GridSearch.bound`."""
        if part.search is None:
            with self._timer.search():
                listed, space = self._known.listed(part.members, part.fleet), self.space
            part.grid = listed.grid
            if self._pins is None:
                self._pins = tuple(self._pinned(space))
            like = next((each.search for each in self._parts if each.search is not None), None)
            known = self._pins, self._look, self._solvers, like, self._before
            part.search = GridSearch(self._graph, space, listed, self._timer, *known)
            part.arithmetic_s = part.search.arithmetic_s()
            part.bound_s = max(part.bound_s, part.arithmetic_s)
        else:
            part.bound_s = max(part.bound_s, part.search.bound(target_s, roughly=roughly))
            self._known.solver = part.search.solver
        part.looked += 1

    def _plan(self, part: GridPart, target_s: float, least_s: float, *, briefly: bool) -> None:
        """Plan a part, with what rules it out: a bound as high as a target, or a plan of another part."""
        assert part.search is not None and part.grid is not None, "it was looked at"
        most_s = min(target_s, least_s)
        content_s = min(target_s, least_s * (1 - ENOUGH))
        part.found = part.search.plan(most_s, content_s, briefly=briefly)
        part.fits = fits(part.found, part.grid.model)
        # A program that is dearer without a limit, too, would not have been the plan.
        part.unfinished = briefly and part.found.dearer and part.search.free_s < most_s
        part.bound_s = max(part.bound_s, part.found.bound_s)

    def _chosen(self, best: GridPart | None, rival: Choice | None) -> Choice | None:
        made = self._parts
        if best is None and rival is not None and not (made[0].bound_s or made[0].members in self._least_s):
            self._look_at(made[0], math.inf)  # time was over before that
        # Of a plan that fits, the bound is that of all that fit: parts too small for any have no say.
        fitting = best is not None and best.fits
        least_s = min(part.bound_s for part in made if not (fitting and part.impossible))
        if best is None or best.found is None or best.grid is None:
            if rival is None:
                return None
            late = self._timer.late() and least_s < rival.found.cost_s * (1 - self._worth)
            notes = (*rival.found.notes, _LATE if late else _ONE)
            found = replace(bounded(rival.found, least_s), notes=notes)
            return replace(rival, found=found, parts=(*rival.parts, *made))
        searched = [part.found for part in made if part.found is not None]
        found = replace(
            bounded(best.found, least_s),
            expanded=sum(each.expanded for each in searched),
            searches=sum(each.searches for each in searched),
        )
        chosen = Choice(found, best.grid.model, best, tuple(made))
        return chosen if rival is None else better(rival, chosen)


def better(one: Choice, two: Choice, note: str = _BOTH) -> Choice:
    """The better of a plan on one axis and one on two; its bound covers both spaces, as a note says."""
    best = two if beats(two.best, one.best) else one
    found = replace(
        bounded(best.found, min(one.found.bound_s, two.found.bound_s)),
        notes=(*best.found.notes, note),
        expanded=one.found.expanded + two.found.expanded,
        searches=one.found.searches + two.found.searches,
    )
    return replace(best, found=found, parts=(*one.parts, *two.parts))


def bounded(found: Synthesis, bound_s: float) -> Synthesis:
    """What was found, with a bound that is no higher than another one."""
    return replace(found, bound_s=min(found.cost_s, found.bound_s, bound_s))
