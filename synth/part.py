"""One part of a fleet on one mesh axis, with what is known of its plans so far, for `subfleets.py`."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from shardwright.cost.fleet import Fleet
from shardwright.cost.memory.liveness import Peaks
from shardwright.cost.model import CostModel
from shardwright.cost.subfleet import subfleet
from shardwright.synth.alternate import Synthesis
from shardwright.synth.fallback import fullest
from shardwright.synth.freely import Free
from shardwright.synth.parts import Members, candidates
from shardwright.synth.prices.lists import Catalogue, PriceList, learn_products
from shardwright.synth.prices.tables import Prices
from shardwright.synth.search.priced import SpaceSolver
from shardwright.synth.space.factors import EquationFactor, Factor
from shardwright.synth.space.space import Space

#: More parts than this are bounded at once (see `bounded_at_once`).
_TOGETHER = 2

#: Kinds of nodes up to which they are.
_KINDS = 2

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
        #: Whether all that there is was tried to make its plan fit, in vain.
        self.hopeless = False

    def follow(self) -> None:
        """Take over the bound of a stronger part."""
        if self.stronger is not None:
            self.bound_s = max(self.bound_s, self.stronger.bound_s + self.more_s)

    @property
    def by_others(self) -> bool:
        """Whether its bound is by other parts' prices."""
        return self.joined is not None or self.stronger is not None

    @property
    def cost_s(self) -> float:
        """What its plan costs; infinite where there is none."""
        return math.inf if self.found is None else self.found.cost_s

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
        little = self.found is not None and fullest(self.found, self.model) <= _LITTLE
        return other.whole and other.bound_s <= FAR_ABOVE * self.bound_s and not little

    def beats(self, other: Part) -> bool:
        """Whether its plan is better: one that fits into memory is better than any that does not.

        Of those that do not, whatever was searched for, what lacks least is.
        """
        if self.fits != other.fits:
            return self.fits
        if not (self.fits or self.unfinished or other.unfinished) and self.found and other.found:
            return fullest(self.found, self.model) < fullest(other.found, other.model)
        return self.cost_s < other.cost_s * (1 - 1e-9)

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


def price_even(parts: Sequence[Part], alone: Sequence[Part], no_room: Callable[[Part], bool]) -> None:
    """Have even ratios priced with the floors of the whole fleet, if its search is sure to ask for them.

    That is of unlike devices, where it is planned first: no other part has room that is bounded alone.
    """
    whole, others = parts[0], [part for part in alone if part is not parts[0]]
    if whole.whole and len(whole.model.types) > 1 and others and all(map(no_room, others)):
        even = (1.0 / len(whole.members),) * len(whole.members)
        whole.known[even] = Prices.at(whole.listed, even)


def bounded_at_once(
    parts: Sequence[Part], favourite: Members | None, no_room: Callable[[Part], bool]
) -> list[Part]:
    """The parts that are bounded at once, as if each instruction ran on the one that it likes best.

    All but what lies in one node and the favourite, if they are more than two beside the whole fleet. That is
    among them where a node has room: it is more likely to be planned first otherwise. The more kinds of nodes
    there are, the less such a bound says: with more than two kinds, none.
    """
    if len({node.kind for node in parts[0].model.fleet.nodes}) > _KINDS:
        return []
    several = [part for part in parts if len(part.model.fleet.nodes) > 1 and part.members != favourite]
    if sum(not part.whole for part in several) <= _TOGETHER:
        return []
    nodes = (part for part in parts if len(part.model.fleet.nodes) == 1 and part.stronger is None)
    if any(not no_room(part) for part in nodes):
        return several
    return [part for part in several if not part.whole]


def node_comes_first(parts: Sequence[Part], joined: Sequence[Part], solver: SpaceSolver) -> bool:
    """Whether a part bounded alone is bounded no higher than those at once, looked at closely if need be."""
    least_s, prices = min(part.bound_s for part in parts if part not in joined), joined[0].joined
    if joined[0].bound_s < least_s and prices is not None:
        (bound_s,) = solver.closer([prices])
        for part in joined:
            part.bound_s, part.looked_at = max(part.bound_s, bound_s), True
    return joined[0].bound_s >= least_s


def find_weaker(
    parts: Sequence[Part], favourite: Members | None, factors: Sequence[Factor], space: Space
) -> None:
    """Tell parts that are no better than another one so (`Part.stronger`): nodes of alike devices.

    Args:
        parts: of a fleet; the favourite is compared with none.
        factors: of the space, for which there need not be any prices yet.
        space: all programs.
    """
    alike: dict[int, list[Part]] = {}
    for part in parts:
        if len(part.model.fleet.nodes) == len(part.model.types) == 1:
            alike.setdefault(len(part.members), []).append(part)
    for some in alike.values():
        strongest = max(some, key=_sheet)
        for part in some:
            less = all(mine <= theirs for mine, theirs in zip(_sheet(part), _sheet(strongest), strict=True))
            if less and part is not strongest and part.members != favourite:
                part.floors.enlist(factors)
                learn_products([each.listed for each in parts])
                more_s = costs_more(part, strongest, space)
                if more_s >= 0:
                    part.stronger, part.more_s, part.looked_at = strongest, more_s, True


def _sheet(part: Part) -> tuple[float, float, float]:
    """What its devices are said to be able to: operations and bytes per second, bytes of memory."""
    (device,) = part.model.types
    return device.float32_flop_per_s, device.bandwidth_byte_per_s, device.memory_bytes


def costs_more(part: Part, other: Part, space: Space) -> float:
    """By how much every program costs more at least on a part than on another one of as many devices.

    At any ratios; negative where that cannot be said. Both are of one class, and all lines are in their
    catalogue. No exchange may cost less; of each equation that kernel counts which costs least more.
    """
    mine, theirs = (each.listed.stack() for each in (part, other))
    arrays = ((mine.constant, theirs.constant), (mine.linear, theirs.linear), (mine.product, theirs.product))
    constant, linear, product = (np.subtract(a, b, out=np.zeros(a.shape), where=a != b) for a, b in arrays)
    # Some device has no less than the even share.
    more = (constant + np.minimum(linear, linear / len(part.members)) + np.minimum(product, 0.0)).min(
        axis=(1, 2)
    )
    exchanged, total = np.ones(len(more), dtype=np.bool_), 0.0
    for factor, times in Counter([use.factor for use in space.uses]).items():
        if isinstance(factor, EquationFactor):
            lines = part.listed.kernels(factor)
            exchanged[lines] = False
            total += times * factor.weight * float(more[lines].min())
    dearer = (np.minimum(constant, linear)[exchanged] >= 0).all() and (product >= 0).all()
    return total if dearer else -math.inf
