"""The symbolic profile against JAX and XLA, on the six examples, tiny and at full size.

    python -m bench memory

Per example: time to trace and to profile; peak bytes against `memory_analysis()` of the step that XLA
compiles with its state donated (nothing is run); bytes of the state against its leaves. Then the same under
plans on three fleets, and time against budget (`bench/memory_plans.py`). Written to bench/results/memory.json
and .md, and docs/memory-frontier.svg.
"""

from __future__ import annotations

import statistics
import time
import warnings
from pathlib import Path
from typing import Any

import jax

from bench.memory_plans import all_rows, draw, frontier
from bench.record import EXAMPLES, markdown, table, write
from shardwright.cost.profile import profile_step
from shardwright.factory import load_factory
from shardwright.ir.trace import Traced, trace

FACTORIES = (
    "gpt2:tiny", "gpt2:tiny_scan", "vit:tiny", "bert:tiny", "bert_moe:tiny", "vgg19:tiny",
    "gpt2:small", "gpt2:small_scan", "vit:base", "bert:base", "bert_moe:base", "vgg19:base",
)  # fmt: skip


def xla_bytes(step: Any, args: tuple[Any, ...], traced: Traced) -> int:
    """Arguments, results that are not written over them, and buffers of the compiled step."""
    state = tuple(range(len(traced.state_names)))
    lowered = jax.jit(step, donate_argnums=state, keep_unused=True).lower(*args)
    found = lowered.compile().memory_analysis()
    fresh = found.output_size_in_bytes - found.alias_size_in_bytes
    return found.argument_size_in_bytes + fresh + found.temp_size_in_bytes


def leaf_bytes(tree: Any) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def row(target: str, repeat: int) -> dict[str, Any]:
    """Medians of times over `repeat` traces and profiles; the first trace, cold, does not count."""
    module, factory = target.split(":")
    step, args = load_factory(f"{EXAMPLES / module}.py:{factory}")
    trace_s: list[float] = []
    profile_s: list[float] = []
    for _ in range(repeat + 1):
        jax.clear_caches()
        traced = trace(step, *args)
        start = time.perf_counter()
        found = profile_step(traced.graph)
        profile_s.append(time.perf_counter() - start)
        trace_s.append(traced.trace_s)
    actual = xla_bytes(step, args, traced)
    return {
        "example": target,
        "equations": len(found.equations),
        "trace_s": statistics.median(trace_s[1:]),
        "profile_s": statistics.median(profile_s[1:]),
        "state_exact": found.parameter_bytes == leaf_bytes(args[0])
        and found.optimizer_bytes == leaf_bytes(args[1]),
        "saved_bytes": found.saved_bytes,
        "peak_bytes": found.peak_bytes,
        "xla_bytes": actual,
        "peak_over_xla": found.peak_bytes / actual,
    }


def main(repeat: int = 3) -> Path:
    """All rows, written as JSON and as a table."""
    rows: list[dict[str, Any]] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for target in FACTORIES:
            rows.append(row(target, repeat))
            table(rows[-1:], header=len(rows) == 1)
    plans, points = all_rows(), frontier()
    markdown("memory", rows)
    markdown("memory_plans", plans)
    markdown("memory_frontier", points)
    draw(points)
    return write("memory", rows, repeat=repeat, plans=plans, frontier=points)


if __name__ == "__main__":
    main()
