"""Plans of all ways to keep less for a small step's backward part, for `rewritings.py`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from shardwright.ir.rewrites.recompute import Stretch
from shardwright.ir.trace import Traced
from shardwright.memory.rivals import Planning, better, cost_of, overfill
from shardwright.plan import Plan
from shardwright.synth.combinations import SMALL
from shardwright.synth.memory.rent import too_small

#: Where the way that keeps least takes so many times the memory of a device, no other is searched: of thirty
#: small steps in up to 64 pieces, none that took so much was seen to fit in another way. Each way takes
#: seconds for a step with loops of many equations: then no other is searched unless that one fits.
_FAR = 1.5


@dataclass
class EveryWay:
    """Plans of a step in so many pieces in every way to keep less.

    Attributes:
        traced: the step.
        step: it, in so many pieces, of which some stretches keep less.
        combinations: what is done with which layers, the quickest way first; none if they are too many.
        complete: whether they are all there are.
        slight: what frees so little of a layer that only for a small step it is worth planning.
        limits: bytes of memory per device.
        planner: plans a step, within a rival's cost.
        late: whether no further plan may be made.
        too_large: plans that do not fit.
        far: how many times its memory a device would take for the way that keeps least, if the others were
            not searched for that; else 0.
    """

    traced: Traced
    step: Callable[..., Traced]
    combinations: Sequence[tuple[Stretch, ...]]
    complete: bool
    slight: frozenset[Stretch]
    limits: Sequence[float]
    planner: Planning
    late: Callable[[], bool]
    too_large: list[Plan] = field(default_factory=list[Plan])
    far: float = 0.0

    @property
    def untried(self) -> str:
        """What was not planned, in words; empty where everything was."""
        if self.far:
            return (
                f"of {len(self.combinations)} ways to keep less for the backward part only the one that "
                f"keeps least was searched, which takes {self.far:.3g} times the memory of a device"
            )
        notes: list[str] = []
        if len(self._worth) < len(self.combinations):
            notes.append("ways to keep less of a layer that free hardly any memory were not searched")
        if not self.complete:
            notes.append("layers of which some alone wait in host memory were not all searched")
        return "; ".join(notes)

    @cached_property
    def _looped(self) -> bool:
        """Whether the loops of the step make it a large one, each plan of which takes seconds."""
        return len(self.traced.graph.all_equations()) > SMALL

    @cached_property
    def _worth(self) -> Sequence[tuple[Stretch, ...]]:
        """The ways that are planned: of a large step, those in which all that is done frees something."""
        if not self._looped:
            return self.combinations
        return [some for some in self.combinations if self.slight.isdisjoint(some)]

    def best(self, rival_s: float) -> Plan | None:
        """The best plan that fits, None where none does at less than a rival costs.

        Where nothing fits yet, what keeps least comes first, and is all if it takes far too much.
        """
        found: Plan | None = None
        first = self._least if rival_s == math.inf and not self.late() else ()
        plans = [self._planned(again, rival_s) for again in first]
        for plan in plans:
            found = better(found, plan)
        least = min((overfill(plan) for plan in plans if plan is not None), default=0.0)
        if found is None and least > (1.0 if self._looped else _FAR):
            self.far = least
            return None
        for again in self._worth:
            if self.late():
                break
            if again not in first:
                found = better(found, self._planned(again, min(rival_s, cost_of(found))))
        return found

    @property
    def _least(self) -> tuple[tuple[Stretch, ...], ...]:
        """The ways that keep least, without trips to host memory and with them: they take longest."""
        return tuple(dict.fromkeys((*self._here[-1:], self.combinations[-1])))

    @property
    def _here(self) -> Sequence[tuple[Stretch, ...]]:
        """The ways without trips to host memory."""
        return [some for some in self.combinations if not any(each.host for each in some)]

    def _planned(self, again: tuple[Stretch, ...], rival_s: float) -> Plan | None:
        """The plan of a way, None where nothing in it fits or is cheaper than a rival."""
        step = self.step(*again)
        if too_small(step.graph, self.limits):
            return None
        # Baselines of so small a step take a moment, and rent misses what lies between corners.
        plan = self.planner.plan(step, rival_s)
        self.too_large += [] if plan is None or plan.fits else [plan]
        return plan

    def that_saves(self, best: Plan) -> Plan | None:
        """A plan cheaper than one that fits, because computing something cheap again saves traffic.

        Each layer is tried alone, which a bound mostly rules out; of those that pay, all combinations.
        """
        pays: set[Stretch] = set()
        found = best
        for again in sorted(self._here, key=len):
            if self.late():
                break
            if len(again) == 1 or pays.issuperset(again):
                step = self.step(*again)
                plan = None
                if not too_small(step.graph, self.limits):
                    plan = self.planner.plan(step, (best if len(again) == 1 else found).cost_s)
                if plan is not None and plan.fits and plan.cost_s < best.cost_s * (1 - 1e-9):
                    pays.update(again)
                    found = plan if plan.cost_s < found.cost_s else found
        return None if found is best else found
