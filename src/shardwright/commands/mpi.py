"""What commands that may run as ranks of an MPI job share: one voice, one bar."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager

from shardwright.backends.launch import under_mpi
from shardwright.console import bar
from shardwright.ir.errors import ShardwrightError


def is_silent() -> bool:
    """Whether this is a rank that another one speaks for."""
    if not under_mpi():
        return False
    from shardwright.backends.mpi.moves import mpi

    return mpi().COMM_WORLD.rank != 0


@contextmanager
def one_voice() -> Generator[None]:
    """An error that all ranks meet is said by the first; the others leave with the same exit code."""
    try:
        yield
    except ShardwrightError:
        if is_silent():
            sys.exit(2)
        raise


@contextmanager
def progress(what: str) -> Generator[Callable[[int, int], None]]:
    """A bar on a terminal; silence in a pipe, and of a rank that another one speaks for."""
    if is_silent():
        yield lambda done, total: None
        return
    with bar(what) as tick:
        yield tick
