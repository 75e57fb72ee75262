"""What a backend needs to know of a fleet: which devices share a node, and which take part."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Wiring:
    """Devices by node.

    Attributes:
        node_of: the node of every device.
        leaders: devices that speak for their node, one for each that has several devices at least.
    """

    node_of: tuple[int, ...]
    leaders: tuple[int, ...] = ()

    def groups(self, devices: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        """Positions in `devices` by node, each ascending; the nodes in order of appearance."""
        nodes: dict[int, list[int]] = {}
        for position, device in enumerate(devices):
            nodes.setdefault(self.node_of[device], []).append(position)
        return tuple(map(tuple, nodes.values()))

    def leader(self, devices: Sequence[int], group: Sequence[int]) -> int:
        """Which of the positions in `group` speaks for it: a leader's, or else the first."""
        return min(group, key=lambda position: devices[position] not in self.leaders)


@dataclass(frozen=True, slots=True)
class Seats:
    """The devices of a fleet that a program is for: its device i is device `used[i]` of the fleet.

    Attributes:
        used: ascending.
        devices: how many the fleet has.
        wiring: of the used devices; None: as the backend finds it.
    """

    used: tuple[int, ...]
    devices: int
    wiring: Wiring | None = None
