"""Pictures: where they may be drawn, and how they are written."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path
from typing import Any

from shardwright.files import Named, check_outputs, write_whole
from shardwright.ir.errors import InputError


def check_plot(path: str, inputs: Named) -> None:
    """Find out before the work whether a picture can be drawn there, where nothing is that is read.

    Raises:
        InputError: matplotlib is missing, the name has no ending that it knows; or see `check_outputs`.
    """
    known = sorted(figure().canvas.get_supported_filetypes())
    if Path(path).suffix[1:] not in known:
        raise InputError(place=path, reason="is no picture's name", remedy=f"End it in {', '.join(known)}")
    check_outputs({"--plot": path}, inputs)


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
    """Write a figure: the same bytes for the same picture, whole or not at all.

    Raises:
        PlanError: it cannot be written.
    """
    import matplotlib as mpl

    drawing = BytesIO()
    with mpl.rc_context({"svg.hashsalt": "shardwright"}):
        metadata = {"Date": None} if path.endswith(".svg") else None
        drawn.savefig(drawing, format=Path(path).suffix[1:], metadata=metadata)
    write_whole(path, drawing.getvalue())
