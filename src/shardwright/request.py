"""What a plan is wanted for, apart from the step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from shardwright.constraints import Constraints
from shardwright.cost.fleet import Fleet
from shardwright.ir.graph import Graph
from shardwright.ir.state import StateMap
from shardwright.synth.search.priced import SpaceSolver
from shardwright.synth.space.space import Space

#: Mesh axes of programs.
Axes: TypeAlias = Literal[1, 2, "auto"]

#: By a graph's id: the graph, its programs on one mesh axis, and what solves for them at any prices.
Spaces: TypeAlias = dict[int, tuple[Graph, Space, SpaceSolver]]


@dataclass(frozen=True, slots=True)
class Request:
    """What is to be planned for, and how; see `shardwright.api.synthesize`.

    Requests that differ in memory alone may share their `spaces`: what was solved once is known then.
    """

    fleet: Fleet
    state: StateMap | None = None
    constraints: Constraints | None = None
    time_limit_s: float | None = None
    devices: Literal["auto", "all"] = "auto"
    axes: Axes = "auto"
    first: Sequence[float] | None = None
    tick: Callable[[str], None] = lambda what: None
    spaces: Spaces = field(default_factory=dict[int, "tuple[Graph, Space, SpaceSolver]"])
