"""A profile as tables and as a picture: memory over time, and a treemap of what layers hold at the peak."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Group
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from shardwright.cost.profile import ROLES, LayerRow, StepProfile
from shardwright.cost.quantity import size
from shardwright.profile_api import Profile
from shardwright.reports.picture import figure, save

#: Layers that the table shows; the rest is one line.
_MOST_LAYERS = 24

Box = tuple[float, float, float, float]


def layout(profile: Profile) -> Group:
    """The printout."""
    parts: list[Text | Padding] = [_head(profile.step), Padding(_layers(profile.step), (0, 0, 1, 0))]
    if profile.devices:
        parts.append(Padding(_devices(profile), (0, 0, 1, 0)))
    return Group(*parts)


#: Compilers in words.
_BY = {
    "cpu": "XLA's CPU compiler",
    "gpu": "XLA's GPU compiler",
    "gpu-float32": "XLA's GPU compiler, for cards without bfloat16,",
}


def _head(step: StepProfile) -> Text:
    lines = (
        f"{len(step.equations):,} equations, {step.flop:.4g} flop",
        f"parameters {size(step.parameter_bytes)}, optimizer {size(step.optimizer_bytes)}, "
        f"gradients {size(step.gradient_bytes)}, data {size(step.data_bytes)}",
        f"saved for the backward pass {size(step.saved_bytes)}"
        + (f", of which {size(step.unread_bytes)} is never read" if step.unread_bytes else ""),
        f"peak {size(step.peak_bytes)}: arguments {size(step.arguments_bytes)}, "
        f"buffers {size(step.scratch_bytes)}, as {_BY[step.compiler]} lays them out",
    )
    return Text("\n".join(lines) + "\n")


def _layers(step: StepProfile) -> Table:
    table = Table(title="by layer", title_justify="left", box=None, pad_edge=False)
    columns = (
        "layer",
        "flop",
        "read",
        "written",
        "parameters",
        "gradients",
        "optimizer",
        "saved",
        "at the peak",
    )
    for name in columns:
        table.add_column(name, justify="left" if name == "layer" else "right")
    shown = sorted(step.layers, key=lambda row: -row.held_bytes)[:_MOST_LAYERS]
    for row in step.layers:
        if row in shown:
            table.add_row(row.layer, *_cells([row]))
    rest = [row for row in step.layers if row not in shown]
    if rest:
        table.add_row(f"{len(rest)} others", *_cells(rest))
    return table


def _cells(rows: Sequence[LayerRow]) -> list[str]:
    columns = (
        "read_bytes", "written_bytes", "parameter_bytes", "gradient_bytes", "optimizer_bytes", "saved_bytes",
        "held_bytes",
    )  # fmt: skip
    flop = f"{sum(row.flop for row in rows):.3g}"
    return [flop, *(size(sum(getattr(row, name) for row in rows)) for name in columns)]


def _devices(profile: Profile) -> Table:
    table = Table(title="under the plan", title_justify="left", box=None, pad_edge=False)
    for name in ("devices", "type", "share", "arguments", "peak", "of memory"):
        table.add_column(name, justify="right" if name not in ("devices", "type") else "left")
    for device in profile.devices:
        names = (
            device.devices[0] if len(device.devices) == 1 else f"{device.devices[0]} … {device.devices[-1]}"
        )
        peak = device.memory.peak_bytes
        cells = (size(device.memory.arguments_bytes), size(peak), f"{peak / device.limit_bytes:.0%}")
        table.add_row(names, device.type, f"{device.share:.3g}", *cells)
    return table


def plot(profile: Profile, path: str) -> None:
    """Draw memory over time, and what is held at the peak by layer."""
    step = profile.step
    drawn = figure(10, 4.5)
    over, tree = drawn.subplots(1, 2)
    times = list(range(len(step.over_time)))
    over.stackplot(times, *(step.over_time / 2**30).T, labels=ROLES, step="post")
    over.set_xlabel("kernels, in the order in which they run")
    over.set_ylabel("GiB alive")
    over.set_title(f"peak {size(step.peak_bytes)}")
    over.legend(loc="upper left", fontsize="small")
    rows = [row for row in sorted(step.layers, key=_weight, reverse=True) if _weight(row) > 0]
    for number, (row, (x, y, w, h)) in enumerate(zip(rows, squares([_weight(r) for r in rows]), strict=True)):
        _draw(tree, number, row, (x, y, w, h))
    tree.set_xlim(0, 1)
    tree.set_ylim(0, 1)
    tree.set_axis_off()
    tree.set_title("parameters, optimizer and buffers at the peak, by layer")
    save(drawn, path)


def _weight(row: LayerRow) -> float:
    return float(row.parameter_bytes + row.optimizer_bytes + row.held_bytes)


def _draw(axes: Any, number: int, row: LayerRow, box: Box) -> None:
    from matplotlib.patches import Rectangle

    x, y, w, h = box
    axes.add_patch(Rectangle((x, y), w, h, facecolor=f"C{number % 10}", edgecolor="white", alpha=0.75))
    if w > 0.09 and h > 0.04:
        text = f"{row.layer}\n{size(_weight(row))}" if h > 0.09 else row.layer
        axes.text(x + w / 2, y + h / 2, text, ha="center", va="center", fontsize=7)


def squares(weights: Sequence[float]) -> Iterator[Box]:
    """A treemap of the unit square: boxes of areas in proportion to descending weights, near squares.

    Rows are filled as long as their worst aspect ratio gets better (Bruls, Huizing and van Wijk 2000).
    """
    x, y, w, h = 0.0, 0.0, 1.0, 1.0
    left = list(weights)
    scale = 1.0 / sum(left) if left else 1.0
    areas = [weight * scale for weight in left]
    start = 0
    while start < len(areas):
        side = min(w, h)
        end = start + 1
        while end < len(areas) and _worst(areas[start : end + 1], side) <= _worst(areas[start:end], side):
            end += 1
        thick = sum(areas[start:end]) / side if side else 0.0
        along = 0.0
        for area in areas[start:end]:
            length = area / thick if thick else 0.0
            yield (x, y + along, thick, length) if w >= h else (x + along, y, length, thick)
            along += length
        x, y, w, h = (x + thick, y, w - thick, h) if w >= h else (x, y + thick, w, h - thick)
        start = end


def _worst(areas: Sequence[float], side: float) -> float:
    thick = sum(areas) / side if side else 0.0
    if not thick:
        return float("inf")
    return max(max(thick * thick / area, area / (thick * thick)) for area in areas)
