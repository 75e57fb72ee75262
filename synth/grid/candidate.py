"""Programs on two mesh axes with what they cost and take, and what says so."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from shardwright.cost.bill import Item
from shardwright.cost.memory.liveness import Peaks
from shardwright.ir.program import Program
from shardwright.synth.prices.tables import Prices
from shardwright.synth.search.solve import Solution


@dataclass(frozen=True, slots=True)
class GridCandidate:
    """A program at ratios, with what it costs and the memory it takes."""

    solution: Solution
    prices: Prices
    program: Program
    items: tuple[Item, ...]
    ratios: tuple[float, ...]
    cost_s: float
    memory: Peaks
    over: float

    @property
    def fits(self) -> bool:
        """By the judge's present budgets."""
        return self.over <= 1

    def beats(self, other: GridCandidate) -> bool:
        """Whether it is better: what fits is better than what does not."""
        if self.fits and other.fits:
            return self.cost_s < other.cost_s * (1 - 1e-9)
        return self.over < other.over


class Pricing(Protocol):
    """What the search on two axes knows of costs."""

    def prices(self, ratios: tuple[float, ...]) -> Prices:
        """At some ratios."""
        ...

    def best_ratios(
        self, solution: Solution, prices: Prices, start: tuple[float, ...]
    ) -> tuple[tuple[float, ...], float]:
        """The ratios at which a program costs least, and what it costs there."""
        ...
