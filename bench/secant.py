"""What it costs to price a sharded contraction at one rate for all shares (`cost/model.py`).

    python -m bench secant

Every contraction of GPT-2 small, cut in each way its rule allows, is priced on four devices of a type as the
planner does, by the rate at the even share, and by the kernel model at the local shape of other shares. A
row per type and share: mean error weighted by time, median and 90th percentile of the unweighted ones, and
the seconds that pricing took. Written to bench/results/secant.json.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np

from bench.record import EXAMPLES, table, write
from shardwright.cost.fleet import Fleet
from shardwright.cost.kernels.contractions import like_linear, product_sizes, sharded_size
from shardwright.cost.kernels.seconds import products_s
from shardwright.cost.model import CostModel
from shardwright.cost.traffic import Traffic
from shardwright.factory import load_factory
from shardwright.ir.graph import Equation
from shardwright.ir.registry import rule_of
from shardwright.ir.rules import Signature, flop_count, signatures
from shardwright.ir.trace import trace

TYPES = ("A100-PCIE-40GB", "V100-PCIE-32GB", "P100-PCIE-16GB", "T4")
SHARES = (0.03125, 0.125, 0.375, 0.5, 0.75, 0.9375)


def _model(name: str) -> CostModel:
    link = {"bandwidth": "12 GB/s", "latency": "10 us"}
    node = {"devices": [{"type": name, "count": 4}], "link": link}
    return CostModel(Fleet.from_dict({"name": name, "nodes": [node]}))


def _cuts(equations: list[Equation]) -> dict[tuple[object, ...], tuple[Equation, Signature]]:
    """One equation for each product and way to cut it."""
    found: dict[tuple[object, ...], tuple[Equation, Signature]] = {}
    for equation in equations:
        rule = rule_of(equation)
        sizes = product_sizes(equation, flop_count(rule, equation))
        for signature in signatures(rule, equation) if sizes else ():
            if (cut := sharded_size(signature)) is not None:
                found.setdefault((sizes, cut, like_linear(equation)), (equation, signature))
    return found


def main() -> Path:
    """Compare, print and write."""
    step, args = load_factory(f"{EXAMPLES / 'gpt2.py'}:small")
    cuts = _cuts(list(trace(step, *args).graph.all_equations()))
    rows: list[dict[str, Any]] = []
    for name in TYPES:
        model = _model(name)
        (device,) = model.types
        dtype = "tf32" if device.tf32_flop_per_s else "float32"
        began = time.perf_counter()
        prices = {key: model.kernel(*entry, Traffic((True,) * 2, (True,))) for key, entry in cuts.items()}
        pricing_s = time.perf_counter() - began
        for share in SHARES:
            exact = np.array(
                [
                    products_s([device], [dtype], [_local(key, share)], linear=bool(key[2]))[0, 0]
                    for key in prices
                ]
            )
            parts = [_part(key, share) for key in prices]
            secant = np.array(
                [
                    price.per_class(np.array([part]))[0]
                    for part, price in zip(parts, prices.values(), strict=True)
                ]
            )
            secant -= device.launch_s
            error = np.abs(secant / exact - 1)
            rows.append(
                {
                    "type": name,
                    "share": share,
                    "products": len(prices),
                    "by time %": round(100 * float((error * exact).sum() / exact.sum()), 1),
                    "median %": round(100 * float(np.median(error)), 1),
                    "90th %": round(100 * float(np.quantile(error, 0.9)), 1),
                    "pricing ms": round(1e3 * pricing_s, 1),
                }
            )
            table(rows[-1:], header=len(rows) == 1)
    return write("secant", rows)


def _local(key: tuple[Any, ...], share: float) -> tuple[int, ...]:
    sizes, cut, _ = key
    return tuple(max(round(size * share), 1) if i == cut else size for i, size in enumerate(sizes))


def _part(key: tuple[Any, ...], share: float) -> float:
    sizes, cut, _ = key
    return _local(key, share)[cut] / sizes[cut]


if __name__ == "__main__":
    main()
