"""What searches on two axes for a step and for its rewritings have in common."""

from __future__ import annotations

from shardwright.cost.fleet import Fleet
from shardwright.cost.grid.kernels import KnownWays
from shardwright.cost.grid.model import GridModel
from shardwright.cost.model import CostModel
from shardwright.synth.grid.pricing import GridPriceList, KnownMoves
from shardwright.synth.grid.solve import GridSolver
from shardwright.synth.parts import Members
from shardwright.synth.space.conversions import Domains
from shardwright.synth.space.vocabulary import Vocabulary


class Common:
    """What a step and its rewritings have in common: factors, and what they cost on parts of a fleet."""

    def __init__(self) -> None:
        self._listed: dict[Members, GridPriceList] = {}
        self._words: dict[tuple[int, ...], Vocabulary] = {}
        self._ways: KnownWays = {}
        self._between: KnownMoves = {}
        #: Whether a part on which two axes are one had a plan that fits (see `synth/grid/single.py`).
        self.single = False
        #: What solved for the programs of the latest step.
        self.solver: GridSolver | None = None

    def listed(self, members: Members, fleet: Fleet) -> GridPriceList:
        """Prices on a part of the fleet."""
        if members not in self._listed:
            self._listed[members] = GridPriceList(GridModel(CostModel(fleet), self._ways), self._between)
        return self._listed[members]

    def vocabulary(self, nodes: tuple[int, ...]) -> Vocabulary:
        """What spaces on such nodes are made of."""
        return self._words.setdefault(nodes, Vocabulary(Domains(nodes)))
