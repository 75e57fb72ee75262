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
from shardwright.cost.stages import Crews, Scans, relays_s
from shardwright.ir.placement import Shard
from shardwright.ir.rewrites.batch import batch_of
from shardwright.ir.rewrites.pieces import NotInPiecesError
from shardwright.ir.rewrites.rewriting import Rewriting, rewritten
from shardwright.ir.trace import Traced
from shardwright.memory.in_pieces import InPieces
from shardwright.memory.ladder import Ladder
from shardwright.memory.rivals import WORTH, Planning, better, cost_of, tolerance, unlimited_s
from shardwright.plan import Plan
from shardwright.synth.combinations import SMALL
from shardwright.synth.grid.part import on_grid
from shardwright.synth.parts import candidates
from shardwright.synth.stretches import Policy

#: Pieces tried at most, for every device of a stage.
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
            InputError: no scan of the step comes in so many pieces.
        """
        rewritten(self._traced, Rewriting(stages=pieces))
        known = self._traced, self._fleet, self._policies, 1, self._planner, self._late
        ladder = Ladder(*known, stages=pieces)
        return ladder.top() if self._every else InPieces(ladder, None, rival_s).best()

    def early(self) -> Plan | None:
        """A plan with stages that fits, of a large step that does not fit as it is: before anything else.

        It takes a moment, and whatever else makes the step fit may take minutes. Where stages are no faster
        whatever the memory, they can wait.
        """
        graph = self._traced.graph
        if self._alone or self._every or len(graph.all_equations()) <= SMALL:
            return None
        base = self._planner.plan(self._traced, briefly=True, glance=True)
        if base is None or base.fits or self._late():
            return None
        pieces = self._pieces(unlimited_s(base))
        found = None if pieces is None else self.plan(pieces)
        return found if found is not None and found.fits else None

    @property
    def _alone(self) -> bool:
        """Whether there are no stages in any case."""
        return len(self._fleet.devices) == 1 or self._late()

    def beside(self, found: Plan) -> Plan:
        """The best of a plan and those with stages, which are looked for where they may be cheaper."""
        if self._alone:
            return found
        worth_s = (cost_of(found) if found.fits else math.inf) * (
            1 - tolerance(self._traced, self._fleet, WORTH)
        )
        pieces = self._pieces(worth_s)
        if pieces is None or self._late():
            return found
        step = rewritten(self._traced, Rewriting(stages=pieces))
        if self._planner.plan(step, worth_s, briefly=True, baselines=False) is None:
            return found
        plan = self.plan(pieces, cost_of(better(None, found)))
        return plan if plan.fits and plan.cost_s < worth_s else found

    def _pieces(self, worth_s: float) -> int | None:
        """The number of pieces with which layers take least as stages, if that is less than so many seconds.

        More pieces idle less, and run slower, by more than a rough estimate knows: from the number on that is
        best by that, fewer are looked at as long as they are better.
        """
        model = CostModel(self._fleet)
        crews = self._crews(model)
        scans = Scans(self._traced.graph, model)
        rough = {n: min(scans.least_s(n, some) for some in crews) for n in self._counts(crews)}
        first = min(rough, key=lambda n: (rough[n], n), default=0)
        best: tuple[float, int] | None = None
        for pieces in [n for n, seconds in rough.items() if n <= first and seconds < worth_s]:
            if self._late():
                break
            try:
                graph = rewritten(self._traced, Rewriting(stages=pieces)).graph
            except NotInPiecesError:
                continue
            found = min(relays_s(graph, model, some) for some in crews), pieces
            if best is not None and found > best:
                break
            best = found
        return None if best is None or best[0] >= worth_s else best[1]

    def _crews(self, model: CostModel) -> list[Crews]:
        """The stages that parts of the fleet may be: single devices, and on two mesh axes nodes."""
        fleet, parts = self._fleet, candidates(self._fleet)
        found: list[Crews] = []
        if not self._planner.thorough:
            found += [Crews.of(model, part, nodes=False) for part in parts if len(part) > 1]
        if not self._planner.content:
            found += [Crews.of(model, part, nodes=True) for part in on_grid(fleet, parts)]
        return found

    def _counts(self, crews: Sequence[Crews]) -> Iterator[int]:
        """In how many pieces: the most first."""
        graph = self._traced.graph
        try:
            batch = batch_of(graph, 1)
        except NotInPiecesError:
            return
        pairs = zip(graph.inputs, batch, strict=True)
        rows = next(value.type.shape[0] for value, kind in pairs if isinstance(kind, Shard))
        most = _MOST_PIECES * max(int(some.sizes.max()) for some in crews)
        for pieces in range(min(rows, most), 1, -1):
            if rows % pieces == 0:
                yield pieces
