"""Files that people are given: whole or not at all, and refused before the work, not after it."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from itertools import combinations
from pathlib import Path
from typing import TypeAlias

from shardwright.ir.errors import InputError, PlanError

#: Files of a command: what names each (an option, or what stands for an argument) -> path; None: not given.
Named: TypeAlias = Mapping[str, str | os.PathLike[str] | None]


def write_whole(path: str | os.PathLike[str], content: str | bytes) -> None:
    """Write a file that appears whole or not at all; what is there and no file, as a pipe, is written into.

    Raises:
        PlanError: it cannot be written.
    """
    # What a link points to is replaced, not the link.
    target = Path(os.path.realpath(path))
    data = content.encode() if isinstance(content, str) else content
    try:
        if target.exists() and not target.is_file():
            target.write_bytes(data)
            return
        handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    except OSError as error:
        raise PlanError(
            place=str(path), reason=f"cannot be written: {error.strerror}", remedy="Choose another path"
        ) from error
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        Path(name).chmod(0o644)
        Path(name).replace(target)
    except BaseException as error:
        Path(name).unlink(missing_ok=True)
        if not isinstance(error, OSError):
            raise
        raise PlanError(
            place=str(path), reason=f"cannot be written: {error.strerror}", remedy="Choose another path"
        ) from error


def check_writable(path: str | os.PathLike[str] | None, option: str = "-o") -> None:
    """Find out before the work, not after it, that a file can be written; None is no file.

    Raises:
        InputError: it cannot; `option` is what named it.
    """
    if path is None:
        return
    target = Path(path)
    try:
        target = Path(os.path.realpath(path))
        target.lstat()
    except (FileNotFoundError, NotADirectoryError):
        special = False
    except (OSError, ValueError) as error:  # its name is too long, or holds what none may
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise InputError(
            place=str(path), reason=f"cannot be written: {reason}", remedy=f"Choose another path for {option}"
        ) from None
    else:
        special = not (target.is_file() or target.is_dir())
    if target.is_dir():
        named = "is a folder" if os.fspath(path) else "is no file's name"
        raise InputError(place=str(path), reason=named, remedy=f"Name a file with {option}")
    if special and os.access(target, os.W_OK):
        return
    folder = target.parent
    if special or not folder.is_dir() or not os.access(folder, os.W_OK):
        raise InputError(
            place=str(path),
            reason="cannot be written" if special else "its folder cannot be written",
            remedy=f"Choose another path for {option}",
        )


def check_outputs(outputs: Named, inputs: Named | None = None) -> None:
    """Find out before the work that every output can be written, and that nothing given is lost by it.

    Raises:
        InputError: see `check_writable`; or two outputs are one file, or an output is what is read.
    """
    for option, path in outputs.items():
        check_writable(path, option)
    written = {option: path for option, path in outputs.items() if path is not None}
    read = {name: path for name, path in (inputs or {}).items() if path is not None}
    for (first, path), (second, other) in combinations(written.items(), 2):
        if _one_file(path, other):
            raise InputError(
                place=str(other),
                reason=f"is where {first} and {second} would both write",
                remedy=f"Name another file with {second}",
            )
    for option, path in written.items():
        for name, other in read.items():
            if _one_file(path, other):
                raise InputError(
                    place=str(path),
                    reason=f"is given as {name}, and {option} would overwrite it",
                    remedy=f"Name another file with {option}",
                )


def _one_file(one: str | os.PathLike[str], other: str | os.PathLike[str]) -> bool:
    """Whether two paths lead to one file, there or yet to be written; a pipe or a terminal loses nothing."""
    try:
        return os.path.samefile(one, other) and Path(one).is_file()
    except (OSError, ValueError):  # one of them is not there, or has no name that a file can have
        pass
    try:
        return os.path.realpath(one) == os.path.realpath(other)
    except (OSError, ValueError):
        return False
