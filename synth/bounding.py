"""What the parts of a fleet cost at least on one mesh axis, before they are planned (see `subfleets.py`).

All are priced and bounded together, without large tables: what each costs at least at the floors of all its
prices, parts of several nodes at the least of all their floors, a node on which no program costs less than on
another one by what that has. A part without room for any program is bounded only if somebody asks.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np

from shardwright.cost.fleet import Fleet
from shardwright.ir.graph import Graph
from shardwright.synth.memory.rent import too_small
from shardwright.synth.part import Part
from shardwright.synth.parts import Members
from shardwright.synth.prices.lists import learn_products
from shardwright.synth.prices.tables import Prices
from shardwright.synth.search.priced import SpaceSolver
from shardwright.synth.space.factors import EquationFactor, Factor
from shardwright.synth.space.space import Space
from shardwright.synth.timer import Timer

#: More parts than this are bounded at once (see `Bounding._together`).
_TOGETHER = 2

#: Kinds of nodes up to which they are.
_KINDS = 2


class Bounding:
    """The bounds of the parts of a fleet; without a bound that of a part is 0.

    Args:
        parts: of the fleet, the whole first if it is one. What is outside, in which the step fits in no way,
            is told so.
        graph: the step.
        space: its programs.
        fleet: all devices.
        solver: of the space with the factors that pin choices.
        timer: is told where time goes, and says when it is over.
        favourite: the part that is planned first.
    """

    def __init__(
        self,
        parts: Sequence[Part],
        graph: Graph,
        space: Space,
        fleet: Fleet,
        solver: SpaceSolver,
        timer: Timer,
        favourite: Members | None,
    ) -> None:
        self._parts, self._space, self._solver, self._timer = parts, space, solver, timer
        self._fleet, self._favourite = fleet, favourite
        for part in parts:
            limits = [device.type.memory_bytes for device in part.model.fleet.devices]
            part.impossible = part.outside = not part.whole and too_small(graph, limits)
        #: Parts without a bound: nobody plans what fits in no way, and few ask what it would cost.
        self._waiting = [part for part in parts if part.outside]

    @property
    def strong(self) -> list[Part]:
        """The parts of which none is known to be no better than another one."""
        return [part for part in self._parts if part.stronger is None]

    def begin(self, *, even: bool) -> None:
        """Bound the parts that have room; one alone needs no bound to be chosen.

        Args:
            even: whether the search for ratios may start at even ones.
        """
        inside = [part for part in self._parts if not part.outside]
        if not inside or len(self._parts) == 1:
            return
        joined = self._together(inside)
        strong = [part for part in inside if part.stronger is None]
        if even:
            _price_even(inside[0], [part for part in strong if part not in joined])
        self._first(strong, joined)
        if inside[0] in joined and not _node_comes_first(strong, joined, self._solver):
            self._first(inside[:1])
        for part in inside:
            part.follow()

    def outside(self) -> None:
        """Bound the parts into which the step fits in no way: what keeps less may fit there."""
        parts, self._waiting = self._waiting, []
        if parts:
            with self._timer.search():
                joined = self._together(parts)
                self._first([part for part in parts if part.stronger is None], joined)
            for part in parts:
                part.follow()

    def closer(self, waiting: Sequence[Part], least_s: float) -> None:
        """Raise the bounds of parts that are not ruled out: those of several, or else that of the first."""
        part = waiting[0]
        fresh = [each for each in waiting if not (each.looked_at or each.bounded or each.free)]
        with self._timer.search():
            if part.joined and part.looked_at:
                self._first([each for each in waiting if each.joined])
            elif not part.looked_at and (len(fresh) > 1 or part.joined):
                prices = list(dict.fromkeys([each.joined or each.floors for each in fresh]))
                closer = dict(zip(prices, self._solver.closer(prices), strict=True))
                for each in fresh:
                    bound_s = closer[each.joined or each.floors]
                    each.bound_s, each.looked_at = max(each.bound_s, bound_s), True
            else:
                # The program itself is looked for where its bound does not rule the part out.
                bound_s = self._solver.bound(part.floors, self._timer.late, least_s)
                part.bound_s, part.bounded = max(part.bound_s, bound_s), True

    def _together(self, parts: Sequence[Part]) -> list[Part]:
        """Find the weaker ones of some parts; those of them that are bounded at once.

        That is as if each instruction ran on the one that it likes best: all but what lies in one node and
        the favourite, if they are more than two beside the whole fleet. That is among them where a node is
        one of the parts: it is more likely to be planned first otherwise. The more kinds of nodes there are,
        the less such a bound says: with more than two kinds, none.
        """
        find_weaker(parts, self._favourite, self._solver.factors, self._space)
        if len({node.kind for node in self._fleet.nodes}) > _KINDS:
            return []
        several = [p for p in parts if len(p.model.fleet.nodes) > 1 and p.members != self._favourite]
        if sum(not part.whole for part in several) <= _TOGETHER:
            return []
        nodes = any(len(part.model.fleet.nodes) == 1 and part.stronger is None for part in parts)
        return [part for part in several if nodes or not part.whole]

    def _first(self, some: Sequence[Part], joined: Sequence[Part] = ()) -> None:
        """First bounds of parts, worked out together; those of `joined` under the least of their prices."""
        alone = [part for part in some if part not in joined]
        prices = [part.floors for part in alone]
        if joined:
            prices.append(Prices.least_of([part.floors for part in joined]))
        # What a search will ask for takes hardly any time beside that.
        prices += [each for part in alone for each in part.known.values()]
        several = Prices.of_all(prices)
        bounds = self._solver.bounds(several).tolist()
        for number, part in enumerate(alone):
            part.bound_s, part.floors = max(part.bound_s, bounds[number]), several.one(number)
            part.joined, part.looked_at = None, False
        for part in joined:
            part.bound_s, part.joined = bounds[len(alone)], prices[len(alone)]
        for number in range(len(alone) + bool(joined), len(prices)):
            several.one(number)


def _price_even(whole: Part, alone: Sequence[Part]) -> None:
    """Have even ratios priced with the floors of the whole fleet, if its search is sure to ask for them.

    That is of unlike devices, where it is planned first: of what has room, no other part is bounded alone.
    """
    if whole.whole and len(whole.model.types) > 1 and list(alone) == [whole]:
        even = (1.0 / len(whole.members),) * len(whole.members)
        whole.known[even] = Prices.at(whole.listed, even)


def _node_comes_first(parts: Sequence[Part], joined: Sequence[Part], solver: SpaceSolver) -> bool:
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
