"""One part of a fleet on one mesh axis, with what is known of its plans so far (see `subfleets.py`)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shardwright.cost.fleet import Fleet
from shardwright.cost.memory.liveness import Peaks
from shardwright.cost.model import CostModel
from shardwright.cost.subfleet import subfleet
from shardwright.synth.alternate import Synthesis
from shardwright.synth.fallback import fullest
from shardwright.synth.freely import Free
from shardwright.synth.parts import Members, beats, candidates
from shardwright.synth.prices.lists import Catalogue, PriceList
from shardwright.synth.prices.tables import Prices

#: What takes up to so many times the memory of a part lacks little.
_LITTLE = 1.1

#: A part is bounded far above another one at this multiple.
FAR_ABOVE = 1.2


class Part:
    """A part of the fleet, with what is known of its plans so far."""

    def __init__(self, members: Members, model: CostModel, catalogue: Catalogue, *, whole: bool) -> None:
        self.members = members
        self.whole = whole
        self.model = model
        self.listed = PriceList(model, catalogue)
        self.floors = Prices.floors(self.listed)
        #: By ratios, prices that were worked out together with the floors.
        self.known: dict[tuple[float, ...], Prices] = {}
        #: A part of as much memory on which every program costs less, or no more; and by how much at least.
        self.stronger: Part | None = None
        self.more_s = 0.0
        self.bound_s = 0.0
        #: Prices of several parts at once that its bound is taken under; None once it is under its own.
        self.joined: Prices | None = None
        self.looked_at = self.bounded = False
        self.free: Free | None = None
        self.found: Synthesis | None = None
        self.fits = False
        self.unfinished = False
        self.impossible = False
        #: Whether the step fits there in no way by what there is before any program; it is impossible then.
        self.outside = False
        #: Whether all that there is was tried to make its plan fit, in vain.
        self.hopeless = False

    def follow(self) -> None:
        """Take over the bound of a stronger part."""
        if self.stronger is not None:
            self.bound_s = max(self.bound_s, self.stronger.bound_s + self.more_s)

    @property
    def alone(self) -> bool:
        """Whether it is of one node or of one kind of devices: baselines are on such parts, too."""
        fleet = self.model.fleet
        return len(fleet.nodes) == 1 or len(set(fleet.types)) == 1

    @property
    def by_others(self) -> bool:
        """Whether its bound is by other parts' prices."""
        return self.joined is not None or self.stronger is not None

    @property
    def cost_s(self) -> float:
        """What its plan costs; infinite where there is none."""
        return math.inf if self.found is None else self.found.cost_s

    @property
    def lacking(self) -> float:
        """The largest part of its memory that its plan takes on a device; infinite where there is none."""
        return math.inf if self.found is None else fullest(self.found, self.model)

    @property
    def free_s(self) -> float:
        """What the best program found costs if memory were no limit; infinite if none was looked for."""
        return math.inf if self.free is None else self.free.found.cost_s

    def turn(self, number: int) -> tuple[float, int, int]:
        """When its turn comes: by its bound; of parts with equal bounds the one of fewest devices first."""
        return float(f"{self.bound_s:.9g}"), len(self.members), number

    def gives_way(self, other: Part) -> bool:
        """Whether what does not fit here is tried on another part: the whole, unless that is far dearer.

        Nor where little is lacking here: a step that keeps a little less will fit.
        """
        little = self.lacking <= _LITTLE
        return other.whole and other.bound_s <= FAR_ABOVE * self.bound_s and not little

    def in_vain(self, other: Part, rival_s: float) -> bool:
        """Whether what fits is sought here in vain, after a search on another part that found none.

        What fits here fits there: the same with no shares for further devices, of which each has room for
        what a smallest one here has. It may be dearer there, but hardly where the best memory aside is not.

        Args:
            other: a part that was searched for programs that fit.
            rival_s: what they have to cost less than; infinite if any will do.
        """
        if (other.fits and other.cost_s < rival_s) or not set(self.members) < set(other.members):
            return False
        least, theirs = (min(kind.memory_bytes for kind in part.model.types) for part in (self, other))
        return theirs >= least and (rival_s == math.inf or self.bound_s >= other.free_s)

    def beats(self, other: Part) -> bool:
        """Whether its plan is better."""
        return beats(self, other)

    def lacks_room(self, *, sure: bool = False) -> bool:
        """Whether a part of one device, on which all programs are one, has no room for it as it will run.

        Args:
            sure: look at the program if nobody did. It was planned.
        """
        if len(self.members) > 1 or self.fits or self.found is None or self.free is None:
            return False
        found, judge = self.found, self.free.turns.judge
        memory = found.memory
        if sure:
            memory = judge.peaks(found.program, found.ratios, memory, sure=True)
        looked = judge.look is None or (isinstance(memory, Peaks) and memory.seen)
        return looked and judge.feared(memory, found.ratios) > 1


@dataclass(frozen=True, slots=True)
class Promising:
    """What the search for a plan of a step says about one like it.

    Attributes:
        parts: of the fleet, that are any good.
        favourite: the best of them, if one was planned.
        free_s: what the best programs found on some of them cost if memory were no limit, where the other
            step has the same to do and more; such a part is not planned beside a plan that costs less.
        agreed: those on which no further start led the search to anything much cheaper than the first.
    """

    parts: tuple[Members, ...]
    favourite: Members | None
    free_s: Mapping[Members, float]
    agreed: frozenset[Members] = frozenset()


def parts_of(fleet: Fleet, parts: Sequence[Members] | None) -> list[Part]:
    """The parts to consider, the whole fleet first, with prices of one catalogue."""
    catalogue, whole = Catalogue(), CostModel(fleet)
    made: list[Part] = []
    for members in parts or candidates(fleet):
        if len(members) == len(fleet.devices):
            made.append(Part(members, whole, catalogue, whole=True))
        else:
            model = CostModel(subfleet(fleet, members, fleet.name), whole.known_products)
            made.append(Part(members, model, catalogue, whole=False))
    return made


def starts_agree(parts: Sequence[Part]) -> bool:
    """Whether no further start led to anything much cheaper, on all parts of unlike devices so far."""
    tried = [part.free for part in parts if part.free is not None and len(part.model.types) > 1]
    return bool(tried) and all(free.agree for free in tried)
