"""Files that people are given: whole or not at all, and refused before the work, not after it."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from shardwright.ir.errors import InputError, PlanError


def write_whole(path: str | os.PathLike[str], text: str) -> None:
    """Write a file that appears whole or not at all.

    Raises:
        PlanError: it cannot be written.
    """
    target = Path(path)
    try:
        handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    except OSError as error:
        raise PlanError(
            place=str(path), reason=f"cannot be written: {error.strerror}", remedy="Choose another path"
        ) from error
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
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
    if Path(path).is_dir():
        raise InputError(place=str(path), reason="is a folder", remedy=f"Name a file with {option}")
    folder = Path(path).resolve().parent
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise InputError(
            place=str(path),
            reason="its folder cannot be written",
            remedy=f"Choose another path for {option}",
        )
