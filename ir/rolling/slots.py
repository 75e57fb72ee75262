"""What the iterations of a run hand to each other, and what each has for itself.

In a loop over iterations, an operand of an equation in its body is one of these:

    Own      made in the same iteration
    Carried  made in the iteration before; in the first, something from before the run
    Same     the same for all of them
    Rows     something for each, such as the parameters of a layer, or what its forward part kept
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from shardwright.ir.graph import Atom, Equation, Literal, Value
from shardwright.ir.rolling.runs import Run

#: In a body: which equation, and which of its results.
Place: TypeAlias = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Own:
    """Made in the same iteration."""

    place: Place


@dataclass(frozen=True, slots=True)
class Carried:
    """Made in the iteration before; `start` in the first."""

    place: Place
    start: Atom


@dataclass(frozen=True, slots=True)
class Same:
    """The same in all iterations."""

    atom: Atom


@dataclass(frozen=True, slots=True)
class Rows:
    """Something for each iteration."""

    atoms: tuple[Atom, ...]


Slot: TypeAlias = Own | Carried | Same | Rows


@dataclass(frozen=True, slots=True)
class Body:
    """A run as the body of a loop.

    Attributes:
        run: where it is.
        slots: what the operands of every equation of an iteration are.
        once: equations that do the same in every iteration.
    """

    run: Run
    slots: tuple[tuple[Slot, ...], ...]
    once: frozenset[int]

    @property
    def carried(self) -> Mapping[Place, Atom]:
        """What is handed on, and what the first iteration has in its place."""
        found = [slot for slots in self.slots for slot in slots if isinstance(slot, Carried)]
        return {slot.place: slot.start for slot in found}

    @property
    def rows(self) -> Sequence[tuple[Atom, ...]]:
        """What is there for each iteration."""
        slots = (slot for slots in self.slots for slot in slots)
        return list(dict.fromkeys(slot.atoms for slot in slots if isinstance(slot, Rows)))


def body_of(
    run: Run,
    order: Sequence[Equation],
    makers: Mapping[Value, tuple[int, int]],
    same: Callable[[Atom], Atom] = lambda atom: atom,
) -> Body | None:
    """A run as the body of a loop; None where iterations do not do the same with each other's results.

    Args:
        run: where it is.
        order: equations.
        makers: by value, where it is made.
        same: what stands for an atom: one for all that are equal.
    """
    slots: list[tuple[Slot, ...]] = []
    for position in range(run.period):
        mine: list[Slot] = []
        for atoms in zip(*[equation.inputs for equation in run.at(position, order)], strict=True):
            slot = _slot(run, [same(atom) for atom in atoms], makers)
            if slot is None:
                return None
            mine.append(slot)
        slots.append(tuple(mine))
    carried: dict[Place, Atom] = {}
    for slot in (slot for some in slots for slot in some):
        if isinstance(slot, Carried) and not equal(carried.setdefault(slot.place, slot.start), slot.start):
            return None  # begins with one thing here and with another there
    return Body(run, tuple(slots), _once(slots, carried))


def _slot(run: Run, atoms: Sequence[Atom], makers: Mapping[Value, tuple[int, int]]) -> Slot | None:
    inside: list[tuple[int, Place] | None] = []
    for atom in atoms:
        at, result = makers.get(atom, (-1, 0)) if isinstance(atom, Value) else (-1, 0)
        if at >= run.last:
            return None
        iteration, position = divmod(at - run.first, run.period)
        inside.append((iteration, (position, result)) if at >= run.first else None)
    if not any(inside):
        first = atoms[0]
        return Same(first) if all(equal(first, atom) for atom in atoms) else Rows(tuple(atoms))
    if None in inside[1:]:
        return None
    _, place = inside[1] or (0, (0, 0))
    if inside == [(n, place) for n in range(len(atoms))]:
        return Own(place)
    if inside[0] is None and inside[1:] == [(n, place) for n in range(len(atoms) - 1)]:
        return Carried(place, atoms[0])
    return None


def equal(one: Atom, other: Atom) -> bool:
    """Whether atoms are one, or literals of one number."""
    if one is other:
        return True
    if isinstance(one, Literal) and isinstance(other, Literal):
        return one.type == other.type and np.asarray(one.value).tobytes() == np.asarray(other.value).tobytes()
    return False


def _once(slots: Sequence[Sequence[Slot]], carried: Mapping[Place, Atom]) -> frozenset[int]:
    """Equations whose operands are the same in all iterations, but for what is handed on."""
    handed_on = {position for position, _ in carried}
    found: set[int] = set()
    for position, mine in enumerate(slots):
        alike = all(isinstance(s, Same) or (isinstance(s, Own) and s.place[0] in found) for s in mine)
        if alike and position not in handed_on:
            found.add(position)
    return frozenset(found)
