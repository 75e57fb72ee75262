"""`python pin.py RANKS COMMAND…`: run a command on the cores and the card of this rank of an MPI job.

For jobs on one machine. Started by path, before the interpreter that does the work: threads take the cores of
whoever makes them, and JAX opens every card it sees, so that a rank must be pinned before its libraries are
imported. Nothing but the standard library is at hand.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

#: Rank among those of this machine, as MPICH's and Open MPI's launchers state it.
LOCAL_RANK_VARIABLES = ("MPI_LOCALRANKID", "OMPI_COMM_WORLD_LOCAL_RANK")


def cores_of(rank: int, ranks: int, cores: Sequence[int]) -> list[int]:
    """The cores of a rank: its equal part of them, or the one it shares; all where they do not divide."""
    if len(cores) % ranks == 0:
        each = len(cores) // ranks
        return list(cores[rank * each : (rank + 1) * each])
    if ranks % len(cores) == 0:
        return [cores[rank % len(cores)]]
    return list(cores)


def main(arguments: Sequence[str], environment: Mapping[str, str] = os.environ) -> None:
    """Pin this process and become the command.

    Args:
        arguments: how many ranks there are, then the command.
        environment: which has this rank's number, and is the command's, with its card.
    """
    variables = dict(environment)
    number = next((environment[name] for name in LOCAL_RANK_VARIABLES if name in environment), None)
    if number is not None:
        ranks, cores = int(arguments[0]), sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, cores_of(int(number) % ranks, ranks, cores))
        variables |= _beside("cards").card_variables(int(number) % ranks, ranks, environment)
    os.execve(arguments[1], list(arguments[1:]), variables)


def _beside(name: str) -> Any:
    """A module of this folder; the package that it is of may not be importable yet."""
    sys.path.insert(0, str(Path(__file__).parent))
    try:
        return import_module(name)
    finally:
        del sys.path[0]


if __name__ == "__main__":
    main(sys.argv[1:])
