"""`python -m bench [NAME…]`: run benchmarks; without a name, all of them. Results go to bench/results/."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from bench import accuracy, baselines, collectives, memory, runtime, search, secant, stages, testbed

BENCHMARKS: dict[str, Callable[[], Path]] = {
    "search": search.main,
    "baselines": baselines.main,
    "secant": secant.main,
    "stages": stages.main,
    "accuracy": accuracy.main,
    "collectives": collectives.main,
    "testbed": testbed.main,
    "memory-steps": memory.steps,
    "memory-plans": memory.plans,
    "memory-frontier": memory.budgets,
    "memory-refused": memory.refusals,
    "runtime": runtime.main,
}


def main(names: list[str]) -> None:
    """Run the named benchmarks in order."""
    unknown = [name for name in names if name not in BENCHMARKS]
    if unknown:
        sys.exit(f"bench: no benchmark {', '.join(unknown)}; there are {', '.join(BENCHMARKS)}")
    for name in names or list(BENCHMARKS):
        print(f"== {name}", flush=True)
        print(f"written to {BENCHMARKS[name]().relative_to(Path.cwd())}")


if __name__ == "__main__":
    main(sys.argv[1:])
