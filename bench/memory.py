"""The symbolic profile against JAX and XLA, on the six examples, tiny and at full size.

    python -m bench memory-steps memory-plans memory-frontier

Per example: time to trace and to profile; peak bytes against `memory_analysis()` of the step that XLA
compiles with its state donated (nothing is run); bytes of the state against its leaves. Then the same under
plans on three fleets, and time against budget (`bench/memory_plans.py`). Each part is written to
bench/results/memory_PART.json and .md, and shown in docs/memory.md; the last draws docs/memory-frontier.svg.
"""

from __future__ import annotations

import statistics
import time
import warnings
from pathlib import Path
from typing import Any

import jax

from bench.memory_plans import all_rows, draw, frontier, summary
from bench.record import EXAMPLES, markdown, show, table, write
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


def steps(repeat: int = 3) -> Path:
    """The step on one device."""
    rows: list[dict[str, Any]] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for target in FACTORIES:
            rows.append(row(target, repeat))
            table(rows[-1:], header=len(rows) == 1)
    return _written("memory_steps", rows)


def plans() -> Path:
    """Every kind of device of every plan."""
    rows: list[dict[str, Any]] = []
    for some in all_rows():
        table(some, header=not rows)
        rows += some
    markdown("memory_plans", summary(rows))
    show("memory_plans", "memory.md")
    return write("memory_plans", rows)


def budgets() -> Path:
    """Time against budget, and its picture."""
    rows: list[dict[str, Any]] = []
    for point in frontier():
        rows.append(point)
        table(rows[-1:], header=len(rows) == 1)
    draw(rows)
    return _written("memory_frontier", rows)


def _written(name: str, rows: list[dict[str, Any]]) -> Path:
    markdown(name, rows)
    show(name, "memory.md")
    return write(name, rows)
