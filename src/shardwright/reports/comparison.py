"""A comparison of strategies as tables, as plain data and as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Group
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from shardwright.compare import Crossover, StrategyRow
from shardwright.cost.fleet import Fleet
from shardwright.cost.quantity import size
from shardwright.reports.picture import figure, save
from shardwright.reports.units import duration


@dataclass(frozen=True, slots=True)
class Comparison:
    """What was asked, and what came out: rows for each size, ascending, and where the winner changes."""

    collective: str
    fleet: Fleet
    ratios: tuple[float, ...]
    sizes: tuple[int, ...]
    rows: tuple[tuple[StrategyRow, ...], ...]
    crossovers: tuple[Crossover, ...] = ()

    @property
    def measured(self) -> bool:
        """Whether anything was measured."""
        return self.rows[0][0].measured_s is not None

    def to_dict(self) -> dict[str, object]:
        """Plain data for `--json`."""
        return {
            "collective": self.collective,
            "fleet": self.fleet.name,
            "devices": [device.name for device in self.fleet.devices],
            "ratios": list(self.ratios),
            "sizes": [
                {"nbytes": nbytes, "fastest": rows[0].strategy, "rows": [asdict(row) for row in rows]}
                for nbytes, rows in zip(self.sizes, self.rows, strict=True)
            ],
            "crossovers": [asdict(crossover) for crossover in self.crossovers],
        }


def layout(comparison: Comparison) -> Group:
    """The printout: one table for one size, one line per size for several."""
    head = Text(f"{comparison.collective} on {comparison.fleet}, shares {_shares(comparison.ratios)}\n")
    table = _one_size(comparison) if len(comparison.sizes) == 1 else _sweep(comparison)
    parts: list[Text | Padding | Table] = [head, table]
    if len(comparison.sizes) > 1:
        changes = [
            f"from {c.nbytes:,} bytes on {c.after} instead of {c.before}" for c in comparison.crossovers
        ]
        parts.append(Text("\npredicted fastest: " + ("; ".join(changes) or comparison.rows[0][0].strategy)))
    return Group(*parts)


def _shares(ratios: Sequence[float]) -> str:
    if len(set(ratios)) == 1:
        return "even"
    return " ".join(f"{ratio:.3g}" for ratio in ratios)


def _one_size(comparison: Comparison) -> Table:
    table = Table(title=size(comparison.sizes[0]), title_justify="left", box=None, pad_edge=False)
    columns = ("strategy", "predicted", "of the fastest", "on the busiest link")
    for name in (*columns, "measured", "predicted / measured") if comparison.measured else columns:
        table.add_column(name, justify="left" if name == "strategy" else "right")
    (rows,) = comparison.rows
    for row in rows:
        cells = [row.strategy, duration(row.predicted_s), f"{row.predicted_s / rows[0].predicted_s:.2f} ×"]
        cells.append(size(row.link_bytes))
        if row.measured_s is not None:
            cells += [duration(row.measured_s), f"{row.predicted_s / row.measured_s:.2f}"]
        table.add_row(*cells, style="bold" if row is rows[0] else "")
    return table


def _sweep(comparison: Comparison) -> Table:
    table = Table(title="predicted", title_justify="left", box=None, pad_edge=False)
    names = sorted(row.strategy for row in comparison.rows[0])
    table.add_column("bytes", justify="right")
    for name in names:
        table.add_column(name, justify="right")
    table.add_column("fastest")
    if comparison.measured:
        table.title = "predicted, and measured"
        table.add_column("measured fastest")
    for nbytes, rows in zip(comparison.sizes, comparison.rows, strict=True):
        by_name = {row.strategy: row for row in rows}
        cells = [_times(by_name[name]) for name in names]
        table.add_row(size(nbytes), *cells, rows[0].strategy, *_measured_fastest(rows))
    return table


def _times(row: StrategyRow) -> str:
    measured = "" if row.measured_s is None else f" ({duration(row.measured_s)})"
    return duration(row.predicted_s) + measured


def _measured_fastest(rows: Sequence[StrategyRow]) -> list[str]:
    timed = [(row.measured_s, row.strategy) for row in rows if row.measured_s is not None]
    return [min(timed)[1]] if timed else []


def plot(comparison: Comparison, path: str) -> None:
    """Draw seconds by bytes, both logarithmic: predictions as lines, measurements as points."""
    drawn = figure()
    axes: Any = drawn.add_subplot()
    for number, name in enumerate(sorted(row.strategy for row in comparison.rows[0])):
        rows = [next(row for row in rows if row.strategy == name) for rows in comparison.rows]
        colour, dotted = f"C{number}", "o-" if len(rows) == 1 else "-"
        axes.plot(comparison.sizes, [row.predicted_s for row in rows], dotted, color=colour, label=name)
        if comparison.measured:
            axes.plot(comparison.sizes, [row.measured_s for row in rows], "o", color=colour, ms=4)
    for crossover in comparison.crossovers:
        axes.axvline(crossover.nbytes, color="grey", lw=0.8, ls=":")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("bytes of the whole tensor")
    axes.set_ylabel(
        "seconds" + (": lines predicted, points measured" if comparison.measured else ", predicted")
    )
    axes.set_title(f"{comparison.collective} on {comparison.fleet.name}, shares {_shares(comparison.ratios)}")
    axes.grid(alpha=0.3)
    axes.legend()
    save(drawn, path)
