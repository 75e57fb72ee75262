"""What every benchmark shares: where examples are, how rows are shown and written."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples"
FLEETS = EXAMPLES / "fleets"
RESULTS = ROOT / "bench" / "results"


def table(rows: Sequence[Mapping[str, Any]], *, header: bool) -> None:
    """Print rows in columns."""
    if header:
        print("  ".join(f"{name:>20}" for name in rows[0]), flush=True)
    for row in rows:
        cells = (f"{value:.4g}" if isinstance(value, float) else str(value) for value in row.values())
        print("  ".join(f"{cell:>20}" for cell in cells), flush=True)


def markdown(name: str, rows: Sequence[Mapping[str, Any]]) -> Path:
    """Write bench/results/NAME.md: the rows as a table, to be shown in docs/."""
    RESULTS.mkdir(parents=True, exist_ok=True)

    def line(cells: Iterable[object]) -> str:
        return "| " + " | ".join(f"{c:.3g}" if isinstance(c, float) else str(c) for c in cells) + " |\n"

    text = line(rows[0]) + line("---" for _ in rows[0]) + "".join(line(row.values()) for row in rows)
    path = RESULTS / f"{name}.md"
    path.write_text(text)
    return path


def show(name: str, page: str) -> None:
    """Put bench/results/NAME.md into a page of docs/, in place of the table after `<!-- results NAME -->`."""
    path, mark = ROOT / "docs" / page, f"<!-- results {name} -->\n\n"
    before, found, after = path.read_text().partition(mark)
    assert found, f"docs/{page} has no place for the table of {name}"
    rest = after[after.find("\n\n") :] if after.startswith("|") else after
    path.write_text(before + mark + (RESULTS / f"{name}.md").read_text() + "\n" + rest.lstrip("\n"))


def write(name: str, rows: Sequence[Mapping[str, Any]], **more: Any) -> Path:
    """Write bench/results/NAME.json: rows, what else is given, and the state of the machine that measured."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    one, five, fifteen = os.getloadavg()
    machine = {
        "cores": len(os.sched_getaffinity(0)),
        "load": {"1min": one, "5min": five, "15min": fifteen},
        "python": platform.python_version(),
        "jax": jax.__version__,
    }
    path = RESULTS / f"{name}.json"
    path.write_text(
        json.dumps({"name": name, "machine": machine, **more, "rows": list(rows)}, indent=1) + "\n"
    )
    return path
