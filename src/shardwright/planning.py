"""The plans of a step and of what it is changed into, for one request."""

from __future__ import annotations

import math

from shardwright.ir.rewrites.rewriting import rewriting_of
from shardwright.ir.trace import Traced
from shardwright.one_step import OneStep
from shardwright.plan import Plan
from shardwright.request import Request
from shardwright.synth.grid.alternate import is_mesh
from shardwright.synth.grid.common import Common
from shardwright.synth.subfleets import Choosing
from shardwright.synth.timer import Timer


class Planner:
    """Plans the step and its rewritings for one request; what was found of each is kept.

    Args:
        asked: what for.
        timer: is told where time goes, and says when it is over.
    """

    def __init__(self, asked: Request, timer: Timer) -> None:
        self.asked, self.timer = asked, timer
        self._known: dict[int, OneStep] = {}
        self._grids = Common()

    def plan(
        self,
        traced: Traced,
        rival_s: float = math.inf,
        *,
        briefly: bool = False,
        glance: bool = False,
        baselines: bool = True,
    ) -> Plan | None:
        """The plan of a step as it is, or None if none costs less than a rival.

        What it took the caller knows.

        Args:
            traced: the step.
            rival_s: cost of a plan that there is already.
            briefly: programs that do not fit are not searched around: that may be asked for later.
            glance: what should need far too much memory is not even looked at, nor more than one part of the
                fleet: the step may be changed, which comes first.
            baselines: whether a baseline may be the plan.

        Raises:
            InputError: a pin cannot be kept.
            PlanError: no program carries out the step.
        """
        step = self._known.get(id(traced))
        if step is None:
            # A step that was changed is planned on parts of the fleet that are any good for it as it is; with
            # layers as stages, other parts may be.
            known, in_stages = self._known.values(), rewriting_of(traced).stages
            like = next((each for each in known if rewriting_of(each.traced).stages == in_stages), None)
            step = self._known[id(traced)] = OneStep(traced, self.asked, self.timer, self._grids, like)
        return step.plan(rival_s, briefly=briefly, glance=glance, baselines=baselines)

    def certified(self, plan: Plan) -> Plan:
        """A plan that was found, with a bound found with more effort where it is far below the cost."""
        step = self._step_of(plan)
        return plan if step is None else step.certified(step.settled(plan))

    def settled(self, plan: Plan) -> Plan:
        """A plan that was found, with the bounds of all that was searched as good as a plan is worth.

        Those of a plan are rough, of a step of many choices, until then: it may be none.
        """
        step = self._step_of(plan)
        return plan if step is None else step.settled(plan)

    def _step_of(self, plan: Plan) -> OneStep | None:
        return next(
            (each for each in self._known.values() if rewriting_of(each.traced) == plan.rewriting), None
        )

    @property
    def thorough(self) -> bool:
        """See `shardwright.memory.rivals.Planning`: programs on two mesh axes alone are searched."""
        return self.asked.axes == 2 and is_mesh(self.asked.fleet)

    @property
    def content(self) -> bool:
        """See `shardwright.memory.rivals.Planning`: on one mesh axis alone plans are made in a moment."""
        return self.asked.axes == 1

    def unfinished(self, traced: Traced) -> bool:
        """Whether a step was planned briefly and memory was in the way."""
        step = self._known.get(id(traced))
        return step is not None and step.unfinished

    def crowded(self, traced: Traced) -> tuple[float, int]:
        """Of the best program without a limit: the largest part of its memory a device takes; its devices."""
        step = self._known.get(id(traced))
        return (0.0, 1) if step is None else step.crowded

    def outgrown(self, traced: Traced) -> bool:
        """Whether a part of the fleet into which a step fits in no way may be the best for it in pieces."""
        step = self._known.get(id(traced))
        return step is not None and step.outgrown

    def room(self, traced: Traced, below_s: float) -> float:
        """See `shardwright.memory.rivals.Planning`; of a step that was planned."""
        devices, likely = self.asked.fleet.devices, self._known[id(traced)].likely(below_s)
        return min((sum(devices[d].type.memory_bytes for d in part) for part in likely), default=math.inf)

    def outside_s(self, traced: Traced, wanted_s: float) -> float:
        """See `Choosing.outside_s`; of programs on one mesh axis, if those were searched."""
        step = self._known.get(id(traced))
        made = None if step is None else vars(step).get("choosing")
        return made.outside_s(wanted_s) if isinstance(made, Choosing) else math.inf
