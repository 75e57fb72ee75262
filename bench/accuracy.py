"""Predicted against measured: plans on local MPI ranks, after a calibration of those ranks.

    python -m bench accuracy

Calibrates 2 and 4 ranks, plans several models, varies programs, ratios and strategies, and runs them all in
turns. Written to bench/results/accuracy.json: every plan's error, their mean (MAPE), Spearman's rank
correlation, and where the time went; docs/calibrate.md shows the table.
"""

from __future__ import annotations

import json
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from scipy import stats

from bench.accuracy_plans import SIZES, Case, cases
from bench.record import markdown, table, write
from shardwright.backends.launch import launch
from shardwright.calibrate import calibrate
from shardwright.cost.fleet import Fleet

RANKS = (2, 4)
ROUNDS = 7


def run_cases(wanted: Sequence[Case], ranks: int, patience_s: float) -> list[dict[str, Any]]:
    """Samples and profile of every case."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        listed: list[dict[str, str]] = []
        for number, case in enumerate(wanted):
            case.plan.save(folder / f"{number}.json")
            listed.append({"model": case.model, "file": f"{number}.json"})
        asked = {"cases": listed, "rounds": ROUNDS, "patience_s": patience_s}
        (folder / "asked.json").write_text(json.dumps(asked))
        if status := launch(ranks, ["-m", "bench.accuracy_rank", str(folder)]):
            raise SystemExit(status)
        return json.loads((folder / "measured.json").read_text())


def row_of(case: Case, measured: Mapping[str, Any]) -> dict[str, Any]:
    """One line of the table."""
    seconds = median(s for _, s in measured["samples"])
    profile = measured["profile"]
    return {
        "plan": case.name,
        "predicted_ms": 1e3 * case.predicted.iteration_s,
        "measured_ms": 1e3 * seconds,
        "error": case.predicted.iteration_s / seconds - 1,
        "compute_predicted_ms": 1e3 * max(case.predicted.busy_s),
        "compute_measured_ms": 1e3 * profile["segments"],
        "exchange_predicted_ms": 1e3 * case.predicted.exchange_s,
        "exchange_measured_ms": 1e3 * sum(s for name, s in profile.items() if name != "segments"),
        "load": sum(load for load, _ in measured["samples"]) / len(measured["samples"]),
    }


def main(patience_s: float = 120.0) -> Path:
    """Calibrate, plan, run, compare."""
    rows: list[dict[str, Any]] = []
    calibrated: dict[int, Any] = {}
    for ranks in RANKS:
        found = calibrate(ranks, force=True, patience_s=patience_s)
        fleet: Fleet = found.fleet
        calibrated[ranks] = {"load": found.others, "fleet": fleet.to_dict()}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a primitive that runs replicated is priced so
            wanted = [case for model in SIZES for case in cases(fleet, model)]
        for case, measured in zip(wanted, run_cases(wanted, ranks, patience_s), strict=True):
            rows.append(row_of(case, measured))
            table(rows[-1:], header=len(rows) == 1)
    summary = {
        "plans": len(rows),
        "MAPE": sum(abs(row["error"]) for row in rows) / len(rows),
        "spearman": float(
            stats.spearmanr([row["predicted_ms"] for row in rows], [row["measured_ms"] for row in rows])[0]
        ),
    }
    print(summary)
    markdown("accuracy", rows)
    return write("accuracy", rows, summary=summary, calibrated=calibrated)
