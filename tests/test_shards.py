"""State as shards: made where it lies, cut from global arrays, put together again; rows that a rank needs."""

from __future__ import annotations

import socket
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import shardwright
from shardwright import Fleet, InputError, Plan, PlanError, Shard, shards
from shardwright.backends.launch import find_mpiexec, rank_environment
from shardwright.backends.reference import ReferenceExecutable
from shardwright.direct import direct
from shardwright.ir.placement import Partial, Placement, R
from shardwright.ir.program import Compute, Move
from shardwright.ir.trace import trace

RATIOS = (0.5, 0.0, 0.2, 0.3)
optimizer = optax.adam(1e-3)


def dense(key: jax.Array) -> tuple[Any, Any]:
    """Parameters drawn in several ways, and the state of an optimizer of them."""
    keys = jax.random.split(key, 4)
    normal = jax.nn.initializers.truncated_normal(0.02)
    params = {
        "wide": normal(keys[0], (12, 40), jnp.float32),
        "heads": (jax.random.normal(keys[1], (8, 24)) / jnp.sqrt(8)).reshape(8, 4, 6),
        "half": jax.random.uniform(keys[2], (40,), jnp.bfloat16),
        "square": jax.nn.initializers.orthogonal()(keys[3], (8, 8)),
        "rows": jnp.broadcast_to(jnp.arange(10.0)[:, None], (10, 3)) + jnp.eye(10, 3),
    }
    return params, optimizer.init(params)


def placed(name: str, shape: tuple[int, ...]) -> Placement:
    """A placement for everything that has a dimension, of units where a head must stay whole."""
    if "half" in name and "mu" in name:
        return Partial("sum")
    if "heads" in name:
        return Shard(1)
    return Shard(len(shape) - 1, 2 if shape[-1] % 2 == 0 else 1) if shape else R


def test_every_device_computes_its_part_without_an_exchange() -> None:
    traced = trace(dense, jax.random.key(3), state={})
    graph = traced.graph
    named = zip(graph.output_names, graph.outputs, strict=True)
    outputs = [placed(name, atom.type.shape) for name, atom in named]
    found = direct(graph, outputs)
    assert all(
        i.kind in ("slice", "own") or i.strategy == ""
        for i in found.program.instructions
        if isinstance(i, Move)
    )
    got = ReferenceExecutable(traced, found.program, RATIOS)(*jax.tree.leaves((jax.random.key(3),)))
    wanted = jax.tree.leaves(jax.jit(dense)(jax.random.key(3)))
    for name, a, b in zip(graph.output_names, got, wanted, strict=True):
        np.testing.assert_allclose(
            np.asarray(a, np.float32), np.asarray(b, np.float32), rtol=1e-6, atol=1e-6, err_msg=name
        )
    # The orthogonal matrix is made whole, and nothing else that is of any size.
    whole = {value.index for e in found.whole for value in e.outputs}
    computed = [i for i in found.program.instructions if isinstance(i, Compute)]
    large = {
        e.primitive
        for i in computed
        for e in [graph.equations[i.equation]]
        if i.signature.outs[0] == R and e.outputs[0].type.size > 64
    }
    assert whole and not large, large


def slow(speeds: tuple[float, ...] = (50, 30, 10)) -> Fleet:
    """Devices slow enough, on links fast enough, that cutting small tensors pays."""
    kinds = [
        {"name": f"d{s:g}", "flops": f"{s} MFLOP/s", "memory_bandwidth": f"{2 * s} MB/s", "memory": "1 GB"}
        for s in speeds
    ]
    link = {"bandwidth": "400 GB/s", "latency": "100 ns"}
    nodes = [{"devices": [{"type": kind} for kind in kinds], "link": link}]
    return Fleet.from_dict({"name": "slow", "nodes": nodes})


def step(params: Any, opt_state: Any, x: jax.Array, y: jax.Array) -> tuple[Any, Any, jax.Array]:
    def loss_of(params: Any) -> jax.Array:
        return jnp.mean((jax.nn.relu(x @ params["w1"]) @ params["w2"] - y) ** 2)

    loss, gradients = jax.value_and_grad(loss_of)(params)
    updates, opt_state = optimizer.update(gradients, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss


def made(key: jax.Array) -> tuple[Any, Any]:
    one, two = jax.random.split(key)
    params = {"w1": jax.random.normal(one, (24, 48)), "w2": jax.random.normal(two, (48, 6))}
    return params, optimizer.init(params)


@pytest.fixture(scope="module")
def plan() -> Plan:
    shapes = jax.eval_shape(made, jax.random.key(0))
    x, y = jax.ShapeDtypeStruct((40, 24), "float32"), jax.ShapeDtypeStruct((40, 6), "float32")
    return shardwright.synthesize(
        step, *shapes, x, y, fleet=slow(), devices="all", constraints={"x": "S(0)", "y": "S(0)"}
    )


def test_the_rows_of_all_ranks_are_the_batch(plan: Plan) -> None:
    x = np.arange(40 * 24).reshape(40, 24)
    parts = [plan.local_batch(rank) for rank in range(3)]
    assert [list(part) for part in parts] == [["x", "y"]] * 3
    np.testing.assert_array_equal(np.concatenate([x[part["x"]] for part in parts]), x)
    assert len({x[part["x"]].shape for part in parts}) > 1, "shares are unequal"
    with pytest.raises(InputError, match=r"rank 3.* 3 devices"):
        plan.local_batch(3)


def test_a_rank_of_the_devices_in_use_is_not_one_of_the_fleet(
    plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 of a job of two ranks has the rows of the first device that the plan uses."""
    whole = plan.ratios
    some = replace(plan, used=(1, 2, 4), ratios=(0.0, *whole[:2], 0.0, whole[2]))
    rows = [plan.local_batch(rank) for rank in range(3)]
    assert [some.local_batch(rank, ranks=3) for rank in range(3)] == rows
    assert [some.local_batch(rank, ranks=5) for rank in (1, 2, 4)] == rows
    assert some.local_batch(0)["x"] == (slice(0, 0), slice(0, 0))
    with pytest.raises(InputError, match=r"ranks 4: the plan uses 3 of 5 devices\. Pass 3 or 5"):
        some.local_batch(0, ranks=4)
    with pytest.raises(InputError, match="rank 3"):
        some.local_batch(3, ranks=3)
    monkeypatch.setattr(shards, "under_mpi", lambda: True)
    for size, wanted in ((3, rows[0]["x"]), (5, (slice(0, 0), slice(0, 0))), (1, (slice(0, 0), slice(0, 0)))):
        monkeypatch.setattr(shards, "world_size", partial(int, size))
        assert some.local_batch(0)["x"] == wanted


def test_outside_of_an_mpi_job_state_is_whole(plan: Plan) -> None:
    state = plan.init(made, jax.random.key(1))
    wanted = jax.jit(made)(jax.random.key(1))
    for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_array_equal(a, b)
    assert plan.shard(state) is state
    assert shardwright.gather(state)[0]["w1"] is state[0]["w1"]
    assert shardwright.to_global(state[0]["w1"]) is state[0]["w1"]


def test_what_is_made_must_be_what_was_planned_for(plan: Plan) -> None:
    with pytest.raises(InputError, match=r"params\['w1'\]: is float32\[3\], the step was planned for"):
        plan.init(lambda key: {"w1": jax.random.normal(key, (3,))}, jax.random.key(0))
    with pytest.raises(InputError, match=r"argument 'weights': is none of the step's.*params, opt_state, x"):
        plan.init(made, jax.random.key(0), argument="weights")


def test_a_loaded_plan_asks_for_its_step(plan: Plan) -> None:
    loaded = Plan.from_dict(plan.to_dict())
    with pytest.raises(PlanError, match=r"plan\.attach"):
        loaded.local_batch(0)
    assert loaded.local_batch(1, traced=plan.traced) == plan.local_batch(1)


GLOBAL = """
import sys
import jax
from mpi4py import MPI
comm = MPI.COMM_WORLD
jax.distributed.initialize(f"localhost:{sys.argv[1]}", num_processes=comm.size, process_id=comm.rank)
import numpy as np
import shardwright
from shardwright.backends.layout import cut
from shardwright.backends.world import ShardedArray, World
from shardwright.ir.graph import TensorType
from shardwright.ir.placement import Shard
from shardwright.shards import move

whole, tensor = np.arange(24.0, dtype=np.float32).reshape(4, 6), TensorType((4, 6), "float32")
even = move(whole, tensor, Shard(1), World((0.5, 0.5)))
found = shardwright.to_global(even)
assert found.shape == (4, 6) and len(found.addressable_shards) == 1
assert found.sharding.spec == jax.sharding.PartitionSpec(None, "devices")
part = found.addressable_shards[0]
np.testing.assert_array_equal(part.data, whole[part.index])
assert (part.index[1].start or 0) == 3 * comm.rank
try:
    shardwright.to_global(move(whole, tensor, Shard(1), World((0.7, 0.3))))
except shardwright.PlanError as error:
    assert "uneven" in str(error)
else:
    raise AssertionError("JAX has no uneven shards")
"""


@pytest.mark.full
def test_even_stretches_are_a_global_array_in_a_job_of_jax(tmp_path: Path) -> None:
    (tmp_path / "rank.py").write_text(GLOBAL)
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    done = subprocess.run(
        [find_mpiexec(), "-n", "2", sys.executable, str(tmp_path / "rank.py"), str(port)],
        capture_output=True, text=True, check=False, timeout=300, env=rank_environment(2),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
