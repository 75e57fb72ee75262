"""Strategies of one's own: price and lowering in one call."""

from __future__ import annotations

from shardwright.backends.mpi.link import Lowering
from shardwright.backends.mpi.moves import lowerings
from shardwright.backends.spmd.moves import Lowering as SpmdLowering
from shardwright.backends.spmd.moves import lowerings as spmd_lowerings
from shardwright.cost.moves import Strategy, register

__all__ = ["Strategy", "add_strategy"]


def add_strategy(strategy: Strategy, *, mpi: Lowering, spmd: SpmdLowering | None = None) -> None:
    """Give the planner one more strategy of a collective, or another in place of one it has.

    The reference backend runs every strategy by the collective's own definition and needs nothing more.

    Args:
        strategy: its name and price.
        mpi: how the MPI backend carries it out: a function of a `Link` and the local array.
        spmd: how the SPMD backend carries it out: a function of a `Site` and the padded local array, traced
            under `jax.shard_map`. Without it that backend refuses plans that use the strategy.
    """
    register(strategy)
    lowerings()[strategy.kind, strategy.name] = mpi
    spmd_lowerings().pop((strategy.kind, strategy.name), None)
    if spmd is not None:
        spmd_lowerings()[strategy.kind, strategy.name] = spmd
