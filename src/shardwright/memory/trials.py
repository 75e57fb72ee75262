"""Changes under which a step may fit, planned as the plan that does not has it, or with less done to fit."""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass
from typing import Literal

from shardwright.constraints import Constraints
from shardwright.cost.fleet import Fleet
from shardwright.ir.errors import InputError
from shardwright.ir.rewrites.rewriting import Rewriting, rewritten
from shardwright.ir.state import StateMap
from shardwright.ir.trace import Traced
from shardwright.memory.microbatches import NEAR, Pieces
from shardwright.memory.rewritings import Microbatches, Offload, Recompute, best_plan
from shardwright.memory.rivals import better, cost_of, dearer, existing
from shardwright.plan import Plan
from shardwright.planning import Planner
from shardwright.request import Request, Spaces
from shardwright.synth.combinations import SMALL, in_a_moment
from shardwright.synth.memory.alive import most_alive
from shardwright.synth.memory.rent import too_small
from shardwright.synth.timer import Timer

#: What fits is searched for what costs less if that may be less than such a part of its cost.
_FAR = 0.5


@dataclass(frozen=True, slots=True)
class Wanted:
    """What every plan is to keep of the one that does not fit.

    Attributes:
        state: which outputs continue which arguments, as the user said it.
        axes: of the mesh.
        constraints: pins.
        rewriting: how the step was changed, for want of memory or because that was asked for.
        recompute, microbatches, offload: what was asked for.
        staged: whether layers as stages were.
    """

    state: StateMap | None
    axes: Literal[1, 2]
    constraints: Constraints | None
    rewriting: Rewriting
    recompute: Recompute
    microbatches: Microbatches
    offload: Offload
    staged: bool = False

    @property
    def fixed(self) -> bool:
        """Whether all that was changed was asked for."""
        return isinstance(self.recompute, Rewriting) or "all" in (self.recompute, self.offload)

    @property
    def least(self) -> Rewriting:
        """As much of what was changed as was asked for."""
        pieces = 1 if self.microbatches == "auto" else self.microbatches
        stages = self.rewriting.stages if self.staged else 1
        return self.rewriting if self.fixed else Rewriting(microbatches=pieces, stages=stages)


def planner_for(wanted: Wanted, fleet: Fleet, devices: Literal["auto", "all"], spaces: Spaces) -> Planner:
    """Plans for another fleet."""
    asked = Request(fleet, wanted.state, wanted.constraints, devices=devices, axes=wanted.axes, spaces=spaces)
    return Planner(asked, Timer())


class Trial:
    """A change under which a step may fit.

    Args:
        what: the change, in words.
        wanted: what to keep.
        fleet: as it is then.
        traced: the step then, as it was traced.
        spaces: of steps that have the same graphs.
        steps: how many do the work of one.

    Raises:
        InputError: the step does not come in as many pieces as were asked for.
    """

    def __init__(
        self, what: str, wanted: Wanted, fleet: Fleet, traced: Traced, spaces: Spaces, steps: int = 1
    ) -> None:
        self.what, self.steps = what, steps
        self._wanted, self._fleet, self._traced = wanted, fleet, traced
        self._less = self._step = rewritten(traced, wanted.least)
        with contextlib.suppress(InputError):  # a smaller batch has fewer pieces
            self._step = rewritten(traced, wanted.rewriting)
        self._limits = [device.type.memory_bytes for device in fleet.devices]
        # Where nothing fits, every part of a fleet would be searched: each has less memory than the whole.
        self._planner = planner_for(wanted, fleet, "all", spaces)
        cut = wanted.microbatches == "auto" and not wanted.fixed
        self._pieces = Pieces(traced, fleet, self._planner, _never) if cut else None
        #: The best programs of steps that memory was in the way of; what fits and costs least.
        self._open: list[Plan] = []
        self._best: Plan | None = None

    def briefly(self) -> Plan | None:
        """The best plan, which may not fit: nobody searches for one that does. None if none can fit."""
        less = own = self._brief(self._less)
        if less is not None and less.fits and not dearer(less, unasked=False):
            return less  # whatever else is done about memory takes time
        if self._step is not self._less:
            own = self._brief(self._step)
        if self._pieces is not None:
            crowded = self._planner.crowded(self._less)
            if less is None:
                crowded = most_alive(self._less.graph) / sum(self._limits), len(self._limits)
            brief = self._pieces.briefly(cost_of(self._best), crowded, bound=less is None)
            self._best = better(self._best, brief)
        return self._best or own or less

    def _brief(self, step: Traced) -> Plan | None:
        if too_small(step.graph, self._limits):
            return None
        plan = existing(self._planner.plan(step, briefly=True))
        if not plan.fits or self._planner.unfinished(step):
            self._open.append(plan)
        self._best = better(self._best, plan)
        return plan

    @property
    def least_s(self) -> float:
        """What nothing costs less than, for the work of one step, that a search within memory may find."""
        pieces = () if self._pieces is None else self._pieces.open
        unsearched = [*self._open, *(plan for _, plan in pieces)]
        return self.steps * min((plan.bound_s for plan in unsearched), default=math.inf)

    @property
    def least_part(self) -> float:
        """The same as a part of what the best plan that fits costs; zero without one."""
        return self.least_s / (self.steps * cost_of(self._best))

    @property
    def unfinished(self) -> bool:
        """Whether that may find what fits, or costs less than what does."""
        return self.least_s < math.inf and self.least_part < 1 - NEAR

    @property
    def promising(self) -> bool:
        """Whether it is worth it: what fits is enough, but where it takes a moment and may be far cheaper."""
        if self._best is None:
            return self.unfinished
        return self.quick and self.least_part < _FAR

    def in_full(self) -> Plan:
        """The best plan found within memory, or one that lacks little.

        Of a small step that fits already, but may be far cheaper, it is the best of all that may be changed
        about it; of others, that of the step as the plan that does not fit has it.
        """
        asked = self._wanted.recompute, self._wanted.microbatches, self._wanted.offload
        if self.quick and self._best is not None:
            stages = self._wanted.rewriting.stages if self._wanted.staged else "off"
            found = best_plan(self._traced, self._fleet, *asked, self._planner, _never, stages)
        else:
            found = existing(self._planner.plan(self._step))
        return better(self._best, found) or found

    @property
    def quick(self) -> bool:
        """Whether the search for what fits takes a moment, with all that may be changed about the step."""
        graph = self._traced.graph
        return len(graph.equations) <= SMALL and in_a_moment(graph, self._fleet)


def _never() -> bool:
    """Whether there is no time left: nobody limits it."""
    return False
