"""`python -m bench.compare OLD.json NEW.json`: what changed between two runs of one benchmark."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def _key(row: dict[str, Any]) -> tuple[str, ...]:
    return tuple(value for value in row.values() if isinstance(value, str))


def main(old: str, new: str) -> None:
    """Print every number that differs by more than 2 %, with its ratio."""
    before = {_key(row): row for row in json.loads(Path(old).read_text())["rows"]}
    for row in json.loads(Path(new).read_text())["rows"]:
        other = before.get(_key(row))
        print(" ".join(_key(row)) + ("" if other else "  (new)"))
        for name, value in row.items():
            if other is None or isinstance(value, (str, bool)) or not other.get(name):
                continue
            ratio = value / other[name]
            if abs(ratio - 1) > 0.02:
                print(f"  {name:<24}{other[name]:>14.4g} -> {value:<14.4g}{ratio:>6.2f} ×")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: python -m bench.compare OLD.json NEW.json")
    main(sys.argv[1], sys.argv[2])
