"""Predicted against measured: plans on local MPI ranks, after a calibration of those ranks.

    python -m bench accuracy                        all of it
    python -m bench.accuracy 2-ranks 2-ranks-gpt2   some pieces; the others as they were measured before

Calibrates 2 and 4 ranks, plans several models, varies programs, ratios and strategies, and runs them all in
turns. Written to bench/results/accuracy.json: every plan's error, their mean (MAPE), Spearman's rank
correlation, and where the time went; docs/calibrate.md shows the table.
"""

from __future__ import annotations

import json
import sys
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from scipy import stats

from bench.accuracy_plans import SIZES, Case, cases
from bench.pieces import Piece, found, measured
from bench.record import markdown, show, table, write
from shardwright.backends.launch import launch
from shardwright.cost.fleet import Fleet
from shardwright.fleets.calibrate import calibrate

RANKS = (2, 4)
ROUNDS = 7
PATIENCE_S = 30.0


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
        "compute_predicted_ms": 1e3 * max(case.predicted.compute_s),
        "compute_measured_ms": 1e3 * profile["segments"],
        "exchange_predicted_ms": 1e3 * case.predicted.exchange_s,
        "exchange_measured_ms": 1e3 * sum(s for name, s in profile.items() if name != "segments"),
        "load": sum(load for load, _ in measured["samples"]) / len(measured["samples"]),
    }


def calibration(ranks: int) -> dict[str, Any]:
    """The fleet that these ranks are."""
    result = calibrate(ranks, force=True)
    return {"load": result.others, "fleet": result.fleet.to_dict()}


def of_model(ranks: int, model: str) -> list[dict[str, Any]]:
    """Rows of one model's plans."""
    fleet = Fleet.from_dict(found("accuracy", f"{ranks}-ranks")["fleet"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a primitive that runs replicated is priced so
        wanted = list(cases(fleet, model))
    timed = zip(wanted, run_cases(wanted, ranks, PATIENCE_S), strict=True)
    rows = [row_of(case, samples) for case, samples in timed]
    table(rows, header=True)
    return rows


def main(wanted: Sequence[str] = ()) -> Path:
    """Calibrate, plan, run, compare."""
    pieces: dict[str, Piece] = {}
    for ranks in RANKS:
        pieces[f"{ranks}-ranks"] = partial(calibration, ranks)
        pieces |= {f"{ranks}-ranks-{model}": partial(of_model, ranks, model) for model in SIZES}
    results = measured("accuracy", pieces, wanted)
    calibrated = {ranks: results.get(f"{ranks}-ranks") for ranks in RANKS}
    rows = [row for ranks in RANKS for model in SIZES for row in results.get(f"{ranks}-ranks-{model}", ())]
    ranked = stats.spearmanr([row["predicted_ms"] for row in rows], [row["measured_ms"] for row in rows])
    summary = {
        "plans": len(rows),
        "MAPE": sum(abs(row["error"]) for row in rows) / len(rows),
        "spearman": float(ranked[0]),
        "not measured": [piece for piece in pieces if piece not in results],
    }
    print(summary)
    shown = ("plan", "predicted_ms", "measured_ms", "error")
    markdown("accuracy", [{name: row[name] for name in shown} for row in rows])
    show("accuracy", "calibrate.md")
    return write("accuracy", rows, summary=summary, calibrated=calibrated)


if __name__ == "__main__":
    main(sys.argv[1:])
