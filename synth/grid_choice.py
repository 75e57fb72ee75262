"""Which devices take part on two mesh axes, and whether two are better than one.

    choose_on_grid   branch and bound over parts of the fleet, as on one axis (`shardwright.synth.subfleets`)
    better           of a plan on one axis and one on two, with one certificate that covers both

A plan on one axis is a rival: a part of the fleet is not planned on two axes where its bound proves that it
cannot beat the rival by more than the gap with which a certificate is content.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeAlias

from shardwright.cost.fleet import Fleet
from shardwright.cost.model import CostModel
from shardwright.cost.subfleet import subfleet
from shardwright.ir.graph import Graph
from shardwright.synth.alternate import Synthesis
from shardwright.synth.bounds import ENOUGH
from shardwright.synth.factors import Use
from shardwright.synth.fallback import fits
from shardwright.synth.grid_alternate import GridSearch, is_mesh
from shardwright.synth.judge import Look
from shardwright.synth.space import Space
from shardwright.synth.subfleets import Choice, Members, unused
from shardwright.synth.timer import Timer

#: Parts of a fleet that are considered on two axes at most, the whole included.
MOST_PARTS = 4

#: What the plan says of the space that was searched.
_BOTH = "programs of one mesh axis and of two were searched, and the bound is of both"
_ONE = "the bound is of two mesh axes too, of which no program was worth searching for"

#: What pins choices of a space.
Pinned: TypeAlias = Callable[[Space], Sequence[Use]]


class _Part:
    """A part of the fleet, with what is known of its plans on two axes so far.

    Attributes:
        bound_s: what no plan costs less than.
        looked: how well it is bounded: 0 not at all, 1 by arithmetic, 2 by the best program at its floors.
    """

    def __init__(self, fleet: Fleet, members: Members) -> None:
        whole = len(members) == len(fleet.devices)
        self.members = members
        self.fleet = fleet if whole else subfleet(fleet, members, fleet.name)
        self.model: CostModel | None = None
        self.search: GridSearch | None = None
        self.bound_s, self.looked = 0.0, 0
        self.found: Synthesis | None = None
        self.fits = False

    @property
    def nodes(self) -> tuple[int, ...]:
        """Devices of every node."""
        return tuple(len(node.devices) for node in self.fleet.nodes)

    @property
    def cost_s(self) -> float:
        """What its plan costs; infinite where there is none."""
        return math.inf if self.found is None else self.found.cost_s


def on_grid(fleet: Fleet, parts: Sequence[Members]) -> tuple[Members, ...]:
    """Those of the parts of a fleet that are considered on two axes, the whole first if it is one."""
    some = (members for members in parts if is_mesh(_Part(fleet, members).fleet))
    return tuple(members for members, _ in zip(some, range(MOST_PARTS), strict=False))


def choose_on_grid(
    graph: Graph,
    fleet: Fleet,
    timer: Timer,
    parts: Sequence[Members],
    pinned: Pinned = lambda space: (),
    rival: Choice | None = None,
    look: Look | None = None,
    below_s: float = math.inf,
) -> Choice | None:
    """The best plan on two axes or that of a rival, on the whole fleet or a part of it.

    Args:
        graph: the step.
        fleet: all devices.
        timer: is told where time goes, and says when it is over.
        parts: the parts to consider (see `on_grid`), the whole fleet first.
        pinned: what pins choices.
        rival: a plan on one axis.
        look: what says how much memory a program takes.
        below_s: what a plan of the step, changed in another way, costs that fits.

    Returns:
        The better of it and the rival; None if there is no rival and none is worth searching for.

    Raises:
        PlanError: no program keeps to the pins.
    """
    spaces: dict[tuple[int, ...], Space] = {}
    made = [_Part(fleet, members) for members in parts]
    target_s = math.inf if rival is None else rival.found.cost_s * (1 - ENOUGH)
    if rival is not None and not fits(rival.found, rival.model):
        target_s = math.inf  # what does not fit rules nothing out
    target_s = min(target_s, below_s * (1 - ENOUGH))
    best: _Part | None = None
    queue = [(0.0, number) for number in range(len(made))]
    while queue and not (timer.late() and (best is not None or rival is not None or below_s < math.inf)):
        bound_s, number = heapq.heappop(queue)
        part = made[number]
        if bound_s >= target_s or (best is not None and best.fits and bound_s >= best.cost_s * (1 - 1e-9)):
            break
        if part.search is None:
            part.model = CostModel(part.fleet)
            with timer.search():
                if part.nodes not in spaces:
                    spaces[part.nodes] = Space(graph, part.nodes)
            space = spaces[part.nodes]
            part.search = GridSearch(graph, space, part.model, timer, tuple(pinned(space)), look)
            part.bound_s = part.search.arithmetic_s()
        elif part.looked == 1:
            part.bound_s = max(bound_s, part.search.bound(target_s))
        else:
            part.found = part.search.plan(target_s)
            part.fits = fits(part.found, CostModel(part.fleet) if part.model is None else part.model)
            if best is None or (part.fits, -part.cost_s) > (best.fits, -best.cost_s):
                best = part
            continue
        part.looked += 1
        heapq.heappush(queue, (part.bound_s, number))
    least_s = min(part.bound_s for part in made)
    if best is None or best.found is None or best.model is None:
        if rival is None:
            return None
        notes = (*rival.found.notes, _ONE)
        return replace(rival, found=replace(_bounded(rival.found, least_s), notes=notes))
    searched = [part.found for part in made if part.found is not None]
    found = replace(
        _bounded(best.found, least_s),
        expanded=sum(each.expanded for each in searched),
        searches=sum(each.searches for each in searched),
    )
    chosen = Choice(found, best.members, best.model, unused(fleet, best, made))
    return chosen if rival is None else better(rival, chosen)


def better(one: Choice, two: Choice) -> Choice:
    """The better of a plan on one axis and one on two; its bound covers both spaces."""
    fitting = fits(one.found, one.model), fits(two.found, two.model)
    cheaper = two.found.cost_s < one.found.cost_s * (1 - 1e-9)
    best = two if (fitting[1] and not fitting[0]) or (fitting[0] == fitting[1] and cheaper) else one
    found = replace(
        _bounded(best.found, min(one.found.bound_s, two.found.bound_s)),
        notes=(*best.found.notes, _BOTH),
        expanded=one.found.expanded + two.found.expanded,
        searches=one.found.searches + two.found.searches,
    )
    return replace(best, found=found)


def _bounded(found: Synthesis, bound_s: float) -> Synthesis:
    return replace(found, bound_s=min(found.cost_s, found.bound_s, bound_s))
