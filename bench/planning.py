"""How long planning takes, against the time JAX takes to trace the same step.

    python -m bench planning [--repeat 3] [--fleet hap_testbed]

Every figure comes from a fresh process: one cold trace, one plan. Written to bench/results/planning.json
with the machine's load, medians over the repetitions.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from bench.record import EXAMPLES, FLEETS, table, write

MODELS = (
    "gpt2.py:small",
    "gpt2.py:small_scan",
    "vit.py:base",
    "bert.py:base",
    "bert_moe.py:base",
    "vgg19.py:base",
)


def plan_once(model: str, fleet: str) -> dict[str, Any]:
    """The plan object of one fresh `shardwright plan --json`."""
    command = [sys.executable, "-m", "shardwright", "plan", str(EXAMPLES / model)]
    command += ["--fleet", str(FLEETS / f"{fleet}.yaml"), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def main(repeat: int = 3, fleet: str = "hap_testbed") -> Path:
    """Plan every full-size example `repeat` times, and write the medians."""
    rows: list[dict[str, Any]] = []
    for model in MODELS:
        plans = [plan_once(model, fleet) for _ in range(repeat)]
        stats = [p["stats"] for p in plans]
        trace_s = statistics.median(s["trace_s"] for s in stats)
        planning_s = statistics.median(s["space_s"] + s["search_s"] + s["ratio_s"] for s in stats)
        first = plans[0]
        rows.append(
            {
                "model": model,
                "fleet": fleet,
                "equations": first["stats"]["equations"],
                "choices": first["stats"]["choices"],
                "trace_s": trace_s,
                "planning_s": planning_s,
                "planning_over_trace": planning_s / trace_s,
                "cost_s": first["cost_s"],
                "bound_s": first["bound_s"],
                "gap": first["gap"],
                "fits": first["fits"],
            }
        )
        table(rows[-1:], header=len(rows) == 1)
    return write("planning", rows)
