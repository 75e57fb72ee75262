"""Files that people are given: whole or not at all, and refused before the work, not after it."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from shardwright.ir.errors import InputError, PlanError


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
        raise InputError(place=str(path), reason="is a folder", remedy=f"Name a file with {option}")
    if special and os.access(target, os.W_OK):
        return
    folder = target.parent
    if special or not folder.is_dir() or not os.access(folder, os.W_OK):
        raise InputError(
            place=str(path),
            reason="cannot be written" if special else "its folder cannot be written",
            remedy=f"Choose another path for {option}",
        )
