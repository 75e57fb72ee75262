"""How often the strategy predicted fastest is the fastest: sizes × shares on four local ranks.

    python -m bench collectives

Calibrates four ranks, then times every strategy of every collective that has several, at sizes and shares of
which the calibration saw none but the even one. A case is won if the strategy predicted fastest takes at most
10 % longer than the fastest measured. Written to bench/results/collectives.json and .md; a picture of a
sweep to docs/compare.svg.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from bench.record import ROOT, markdown, table, write
from shardwright.backends.measure import ExchangeCase, Request
from shardwright.backends.measure_job import measure_on
from shardwright.calibrate import calibrate
from shardwright.compare import StrategyRow, compare_collectives, crossovers, sweep_collectives
from shardwright.compare_report import Comparison, plot
from shardwright.cost.fleet import Fleet
from shardwright.ir.collectives import registry

RANKS = 4
RATIOS = ((0.25, 0.25, 0.25, 0.25), (0.4, 0.3, 0.2, 0.1), (0.6, 0.2, 0.1, 0.1))
SIZES = tuple(3 << power for power in range(9, 24, 2))
ALLOWED = 1.1
PICTURED = ("all_gather", RATIOS[1])


def _strategies(fleet: Fleet, kind: str) -> list[str]:
    """Those that make sense on the fleet."""
    return [row.strategy for row in compare_collectives(fleet, kind, 1024)]


def main(patience_s: float = 90.0) -> Path:
    """Calibrate, measure anew, compare."""
    found = calibrate(RANKS, force=True, patience_s=patience_s)
    kinds = [kind for kind, c in registry().items() if not c.local and len(c.strategies) > 1]
    cases = [
        ExchangeCase(kind, strategy, nbytes, ratios)
        for kind in kinds
        for ratios in RATIOS
        for nbytes in SIZES
        for strategy in _strategies(found.fleet, kind)
    ]
    measured = measure_on(RANKS, Request(tuple(cases), (), 7, patience_s))
    seconds = {case: median(s) for case, s in zip(cases, measured.exchange_s, strict=True)}
    rows: list[dict[str, Any]] = []
    for kind in kinds:
        for ratios in RATIOS:
            swept = sweep_collectives(found.fleet, kind, SIZES, ratios)
            for nbytes, predicted in zip(SIZES, swept, strict=True):
                timed = [replace(r, measured_s=seconds[_case(kind, r, nbytes, ratios)]) for r in predicted]
                rows.append(_row(kind, ratios, nbytes, timed))
                table(rows[-1:], header=len(rows) == 1)
    kind, ratios = PICTURED
    swept = tuple(
        tuple(replace(r, measured_s=seconds[_case(kind, r, nbytes, ratios)]) for r in predicted)
        for nbytes, predicted in zip(SIZES, sweep_collectives(found.fleet, kind, SIZES, ratios), strict=True)
    )
    changes = crossovers(found.fleet, kind, SIZES[0], SIZES[-1], ratios)
    picture = Comparison(kind, found.fleet, ratios, SIZES, swept, changes)
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
    loads = {"calibration": found.others, "measurement": measured.others}
    markdown("collectives", summary)
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
