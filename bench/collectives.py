"""How often the strategy predicted fastest is the fastest: sizes × shares on four local ranks.

    python -m bench collectives                   all of it
    python -m bench.collectives all_gather        one collective; the others as they were measured before

Calibrates four ranks, then times every strategy of every collective that has several, at sizes and shares of
which the calibration saw none but the even one. A case is won if the strategy predicted fastest takes at most
10 % longer than the fastest measured. Written to bench/results/collectives.json and .md; a picture of a
sweep to docs/compare.svg.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from bench.pieces import Piece, found, measured
from bench.record import ROOT, markdown, show, table, write
from shardwright.backends.measuring.job import measure_on
from shardwright.backends.measuring.timing import ExchangeCase, Request
from shardwright.compare import StrategyRow, compare_collectives, crossovers, sweep_collectives
from shardwright.cost.device import DeviceType
from shardwright.cost.fleet import Fleet, Link, Node
from shardwright.fleets.calibrate import calibrate
from shardwright.ir.collectives import registry
from shardwright.reports.comparison import Comparison, plot

RANKS = 4
ROUNDS = 7
PATIENCE_S = 30.0
RATIOS = ((0.25, 0.25, 0.25, 0.25), (0.4, 0.3, 0.2, 0.1), (0.6, 0.2, 0.1, 0.1))
SIZES = tuple(3 << power for power in range(9, 24, 2))
ALLOWED = 1.1
PICTURED = ("all_gather", RATIOS[1])


def _strategies(fleet: Fleet, kind: str) -> list[str]:
    """Those that make sense on the fleet."""
    return [row.strategy for row in compare_collectives(fleet, kind, 1024)]


def calibration() -> dict[str, Any]:
    """The fleet that four ranks are."""
    result = calibrate(RANKS, force=True)
    return {"load": result.others, "fleet": result.fleet.to_dict()}


def times_of(kind: str) -> dict[str, Any]:
    """Median seconds of every case of a collective."""
    fleet = Fleet.from_dict(found("collectives", "calibration")["fleet"])
    cases = [
        ExchangeCase(kind, strategy, nbytes, ratios)
        for ratios in RATIOS
        for nbytes in SIZES
        for strategy in _strategies(fleet, kind)
    ]
    result = measure_on(RANKS, Request(tuple(cases), (), ROUNDS, PATIENCE_S))
    return {
        "load": result.others,
        "cases": [asdict(case) for case in cases],
        "seconds": [median(samples) for samples in result.exchange_s],
    }


def main(wanted: Sequence[str] = ()) -> Path:
    """Calibrate, measure anew, compare."""
    # All-to-all has one strategy within a machine: nothing to choose.
    flat = Fleet("flat", (Node("n0", (DeviceType("any", 1.0, 1.0, 1),) * RANKS, Link(1.0, 1.0)),), None)
    kinds = [kind for kind, c in registry().items() if not c.local and len(_strategies(flat, kind)) > 1]
    pieces: dict[str, Piece] = {"calibration": calibration}
    pieces |= {kind: partial(times_of, kind) for kind in kinds}
    results = measured("collectives", pieces, wanted)
    kinds = [kind for kind in kinds if kind in results]
    fleet = Fleet.from_dict(results["calibration"]["fleet"])
    seconds = {
        ExchangeCase(**{**case, "ratios": tuple(case["ratios"])}): time
        for kind in kinds
        for case, time in zip(results[kind]["cases"], results[kind]["seconds"], strict=True)
    }
    rows: list[dict[str, Any]] = []
    for kind in kinds:
        for ratios in RATIOS:
            swept = sweep_collectives(fleet, kind, SIZES, ratios)
            for nbytes, predicted in zip(SIZES, swept, strict=True):
                timed = [replace(r, measured_s=seconds[_case(kind, r, nbytes, ratios)]) for r in predicted]
                rows.append(_row(kind, ratios, nbytes, timed))
                table(rows[-1:], header=len(rows) == 1)
    kind, ratios = PICTURED
    swept = tuple(
        tuple(replace(r, measured_s=seconds[_case(kind, r, nbytes, ratios)]) for r in predicted)
        for nbytes, predicted in zip(SIZES, sweep_collectives(fleet, kind, SIZES, ratios), strict=True)
    )
    changes = crossovers(fleet, kind, SIZES[0], SIZES[-1], ratios)
    picture = Comparison(kind, fleet, ratios, SIZES, swept, changes)
    plot(picture, str(ROOT / "docs" / "compare.svg"))
    summary = [
        {
            "collective": kind,
            "shares": " ".join(map(str, ratios)),
            "cases": len(some),
            "won": sum(row["won"] for row in some),
            "worst": max(row["chosen_over_fastest"] for row in some),
            "prediction MAPE": sum(row["MAPE"] for row in some) / len(some),
        }
        for kind in kinds
        for ratios in RATIOS
        if (some := [r for r in rows if r["collective"] == kind and r["ratios"] == ratios])
    ]
    won = sum(row["won"] for row in rows) / len(rows)
    loads = {piece: result["load"] for piece, result in results.items()}
    markdown("collectives", summary)
    show("collectives", "comparing-collectives.md")
    print({"cases": len(rows), "won": won, "load": loads})
    return write("collectives", rows, won=won, load=loads, summary=summary)


def _case(kind: str, row: StrategyRow, nbytes: int, ratios: tuple[float, ...]) -> ExchangeCase:
    return ExchangeCase(kind, row.strategy, nbytes, ratios)


def _row(kind: str, ratios: tuple[float, ...], nbytes: int, rows: Sequence[StrategyRow]) -> dict[str, Any]:
    """One case; the strategy predicted fastest comes first."""
    timed = {row.strategy: row.measured_s or 0.0 for row in rows}
    chosen, fastest = rows[0].strategy, min(timed, key=timed.__getitem__)
    over = timed[chosen] / timed[fastest]
    return {
        "collective": kind,
        "ratios": ratios,
        "nbytes": nbytes,
        "chosen": chosen,
        "fastest": fastest,
        "chosen_over_fastest": over,
        "won": over <= ALLOWED,
        "MAPE": sum(abs(row.predicted_s / timed[row.strategy] - 1) for row in rows) / len(rows),
        "measured_s": timed,
    }


if __name__ == "__main__":
    main(sys.argv[1:])
