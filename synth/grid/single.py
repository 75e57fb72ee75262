"""Parts of a fleet on which two mesh axes are one, beside those of several nodes with several devices.

On a single node, or on nodes of one device each, programs on two axes are those on one: they are planned as
on one axis (`shardwright.synth.subfleets`), with all that is done there about memory. What they cost is a
rival for parts on two axes (`shardwright.synth.grid.choice`), and their bounds are part of the certificate.

That takes a search of its own, and is done where two axes leave something to be desired: before anybody
searches for what fits in place of what does not (until then they are looked at memory aside, where their
products take less time than the best program on two axes), where the plan is far above its bound, where the
products of a step take such a part less time at its peak than the plan takes, unless it is one of nodes that
are all alike or has no room for any program, and where one had a plan for the step changed in another way. Of
small steps it is always done.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from shardwright.cost.fleet import Fleet
from shardwright.synth.chosen import Choice, least_bound
from shardwright.synth.fallback import fits
from shardwright.synth.grid.choice import WIDE, GridChoosing, better
from shardwright.synth.grid.common import Common
from shardwright.synth.grid.part import GridPart
from shardwright.synth.parts import Members
from shardwright.synth.subfleets import Choosing
from shardwright.synth.timer import Timer

#: What a plan says of these parts: that they were searched, or could not be.
_NOTE = "parts of the fleet on which two mesh axes are one were searched, too, and the bound covers them"
_GLANCED = (
    "parts of the fleet on which two mesh axes are one were looked at memory aside, and the bound covers them"
)
_LATE = "parts of the fleet on which two mesh axes are one were not searched: the time limit came first"
_BEFORE = "parts of the fleet on which two mesh axes are one were not searched: memory came first"


class BesideSingle:
    """The search on two axes with the parts of the fleet on which these are one.

    Args:
        fleet: all devices.
        grid: the search on the other parts.
        parts: the parts on which two axes are one.
        single: makes the search on them, of a step without pins.
        timer: says when it is over.
        known: what a step and its rewritings have in common.
        small: whether the step is planned alike whatever was planned before.
    """

    def __init__(
        self,
        fleet: Fleet,
        grid: GridChoosing,
        parts: Sequence[Members],
        single: Callable[[], Choosing],
        timer: Timer,
        known: Common,
        *,
        small: bool,
    ) -> None:
        self._fleet, self._grid, self._make, self._timer = fleet, grid, single, timer
        self._parts, self._known, self._small = parts, known, small
        self._single: Choosing | None = None
        #: Whether that was asked for what fits.
        self._searched = False
        #: What to say where these parts, which might have a better plan, were not searched the last time.
        self._left = ""

    def left_s(self, *, fitting: bool) -> float:
        """What no plan, if `fitting` one that fits, costs less than on parts of which the bound may not be.

        Infinite if there are none.
        """
        if self._single is not None:  # what was planned before has no bound of parts without room
            return math.inf if fitting else least_bound(self._single.parts, fitting=False)
        return least_bound(tuple(self._by_products()), fitting=fitting) if self._left else math.inf

    def below(
        self, below_s: float = math.inf, rival: Choice | None = None, *, briefly: bool = False
    ) -> Choice | None:
        """The best plan; see `GridChoosing.below`.

        Args:
            below_s: what a plan of the step, changed in another way, costs that fits.
            rival: a plan on one axis.
            briefly: what does not fit is not searched around: it may be later.
        """
        grid, one = self._grid, rival
        first = not briefly and grid.unfinished
        if first:
            one = self._on_single(below_s)
        two = grid.below(below_s, one, briefly=briefly)
        least_s = min(below_s, two.found.cost_s if two is not None and _fits(two) else math.inf)
        self._left = ""
        if briefly and grid.unfinished and not first:
            one = self._glanced(below_s)
            two = one if two is None else two if one is None else better(one, two, _GLANCED)
        elif not first and self._wanting(two, least_s):
            if self._timer.late():
                self._left = _LATE
            else:
                one = self._on_single(least_s)
                two = one if two is None else two if one is None else better(one, two, _NOTE)
        self._known.single = self._known.single or (one is not None and _fits(one))
        return None if two is None else self._told(two)

    def _wanting(self, two: Choice | None, least_s: float) -> bool:
        """Whether a plan on two axes leaves something to be desired; see the module's docstring."""
        if two is not None and (not _fits(two) or two.found.bound_s < least_s * (1 - WIDE)):
            return True
        always, grid = self._small or self._known.single, self._grid
        likely = (each for each in self._apart if always or grid.products_s(each) < least_s)
        # Beside a plan that fits, parts without room for any are of no use.
        return any(two is None or not grid.lacks_room(each) for each in likely)

    @property
    def _apart(self) -> list[Members]:
        """The parts that can do what the whole fleet cannot: not one of several nodes that are all alike.

        Of those, each can do what one alone would, in the same time: such programs are among those on two
        axes, but for tensors that are computed and then held in two placements.
        """
        alike = len({node.kind for node in self._fleet.nodes}) == 1
        home = [device.node for device in self._fleet.devices]
        size = len(home) // len(self._fleet.nodes)
        return [
            members
            for members in self._parts
            if not (alike and len(members) == size and len({home[d] for d in members}) == 1)
        ]

    def _on_single(self, below_s: float) -> Choice | None:
        """A plan that fits on parts of one axis, None where none costs less than a rival."""
        if self._single is None:
            self._single = self._make()
        self._searched = True
        found = self._single.below(below_s)
        return found if found is not None and _fits(found) else None

    def _glanced(self, below_s: float) -> Choice | None:
        """The best program on parts of one axis, memory aside, where that may cost less than on two."""
        apart, least_s = self._apart, min(self._grid.free_s, below_s)
        if not apart:
            return None
        self._left = _LATE if self._timer.late() else _BEFORE
        if self._left == _LATE or all(self._grid.products_s(each) >= least_s for each in apart):
            return None
        self._left = ""
        if self._single is None:
            self._single = self._make()
        return self._single.below(below_s, briefly=True, glance=True)

    def _by_products(self) -> Iterator[GridPart]:
        """The parts, bounded by what the products of the step take at least."""
        for members in self._apart:
            part = GridPart(self._fleet, members)
            part.bound_s = self._grid.products_s(members)
            part.impossible = self._grid.lacks_room(members)
            yield part

    def _told(self, chosen: Choice) -> Choice:
        """With a bound of all parts, and with all of them to say why devices are left out."""
        found, single = chosen.found, self._single
        if single is None and not self._left:
            return chosen
        note = self._left if single is None else _NOTE if self._searched else _GLANCED
        notes = found.notes if note in found.notes else (*found.notes, note)
        if note == _BEFORE:  # the bound of what is briefly planned is nobody's yet, see `Planner.certified`
            return replace(chosen, found=replace(found, notes=notes))
        parts = (*(self._by_products() if single is None else single.parts), *self._grid.parts)
        # Of a plan that does not fit, the bound is that of all programs, memory aside.
        bound_s = min(found.bound_s, least_bound(parts, fitting=_fits(chosen)))
        return replace(chosen, found=replace(found, bound_s=bound_s, notes=notes), parts=parts)


def _fits(chosen: Choice) -> bool:
    return fits(chosen.found, chosen.model)
