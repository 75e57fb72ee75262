"""Strategies that are functions over MPI instead of routines: those that users add (`add_strategy`).

The strategies of this package are routines (`backends/schedule/lower.py`), which schedules can express and
any transport can run. A function of a `Link` and the local array is quicker to write, and tied to MPI: it
runs as it is, blocking, and a schedule that needs it cannot be emitted.
"""

from __future__ import annotations

from shardwright.backends.mpi.link import Lowering, mpi

_LOWERINGS: dict[tuple[str, str], Lowering] = {}


def lowerings() -> dict[tuple[str, str], Lowering]:
    """The functions by (collective, strategy)."""
    return _LOWERINGS


__all__ = ["Lowering", "lowerings", "mpi"]
