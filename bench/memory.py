"""The symbolic profile against JAX and XLA, on the six examples, tiny and at full size.

    python -m bench memory-steps memory-plans memory-frontier memory-refused
    python -m bench.memory PART [PIECE…]        in pieces of a minute: steps vit:tiny, frontier 0.7 0.55

Per example: time to trace and to profile; peak bytes against `memory_analysis()` of the step that XLA
compiles with its state donated (nothing is run); bytes of the state against its leaves. Then the same under
plans on three fleets, time against budget, and the answer where nothing fits (`bench/memory_plans.py`). Each
part is written to bench/results/memory_PART.json and .md, and shown in docs/memory.md; the frontier is drawn,
in docs/memory-frontier.svg.
"""

from __future__ import annotations

import statistics
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax

from bench.memory_plans import (
    FLEETS,
    PARTS,
    REFUSED,
    STEPS,
    draw,
    frontier,
    plan_rows,
    refused,
    refused_summary,
    summary,
)
from bench.pieces import Piece, measured
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
    return xla_bytes_of(lowered.compile())


def xla_bytes_of(compiled: Any) -> int:
    """The same of a step that is compiled already."""
    found = compiled.memory_analysis()
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


def steps(wanted: Sequence[str] = (), repeat: int = 3) -> Path:
    """The step on one device."""
    pieces = {target: partial(_quietly, partial(row, target, repeat)) for target in FACTORIES}
    return _written("memory_steps", wanted, pieces, _steps_summary)


def _steps_summary(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What people read: sizes in MiB, and the time to profile as a part of that to trace."""
    return [
        {
            "example": row["example"],
            "equations": row["equations"],
            "profile / trace": f"{row['profile_s'] / row['trace_s']:.2f}",
            "saved, MiB": f"{row['saved_bytes'] / 2**20:,.1f}",
            "peak, MiB": f"{row['peak_bytes'] / 2**20:,.1f}",
            "peak / XLA's": f"{row['peak_over_xla']:.3f}",
            "state exact": "yes" if row["state_exact"] else "no",
        }
        for row in rows
    ]


def plans(wanted: Sequence[str] = ()) -> Path:
    """Every kind of device of every plan."""
    pairs = [(target, name) for target in STEPS for name in FLEETS]
    pieces = {f"{t}@{f}": partial(_quietly, partial(plan_rows, t, f)) for t, f in pairs}
    return _written("memory_plans", wanted, pieces, summary)


def budgets(wanted: Sequence[str] = ()) -> Path:
    """Time against budget, and its picture."""
    pieces = {f"{part:g}": partial(_quietly, partial(frontier, part)) for part in PARTS}
    return _written("memory_frontier", wanted, pieces, draw)


def refusals(wanted: Sequence[str] = ()) -> Path:
    """What fits nowhere, and the answer to it."""
    pieces = {REFUSED: partial(_quietly, partial(refused, REFUSED))}
    return _written("memory_refused", wanted, pieces, refused_summary)


def _quietly(piece: Piece) -> list[dict[str, Any]]:
    """Its rows, printed; what runs replicated is said elsewhere."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = piece()
    rows = found if isinstance(found, list) else [found]
    table(rows, header=True)
    return rows


def _written(
    name: str,
    wanted: Sequence[str],
    pieces: Mapping[str, Piece],
    shown: Callable[[list[dict[str, Any]]], list[dict[str, Any]]] = list,
) -> Path:
    rows = [row for found in measured(name, pieces, wanted).values() for row in found]
    markdown(name, shown(rows))
    show(name, "memory.md")
    return write(name, rows)


#: What `python -m bench.memory` measures in pieces.
MEASURED = {"steps": steps, "plans": plans, "frontier": budgets, "refused": refusals}

if __name__ == "__main__":
    part, *wanted = sys.argv[1:] or [""]
    if part not in MEASURED:
        sys.exit(f"bench.memory: no part {part!r}; there are {', '.join(MEASURED)}")
    print(f"written to {MEASURED[part](wanted)}")
