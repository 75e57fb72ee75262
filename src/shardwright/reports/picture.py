"""Pictures: where they may be drawn, and how they are written."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from shardwright.ir.errors import InputError


def check_plot(path: str) -> None:
    """Find out before the work whether a picture can be drawn there.

    Raises:
        InputError: matplotlib is missing, or the file name has no ending that it knows.
    """
    known = sorted(figure().canvas.get_supported_filetypes())
    if Path(path).suffix[1:] not in known:
        raise InputError(place=path, reason="is no picture's name", remedy=f"End it in {', '.join(known)}")


def figure(width: float = 7, height: float = 4.5) -> Any:
    """An empty figure, in inches.

    Raises:
        InputError: matplotlib is missing.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise InputError(
            place="--plot", reason="matplotlib is not installed", remedy="pip install 'shardwright[plot]'"
        ) from None
    return Figure(figsize=(width, height), layout="constrained")


def save(drawn: Any, path: str) -> None:
    """Write a figure: the same bytes for the same picture, whole or not at all."""
    import matplotlib as mpl

    partial = f"{path}.partial{Path(path).suffix}"
    with mpl.rc_context({"svg.hashsalt": "shardwright"}):
        drawn.savefig(partial, metadata={"Date": None} if path.endswith(".svg") else None)
    os.replace(partial, path)
