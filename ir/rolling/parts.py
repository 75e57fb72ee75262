"""What a step is made of whose layers are scanned: loops, stacks, equations on stacks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from shardwright.ir.graph import Atom, Equation, TensorType
from shardwright.ir.rolling.slots import Body, Place


@dataclass(frozen=True, slots=True, eq=False)
class Given:
    """The step is given it."""


@dataclass(frozen=True, slots=True, eq=False)
class Scanned:
    """A loop makes it: of every iteration a result, or what came into it in its place."""

    loop: Loop
    place: Place
    entering: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Mapped:
    """A result of an equation for each layer that is one on stacks."""

    group: Group


@dataclass(frozen=True, slots=True, eq=False)
class Joined:
    """Put together from its rows."""


Source: TypeAlias = Given | Scanned | Mapped | Joined


@dataclass(frozen=True, slots=True, eq=False)
class Stack:
    """Rows by layer, of a family of layers."""

    rows: tuple[Atom, ...]
    source: Source
    family: int

    @property
    def row_type(self) -> TensorType:
        return self.rows[0].type


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """Equations of one kind, one per layer; each operand is a stack, or one for all."""

    equations: tuple[Equation, ...]
    operands: tuple[Stack | Atom, ...]


@dataclass(slots=True, eq=False)
class Loop:
    """A run as a loop over layers.

    Attributes:
        body: what an iteration does.
        layers: of every iteration, its layer.
        family: number of the layers that these are, others having other numbers.
        starts: what iterations hand on, and what the first one has in its place.
        stacks: of what there is for each layer, by atoms in the order of iterations.
    """

    body: Body
    layers: range
    family: int
    starts: dict[Place, Atom] = field(init=False)
    stacks: dict[tuple[Atom, ...], Stack] = field(default_factory=dict[tuple[Atom, ...], Stack])

    def __post_init__(self) -> None:
        self.starts = dict(self.body.carried)

    @property
    def reverse(self) -> bool:
        """Whether it goes from the last layer to the first."""
        return self.layers.step < 0

    def by_layer(self, atoms: Sequence[Atom]) -> tuple[Atom, ...]:
        """Atoms of iterations in the order of layers; and the other way round."""
        return tuple(reversed(atoms)) if self.reverse else tuple(atoms)
