"""Parts of a fleet on two mesh axes: which are considered, what is known of each, and a first bound."""

from __future__ import annotations

import math
from collections.abc import Sequence

from shardwright.cost.fleet import Fleet
from shardwright.cost.grid.model import GridModel
from shardwright.cost.subfleet import subfleet
from shardwright.synth.alternate import Synthesis
from shardwright.synth.fallback import fullest
from shardwright.synth.grid.alternate import GridSearch, is_mesh
from shardwright.synth.parts import Members, beats

#: Parts of a fleet that are considered on two axes at most, the whole included.
MOST_PARTS = 4


class GridPart:
    """A part of the fleet, with what is known of its plans on two axes so far.

    Attributes:
        bound_s: what no plan costs less than.
        arithmetic_s: the bound by arithmetic; 0 before it was looked at.
        looked: how well it is bounded: 0 not at all, 1 by arithmetic, 2 by the best program at its floors.
        unfinished: whether it was planned briefly and memory was in the way.
        impossible: whether it is too small for any program.
    """

    def __init__(self, fleet: Fleet, members: Members) -> None:
        whole = len(members) == len(fleet.devices)
        self.members = members
        self.fleet = fleet if whole else subfleet(fleet, members, fleet.name)
        self.grid: GridModel | None = None
        self.search: GridSearch | None = None
        self.bound_s, self.arithmetic_s, self.looked = 0.0, 0.0, 0
        self.found: Synthesis | None = None
        self.fits = self.unfinished = self.impossible = False

    @property
    def nodes(self) -> tuple[int, ...]:
        """Devices of every node."""
        return tuple(len(node.devices) for node in self.fleet.nodes)

    @property
    def alike(self) -> bool:
        """Whether it is known that its devices are alike."""
        return self.search is not None and self.search.alike

    @property
    def limits(self) -> list[int]:
        """Bytes of memory of every device."""
        return [device.type.memory_bytes for device in self.fleet.devices]

    @property
    def cost_s(self) -> float:
        """What its plan costs; infinite where there is none."""
        return math.inf if self.found is None else self.found.cost_s

    @property
    def lacking(self) -> float:
        """The largest part of its memory that its plan takes on a device; infinite where there is none."""
        return math.inf if self.found is None or self.grid is None else fullest(self.found, self.grid.model)

    @property
    def free_s(self) -> float:
        """What the best program found costs if memory were no limit; infinite if none was looked for."""
        return math.inf if self.search is None else self.search.free_s

    def beats(self, other: GridPart | None) -> bool:
        """Whether its plan is better; any is better than none."""
        return other is None or beats(self, other)


def on_grid(fleet: Fleet, parts: Sequence[Members]) -> tuple[Members, ...]:
    """Those of the parts of a fleet that are considered on two axes, the whole first if it is one."""
    some = (members for members in parts if is_mesh(GridPart(fleet, members).fleet))
    return tuple(members for members, _ in zip(some, range(MOST_PARTS), strict=False))


def on_one_axis(fleet: Fleet, parts: Sequence[Members]) -> tuple[Members, ...]:
    """Those of the parts of a fleet on which two axes are one: single nodes, or nodes of one device each."""
    return tuple(members for members in parts if not is_mesh(GridPart(fleet, members).fleet))
