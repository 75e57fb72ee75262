"""Plans with the layers of scans on different devices, beside those without; for `rewritings.py`.

Stages hand on activations in place of gradients or parameters: where the network is slow, far less. They
idle while the first piece of the batch fills the pipeline and the last one leaves it, so that more pieces are
better until they are too small for the devices. What all scans take at least in so many pieces, every device
at work on whole layers, says in a moment whether any of that is worth a plan.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

from shardwright.cost.fleet import Fleet
from shardwright.cost.model import CostModel
from shardwright.cost.stages import Scans
from shardwright.ir.errors import InputError
from shardwright.ir.placement import Shard
from shardwright.ir.rewrites.batch import batch_of
from shardwright.ir.rewrites.pieces import NotInPiecesError
from shardwright.ir.rewrites.rewriting import Rewriting, rewritten
from shardwright.ir.trace import Traced
from shardwright.memory.in_pieces import InPieces
from shardwright.memory.ladder import Ladder
from shardwright.memory.rivals import WORTH, Planning, better, cost_of, tolerance, unlimited_s
from shardwright.plan import Plan
from shardwright.synth.parts import candidates
from shardwright.synth.stretches import Policy

#: Pieces tried at most.
_MOST_PIECES = 64


class Staging:
    """Plans of a step whose layers may be stages.

    Args:
        traced: the step.
        fleet: the devices.
        policies: what may be done with a layer for want of memory.
        every: whether that is done with all of them.
        planner: plans a step, within a rival's cost.
        late: whether no further plan may be made.
    """

    def __init__(
        self,
        traced: Traced,
        fleet: Fleet,
        policies: Sequence[Policy],
        every: bool,
        planner: Planning,
        late: Callable[[], bool],
    ) -> None:
        self._traced, self._fleet, self._policies, self._every = traced, fleet, policies, every
        self._planner, self._late = planner, late

    def plan(self, pieces: int, rival_s: float = math.inf) -> Plan:
        """The best plan with so many pieces, or of those that are cheaper than a rival.

        Raises:
            InputError: no scan of the step comes in so many pieces, or two mesh axes are asked for.
        """
        if self._planner.thorough:
            raise InputError(
                place="stages",
                reason="lie on one mesh axis, and axes is 2",
                remedy="Leave axes out, or plan with stages='off'",
            )
        rewritten(self._traced, Rewriting(stages=pieces))
        known = self._traced, self._fleet, self._policies, 1, self._planner, self._late
        ladder = Ladder(*known, stages=pieces)
        return ladder.top() if self._every else InPieces(ladder, None, rival_s).best()

    def beside(self, found: Plan) -> Plan:
        """The best of a plan and those with stages, which are looked for where they may be cheaper."""
        if len(self._fleet.devices) == 1 or self._planner.thorough or self._late():
            return found
        worth_s = (cost_of(found) if found.fits else math.inf) * (
            1 - tolerance(self._traced, self._fleet, WORTH)
        )
        scans = Scans(self._traced.graph, CostModel(self._fleet))
        parts = candidates(self._fleet)
        least_s = {n: min(scans.least_s(n, part) for part in parts) for n in self._counts()}
        counts = sorted((n for n, s in least_s.items() if s < worth_s), key=lambda n: (least_s[n], -n))
        best: tuple[float, int] | None = None
        in_vain = False
        # More pieces idle less, and run slower: once others than the best are no better, the rest is worse.
        for pieces in counts:
            if self._late():
                break
            try:
                step = rewritten(self._traced, Rewriting(stages=pieces))
            except NotInPiecesError:
                return found
            limit_s = worth_s if best is None else min(worth_s, best[0])
            brief = self._planner.plan(step, limit_s, briefly=True, baselines=False)
            if brief is not None and (best is None or unlimited_s(brief) < best[0]):
                best = unlimited_s(brief), pieces
            elif best is not None or in_vain:
                break
            else:
                in_vain = True
        if best is None:
            return found
        plan = self.plan(best[1], cost_of(better(None, found)))
        return plan if plan.fits and plan.cost_s < worth_s else found

    def _counts(self) -> Iterator[int]:
        """In how many pieces: the most first."""
        graph = self._traced.graph
        try:
            batch = batch_of(graph, 1)
        except NotInPiecesError:
            return
        pairs = zip(graph.inputs, batch, strict=True)
        rows = next(value.type.shape[0] for value, kind in pairs if isinstance(kind, Shard))
        for pieces in range(min(rows, _MOST_PIECES), 1, -1):
            if rows % pieces == 0:
                yield pieces
