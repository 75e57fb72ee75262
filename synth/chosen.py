"""The part of a fleet that was chosen, with a bound of all parts, for `subfleets.py`."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from shardwright.cost.fleet import Fleet
from shardwright.cost.model import CostModel
from shardwright.synth.alternate import Synthesis
from shardwright.synth.fallback import fits
from shardwright.synth.part import Part
from shardwright.synth.parts import Members, Tried, unused


@dataclass(frozen=True, slots=True)
class Choice:
    """The devices chosen and the plan for them.

    Attributes:
        found: the plan, of these devices alone; its bound covers all parts that were considered.
        model: prices of these devices alone.
        best: the devices, as the part of the fleet that was chosen.
        parts: all that were considered, on one mesh axis or on two.
    """

    found: Synthesis
    model: CostModel
    best: Tried
    parts: tuple[Tried, ...]

    @property
    def members(self) -> Members:
        """Indices of the devices, ascending."""
        return self.best.members

    @property
    def rival_s(self) -> float:
        """What others have to cost less than; infinite where it does not fit: all that does beats it."""
        return self.found.cost_s if fits(self.found, self.model) else math.inf

    def unused(self, fleet: Fleet) -> tuple[tuple[Members, str], ...]:
        """The other devices of the fleet by class, and why they are left out."""
        return unused(fleet, self.best, self.parts)

    def saying(self, note: str) -> Choice:
        """The same, with a note in the plan."""
        return replace(self, found=replace(self.found, notes=(*self.found.notes, note)))


def settle(parts: Sequence[Part], cost_s: float, *, fitting: bool) -> None:
    """Raise the bounds of parts that were planned, the least first, until that of the whole is exact.

    Args:
        parts: of the fleet.
        cost_s: of the best plan.
        fitting: whether it fits.
    """
    queue = [(part.bound_s, number) for number, part in enumerate(parts)]
    heapq.heapify(queue)
    while queue:
        bound_s, number = heapq.heappop(queue)
        part = parts[number]
        if fitting and part.impossible:
            continue
        if bound_s >= cost_s or part.free is None:
            break
        part.free.certified()
        raised = part.free.certificate.settle(cost_s)
        if raised <= bound_s:
            break
        part.bound_s = raised
        heapq.heappush(queue, (raised, number))


def least_bound(parts: Sequence[Tried], *, fitting: bool) -> float:
    """The least bound of all parts; of a plan that fits, of those that have room for any."""
    return min((part.bound_s for part in parts if not (fitting and part.impossible)), default=math.inf)


def choice_of(best: Part, parts: Sequence[Part], *, ended: bool) -> Choice:
    """The plan of the best part; `ended`: by a time limit, before all were tried."""
    assert best.found is not None
    made = [part.found for part in parts if part.found is not None]
    notes = best.found.notes
    if ended:
        notes = (*notes, "the time limit ended the search before all parts of the fleet were tried")
    found = replace(
        best.found,
        # Of a plan that fits, the bound is that of all that fit: parts too small for any have no say.
        bound_s=min(best.cost_s, least_bound(parts, fitting=best.fits)),
        expanded=sum(each.expanded for each in made),
        searches=sum(each.searches for each in made),
        notes=notes,
    )
    return Choice(found, best.model, best, tuple(parts))
