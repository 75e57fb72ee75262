"""Benchmarks in pieces that are kept on disk: what was measured need not be measured again.

A piece is a few minutes of measuring, told apart by its name. `python -m bench NAME` measures all pieces
anew; `python -m bench.NAME PIECE…` some of them, and puts together what is there.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.record import ROOT

#: Measures a piece; what it returns goes into JSON.
Piece = Callable[[], Any]


def measured(name: str, pieces: Mapping[str, Piece], wanted: Sequence[str] = ()) -> dict[str, Any]:
    """What the pieces of a benchmark found, the wanted ones (all, if none are named) measured now.

    Returns:
        By piece, in the order of `pieces`, as far as they were measured; it is said which were not.
    """
    if unknown := [piece for piece in wanted if piece not in pieces]:
        raise SystemExit(f"bench.{name}: no piece {', '.join(unknown)}; there are {', '.join(pieces)}")
    folder = ROOT / "build" / "bench" / name
    folder.mkdir(parents=True, exist_ok=True)
    for piece in wanted or pieces:
        print(f"-- {piece}", flush=True)
        _path(folder, piece).write_text(json.dumps(pieces[piece]()))
    if missing := [piece for piece in pieces if not _path(folder, piece).is_file()]:
        print(f"not measured: {' '.join(missing)}")
    there = [piece for piece in pieces if piece not in missing]
    return {piece: json.loads(_path(folder, piece).read_text()) for piece in there}


def found(name: str, piece: str) -> Any:
    """What a piece found that was measured before."""
    path = _path(ROOT / "build" / "bench" / name, piece)
    if not path.is_file():
        raise SystemExit(f"bench.{name}: measure {piece} first")
    return json.loads(path.read_text())


def _path(folder: Path, piece: str) -> Path:
    return folder / f"{piece}.json"
