"""Runs as a process of its own with four devices: `python spmd_state.py`. What a loop hands on."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from greedy import build
from jax.sharding import NamedSharding, PartitionSpec
from spmd_cases import UNEVEN, assert_close, fleet, planned, run_all
from steps import STEPS, array, starts

import shardwright
from shardwright.backends.spmd.executable import SpmdExecutable
from shardwright.backends.spmd.layout import Layout, PaddedArray
from shardwright.backends.spmd.strips import Strips
from shardwright.ir.errors import InputError
from shardwright.ir.placement import Shard
from shardwright.ir.trace import Traced, trace


def test_uneven_state_stays_on_the_devices() -> None:
    step, args, plan = planned("mlp", "zero", UNEVEN)
    run, single = plan.compile(step, backend="spmd"), jax.jit(step)
    params, momentum, *batch = args
    wanted = single(*args)
    params, momentum, _ = run(*args)
    w1 = params["w1"]
    assert isinstance(w1, PaddedArray)
    assert jax.tree.leaves(w1) == [w1], "a leaf of pytrees"
    assert (w1.shape, w1.dtype, w1.ndim, w1.placement) == ((6, 8), np.float32, 2, Shard(0))
    assert w1.gather().shape == (6, 8) and isinstance(w1.gather(), jax.Array)
    assert w1.stored.shape == (4 * 3, 8), "padded to the longest of 3, 1, 1, 1"
    everywhere = w1.stored.sharding.device_set
    # The batch, too, lies there already: from here on nothing may go to the host or come from it.
    held = [jax.device_put(x, NamedSharding(w1.layout.mesh, PartitionSpec())) for x in batch]
    with jax.transfer_guard("disallow"):
        for _ in range(3):
            params, momentum, loss = run(params, momentum, *held)
    for _ in range(3):
        wanted = single(*wanted[:2], *batch)
    assert params["w1"].stored.sharding.device_set == everywhere and len(everywhere) == 4
    jax.tree.map(assert_close, (params, momentum, loss), wanted)
    assert float(loss) == float(np.asarray(loss))


def test_what_another_plan_placed_is_moved_once() -> None:
    step, args, plan = planned("mlp", "zero", UNEVEN)
    params, *_ = plan.compile(step, backend="spmd")(*args)
    evaluate = shardwright.parallelize(
        lambda params, x: sum(x @ w for w in jax.tree.leaves(params) if w.shape == (6, 8)),
        fleet=fleet(),
        backend="spmd",
        devices="all",
        cache=False,
        constraints={"x": "S(0)"},
    )
    x = array(7, 6)
    wanted = x @ np.asarray(params["w1"])
    assert_close(evaluate(params, x), wanted)
    assert isinstance(params["w1"], PaddedArray)
    put = Layout.put
    with pytest.MonkeyPatch.context() as patch:
        moved: list[Any] = []
        patch.setattr(Layout, "put", lambda *given: (moved.append(given[1]), put(*given))[1])
        assert_close(evaluate(params, x), wanted)
        assert all(leaf is x for leaf in moved), "the parameters lie there already"
        whole = jax.tree.map(lambda w: w.gather(), params)
        assert_close(evaluate(whole, x), wanted)
    for gone in (params["w1"].stored, whole["w1"]):
        gone.delete()
    for leaves in (params, whole):
        with pytest.raises(InputError, match="took its memory"):
            evaluate(leaves, x)


def test_donated_state_is_given_up() -> None:
    step, args, plan = planned("mlp", "zero", UNEVEN)
    for donate in (True, False):
        run = plan.compile(step, backend="spmd", donate=donate)
        first = run(*args)
        run(*first[:2], *args[2:])
        assert first[0]["w1"].stored.is_deleted() == donate
    assert_close(args[0]["w1"], STEPS["mlp"]()[1][0]["w1"])


def test_state_is_updated_in_place_where_that_can_be() -> None:
    def adam(w: Any, m: Any, v: Any, g: Any) -> Any:
        m, v = 0.9 * m + 0.1 * g, 0.99 * v + 0.01 * g * g
        return w - 0.1 * m / (jnp.sqrt(v) + 1e-3), m, v

    def behind(w: Any, m: Any, g: Any) -> Any:
        both = m * g
        return w - both, 0.9 * m + both  # either reads what the other would have been written over

    def swapped(w: Any, m: Any, g: Any) -> Any:
        return m - g, 0.9 * w

    rows = (48, (0.5, 0.25, 0.125, 0.125)), (50, (0.4, 0.0, 0.2, 0.4)), (47, (0.4, 0.1, 0.2, 0.3))
    for step, loops in ((adam, [2, 1]), (behind, None), (swapped, None)):
        for size, ratios in rows if loops else rows[:1]:
            *state, g = (np.abs(array(size, 128, seed=i)) for i in range(4 if step is adam else 3))
            traced = trace(step, *state, g)
            assert len(traced.graph.state) == len(state)
            program = build(traced.graph, [Shard(0)] * (len(state) + 1))
            run = SpmdExecutable(traced, program, ratios, donate=True)
            assert run.walk is not None
            parts = [part for found in run.walk.branches.values() for part in found]
            found = [part for part in parts if isinstance(part, Strips)]
            in_place = loops if size != 47 else None  # 19 rows, which cannot be cut into up to 16 strips
            assert [[*map(len, part.loops)] for part in found] == ([in_place] if in_place else [])
            held, wanted = list(state), state
            for _ in range(2):
                held, wanted = run(*held, g), step(*wanted, g)
            jax.tree.map(assert_close, list(held), list(wanted))


def test_what_devices_compute_for_themselves_stays_equal() -> None:
    """Replicated results are the same bits everywhere."""
    step, args = STEPS["mlp"]()
    traced: Traced = trace(step, *args)
    run = SpmdExecutable(traced, build(traced.graph, starts(traced.graph)["data"]), UNEVEN)
    for x in run(*jax.tree.leaves(args)):
        assert isinstance(x, jax.Array)
        copies = {np.asarray(shard.data).tobytes() for shard in x.addressable_shards}
        assert len(copies) == 1 and len(x.addressable_shards) == 4


if __name__ == "__main__":
    run_all(globals())
