"""Weak types are as under `jax.jit`: `python weak_checks.py BACKEND [FOLDER]`, on two ranks, or two devices.

Raises where something differs.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import shardwright
from shardwright import Fleet

STARTS: dict[str, Any] = {
    "numbers": {"rate": 0.1, "count": 0},
    "strong arrays": {"rate": jnp.float32(0.1), "count": jnp.int32(0)},
    "numpy's": {"rate": np.float64(0.1), "count": np.int64(0)},
    "weak arrays": {"rate": jnp.asarray(0.1), "count": jnp.asarray(0)},
    "what becomes another type": {"rate": 1, "count": True},
}

traced = 0


def step(state: Any, x: jax.Array) -> Any:
    global traced
    traced += 1
    gradient = jax.grad(lambda w: jnp.mean((x @ w) ** 2))(state["w"])
    new = {
        "w": state["w"] - state["rate"] * gradient,
        "rate": state["rate"] * 0.99,
        "count": state["count"] + 1,
        "many": state["many"] * 0.5,  # typed weakly, and no scalar
        "key": jax.random.split(state["key"])[0],
    }
    return new, {"rate": state["rate"] * 2, "sum": jnp.sum(state["w"]), "many": state["many"] + 1}


def fleet(*speeds: float) -> Fleet:
    kinds = [
        {"name": f"d{s:g}", "flops": f"{s} MFLOP/s", "memory_bandwidth": f"{2 * s} MB/s", "memory": "1 GB"}
        for s in speeds
    ]
    node = {"devices": [{"type": k} for k in kinds], "link": {"bandwidth": "400 GB/s", "latency": "100 ns"}}
    return Fleet.from_dict({"name": "slow", "nodes": [node]})


def types(tree: Any) -> list[tuple[Any, ...]]:
    return [
        (leaf.shape, str(leaf.dtype), getattr(leaf, "weak_type", False)) for leaf in jax.tree.leaves(tree)
    ]


def same(what: str, got: Any, wanted: Any) -> None:
    assert types(got) == types(wanted), f"{what}: {types(got)}, not {types(wanted)}"
    whole = shardwright.gather(got)
    assert types(whole) == types(wanted), f"{what}, gathered: {types(whole)}, not {types(wanted)}"
    for a, b in zip(jax.tree.leaves(whole), jax.tree.leaves(wanted), strict=True):
        if not jnp.issubdtype(b.dtype, jax.dtypes.prng_key):
            np.testing.assert_allclose(np.asarray(a, float), np.asarray(b, float), rtol=1e-2, err_msg=what)


def main(backend: str, folder: Path) -> None:
    global traced
    w, x = jnp.ones((16, 8), "bfloat16"), jnp.ones((8, 16), "bfloat16")
    single = jax.jit(step)
    # Of even plans `spmd` alone makes something else.
    for speeds in ((50, 20), (50, 50)) if backend == "spmd" else ((50, 20),):
        ours = shardwright.parallelize(
            step, fleet=fleet(*speeds), backend=backend, cache=folder / "plans", devices="all"
        )
        for what, start in STARTS.items():
            mine = alone = {"w": w, "many": jnp.full((12,), 0.25), "key": jax.random.key(0), **start}
            for number in range(3):
                alone, wanted = single(alone, x)
                traced = 0
                mine, got = ours(mine, x)
                same(f"{what}, step {number}", (mine, got), (alone, wanted))
                if what in ("numbers", "weak arrays"):  # others make `w` a float32
                    assert traced == 0 or number == 0, f"{what}: traced again"
            path = folder / f"{'-'.join(map(str, speeds))} {what}"
            shardwright.save(path, mine)
            same(f"{what}, as it lay", shardwright.restore(path, mine), alone)
            same(f"{what}, by shapes", shardwright.restore(path, alone, ours.plan(mine, x)), alone)
            same(f"{what}, placed", ours.plan(mine, x).shard(alone), alone)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        main(sys.argv[1], Path(sys.argv[2] if len(sys.argv) > 2 else made))
