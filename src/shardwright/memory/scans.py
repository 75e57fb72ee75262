"""What scans that keep less save, whatever the memory, for `ladder.py`.

What a scan keeps for the backward part is stacked up and taken apart again: to keep less may take less time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from shardwright.cost.fleet import Fleet
from shardwright.ir.graph import Graph
from shardwright.ir.rewrites.recompute import Stretch
from shardwright.ir.trace import Traced
from shardwright.memory.rivals import GAIN, SAME, Planning, better, cost_of, unlimited_s
from shardwright.plan import Plan
from shardwright.synth.memory.alive import most_alive
from shardwright.synth.stretches import surely_dearer

#: Part of the memory that what is alive as traced should fill at most: about as much goes to what devices
#: hold alike, and to what exchanges pack.
ROOM = 0.5


class ScanSavings:
    """The search for what makes scans keep less and a step quicker.

    Attributes:
        stretch, seconds: what does so most if memory were no limit, and how long the step takes with it;
            None and infinite where nothing does.
        in_pieces: the same of more pieces, which may have room on fewer devices than the step has.

    Args:
        graph: the step, as far as it tells forward from backward.
        fleet: the devices.
        step: it as it is, or with less kept of a scan.
        planner: plans it.
        late: whether no further plan may be made.
        every: try whatever may be done with a scan, not only what may save time beside what did.
    """

    def __init__(
        self,
        graph: Graph,
        fleet: Fleet,
        step: Callable[..., Traced],
        planner: Planning,
        late: Callable[[], bool],
        *,
        every: bool,
    ) -> None:
        self._graph, self._fleet, self._step = graph, fleet, step
        self._planner, self._late, self._every = planner, late, every
        self.stretch: Stretch | None = None
        self.seconds = math.inf
        self.in_pieces: Stretch | None = None

    def search(self, scans: Iterable[Stretch], base: Plan) -> Plan | None:
        """A plan that fits because a scan keeps less.

        Args:
            scans: what may be done with which, that which keeps most of a scan first.
            base: the plan of the step as it is.
        """
        found: Plan | None = None
        least_s = unlimited_s(base)
        in_pieces_s = min(least_s, self._outside_s(self._step(), least_s))
        dearer = set[int]()
        for stretch in scans:
            if self._late():
                break
            # What fits is wanted even where something that does not would cost less.
            rival_s = max(least_s, cost_of(better(better(None, base), found)))
            before = self.stretch if rival_s <= least_s * (1 + SAME) else None
            if not self._every and (stretch.first in dearer or self._no_less(before, stretch, least_s)):
                continue
            dearer.add(stretch.first)
            step = self._step(stretch)
            plan = self._planner.plan(step, rival_s, briefly=True, baselines=False)
            found = better(found, plan)
            here_s = math.inf if plan is None else unlimited_s(plan)
            anywhere_s = min(here_s, self._outside_s(step, min(here_s, in_pieces_s)))
            if anywhere_s < in_pieces_s * (1 - 1e-9):
                self.in_pieces, in_pieces_s = stretch, anywhere_s
            if here_s < least_s * (1 - 1e-9):
                dearer.discard(stretch.first)
                self.stretch, self.seconds = stretch, here_s
                least_s = here_s
        return found

    def _outside_s(self, step: Traced, wanted_s: float) -> float:
        """About what a step costs where it has no room, if that is less than so much; else infinite."""
        if self._late() or not self._planner.outgrown(step):
            return math.inf
        least_s = self._planner.outside_s(step, wanted_s)
        return least_s if least_s < wanted_s else math.inf

    def _no_less(self, before: Stretch | None, stretch: Stretch, least_s: float) -> bool:
        """Whether a scan that keeps still less surely saves nothing beside what saved time `before`.

        Not where memory is scarce on a part of the fleet on which the step as it is may cost hardly more than
        the least so far: with less kept, that part may do.
        """
        if before is None or before.first != stretch.first:
            return False
        if most_alive(self._graph) > self._planner.room(self._step(), least_s * GAIN) * ROOM:
            return False
        return surely_dearer(self._graph, self._fleet, before, stretch)
