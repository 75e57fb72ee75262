"""Runs as a process of its own, with as many devices as XLA_FLAGS say.

`python spmd_checks.py FOLDER [every]`: `every` combination of what can be combined, or some of each.

Leaves `summary.json` in the folder; the exit status is 1 where anything is wrong.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections import Counter, defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from cases import DTYPES, Case, before, cases, expected, ratio_sets, same
from greedy import build, several
from jax.sharding import PartitionSpec
from steps import STEPS, starts

from shardwright.backends.layout import from_numpy, to_numpy
from shardwright.backends.spmd import moves
from shardwright.backends.spmd.executable import SpmdExecutable
from shardwright.backends.spmd.layout import AXIS, Layout, PaddedArray, mesh_of
from shardwright.backends.spmd.moves import lowerings, move, moved
from shardwright.ir.dtypes import dtype_of, is_key
from shardwright.ir.graph import TensorType
from shardwright.ir.placement import Shard
from shardwright.ir.trace import trace

DEVICES = jax.device_count()

checked: list[str] = []
failures: list[str] = []


def check(condition: bool, what: str) -> None:
    checked.append(what)
    if not condition:
        failures.append(what)


# -- collectives ------------------------------------------------------------------------------------

#: Cases compiled as one program.
TOGETHER = 80


def padded(array: Any, shape: tuple[int, ...], tensor: TensorType) -> Any:
    """A local array in the shape that all devices have, as numpy; what pads it must not matter."""
    key = is_key(tensor.dtype)
    result = np.full((*shape, 2) if key else shape, 7, np.uint32 if key else dtype_of(tensor.dtype))
    if array is not None:
        result[tuple(map(slice, array.shape))] = to_numpy(array)
    return result


def check_moves() -> None:
    by_ratios: defaultdict[tuple[float, ...], list[Case]] = defaultdict(list)
    seen: set[object] = set()
    tried: Counter[object] = Counter()
    every = "every" in sys.argv
    for case in cases(DEVICES, local=False, every=every):
        lowering = lowerings()[case.move.kind, case.move.strategy]
        # Strategies that differ in rounds alone are one lowering.
        once = replace(case.move, strategy=""), case.tensor, case.ratios, lowering
        # How a dtype travels, and where units end, does not depend on the number of devices.
        plain = case.tensor.dtype in DTYPES[:2] and ":" not in f"{case.move.pre}{case.move.post}"
        # Strategies in turn are at other ratios, of which one will do for all that are lowered alike.
        lowered = case.move.kind, case.move.pre, case.move.post, case.move.root is None, case.tensor, lowering
        enough = not every and tried[lowered] > 1 + (case.move.root is not None)
        if once not in seen and not enough and (plain or (DEVICES == 4 and case.ratios == ratio_sets(4)[0])):
            seen.add(once)
            tried[lowered] += 1
            by_ratios[case.ratios].append(case)
    limits = moves.SLOT_BYTES, moves.SLOT_GAIN
    for ratios, alike in by_ratios.items():
        layout = Layout(mesh_of(DEVICES), ratios)
        for first in range(0, len(alike), TOGETHER):
            some = alike[first : first + TOGETHER]
            if every or ratios == ratio_sets(DEVICES)[0]:  # where all of them are
                check_some(some, layout, "alone", alone)
            check_some(some, layout, "together", together)
            # These are all small: as if they were large.
            large = [case for case in some if case.move.kind == "all_gather"]
            if large and len(set(ratios)) > 1:
                moves.SLOT_BYTES, moves.SLOT_GAIN = 0, 0
                check_some(large, layout, "in slots", alone)
                moves.SLOT_BYTES, moves.SLOT_GAIN = limits


def alone(several: list[Case], layout: Layout, here: Any, values: Any) -> list[Any]:
    pairs = zip(several, values, strict=True)
    return [move(case.move, case.tensor, layout, here, value) for case, value in pairs]


def together(several: list[Case], layout: Layout, here: Any, values: Any) -> list[Any]:
    types = {number: case.tensor for number, case in enumerate(several)}
    numbered = [replace(case.move, value=number) for number, case in enumerate(several)]
    return moved(numbered, types, layout, here, values)


def check_some(several: list[Case], layout: Layout, how: str, carried_out: Any) -> None:
    arrays = [before(case) for case in several]
    held: list[Any] = []
    for case, local in zip(several, arrays, strict=True):
        shape = layout.padded(
            case.tensor, case.move.pre, None if case.move.root is not None else case.move.group
        )
        stacked = np.stack([padded(x, shape, case.tensor) for x in local])
        held.append(from_numpy(stacked, case.tensor.dtype))

    def run(*values: Any) -> tuple[Any, ...]:
        here = jax.lax.axis_index(AXIS)
        results = carried_out(several, layout, here, [x[0] for x in values])
        return tuple(result[None] for result in results)

    spec = PartitionSpec(AXIS)
    mapped = jax.shard_map(run, mesh=layout.mesh, in_specs=spec, out_specs=spec, check_vma=False)
    results = [to_numpy(x) for x in jax.jit(mapped)(*held)]
    for case, local, result in zip(several, arrays, results, strict=True):
        post = case.move.post
        for device, wanted in enumerate(expected(case, local)):
            if wanted is None:
                continue
            got = result[device]
            if isinstance(post, Shard):
                length = layout.lengths(case.tensor, post, case.move.group)[device]
                got = got[(*[slice(None)] * post.dim, slice(length))]
            check(same(got, wanted), f"{case} on {device}, {how}")


# -- programs ---------------------------------------------------------------------------------------


def close(got: Any, wanted: Any, tolerance: float) -> bool:
    a, b = np.asarray(got, np.float64), np.asarray(wanted, np.float64)
    scale = float(np.max(np.abs(b), initial=1e-3))
    return a.shape == b.shape and float(np.max(np.abs(a - b), initial=0.0)) <= tolerance * scale


#: (step, start, seed of the builder, ratios): even ones and uneven ones, the latter with random programs too.
PROGRAMS: dict[int, list[tuple[str, str, int | None, tuple[float, ...]]]] = {
    1: [("mlp", "zero", None, (1.0,))],
    2: [
        ("controlled", "last", None, (0.5, 0.5)),
        ("mlp", "data", 0, (0.7, 0.3)),
        ("half", "zero", 1, (0.7, 0.3)),
    ],
    3: [
        ("scanned", "zero", None, (0.5, 0.0, 0.5)),
        ("batched", "data", None, (0.7, 0.0, 0.3)),
        ("mlp", "last", 2, (0.5, 0.0, 0.5)),
    ],
    4: [
        ("scanned", "last", None, (0.25,) * 4),
        ("mlp", "data", None, (0.5, 0.25, 0.125, 0.125)),
        ("mlp", "zero", 3, (0.25,) * 4),
        ("controlled", "zero", 4, (0.4, 0.1, 0.2, 0.3)),
        ("batched", "data", 6, (0.4, 0.1, 0.2, 0.3)),
        ("scanned", "data", 5, (0.4, 0.1, 0.2, 0.3)),
    ],
}


def check_programs() -> None:
    for number, (name, start, seed, ratios) in enumerate(PROGRAMS[DEVICES]):
        step, args = STEPS[name]()
        traced = trace(step, *args)
        state = {inp: out for out, inp in traced.graph.state.items()}
        rng = None if seed is None else random.Random(seed)
        program = build(traced.graph, starts(traced.graph)[start], rng)
        if rng is not None:
            program = several(program, traced.graph, DEVICES, rng)
        run, single = SpmdExecutable(traced, program, ratios, donate=number % 2 == 1), jax.jit(step)
        tolerance = 2e-2 if name == "half" else 1e-5
        flat, alone = jax.tree.leaves(args), jax.tree.leaves(args)
        for turn in ("first", "second"):
            got = run(*flat)
            wanted = jax.tree.leaves(single(*jax.tree.unflatten(traced.in_tree, alone)))
            for i, (x, y) in enumerate(zip(got, wanted, strict=True)):
                what = f"{name} {start} {ratios} {turn} output {i}"
                check(close(x, y, tolerance), what)
                if isinstance(x, PaddedArray):
                    check(close(x.gather(), y, tolerance), f"{what}, gathered")
            flat = [got[state[i]] if i in state else x for i, x in enumerate(flat)]
            alone = [wanted[state[i]] if i in state else x for i, x in enumerate(alone)]


def main() -> int:
    took: dict[str, float] = {}
    for part in (check_moves, check_programs):
        start = time.perf_counter()
        part()
        took[part.__name__] = time.perf_counter() - start
    summary = {
        "checked": len(checked),
        "failures": failures[:50],
        "seconds": took,
        "cpu": time.process_time(),
    }
    (Path(sys.argv[1]) / "summary.json").write_text(json.dumps(summary))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
