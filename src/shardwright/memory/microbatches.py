"""Plans of a step in 2, 4, 8, … micro-batches, the quick ones first, for `rewritings.py`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from shardwright.cost.fleet import Fleet
from shardwright.ir.errors import InputError
from shardwright.ir.placement import Shard
from shardwright.ir.rewrites.batch import batch_of
from shardwright.ir.rewrites.pieces import NotInPiecesError
from shardwright.ir.rewrites.recompute import Stretch
from shardwright.ir.rewrites.rewriting import Rewriting, differentiated, rewritten
from shardwright.ir.trace import Traced
from shardwright.memory.rivals import (
    OPEN,
    Planning,
    better,
    cost_of,
    dearer,
    overfill,
    tolerance,
    unlimited_s,
)
from shardwright.plan import Plan
from shardwright.synth.stretches import alike

#: A plan this near what it costs without a limit of memory is not planned again in other ways.
NEAR = 0.03

#: Pieces in which a step should take more than so many times the memory are not planned beside more that fit.
_HARDLY = 1.1

#: Pieces that need no more than so many times the memory are searched for what fits before others; those that
#: need more than so many times it are not, beside others that fit.
_NEARLY, _FAR_TOO_LARGE = 1.1, 1.5

#: Nor are those that need more than so many times it, whatever the others cost.
_HOPELESS = 2.0

#: Micro-batches tried at most.
MOST_PIECES = 64


def counts_of(traced: Traced) -> Iterator[int]:
    """In how many pieces "auto" takes a step: those of 2, 4, 8, … that it comes in, the fewest first."""
    pieces = 2
    while pieces <= MOST_PIECES:
        try:
            rewritten(traced, Rewriting(microbatches=pieces))
        except InputError:
            return  # what does not come in two halves does not come in four quarters
        yield pieces
        pieces *= 2


class Pieces:
    """Plans of 2, 4, 8, … micro-batches."""

    def __init__(self, traced: Traced, fleet: Fleet, planner: Planning, late: Callable[[], bool]) -> None:
        self.traced, self.fleet, self.planner, self.late = traced, fleet, planner, late
        self.near = tolerance(traced, fleet, NEAR)
        #: What makes a scan keep less and the step quicker: what one in one piece does, see `Ladder.saving`.
        self.saving: Stretch | None = None
        #: Steps that memory was in the way of, and the best program of each, which does not fit.
        self.open: list[tuple[Traced, Plan]] = []
        #: Those of them that lack so much that they were not searched beside what fits.
        self._passed: list[tuple[Traced, Plan]] = []
        #: Plans that memory made dearer, or that do not fit.
        self.squeezed: list[Plan] = []
        self.tried: list[int] = []
        #: Plans of what did not fit.
        self.too_large: list[Plan] = []
        #: See `Planning.crowded`, of the last step.
        self.crowded = 0.0, 1

    def scarce(self, crowded: float, devices: int) -> bool:
        """Whether as many pieces as should fit have fewer rows than there are devices."""
        try:
            batch = batch_of(self.traced.graph, 1)
        except NotInPiecesError:
            return False
        pairs = zip(self.traced.graph.inputs, batch, strict=True)
        rows = next(value.type.shape[0] for value, kind in pairs if isinstance(kind, Shard))
        return rows < devices * self._first(crowded)

    @staticmethod
    def _first(crowded: float) -> int:
        """As many pieces as should fit."""
        return min(2 ** max(1, math.ceil(math.log2(max(crowded, 1.0)))), MOST_PIECES)

    def briefly(self, rival_s: float, crowded: tuple[float, int], bound: bool = False) -> Plan | None:
        """The cheapest plan that fits without a search for what does.

        First as many pieces as should fit, and more of them until they do; then fewer, which take less time.

        Args:
            rival_s: what a plan that fits costs.
            crowded: the part of a device's memory that the step in one piece takes without a limit, and on
                how many devices.
            bound: whether it takes no less than that, perhaps more.
        """
        whole, devices = crowded
        first = self._first(whole)
        best: Plan | None = None
        stays = 0.0
        #: How much is there in so many pieces, on so many devices.
        known = None if bound else (1, whole, devices)
        pieces = first
        while pieces <= MOST_PIECES and not self.late():
            least_s = min(rival_s, cost_of(best))
            plan = self.brief(pieces, least_s)
            if plan is None and self._elsewhere(pieces, least_s):
                pieces *= 2  # where so many have no room, more of them may be the best
                continue
            if plan is None or (best is not None and not plan.fits):
                break
            best = better(best, plan)
            # Of what is there in one piece, so much is there in however many.
            over, devices = self.crowded
            if known is None or known[2] != devices:
                known = pieces, over, devices
            else:
                stays = (pieces * over - known[0] * known[1]) / (pieces - known[0])
            if best is not None and best.cost_s <= self.planner.settled(best).bound_s * (1 + self.near):
                break  # the bound of more pieces is no less than that of these
            if best is None and stays > 1 and pieces > first:
                # Another program of as many pieces again was no smaller.
                best = self._at_most(pieces, rival_s)
                break
            pieces *= 2
        pieces = first // 2
        while pieces > 1 and best is not None and not self.late():
            if max(stays, 0.0) + (whole - max(stays, 0.0)) / pieces > _HARDLY:
                break
            plan = self.brief(pieces, min(rival_s, cost_of(best)))
            if plan is None or not plan.fits:
                break
            best = better(best, plan)
            pieces //= 2
        return best

    def _at_most(self, pieces: int, rival_s: float) -> Plan | None:
        """The cheapest plan that fits in the most pieces, or in fewer until none does, yet more than so many.

        What is gathered for every piece is gathered so often then that the best program is quite another one.
        """
        best: Plan | None = None
        number = MOST_PIECES
        while number > pieces and not self.late():
            plan = self.brief(number, min(rival_s, cost_of(best)))
            comes = number in self.tried
            if comes and plan is not None and not plan.fits:
                break
            best = better(best, plan)
            number //= 2
        return best

    def _elsewhere(self, pieces: int, rival_s: float) -> bool:
        """Whether so many pieces might be cheaper than a rival where they have no room."""
        if pieces not in self.tried:
            return False  # the step does not come in so many
        return self.planner.outside_s(self._step(pieces), rival_s) < rival_s

    def _step(self, pieces: int) -> Traced:
        """The step in so many pieces, the scans of which keep less if that makes the step quicker.

        Raises:
            NotInPiecesError: it does not come in so many.
        """
        step = rewritten(self.traced, Rewriting(microbatches=pieces))
        if self.saving is None:
            return step
        again = alike(self.saving, differentiated(self.traced), differentiated(step))
        return step if again is None else rewritten(self.traced, Rewriting((again,), microbatches=pieces))

    def brief(self, pieces: int, rival_s: float) -> Plan | None:
        """The plan in so many pieces without a search for what fits; None where it is no rival."""
        try:
            step = self._step(pieces)
        except NotInPiecesError:
            return None
        self.tried.append(pieces)
        plan = self.planner.plan(step, rival_s, briefly=True, baselines=False)
        self.crowded = self.planner.crowded(step)
        self.too_large += [] if plan is None or plan.fits else [plan]
        unfinished = plan is not None and self.planner.unfinished(step)
        self.open += [(step, plan)] if plan is not None and unfinished else []
        self.squeezed += [plan] if plan is not None and (unfinished or dearer(plan, unasked=False)) else []
        return plan

    @property
    def nearly(self) -> bool:
        """Whether some that did not fit lack so little that they may soon."""
        return any(overfill(brief) <= _NEARLY for _, brief in self.open)

    def within(self, rival_s: float) -> Plan | None:
        """The cheapest plan within memory of those that did not fit; none is searched for twice.

        First of those that lack little, the fewest pieces of them, which are cheapest; then of others, with
        fewer pieces the more they lack: beside one that fits, as long as the one before lacked much as well
        and was made to fit, at less than what there was.
        """
        best: Plan | None = None
        made = False  # whether the last one lacked much, and was made to fit at less

        def turn(each: tuple[Traced, Plan]) -> tuple[float, float]:
            lacks = overfill(each[1])
            pieces = each[1].rewriting.microbatches
            return (0.0, each[1].bound_s) if lacks <= _NEARLY else (round(lacks, 1), -pieces)

        waiting, self.open = sorted(self.open, key=turn), []
        for number, (step, brief) in enumerate(waiting):
            if self.late():
                break
            if brief.bound_s >= min(rival_s, cost_of(best)) * (1 - self.near):
                continue
            far = overfill(brief) > _FAR_TOO_LARGE
            if best is not None and far and not made:
                self._passed += waiting[number:]
                break
            plan = self.planner.plan(step, min(rival_s, cost_of(best)), baselines=False)
            if best is not None and plan is None:
                break
            made = far and plan is not None and plan.fits
            self.too_large += [] if plan is None or plan.fits else [plan]
            best = better(best, plan)
        return best

    def passed(self, rival_s: float) -> Plan | None:
        """The same of those that lack much, where the best plan costs far more than they would, memory aside.

        The most pieces first, until so many are no rival: fewer lack more.
        """
        best: Plan | None = None
        waiting, self._passed = sorted(self._passed, key=lambda each: -each[1].rewriting.microbatches), []
        for step, brief in waiting:
            least_s = min(rival_s, cost_of(best))
            if self.late():
                break
            if unlimited_s(brief) * OPEN >= least_s or overfill(brief) > _HOPELESS:
                continue
            plan = self.planner.plan(step, least_s, baselines=False)
            if plan is None or not plan.fits:
                break
            best = plan
        return best
