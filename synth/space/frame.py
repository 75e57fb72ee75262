"""A frame: the choices of one graph of a space, the step itself or the body of a region; see `space.py`."""

from __future__ import annotations

from dataclasses import dataclass, field

from shardwright.ir.graph import Equation, Graph, Value
from shardwright.synth.space.factors import Choice, Use


@dataclass(slots=True)
class Frame:
    """One graph of the space (the step itself, or the body of a region) and its choices.

    Attributes:
        graph: the graph.
        weight: how often it runs per step.
        choice: what each value is held in, for a value of a class that class's placement.
        exits: values computed in a class that have a holding of their own for users outside of it.
        uses: the factor of every equation without regions, and the choices it ties.
        children: frames of an equation's regions.
        ports: placement in which each result of an equation with regions leaves them, by result;
            carries leave as they are carried.
    """

    graph: Graph
    weight: float
    choice: dict[Value, Choice] = field(default_factory=dict[Value, Choice])
    exits: dict[Value, Choice] = field(default_factory=dict[Value, Choice])
    uses: dict[Equation, Use] = field(default_factory=dict[Equation, Use])
    children: dict[Equation, tuple[Frame, ...]] = field(default_factory=dict)
    ports: dict[Equation, dict[int, Choice]] = field(default_factory=dict[Equation, dict[int, Choice]])

    def held(self, value: Value) -> Choice:
        """The choice from which users outside of its class get a value."""
        return self.exits.get(value) or self.choice[value]
