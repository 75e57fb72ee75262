"""What a search found, or what it was told of and found nothing better than."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from shardwright.ir.errors import PlanError
from shardwright.synth.search.astar import Layer

#: Sums of the same prices in another order differ by less than this, as a fraction.
SAME = 1e-10


@dataclass(frozen=True, slots=True)
class Rival:
    """An assignment that there is already.

    Attributes:
        assignment: it.
        seconds: what it costs at the prices of a search.
        expanded: nodes that A* expanded to find it.
    """

    assignment: tuple[int, ...]
    seconds: float
    expanded: int = 0


@dataclass(frozen=True, slots=True)
class Solution:
    """An assignment at one set of prices.

    Attributes:
        assignment: position in its domain of every choice.
        seconds: what it costs.
        bound_s: what no assignment can be cheaper than at these prices; equal to `seconds` where the search
            ended by itself.
        expanded: nodes that A* expanded.
        width: most choices in one table of the elimination.
    """

    assignment: tuple[int, ...]
    seconds: float
    bound_s: float
    expanded: int
    width: int


def existing(found: Solution | None) -> Solution:
    """The solution of a search for programs.

    Raises:
        PlanError: there is none, as no assignment is possible at all.
    """
    if found is None:
        raise PlanError(
            place="search",
            reason="no program of this space carries out the step",
            remedy="Please report the step: its rules contradict each other",
        )
    return found


def unbeaten(rival: Rival, layers: Sequence[Layer]) -> Solution | None:
    """A rival, where these stages say that nothing costs less; None where they do not."""
    bound_s = sum(float(layer.elimination.constant) for layer in layers)
    if not rival.seconds * (1 - SAME) <= bound_s < math.inf:
        return None
    return Solution(rival.assignment, bound_s, bound_s, rival.expanded, width_of(layers))


def width_of(layers: Sequence[Layer]) -> int:
    """Most choices in one table of some stages."""
    return max(layer.elimination.tape.width for layer in layers)
