"""Plans beside the best of the baselines, by the same prices: models × fleets.

    python -m bench baselines

A plan is never to be dearer than the cheapest baseline that fits, on as many mesh axes as the baseline. The
fleets have one to four classes of devices, nodes of equal and unequal size, and slow and fast networks.
Written to bench/results/baselines.json, and as a table of ratios (cost of the best fitting baseline over the
plan's, at least 1; "none fits" where no baseline does) to baselines.md.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.record import EXAMPLES, FLEETS, markdown, table, write
from shardwright import Fleet, baselines, synthesize
from shardwright.factory import load_factory

MODELS: Mapping[str, str] = {
    "gpt2": "gpt2.py:small",
    "gpt2 scanned": "gpt2.py:small_scan",
    "vit": "vit.py:base",
    "bert": "bert.py:base",
    "bert_moe": "bert_moe.py:base",
    "vgg19": "vgg19.py:base",
    "gpt2 tiny": "gpt2.py:tiny",
    "bert_moe tiny": "bert_moe.py:tiny",
}


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
        _fleet("1 + 3, 1 Gbit/s", "1 Gbit/s", _node("12 GB/s", (a100, 1)), _node("12 GB/s", (t4, 3))),
        _fleet(
            "2 + 3 mixed inside",
            "25 Gbit/s",
            _node("12 GB/s", (a100, 1), (t4, 1)),
            _node("12 GB/s", (v100, 3)),
        ),
        _fleet("2 × 8, 10 Gbit/s", "10 Gbit/s", _node("130 GB/s", (v100, 8)), _node("16 GB/s", (p100, 8))),
        _fleet("2 × 8, 200 Gbit/s", "200 Gbit/s", _node("130 GB/s", (v100, 8)), _node("16 GB/s", (p100, 8))),
        _fleet(
            "four classes", "100 Gbit/s", *(_node("12 GB/s", (kind, 4)) for kind in (a100, v100, p100, t4))
        ),
    ]
    return {fleet.name: fleet for fleet in found} | {
        name: Fleet.load(FLEETS / f"{name}.yaml") for name in ("a100_t4", "hap_testbed")
    }


def row_of(model: str, where: str, fleet: Fleet) -> dict[str, Any]:
    """A plan and its baselines."""
    step, args = load_factory(f"{EXAMPLES}/{MODELS[model]}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plan = synthesize(step, *args, fleet=fleet)
        best = baselines(step, *args, fleet=fleet).best_fitting()
    return {
        "model": model,
        "fleet": where,
        "plan_s": plan.cost_s,
        "fits": plan.fits,
        "axes": plan.axes,
        "used": f"{len(plan.used)} of {len(plan.ratios)}",
        "gap": plan.gap,
        "best": "none fits" if best is None else best.name,
        "best_s": None if best is None else best.cost_s,
        "ratio": None if best is None else best.cost_s / plan.cost_s,
    }


def main() -> Path:
    """All models on all fleets; fails where a baseline is cheaper than the plan."""
    found = fleets()
    rows: list[dict[str, Any]] = []
    for model in MODELS:
        for where, fleet in found.items():
            rows.append(row_of(model, where, fleet))
            table(rows[-1:], header=len(rows) == 1)
    shown = [
        {"model": model}
        | {r["fleet"]: "none fits" if r["ratio"] is None else r["ratio"] for r in rows if r["model"] == model}
        for model in MODELS
    ]
    markdown("baselines", shown)
    path = write("baselines", rows)
    if worse := [f"{r['model']} on {r['fleet']}" for r in rows if r["ratio"] is not None and r["ratio"] < 1]:
        raise SystemExit(f"a baseline is cheaper than the plan: {'; '.join(worse)}")
    return path
