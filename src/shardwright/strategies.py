"""Strategies of one's own: price and lowering in one call."""

from __future__ import annotations

from shardwright.backends.mpi_link import Lowering
from shardwright.backends.mpi_moves import lowerings
from shardwright.cost.moves import Strategy, register

__all__ = ["Strategy", "add_strategy"]


def add_strategy(strategy: Strategy, *, mpi: Lowering) -> None:
    """Give the planner one more strategy of a collective, or another in place of one it has.

    The reference backend runs every strategy by the collective's own definition and needs nothing more.

    Args:
        strategy: its name and price.
        mpi: how the MPI backend carries it out: a function of a `Link` and the local array.
    """
    register(strategy)
    lowerings()[strategy.kind, strategy.name] = mpi
