"""Whether a program fits into the devices' memory: a model for many programs, a closer look at the best.

The search asks the model of `cost/memory/liveness.py`, the LP has its rows. What the model takes for the best
is then looked at as it will run (`Look`), unless by the model it leaves ample room; where that says
otherwise, the model's budgets are scaled by how much the two differ, and the search goes on.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

import numpy as np

from shardwright.cost.device import DeviceType
from shardwright.cost.fleet import Device, Fleet
from shardwright.cost.memory.compilers import COMPILERS, compilers
from shardwright.cost.memory.liveness import (
    Footprint,
    Peaks,
    all_bytes,
    footprint,
    largest_bytes,
    within_stages,
)
from shardwright.cost.model import CostModel
from shardwright.cost.quantity import at_least, size
from shardwright.cost.share_cost import Floats
from shardwright.ir.graph import Graph
from shardwright.ir.program import Program


class Look(Protocol):
    """Looks at programs as they will run."""

    def __call__(self, program: Program, ratios: Sequence[float], /) -> tuple[int, ...]:
        """Peak bytes of every device of a program at some ratios."""
        ...


@runtime_checkable
class CloseLook(Look, Protocol):
    """Also says whose the bytes are."""

    def crowds(
        self, program: Program, ratios: Sequence[float], device: int, limit: float
    ) -> Sequence[tuple[int, Mapping[int, int]]]:
        """The moments at which a device needs more than `limit` bytes: these, and those of each value."""
        ...

    def on(self, types: Sequence[DeviceType], /) -> CloseLook:
        """The same for programs on devices of these types."""
        ...


#: How often the search may go on after a look.
MOST_LOOKS = 4

#: Up to this part of every budget, by the model, a program fits and is not looked at: the model has been seen
#: to take up to a thirtieth too little, and mostly takes too much.
AMPLE = 0.8

#: Beyond this multiple of a budget, by the model, a program is not looked at while there may be others.
_FAR = 2.0


def bound(look: Look, fleet: Fleet) -> Look:
    """A look at programs on the devices of a fleet, if it tells devices apart."""
    return look.on(fleet.types) if isinstance(look, CloseLook) else look


class Judge:
    """Of one step on one fleet.

    Args:
        graph: the step.
        model: whose devices have the memory.
        look: at a program; None: the model's word counts.

    Attributes:
        limits: bytes of memory of a device of every class.
        budgets: the same for the model: what it calls full is full.
        roomy: whether everything fits, whatever the program.
    """

    def __init__(self, graph: Graph, model: CostModel, look: Look | None = None) -> None:
        self.graph, self._class_of = graph, model.class_of
        self.look = None if look is None else bound(look, model.fleet)
        self.limits: Floats = np.array([float(device.memory_bytes) for device in model.types])
        self.budgets = self.limits
        #: By class, up to how many times what the model has of a step it takes: the model has bfloat16 as
        #: such, and where that is lacking a copy in float32 lies beside an operand of a product.
        widens = [COMPILERS[name].widens for name in compilers(graph, model.types)]
        self._times: Floats = np.where(widens, 3.0, 1.0)
        # A padded exchange takes as many blocks as there are devices, and one more.
        self._in_stages = within_stages(graph)
        most = float(all_bytes(graph) + (len(self._class_of) + 1) * largest_bytes(graph))
        self.roomy = bool((most * self._times <= self.limits).all())
        #: What was looked at, by ratios and identity; the program is kept, so that no other has its id.
        self._seen: dict[tuple[float, ...], dict[int, tuple[Program, Peaks]]] = {}
        self._whole = Footprint(np.array([most]), np.zeros(1))

    def footprint(self, program: Program) -> Footprint:
        """By the model; of a step that fits anyway, an upper bound."""
        return self._whole if self.roomy else footprint(program, self.graph)

    def over(self, memory: Footprint | Peaks, ratios: Sequence[float]) -> float:
        """The largest part of its budget that a device needs, by the model."""
        return float((memory.peak(np.asarray(ratios)) / self.budgets[self._class_of]).max())

    def feared(self, memory: Footprint | Peaks, ratios: Sequence[float]) -> float:
        """The largest part of its memory that a device needs, by the model, whatever was learned about it."""
        return float((memory.peak(np.asarray(ratios)) / self.limits[self._class_of]).max())

    def ample(self, memory: Footprint | Peaks, ratios: Sequence[float]) -> bool:
        """Whether a program fits by so much that nobody need look."""
        taken = (memory.peak(np.asarray(ratios)) + self._in_stages) * self._times[self._class_of]
        return self.roomy or bool((taken / self.budgets[self._class_of]).max() <= AMPLE)

    def excess(self, peaks: Peaks) -> float:
        """The largest part of its memory that a device needs."""
        return float((np.asarray(peaks.bytes) / self.limits[self._class_of]).max())

    def fits(self, program: Program, ratios: Sequence[float]) -> bool:
        """Whether a program is within every device's memory: as it will run, unless it has ample room."""
        memory = self.footprint(program)
        return self.ample(memory, ratios) or self.excess(self.peaks(program, ratios, memory)) <= 1

    def peaks(
        self,
        program: Program,
        ratios: Sequence[float],
        memory: Footprint | Peaks,
        *,
        sure: bool = False,
        feared: float = math.inf,
    ) -> Peaks:
        """Of a program as it will run; by the model where there is no other word, or none is needed.

        Args:
            program: the program.
            ratios: share of every device.
            memory: its footprint.
            sure: look at it, however far beyond the budgets the model has it.
            feared: what by the model needs more than so many times the memory will not fit, and nobody needs
                to know by how much to the byte.
        """
        told = Peaks(tuple(int(b) for b in memory.peak(np.asarray(ratios))))
        if self.look is None or self.roomy or self.excess(told) > max(feared, 1.0):
            return told
        # The model may learn so low a budget that what it says would fit is far beyond that: then look.
        if not sure and self.over(memory, ratios) > _FAR and self.excess(told) > 1:
            return told
        return self.seen(program, ratios) or told

    def closely(
        self, program: Program, ratios: Sequence[float], memory: Footprint | Peaks
    ) -> Footprint | Peaks:
        """Of a program as it will run, unless by the model it has ample room."""
        return memory if self.ample(memory, ratios) else self.peaks(program, ratios, memory)

    def seen(self, program: Program, ratios: Sequence[float]) -> Peaks | None:
        """Of a program as it will run, None where nobody looks."""
        if self.look is None or self.roomy:
            return None
        there = self._seen.setdefault(tuple(ratios), {})
        if id(program) not in there:
            # An equal program may have been looked at: what another order leaves as it is.
            found = next((seen for other, seen in there.values() if other == program), None)
            there[id(program)] = program, found or Peaks(self.look(program, ratios), seen=True)
        return there[id(program)][1]

    def learn(self, peaks: Peaks, ratios: Sequence[float], memory: Footprint | Peaks, rounds: int) -> None:
        """Scale the model's budgets by what it takes too little or too much; every round is stricter."""
        if not peaks.seen:
            return
        part = memory.peak(np.asarray(ratios)) / np.maximum(np.asarray(peaks.bytes, dtype=np.float64), 1.0)
        scale = np.array([part[self._class_of == c].min() for c in range(len(self.limits))])
        self.budgets = self.limits * scale * 0.98**rounds


#: How a plan begins to say that it does not fit.
SHORT = "no program found fits into every device's memory"


def shortage(ratios: Sequence[float], memory: Footprint | Peaks, model: CostModel) -> str:
    """What the smallest program found would need."""
    return lacking(memory.peak(np.asarray(ratios)), model.fleet.devices)


def lacking(peaks: Floats, devices: Sequence[Device]) -> str:
    """What a program that needs so much on some devices lacks on one of them."""
    limits = np.array([device.type.memory_bytes for device in devices])
    worst = int((peaks / limits).argmax())
    name, over = f"{devices[worst].name} ({devices[worst].type.name})", (peaks / limits).max()
    return (
        f"{SHORT}: of those searched, the one that lacks least needs "
        f"{size(peaks[worst])} on {name}, which has {size(limits[worst])}; with {at_least(over)} times the "
        "memory everywhere it would fit"
    )
