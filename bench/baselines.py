"""Plans beside the best of the baselines, by the same prices: models × fleets.

    python -m bench baselines
    python -m bench.baselines [PIECE…]      MODEL@AXES, such as gpt2-tiny@2: some minutes each at full size

A plan is never to be dearer than the cheapest baseline that fits, on as many mesh axes as the baseline. The
fleets have one to four classes of devices, nodes of equal and unequal size, and slow and fast networks.
Written to bench/results/baselines.json, and as a table of ratios (cost of the best fitting baseline over the
plan's, at least 1; "none fits" where no baseline does) to baselines.md and docs/baselines.md.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

from bench.pieces import measured
from bench.record import EXAMPLES, FLEETS, markdown, show, table, write
from shardwright import Fleet, baselines, synthesize
from shardwright.factory import load_factory
from shardwright.synth.grid.alternate import is_mesh

MODELS: Mapping[str, str] = {
    "gpt2-tiny": "gpt2.py:tiny",
    "gpt2-tiny-scanned": "gpt2.py:tiny_scan",
    "llama3-tiny": "llama3.py:tiny",
    "vit-tiny": "vit.py:tiny",
    "bert-tiny": "bert.py:tiny",
    "bert_moe-tiny": "bert_moe.py:tiny",
    "vgg19-tiny": "vgg19.py:tiny",
    "resnet50-tiny": "resnet50.py:tiny",
    "gpt2": "gpt2.py:small",
    "gpt2-scanned": "gpt2.py:small_scan",
    "vit": "vit.py:base",
    "bert": "bert.py:base",
    "bert_moe": "bert_moe.py:base",
    "vgg19": "vgg19.py:base",
}

#: Mesh axes of plans and baselines.
AXES: tuple[Literal[1, 2], ...] = (1, 2)


def _node(link: str, *devices: tuple[str, int], count: int = 1) -> dict[str, Any]:
    cards = [{"type": kind, "count": number} for kind, number in devices]
    return {"count": count, "devices": cards, "link": {"bandwidth": link, "latency": "10 us"}}


def _fleet(name: str, network: str, *nodes: Mapping[str, Any]) -> Fleet:
    between = {"bandwidth": network, "latency": "30 us"}
    return Fleet.from_dict({"name": name, "nodes": list(nodes), "network": between})


def fleets() -> dict[str, Fleet]:
    """Eight inventories."""
    a100, v100, p100, t4 = "A100-40GB", "V100-16GB", "P100-16GB", "T4"
    found = [
        _fleet("4 alike, NVLink", "100 Gbit/s", _node("300 GB/s", (a100, 4))),
        _fleet("1 + 3, 1 Gbit", "1 Gbit/s", _node("12 GB/s", (a100, 1)), _node("12 GB/s", (t4, 3))),
        _fleet(
            "2 + 3 mixed inside",
            "25 Gbit/s",
            _node("12 GB/s", (a100, 1), (t4, 1)),
            _node("12 GB/s", (v100, 3)),
        ),
        _fleet("2 × 8, 10 Gbit", "10 Gbit/s", _node("130 GB/s", (v100, 8)), _node("16 GB/s", (p100, 8))),
        _fleet("2 × 8, 200 Gbit", "200 Gbit/s", _node("130 GB/s", (v100, 8)), _node("16 GB/s", (p100, 8))),
        _fleet(
            "four classes", "100 Gbit/s", *(_node("12 GB/s", (kind, 4)) for kind in (a100, v100, p100, t4))
        ),
    ]
    return {fleet.name: fleet for fleet in found} | {
        name: Fleet.load(FLEETS / f"{name}.yaml") for name in ("a100_t4", "hap_testbed")
    }


def row_of(model: str, where: str, fleet: Fleet, axes: Literal[1, 2]) -> dict[str, Any]:
    """A plan and the best baseline that fits, both on so many mesh axes."""
    step, args = load_factory(f"{EXAMPLES}/{MODELS[model]}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plan = synthesize(step, *args, fleet=fleet, axes=axes)
        found = baselines(step, *args, fleet=fleet, axes=axes, plan=plan)
    best = found.best_fitting()
    return {
        "model": model,
        "fleet": where,
        "axes": axes,
        "plan_s": plan.cost_s,
        "fits": plan.fits,
        "used": f"{len(plan.used)} of {len(plan.ratios)}",
        "gap": plan.gap,
        "baselines": len(found),
        "best": "none fits" if best is None else best.name,
        "best_s": None if best is None else best.cost_s,
        "ratio": None if best is None else best.cost_s / plan.cost_s,
    }


def piece(model: str, axes: Literal[1, 2]) -> list[dict[str, Any]]:
    """A model on all fleets; two axes are for those of several nodes."""
    rows: list[dict[str, Any]] = []
    for where, fleet in fleets().items():
        if axes == 1 or is_mesh(fleet):
            rows.append(row_of(model, where, fleet, axes))
            table(rows[-1:], header=len(rows) == 1)
    return rows


def main(wanted: Sequence[str] = ()) -> Path:
    """All models on all fleets, or some; fails where a baseline is cheaper than the plan."""
    every = [(model, axes) for axes in AXES for model in MODELS]
    pieces = {f"{model}@{axes}": partial(piece, model, axes) for model, axes in every}
    found = measured("baselines", pieces, wanted)
    rows = [row for some in found.values() for row in some]
    places = list(fleets())
    shown: list[dict[str, Any]] = []
    for name in found:
        model, axes = name.split("@")
        by_fleet = {row["fleet"]: row for row in rows if row["model"] == model and row["axes"] == int(axes)}
        shown.append({"model": model, "axes": axes} | {w: _cell(by_fleet.get(w)) for w in places})
    markdown("baselines", shown)
    show("baselines", "baselines.md")
    path = write("baselines", rows)
    # Prices are sums of floats in another order.
    worse = [row for row in rows if row["ratio"] is not None and row["ratio"] < 1 - 1e-9]
    if worse:
        names = (f"{row['model']} on {row['fleet']}, axes={row['axes']}" for row in worse)
        raise SystemExit(f"a baseline is cheaper than the plan: {'; '.join(names)}")
    return path


def _cell(row: Mapping[str, Any] | None) -> str:
    """How often a plan's cost goes into that of the best baseline."""
    if row is None:
        return "–"
    return "none fits" if row["ratio"] is None else f"{row['ratio']:.3f}"


if __name__ == "__main__":
    print(f"written to {main(sys.argv[1:])}")
