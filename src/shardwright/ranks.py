"""Ranks that write or read a checkpoint together: where one of them fails, all raise the same error.

Between two meetings (`attempt`, `same`, `all`) a rank does nothing that others wait for, so that whatever
goes wrong there, on however few ranks, is known to all at the next one.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from shardwright.backends.launch import under_mpi
from shardwright.ir.errors import InputError, PlanError, ShardwrightError

T = TypeVar("T")

#: How many characters are kept of the beginning and of the end of what another library says: what was done
#: comes first, then files, and why it failed comes last.
_BEGINNING, _END = 120, 240


class Ranks:
    """Ranks of a communicator; a process by itself is one of one.

    Args:
        comm: an mpi4py communicator; None: all ranks of the job.
        place: what they work on, for errors.
        verb: what they do with it, such as "written".
        remedy: what the user can do where they cannot.
    """

    def __init__(self, comm: Any, place: str, verb: str, remedy: str) -> None:
        if comm is None and under_mpi():
            from shardwright.backends.mpi.link import mpi

            comm = mpi().COMM_WORLD
        self.comm = comm
        self.rank: int = 0 if comm is None else comm.rank
        self.size: int = 1 if comm is None else comm.size
        self._place, self._verb, self._remedy = place, verb, remedy

    def first(self, value: Any) -> Any:
        """The first rank's value."""
        return value if self.comm is None else self.comm.bcast(value)

    def all(self, value: Any) -> list[Any]:
        """Every rank's value."""
        return [value] if self.comm is None else self.comm.allgather(value)

    def attempt(self, work: Callable[[], T]) -> T:
        """What `work` returns here, once it has succeeded on every rank.

        Raises:
            ShardwrightError: on every rank where it raised on one: that error if it is one of ours, else a
                PlanError with its words.
        """
        error: ShardwrightError | None = None
        value: T | None = None
        try:
            value = work()
        except ShardwrightError as problem:
            error = problem
        except Exception as problem:  # whatever it is, the others must hear of it
            error = PlanError(
                place=self._place, reason=f"cannot be {self._verb}: {_words(problem)}", remedy=self._remedy
            )
            error.__cause__ = problem
        self._agree(error)
        return value  # type: ignore[return-value]

    def same(self, facts: Mapping[str, str], remedy: str) -> None:
        """Check that all ranks were given the same.

        Args:
            facts: what must be equal, by name.
            remedy: what to do where it is not.

        Raises:
            InputError: on every rank, with what differs on which.
        """
        digest = hashlib.sha256(json.dumps(list(facts.items())).encode()).hexdigest()
        if len(set(self.all(digest))) == 1:
            return
        place = self.first(self._place)
        everyone: list[Mapping[str, str]] = self.all(facts)
        for name in {name: None for mine in everyone for name in mine}:
            told = [mine.get(name, "nothing") for mine in everyone]
            other = next((rank for rank, text in enumerate(told) if text != told[0]), 0)
            if other:
                reason = f"has another {name} than rank 0: {told[other]}, not {told[0]}"
                raise InputError(place=f"{place}, rank {other}", reason=reason, remedy=remedy)
        raise InputError(place=place, reason="ranks have their leaves in another order", remedy=remedy)

    def _agree(self, error: ShardwrightError | None) -> None:
        """Raises on every rank what the first that failed has to say, with its number if not all say so."""
        said = self.all(None if error is None else (type(error), error.place, error.reason, error.remedy))
        failed = next((rank for rank, each in enumerate(said) if each is not None), None)
        if failed is None:
            return
        kind, place, reason, remedy = said[failed]
        if any(each != said[failed] for each in said):
            place = f"{place}, rank {failed}"
        raise kind(place=place, reason=reason, remedy=remedy) from (error.__cause__ if error else None)


def _words(error: Exception) -> str:
    """What an error says, in a line."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    line = (str(error).strip().splitlines() or [""])[0]
    kind = type(error).__name__
    text = f"{kind}: {line}" if line else kind
    return text if len(text) <= _BEGINNING + _END else f"{text[:_BEGINNING]} … {text[-_END:]}"
