"""Plans with the layers of scans on different devices, beside those without; for `rewritings.py`.

Stages hand on activations in place of gradients or parameters: where the network is slow, far less. They
idle while the first piece of the batch fills the pipeline and the last one leaves it, so that more pieces are
better until they are too small for the devices. What all scans take at least in so many pieces, every device
at work on whole layers, says in a moment whether any of that is worth a plan.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property

from shardwright.cost.fleet import Fleet
from shardwright.cost.model import CostModel
from shardwright.cost.stages import Crews, Scans, over_layers, relays_s
from shardwright.cost.subfleet import subfleet
from shardwright.ir.placement import Shard
from shardwright.ir.rewrites.batch import batch_of
from shardwright.ir.rewrites.pieces import NotInPiecesError
from shardwright.ir.rewrites.rewriting import Rewriting, rewritten
from shardwright.ir.trace import Traced
from shardwright.memory.in_pieces import InPieces, hardly_fits
from shardwright.memory.ladder import Ladder
from shardwright.memory.rivals import (
    GAIN,
    WORTH,
    Planning,
    better,
    cost_of,
    existing,
    noted,
    tolerance,
    unlimited_s,
)
from shardwright.plan import Plan
from shardwright.synth.combinations import SMALL
from shardwright.synth.grid.alternate import is_mesh
from shardwright.synth.grid.part import on_grid
from shardwright.synth.parts import Members, candidates
from shardwright.synth.stretches import Policy

#: Pieces tried at most, for every device of a stage.
_MOST_PIECES = 64

#: Part of what a step costs without a limit of memory that stages should save for nothing else to be tried.
_FAR = 0.1

#: What a step takes with stages, at most mostly, by what its scans take at least.
_REST = 1.5

#: A step repeats itself that has so many equations for each that differs from the others.
_OFTEN = 4

_UNSCANNED = "layers are not scanned, and no stages were searched: shardwright.scan_layers may scan them"


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
        #: By numbers of pieces, what scans take at least as stages.
        self._known: dict[int, float] = {}

    def plan(self, pieces: int, rival_s: float = math.inf) -> Plan:
        """The best plan with so many pieces, or of those that are cheaper than a rival.

        Raises:
            InputError: no scan of the step comes in so many pieces.
        """
        rewritten(self._traced, Rewriting(stages=pieces))
        ladder = self._ladder(pieces)
        return ladder.top() if self._every else InPieces(ladder, None, rival_s).best()

    def _ladder(self, stages: int = 1) -> Ladder:
        known = self._traced, self._fleet, self._policies, 1, self._planner, self._late
        return Ladder(*known, stages=stages)

    def early(self) -> tuple[Plan | None, bool]:
        """A plan with stages that fits, of a large step, before anything else is done to that; or None.

        And whether it is the plan. It takes a moment, and whatever else makes the step fit, or faster, may
        take minutes: where stages are far faster than the step as it is whatever the memory, nothing else is
        worth that. Where they are no faster, they can wait.
        """
        if self._alone or self._every or len(self._traced.graph.all_equations()) <= SMALL:
            return None, False
        if not any(map(over_layers, self._traced.graph.equations)):
            return None, False
        ladder = self._ladder()
        if hardly_fits(ladder):  # what keeps less is planned first in any case
            base = ladder.briefly(None)
        else:
            found = self._plainly()
            if found is not None:
                return found, True
            base = self._planner.plan(self._traced, briefly=True, glance=True)
        if base is None or self._late():
            return None, False
        pieces = self._pieces(unlimited_s(base))
        found = None if pieces is None else self._below(pieces, cost_of(better(None, base)))
        if found is None or not found.fits:
            return None, False
        less_kept = bool(base.rewriting.recompute)
        dearer = unlimited_s(base) >= found.cost_s / (1 - _FAR)
        # A glance was at one part.
        if not dearer or not (less_kept or self._dearer(found.cost_s, everywhere=True)):
            return (None if base.fits else found), False
        return _far_below(found, "with less kept" if less_kept else "as traced"), True

    def _plainly(self) -> Plan | None:
        """A plan with stages, where bounds say that the step as it is is far dearer: that is not planned."""
        # On two mesh axes a bound takes nearly as long as a plan: it has to say so of all of a step.
        long = self._planner.thorough
        if is_mesh(self._fleet) and not (self._planner.content or long):
            return None  # a bound on one mesh axis rules out nothing on two
        if not self._rough or not (long or self._dearer(min(self._rough.values()))):
            return None
        pieces = self._pieces(math.inf)
        if pieces is None or not self._dearer(self._known[pieces] * (_REST if long else 1)):
            return None
        staged = rewritten(self._traced, Rewriting(stages=pieces))
        glance = existing(self._planner.plan(staged, briefly=True, glance=True))
        if not glance.fits and not (long and self._dearer(unlimited_s(glance))):
            return None  # it may take minutes until it does, and turn out to be dearer
        found = self.plan(pieces)
        return _far_below(found, "as traced") if self._dearer(found.cost_s, everywhere=True) else None

    def _dearer(self, staged_s: float, *, everywhere: bool = False) -> bool:
        """Whether the step as it is costs far more than with stages, whatever the memory.

        Args:
            staged_s: what it takes with stages.
            everywhere: on any part of the fleet; else where it is looked at first.
        """
        far_s = staged_s / (1 - _FAR)
        plan = self._planner.plan(self._traced, far_s, briefly=True, glance=not everywhere, baselines=False)
        if plan is not None and unlimited_s(plan) < far_s:
            return False
        # Where it has no room as it is no plan was sought: in more pieces it may fit there.
        return self._planner.outside_s(self._traced, far_s) >= far_s

    @property
    def _unscanned(self) -> bool:
        """Whether a large step does the same over and over, and not in a scan over layers."""
        equations = self._traced.graph.equations
        if len(equations) <= SMALL or any(map(over_layers, equations)):
            return False
        return len({equation.form for equation in equations}) * _OFTEN <= len(equations)

    @property
    def _alone(self) -> bool:
        """Whether there are no stages in any case."""
        return len(self._fleet.devices) == 1 or self._late()

    def beside(self, found: Plan) -> Plan:
        """The best of a plan and those with stages, which are looked for where they may be cheaper."""
        if self._alone:
            return found
        if self._unscanned:
            return noted(found, _UNSCANNED)
        worth_s = (cost_of(found) if found.fits else math.inf) * (
            1 - tolerance(self._traced, self._fleet, WORTH)
        )
        pieces = self._pieces(worth_s)
        if pieces is None or self._late():
            return found
        plan = self._below(pieces, cost_of(better(None, found)))
        return plan if plan is not None and plan.fits and plan.cost_s < worth_s else found

    def _below(self, pieces: int, rival_s: float) -> Plan | None:
        """See `plan`; None where bounds say that nothing is cheaper than a rival, even with less kept."""
        step = rewritten(self._traced, Rewriting(stages=pieces))
        most_s = rival_s * GAIN
        if most_s < math.inf and self._planner.plan(step, most_s, briefly=True, baselines=False) is None:
            return None
        return self.plan(pieces, rival_s)

    def _pieces(self, worth_s: float) -> int | None:
        """The number of pieces with which layers take least as stages, if that is less than so many seconds.

        More pieces idle less, and run slower, by more than a rough estimate knows: from the number on that is
        best by that, fewer are looked at as long as they are better.
        """
        first = min(self._rough, key=lambda n: (self._rough[n], n), default=0)
        best: tuple[float, int] | None = None
        for pieces in [n for n, seconds in self._rough.items() if n <= first and seconds < worth_s]:
            if self._late():
                break
            if pieces not in self._known:
                self._known[pieces] = self._relays_s(pieces)
            found = self._known[pieces], pieces
            if found[0] < math.inf and best is not None and found > best:
                break
            best = found if best is None else min(best, found)
        return None if best is None or best[0] >= worth_s else best[1]

    @cached_property
    def _model(self) -> CostModel:
        return CostModel(self._fleet)

    @cached_property
    def _rough(self) -> Mapping[int, float]:
        """By numbers of pieces, the most first: what scans take at least as stages, roughly."""
        scans, crews = Scans(self._traced.graph, self._model), self._crews
        return {n: min(scans.least_s(n, some) for some in crews) for n in self._counts()}

    def _relays_s(self, pieces: int) -> float:
        """The same of the step in so many pieces; infinite where it does not come in them."""
        try:
            graph = rewritten(self._traced, Rewriting(stages=pieces)).graph
        except NotInPiecesError:
            return math.inf
        return relays_s(graph, self._model, self._crews)

    @cached_property
    def _crews(self) -> Sequence[Crews]:
        """The stages that parts of the fleet may be: single devices, and on two mesh axes nodes."""
        fleet, model, scans = self._fleet, self._model, filter(over_layers, self._traced.graph.equations)
        parts = candidates(fleet, {scan.params["length"] for scan in scans})
        found: list[Crews] = []
        models: dict[Members, CostModel] = {p: self._model_of(p) for p in parts if len(p) > 1}
        if not self._planner.thorough:
            found += [Crews.of(model, part, own, nodes=False) for part, own in models.items()]
        if not self._planner.content:
            found += [Crews.of(model, part, models[part], nodes=True) for part in on_grid(fleet, parts)]
        return found

    def _model_of(self, part: Members) -> CostModel:
        """Prices of a part of the fleet, whose links may be faster than those of the whole."""
        whole = len(part) == len(self._fleet.devices)
        return self._model if whole else CostModel(subfleet(self._fleet, part, self._fleet.name))

    def _counts(self) -> Iterator[int]:
        """In how many pieces: the most first."""
        graph = self._traced.graph
        try:
            batch = batch_of(graph, 1)
        except NotInPiecesError:
            return
        pairs = zip(graph.inputs, batch, strict=True)
        rows = next(value.type.shape[0] for value, kind in pairs if isinstance(kind, Shard))
        most = _MOST_PIECES * max(int(some.sizes.max()) for some in self._crews)
        for pieces in range(min(rows, most), 1, -1):
            if rows % pieces == 0:
                yield pieces


def _far_below(found: Plan, how: str) -> Plan:
    """A plan with stages, which says why nothing else was searched; `how` the step was planned without."""
    far_ms = 1e3 * found.cost_s / (1 - _FAR)
    note = f"{how}, whatever the memory no program was found that costs less than {far_ms:.4g} ms"
    return noted(found, f"{note}: no other change was searched")
