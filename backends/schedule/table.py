"""Which routine carries out which strategy."""

from __future__ import annotations

from collections.abc import Mapping

from shardwright.backends.schedule.geometry import Geometry, Lowering, operands
from shardwright.backends.schedule.lower import ONE_STAGE
from shardwright.backends.schedule.nodes import NODES
from shardwright.backends.schedule.ops import Builder, Routine
from shardwright.backends.schedule.rounds import ROUNDS

_BUILDERS: Mapping[tuple[str, str], Lowering] = {**ONE_STAGE, **ROUNDS, **NODES}


def builders() -> Mapping[tuple[str, str], Lowering]:
    """All routines by (collective, strategy)."""
    return _BUILDERS


def routine_of(kind: str, strategy: str, geometry: Geometry) -> Routine:
    """This participant's part; where it is the only one, its operands are the results.

    Raises:
        KeyError: the strategy is none of `builders()`.
    """
    if geometry.count == 1:
        b = Builder()
        return b.routine(operands(b, geometry))
    return builders()[kind, strategy](geometry)
