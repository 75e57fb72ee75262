"""Runs under mpiexec: `python loop_checks.py FOLDER`. State on ranks, checkpoints, and how ranks agree.

FOLDER has plans `0.json`, `1.json`, ... of the step below, each for the first so many ranks. Failures go to
`summary.json`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from mpi4py import MPI

import shardwright
from shardwright import Fleet, InputError, Plan, PlanError, ShardwrightError, checkpoints, shards
from shardwright.backends.mpi.executable import abort_on_error
from shardwright.backends.world import ShardedArray

comm = MPI.COMM_WORLD
optimizer = optax.adam(1e-2)
problems: list[str] = []


def step(params: Any, opt_state: Any, key: jax.Array, x: jax.Array, y: jax.Array) -> Any:
    def loss_of(params: Any) -> jax.Array:
        hidden = jax.nn.relu(x @ params["w1"] + params["b1"])
        keep = jax.random.bernoulli(own, 0.9, hidden.shape)
        return jnp.mean(((hidden * keep) @ params["w2"].astype("float32") - y) ** 2)

    key, own = jax.random.split(key)
    loss, gradients = jax.value_and_grad(loss_of)(params)
    updates, opt_state = optimizer.update(gradients, opt_state, params)
    return (
        optax.apply_updates(params, updates),
        opt_state,
        key,
        {"loss": loss, "rows": (x @ params["w1"])[:, 0]},
    )


def made(key: jax.Array) -> Any:
    one, two, three = jax.random.split(key, 3)
    params = {
        "w1": jax.random.normal(one, (10, 24)),
        "b1": jnp.zeros(24),
        "w2": jax.random.normal(two, (24, 5), "bfloat16"),
    }
    return params, optimizer.init(params), three


BATCH = (np.arange(180, dtype=np.float32).reshape(18, 10) / 90, np.ones((18, 5), np.float32))
SHAPES = (*jax.eval_shape(made, jax.random.key(0)), *BATCH)


def check(what: str, fine: object) -> None:
    if not fine:
        problems.append(f"rank {comm.rank}: {what}")


def data(leaf: Any) -> np.ndarray[Any, Any]:
    key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(leaf) if key else leaf)


def equal(what: str, got: Any, wanted: Any) -> None:
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True)
    bad = [
        i for i, (a, b) in enumerate(pairs) if data(a).tobytes() != data(b).tobytes() or a.dtype != b.dtype
    ]
    check(f"{what}: leaves {bad} differ", not bad)


def raised(what: str, kind: type[ShardwrightError], call: Callable[[], Any]) -> str:
    try:
        call()
    except kind as error:
        return str(error)
    check(f"{what}: no {kind.__name__}", False)
    return ""


def all_pairs(folder: Path, plans: list[Plan]) -> None:
    """Every plan's checkpoint onto every other plan, to the last bit."""
    state = jax.jit(made)(jax.random.key(5))
    groups = [comm.Split(0 if comm.rank < len(plan.used) else MPI.UNDEFINED, comm.rank) for plan in plans]
    for number, (plan, group) in enumerate(zip(plans, groups, strict=True)):
        if group != MPI.COMM_NULL:
            own = shards.shard(plan, plan.step(), state, comm=group)
            equal(f"plan {number} gathered", shardwright.gather(own), state)
            checkpoints.save(folder / "saved" / str(number), own, comm=group)
    comm.Barrier()
    check("latest", shardwright.latest(folder / "saved") == folder / "saved" / str(len(plans) - 1))
    for target, (plan, group) in enumerate(zip(plans, groups, strict=True)):
        if group == MPI.COMM_NULL:
            continue
        here = shards.world(plan, group)
        slots = shards.slots(plan, plan.step())
        for source in range(len(plans)):
            got = checkpoints.restore(folder / "saved" / str(source), SHAPES[:3], plan, comm=group)
            for leaf, slot in zip(jax.tree.leaves(got), slots, strict=False):
                held = shards.held_shape(slot, here)
                check(f"{slot.name} lies otherwise", shards.lies(leaf, slot.placement, here))
                check(f"{slot.name} of {leaf.local.shape}", leaf.local.shape == held)
            equal(f"{source} onto {target}", shardwright.gather(got), state)
    comm.Barrier()


def damage(folder: Path, plan: Plan) -> None:
    """Half-written and damaged checkpoints are refused by all ranks, with the same words."""
    raised("save over", InputError, lambda: shardwright.save(folder / "saved" / "0", {"w": jnp.zeros(3)}))
    if comm.rank == 0:
        (folder / "half" / "7").mkdir(parents=True)
        (folder / "half" / ".8.123.unfinished").mkdir()
        # Which of the files hold numbers that are read again is the library's own affair: all are damaged.
        for broken in (folder / "saved" / "1").rglob("d/*"):
            content = bytearray(broken.read_bytes())
            content[len(content) // 2 :] = b"x" * (len(content) - len(content) // 2)
            broken.write_bytes(bytes(content))
    comm.Barrier()
    check("a half-written one is the latest", shardwright.latest(folder / "half") is None)
    raised("half-written", InputError, lambda: shardwright.restore(folder / "half" / "7", SHAPES[:3], plan))
    said = raised("damaged", PlanError, lambda: shardwright.restore(folder / "saved" / "1", SHAPES[:3], plan))
    check(f"ranks differ: {said}", len(set(comm.allgather(said))) == 1)
    other = ({**SHAPES[0], "w1": SHAPES[0]["b1"]}, *SHAPES[1:3])
    said = raised(
        "another tree", InputError, lambda: shardwright.restore(folder / "saved" / "0", other, plan)
    )
    check(said, "['w1']" in said)


def state_on_ranks(plan: Plan) -> None:
    """Made in place, cut, from local rows: the step takes all of them, and goes on as on one device."""
    single = jax.jit(step)
    state = jax.jit(made)(jax.random.key(5))
    whole = plan.shard(state)
    placed = plan.init(made, jax.random.key(5))
    for a, b in zip(jax.tree.leaves(placed), jax.tree.leaves(whole), strict=True):
        check("init lies otherwise", shards.lies(a, b.placement, b.world) and a.local.shape == b.local.shape)
        check("init differs", np.allclose(data(a.local).astype("f4"), data(b.local).astype("f4"), 1e-5, 1e-6))
    rows = plan.local_batch(comm.rank)
    local = tuple(np.ascontiguousarray(x[rows[name]]) for name, x in zip("xy", BATCH, strict=True))
    batch = plan.from_local(local, "x")
    raised("another shape", InputError, lambda: plan.from_local((local[0][:, 1:], local[1]), "x"))
    run = plan.compile_traced(plan.step(), "mpi")
    ours = wanted = state
    for _ in range(3):
        *ours, metrics = run(*ours, *batch)
        *wanted, single_metrics = single(*wanted, *BATCH)
        check("loss", abs(float(metrics["loss"]) - float(single_metrics["loss"])) < 1e-4)
    for leaf in jax.tree.leaves(whole):
        if all(comm.allgather(leaf.local.shape == leaf.shape)):
            check("to_global of what is whole", shardwright.to_global(leaf) is leaf.local)
        else:
            raised("to_global", PlanError, lambda leaf=leaf: shardwright.to_global(leaf))


def ranks_agree(folder: Path, fleet: Fleet) -> None:
    """Results that are no state are whole; ranks that differ are told before a step."""
    parallel = shardwright.parallelize(step, fleet=fleet, cache=folder / "cache", devices="all")
    evaluate = shardwright.parallelize(
        lambda params, x: x @ params["w1"], fleet=fleet, cache=folder / "cache", devices="all", state={}
    )
    *state, metrics = parallel(*jax.jit(made)(jax.random.key(5)), *BATCH)
    *_, wanted = jax.jit(step)(*jax.jit(made)(jax.random.key(5)), *BATCH)
    check("state is whole", all(isinstance(leaf, ShardedArray) for leaf in jax.tree.leaves(state)))
    check("rows", np.allclose(metrics["rows"], wanted["rows"], 1e-5, 1e-5) and metrics["rows"].shape == (18,))
    first, again = (evaluate(state[0], BATCH[0]) for _ in range(2))
    full = BATCH[0] @ np.asarray(state[0]["w1"].gather())
    check("evaluation", np.allclose(first, full, 1e-4, 1e-4) and np.array_equal(first, again))
    mine = (lambda x: x * 2) if comm.rank != 1 else (lambda x: x * 3)
    unlike = shardwright.parallelize(mine, fleet=fleet, cache=False)
    said = raised("another step", PlanError, lambda: unlike.plan(np.ones((8, 8))))
    check(said, said.startswith("rank 1: has another step than rank 0"))
    pinned = shardwright.parallelize(step, fleet=fleet, cache=False, constraints={"weights": "R"})
    said = raised("a pin of nothing", InputError, lambda: pinned.plan(*SHAPES))
    check(said, "weights" in said and len(set(comm.allgather(said))) == 1)
    wrong = shardwright.parallelize(step, fleet=fleet, cache=False, constraints=lambda name, kind: 1 / 0)
    try:
        wrong.plan(*SHAPES)
    except (ZeroDivisionError, PlanError) as error:
        # Who plans has the error itself; the others hear of it, instead of waiting for a plan.
        kind = ZeroDivisionError if comm.rank == 0 else PlanError
        check(f"of {error!r}", isinstance(error, kind) and "division by zero" in str(error))


def main() -> None:
    folder = Path(sys.argv[1])
    plans = [Plan.load(path) for path in sorted(folder.glob("?.json"))]
    traced = plans[0].attach(step, *SHAPES)
    plans = [replace(plan, traced=plan.attach_traced(traced)) for plan in plans]
    all_pairs(folder, plans)
    damage(folder, plans[0])
    state_on_ranks(plans[0])
    state_on_ranks(plans[1])
    ranks_agree(folder, plans[0].fleet)
    found = [problem for part in comm.allgather(problems) for problem in part]
    if comm.rank == 0:
        (folder / "summary.json").write_text(json.dumps(found))


if __name__ == "__main__":
    with abort_on_error():
        main()
