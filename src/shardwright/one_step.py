"""The plan of one step as it is: spaces on one mesh axis and on two, parts of the fleet, pins, memory."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial

from shardwright.assemble import assembled, looked_at, replicated_in
from shardwright.constraints import ELSEWHERE, conflict, factors, priced, resolve, takes_two_axes
from shardwright.cost.model import CostModel
from shardwright.ir.errors import PlanError
from shardwright.ir.graph import Graph
from shardwright.ir.stages import layers_of
from shardwright.ir.trace import Traced
from shardwright.memory.device_memory import Looking
from shardwright.memory.rivals import FAR, does_more
from shardwright.plan import Plan
from shardwright.plans.parts import Stats
from shardwright.request import Request
from shardwright.synth.chosen import Choice, least_bound
from shardwright.synth.combinations import SMALL
from shardwright.synth.fallback import fits
from shardwright.synth.grid.alternate import is_mesh
from shardwright.synth.grid.choice import GridChoosing, bounded
from shardwright.synth.grid.common import Common
from shardwright.synth.grid.part import on_grid, on_one_axis
from shardwright.synth.grid.single import BesideSingle
from shardwright.synth.grid.unsearched import beside_one_axis
from shardwright.synth.part import Promising
from shardwright.synth.parts import Members, candidates
from shardwright.synth.search.priced import SpaceSolver
from shardwright.synth.shares.bounds import ENOUGH
from shardwright.synth.space.space import Space
from shardwright.synth.subfleets import Choosing
from shardwright.synth.timer import Timer
from shardwright.synth.unsearched import CUT_SHORT, NO_TIME, cut_short, unsearched

#: What a plan says where `meshes` are not all that there are.
_WHOLE = "on two mesh axes the whole fleet alone was considered; axes=2 tries parts of it, too"
_FLAT = "two mesh axes were not searched, and are not part of the bound: memory came first"


class OneStep:
    """The search for a plan of one step as it is; `like` is one that was changed into it, and planned."""

    def __init__(
        self, traced: Traced, asked: Request, timer: Timer, grids: Common, like: OneStep | None = None
    ) -> None:
        self.traced, self.asked, self.timer, self._grids = traced, asked, timer, grids
        self.space_s = 0.0
        #: Whether two mesh axes were left for later when it was planned.
        self._flat = False
        constraints, fleet, axes = asked.constraints, asked.fleet, asked.axes
        self.pins = () if constraints is None else resolve(constraints, traced.graph, self.space)
        layers = {found.length for found in map(layers_of, traced.graph.equations) if found is not None}
        self.parts = self._candidates = candidates(fleet, layers)[: 1 if asked.devices == "all" else None]
        meshes = on_grid(fleet, self.parts) if axes != 1 and is_mesh(fleet) else ()
        # With "auto", parts of the fleet on two axes are for small steps, and for those changed for want of
        # memory, where they are worth it: each takes as long as the whole.
        self.meshes = meshes[: 1 if axes == "auto" and not self._small and like is None else None]
        self._narrowed = len(self.meshes) < len(meshes)
        less = like is not None and does_more(traced, like.traced)
        known = like.on_grid.least_s if less and like is not None and "on_grid" in vars(like) else {}
        #: By part, what every program on two axes costs at least of a step that has less to do.
        self._least_s: Mapping[Members, float] = known
        self.like: Promising | None = None
        if self.meshes and axes == 2 and asked.time_limit_s != 0:
            self.parts = () if self.pins else on_one_axis(fleet, self.parts)
        # Small steps are planned alike whatever was planned before.
        if like is not None and "choosing" in vars(like) and not self._small:
            self.like = like.choosing.promising
            self.parts = self.like.parts
            if not less:
                self.like = replace(self.like, free_s={})

    @cached_property
    def space(self) -> Space:
        """The programs on one mesh axis."""
        return self._known()[1]

    def _known(self) -> tuple[Graph, Space, SpaceSolver]:
        """The graph, its programs and what solves for them without pins."""
        graph, spaces = self.traced.graph, self.asked.spaces
        if id(graph) not in spaces:
            self.asked.tick("building the choice graph")
            start = time.perf_counter()
            space = Space(graph)
            self.space_s = time.perf_counter() - start
            with self.timer.search():
                spaces[id(graph)] = graph, space, SpaceSolver(space)
        return spaces[id(graph)]

    @cached_property
    def _look(self) -> Looking:
        """What says how much memory a program takes on every device, as the MPI backend runs it."""
        return Looking(self.traced.graph)

    @cached_property
    def choosing(self) -> Choosing:
        """The search on one mesh axis."""
        return Choosing(
            self.traced.graph,
            self.space,
            self.asked.fleet,
            self.timer,
            factors(self.pins, self.space),
            self.parts,
            self.asked.first,
            self._look,
            None if self.pins else self._known()[2],
            self.like,
        )

    @cached_property
    def on_grid(self) -> GridChoosing:
        """The search on two mesh axes."""
        pinned = partial(factors, self.pins)
        graph, fleet, look = self.traced.graph, self.asked.fleet, self._look
        known = self._grids, self._least_s
        return GridChoosing(graph, fleet, self.timer, self.meshes, pinned, look, *known)

    @cached_property
    def on_two(self) -> GridChoosing | BesideSingle:
        """The search on two mesh axes, with parts of the fleet on which they are one where two are wanted."""
        if self.asked.axes != 2 or not self.parts:
            return self.on_grid
        asked = self.asked
        return BesideSingle(
            asked.fleet,
            self.on_grid,
            self.parts,
            lambda: self.choosing,
            self.timer,
            self._grids,
            small=self._small,
        )

    @property
    def _small(self) -> bool:
        """Whether the step is planned in a moment, and alike whatever was planned before."""
        return len(self.traced.graph.equations) <= SMALL

    @property
    def unfinished(self) -> bool:
        """See `Planner.unfinished`."""
        return self._flat or any(made.unfinished for made in self._searches)

    @property
    def crowded(self) -> tuple[float, int]:
        """See `Planner.crowded`; with axes=2 of the better one of what is searched on one axis and on two."""
        some = self._searches[: 2 if self.asked.axes == 2 else 1]
        made = [each for each in some if each.crowded[0] > 0]
        return min(made, key=lambda each: each.free_s).crowded if made else (0.0, 1)

    @property
    def outgrown(self) -> bool:
        """See `Planner.outgrown`."""
        return next((made.outgrown for made in self._searches), False)

    def likely(self, below_s: float) -> Sequence[Members]:
        """The parts of the fleet on which the step may cost less than so much."""
        return [part.members for made in self._searches for part in made.parts if part.bound_s < below_s]

    @property
    def _searches(self) -> list[Choosing | GridChoosing]:
        """Those that were begun."""
        names = ("on_grid", "choosing") if self.asked.axes == 2 else ("choosing", "on_grid")
        return [vars(self)[name] for name in names if name in vars(self)]

    def plan(self, rival_s: float, *, briefly: bool, glance: bool, baselines: bool) -> Plan | None:
        """See `Planner.plan`."""
        traced, pins = self.traced, self.pins
        try:
            chosen = self._chosen(rival_s, briefly=briefly, glance=glance, baselines=baselines)
        except PlanError as error:
            if not pins:
                raise
            raise conflict(pins, traced.graph, self.space, CostModel(self.asked.fleet)) from error
        if chosen is None:
            return None
        if briefly and not fits(chosen.found, chosen.model):
            ample = False  # a closer look is for plans that somebody may want
        else:
            chosen, ample = looked_at(chosen, self._look, self.timer)
        if pins and len(chosen.members) < len(self.asked.fleet.devices):
            chosen = chosen.saying(ELSEWHERE)
        found = chosen.found
        # What a space says of the step is the same on two axes.
        space = self.space if "space" in vars(self) else self.on_grid.space
        prices = priced(pins, traced.graph, space, chosen.model, found, self._look)
        stats = Stats(
            trace_s=traced.trace_s,
            space_s=self.space_s,
            search_s=0.0,
            ratio_s=0.0,
            expanded=found.expanded,
            searches=found.searches,
            equations=len(traced.graph.all_equations()),
            choices=len(space.choices),
            replicated=replicated_in(traced.graph, space),
        )
        return assembled(
            traced,
            space,
            self.asked.fleet,
            chosen,
            stats,
            self.asked.state,
            prices,
            ample=ample,
            free_s=min((made.free_s for made in self._searches), default=None),
        )

    def settled(self, plan: Plan) -> Plan:
        """See `Planner.settled`."""
        for made in self._searches:
            made.settle(plan.cost_s, fitting=plan.fits)
        bounds = [least_bound(made.parts, fitting=plan.fits) for made in self._searches]
        return _raised(plan, min(plan.cost_s, *bounds)) if bounds else plan

    def certified(self, plan: Plan) -> Plan:
        """See `Planner.certified`."""
        beside = vars(self).get("on_two")
        left_s = beside.left_s(fitting=plan.fits) if isinstance(beside, BesideSingle) else math.inf
        plan = _raised(plan if plan.bound_s <= left_s else plan.but(bound_s=left_s), 0.0)
        if not plan.fits or plan.bound_s >= plan.cost_s * (1 - ENOUGH) or not self._searches:
            return plan
        return _raised(plan, min(left_s, *(made.sharpened(plan.cost_s) for made in self._searches)))

    def _chosen(self, rival_s: float, *, briefly: bool, glance: bool, baselines: bool) -> Choice | None:
        if self.asked.time_limit_s == 0:
            return self._noted(self._unsearched(NO_TIME))
        chosen = self._searched(rival_s, briefly=briefly, glance=glance, baselines=baselines)
        if self.pins or not self.timer.late():  # baselines keep to no pins
            return chosen
        # With axes=2 the cheapest one may be on two axes, and the bound is of baselines on one as well.
        alike = self.asked.axes != 2 or not self.meshes
        below_s = min(rival_s, chosen.rival_s if chosen else math.inf) if alike else math.inf
        with contextlib.suppress(PlanError):  # no baseline applies, or is cheaper
            other = self._noted(self._unsearched(CUT_SHORT, below_s))
            chosen = cut_short(chosen, other, rival_s, alike=alike)
        return chosen

    def _searched(self, rival_s: float, *, briefly: bool, glance: bool, baselines: bool) -> Choice | None:
        asked, meshes = self.asked, self.meshes
        one = two = None
        meant_for_two = takes_two_axes(self.pins, bool(meshes))
        flat = not meshes or (asked.axes == "auto" and not meant_for_two)
        if flat:
            beside_s = min(rival_s, self._on_two_s(rival_s)) if not briefly else rival_s
            one = self.choosing.below(beside_s, briefly=briefly, glance=glance, baselines=baselines)
            self._flat = briefly and bool(meshes) and not self._small and self._memory_first(one, glance)
            if self._flat:
                return one and one.saying(_FLAT)  # two axes, too, are for those who search around
        if meshes:
            # Pins that one axis keeps and two cannot leave the plan on one axis.
            with contextlib.suppress(*([PlanError] if self.pins and flat else [])):
                two = self.on_two.below(rival_s, one, briefly=briefly)
            if two is not None and flat and one is None:
                two = replace(two, found=bounded(two.found, self.choosing.bound_s))
        return one if two is None else self._noted(two)

    def _memory_first(self, one: Choice | None, glance: bool) -> bool:
        """Whether what to do about memory comes before two mesh axes.

        Nothing fits yet; or, changed, the step may take far less time where it has no room as it is.
        """
        if one is None or self.choosing.unfinished:
            return True
        far_s = (1 - FAR) * one.found.cost_s
        return glance and self.choosing.outside_s(far_s) < far_s

    def _on_two_s(self, rival_s: float) -> float:
        """What a plan costs that fits on two mesh axes as it is; infinite if none does, or none is wanted.

        It may spare a search around what does not fit on one, which takes longer.
        """
        lacking = "choosing" in vars(self) and self.choosing.unfinished
        if self._small or self.pins or self.timer.late() or not (self.meshes and lacking):
            return math.inf
        two = self.on_two.below(rival_s, briefly=True)
        return two.found.cost_s if two is not None and fits(two.found, two.model) else math.inf

    def _noted(self, chosen: Choice) -> Choice:
        """A choice of two mesh axes or one, saying what was left out on two."""
        return chosen.saying(_WHOLE) if self._narrowed else chosen

    def _unsearched(self, why: str, below_s: float = math.inf) -> Choice:
        """The best baseline, with a bound of all that would have been searched; see `unsearched`."""
        (graph, _, solver), fleet, tick, look = self._known(), self.asked.fleet, self.asked.tick, self._look
        parts, both = self._candidates, self.asked.axes == 2
        found = unsearched(graph, solver, self.space, fleet, self.timer, parts, look, why, below_s)
        if not self.meshes:
            return found
        # A glance takes no longer than baselines do, however little time there is to search.
        grid = GridChoosing(graph, fleet, Timer(tick), self.meshes)
        return beside_one_axis(found, grid, graph, fleet, tick, look=look, baselines=both, why=why)


def _raised(plan: Plan, bound_s: float) -> Plan:
    """A plan with a bound if that is better; at its ratios nothing is cheaper than at any."""
    plan = plan.but(bound_s=max(plan.bound_s, bound_s))
    return plan.but(search_gap=min(plan.search_gap, plan.gap))
