"""Runs as a process of its own with four devices: `python spmd_plans.py`. Plans in a user's loop.

Each function is one check; the first one that fails ends the process.
"""

from __future__ import annotations

import random
import re
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from greedy import build
from jax.sharding import NamedSharding, PartitionSpec
from steps import STEPS, array, starts

import shardwright
from shardwright import Fleet, Plan, synthesize
from shardwright.backends.schedule.order import arrange
from shardwright.backends.spmd.executable import BUCKET_BYTES, SpmdExecutable
from shardwright.backends.spmd.layout import AXIS, Layout, PaddedArray
from shardwright.backends.spmd.strips import Strips
from shardwright.ir.errors import InputError, PlanError
from shardwright.ir.placement import Partial, R, Shard
from shardwright.ir.program import Compute, Move, Program
from shardwright.ir.rules import Signature
from shardwright.ir.segments import Segment
from shardwright.ir.text import parse_program
from shardwright.ir.trace import Traced, trace

UNEVEN, PAIRS, EVEN = (0.5, 0.25, 0.15, 0.1), (0.4, 0.4, 0.1, 0.1), (0.25,) * 4


def fleet() -> Fleet:
    """Four devices whose links make it worth cutting something."""
    cpu = {"name": "cpu", "flops": "1 MFLOP/s", "memory_bandwidth": "2 MB/s", "memory": "1 GB"}
    node = {"devices": {"type": cpu, "count": 4}, "link": {"bandwidth": "1 GB/s", "latency": "1 us"}}
    return Fleet.from_dict({"name": "four", "nodes": [node]})


def planned(name: str, start: str, ratios: tuple[float, ...]) -> tuple[Any, tuple[Any, ...], Plan]:
    """A plan with a program and shares of our choice."""
    step, args = STEPS[name]()
    plan = synthesize(step, *args, fleet=fleet(), devices="all")
    assert plan.traced is not None
    graph = plan.traced.graph
    return step, args, replace(plan, program=build(graph, starts(graph)[start]), ratios=ratios)


def assert_close(got: Any, wanted: Any) -> None:
    a, b = np.asarray(got, np.float64), np.asarray(wanted, np.float64)
    assert a.shape == b.shape
    np.testing.assert_allclose(a, b, atol=1e-5 * float(np.max(np.abs(b), initial=1e-3)))


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


def test_an_even_plan_is_plain_jit_and_its_specs_say_how() -> None:
    step, _ = STEPS["mlp"]()
    params = {"w1": array(8, 8), "b1": array(8, seed=1), "w2": array(8, 4, seed=2)}
    args = (params, jax.tree.map(np.zeros_like, params), array(8, 8, seed=3), array(8, 4, seed=4))
    plan = synthesize(step, *args, fleet=fleet(), devices="all")
    assert plan.traced is not None
    program = build(plan.traced.graph, starts(plan.traced.graph)["data"])
    plan = replace(plan, program=program, ratios=EVEN)
    run = plan.compile(step, backend="spmd")
    got = run(*args)
    specs = plan.partition_specs()
    assert specs.arguments[2] == PartitionSpec(AXIS) and specs.arguments[0]["w1"] == PartitionSpec()
    mesh = got[0]["w1"].sharding.mesh
    assert mesh.devices.tolist() == jax.devices()
    shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
    for x, sharding in zip(jax.tree.leaves(got), jax.tree.leaves(shardings.results), strict=True):
        assert isinstance(x, jax.Array) and x.sharding.is_equivalent_to(sharding, x.ndim)
    by_hand = jax.jit(step, in_shardings=shardings.arguments, out_shardings=shardings.results)
    jax.tree.map(assert_close, got, by_hand(*args))
    jax.tree.map(assert_close, got, jax.jit(step)(*args))
    executable = SpmdExecutable(plan.traced, program, EVEN)
    text = executable.lower(*jax.tree.leaves(args)).as_text()
    assert executable.even and executable.branches == () and "manual" not in text and "case" not in text


def test_parts_that_are_added_are_exchanged_once() -> None:
    """Of even programs, where XLA alone would exchange the parts of every gradient's norm."""

    def clip(gradients: list[jax.Array]) -> tuple[list[jax.Array], jax.Array]:
        first, *rest = (jnp.sum(g * g) for g in gradients)
        norm = jnp.sqrt(sum(rest, first))
        return [g / norm for g in gradients], norm

    gradients = [array(8, 3), array(3, 8, seed=1), array(4, seed=2)]
    pins = {"gradients[0]": "S(0)", "gradients[1]": "S(1)", "gradients[2]": "R"}
    plan = synthesize(clip, gradients, fleet=fleet(), devices="all", constraints=pins)
    assert plan.traced is not None
    program = plan.program
    sums = [i for i in program.instructions if isinstance(i, Move) and i.pre == Partial("sum")]
    assert len(sums) == 1, "the plan adds first"
    run = SpmdExecutable(plan.traced, program, plan.ratios)
    lowered = run.lower(*gradients)
    assert run.even and "manual" not in lowered.as_text()
    exchanged = re.findall(r"= (.*) all-reduce\(", lowered.compile().as_text())
    assert exchanged == ["f32[]"], "one number, not one for every gradient"
    for got, wanted in zip(run(*gradients), jax.tree.leaves(clip(gradients)), strict=True):
        assert_close(got, wanted)


def test_an_even_plan_on_two_axes_is_plain_jit_over_nodes_and_devices() -> None:
    step, _ = STEPS["mlp"]()
    params = {"w1": array(8, 8), "b1": array(8, seed=1), "w2": array(8, 4, seed=2)}
    args = (params, jax.tree.map(np.zeros_like, params), array(8, 8, seed=3), array(8, 4, seed=4))
    pins = {"*/w1": "S(0)/S(1)", "*/w2": "R/S(0)", "x": "S(0)/S(0)"}
    plan = synthesize(step, *args, fleet=mesh(2, 2), devices="all", axes=2, constraints=pins)
    assert plan.axes == 2 and set(plan.ratios) == {0.25}
    specs = plan.partition_specs()
    assert specs.arguments[0]["w1"] == PartitionSpec("nodes", AXIS)
    assert specs.arguments[0]["w2"] == PartitionSpec(AXIS) and specs.results[0]["w2"] == PartitionSpec(AXIS)
    assert specs.arguments[2] == PartitionSpec(("nodes", AXIS))
    run = plan.compile(step, backend="spmd")
    params, momentum, loss = run(*args)
    jax.tree.map(assert_close, (params, momentum, loss), jax.jit(step)(*args))
    assert params["w1"].sharding.mesh.shape == {"nodes": 2, AXIS: 2}
    assert {s.data.shape for s in params["w1"].addressable_shards} == {(4, 4)}
    again = run(params, momentum, *args[2:])
    jax.tree.map(assert_close, again, jax.jit(step)(*jax.jit(step)(*args)[:2], *args[2:]))


def test_uneven_plans_on_two_axes_are_refused_with_what_is_uneven() -> None:
    step, args = STEPS["mlp"]()
    plan = synthesize(step, *args, fleet=mesh(1, 3), devices="all", axes=2, constraints={"x": "S(0)/S(0)"})
    with pytest.raises(PlanError, match=r"two mesh axes, .* and its nodes have 1, 3 devices"):
        plan.compile(step, backend="spmd")(*args)


def mesh(*nodes: int) -> Fleet:
    kind = {"name": "k", "flops": "50 MFLOP/s", "memory_bandwidth": "100 MB/s", "memory": "1 GB"}
    link = {"bandwidth": "1 GB/s", "latency": "1 us"}
    listed = [{"devices": {"type": kind, "count": n}, **({"link": link} if n > 1 else {})} for n in nodes]
    return Fleet.from_dict({"name": "mesh", "nodes": listed, "network": link})


def test_uneven_plans_have_no_specs() -> None:
    _, _, plan = planned("mlp", "data", UNEVEN)
    with pytest.raises(PlanError, match=r"x is S\(0\) in stretches of 5, 2, 1, 1.*backend=\"spmd\""):
        plan.partition_specs()


def test_branches_are_classes() -> None:
    """Two devices with four units each and two with one are two branches, wherever their stretches begin."""
    step, args = indexed()
    traced = trace(step, *args)
    program = build(traced.graph, starts(traced.graph)["zero"])
    run = SpmdExecutable(traced, program, PAIRS)
    assert max(run.branches) == 2
    text = run.lower(*jax.tree.leaves(args)).compile().as_text()
    conditionals = re.findall(r"branch_computations=\{([^}]*)\}", text)
    assert len(conditionals) >= run.branches.count(2) > 0
    assert all(branches.count(",") == 1 for branches in conditionals)
    segments = [s for s in arrange(program, traced.graph, BUCKET_BYTES).steps if isinstance(s, Segment)]
    assert len(run.branches) >= len(segments)
    assert max(SpmdExecutable(traced, program, UNEVEN).branches) == 4


def test_what_all_compute_alike_is_in_no_branch() -> None:
    """Tensor parallelism: the normalisation in front of a layer, but not what a branch is fused with."""

    def step(x: Any, up: Any, down: Any) -> Any:
        centred = x - x.mean(1, keepdims=True)
        normal = centred * jax.lax.rsqrt((centred * centred).mean(1, keepdims=True) + 1e-3)
        return x + jnp.tanh(normal @ up) @ down

    args = array(48, 64), array(64, 96), array(96, 64)
    traced = trace(step, *args, state={})
    cut, part = Shard(1), Partial("sum")
    instructions: list[Compute | Move] = []
    first = True
    for number, equation in enumerate(traced.graph.equations):
        signature = Signature((R,) * len(equation.inputs), (R,))
        if equation.primitive == "dot_general":
            signature = Signature((R, cut), (cut,)) if first else Signature((cut, Shard(0)), (part,))
            first = False
        elif equation.primitive == "tanh":
            signature = Signature((cut,), (cut,))
        instructions.append(Compute(number, signature))
        if signature.outs == (part,):
            instructions.append(Move("all_reduce", equation.outputs[0].index, part, R, strategy="ring"))
    program = Program((R, cut, Shard(0)), tuple(instructions), (R,))
    run = SpmdExecutable(traced, program, (0.5, 0.25, 0.125, 0.125))
    assert run.walk is not None
    parts = [part for found in run.walk.branches.values() for part in found]
    branches = [i for part in parts if part.count > 1 for i in part.segment.instructions]
    names = {traced.graph.equations[i.equation].primitive for i in branches if isinstance(i, Compute)}
    assert names == {"dot_general", "tanh"} and run.branches.count(3) == 1
    (got,) = run(*args)
    assert_close(got, step(*args))


def indexed() -> tuple[Any, tuple[Any, ...]]:
    """All that asks where a stretch begins: gathers, scatters, iota, random bits, slices, pads, joins."""

    def loss_of(table: jax.Array, x: jax.Array, tokens: jax.Array, key: jax.Array) -> jax.Array:
        taken = table[tokens] + jnp.take(table, tokens, axis=0, mode="fill", fill_value=1.0)
        rows = jax.lax.broadcasted_iota(jnp.float32, x.shape, 0)
        noise = jax.random.uniform(key, x.shape)
        joined = jnp.concatenate([x * rows, x + noise, x[:10]], axis=0)
        padded = jnp.pad(joined[5:], ((3, 2), (0, 0)))
        piece = jax.lax.dynamic_slice(padded, (tokens[0], 0), (10, x.shape[1]))
        changed = jax.lax.dynamic_update_slice(x, piece[:4], (tokens[1], 0))
        return jnp.mean(jnp.square(taken)) + jnp.mean(changed * padded[:20]) + jnp.sum(piece * rows[:10])

    def step(
        table: jax.Array, x: jax.Array, tokens: jax.Array, key: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        loss, gradient = jax.value_and_grad(loss_of)(table, x, tokens, key)
        return table - 0.1 * gradient, loss

    rng = np.random.default_rng(0)
    table, x = rng.normal(size=(20, 10)).astype(np.float32), rng.normal(size=(20, 10)).astype(np.float32)
    return step, (table, x, rng.integers(0, 20, 10).astype(np.int32), jax.random.key(3))


def test_where_stretches_begin() -> None:
    step, args = indexed()
    traced = trace(step, *args)
    wanted = jax.jit(step)(*args)
    rng = random.Random(1)
    for start, seed in (("last", None), ("zero", rng), ("data", rng)):
        program = build(traced.graph, starts(traced.graph)[start], seed)
        got = SpmdExecutable(traced, program, PAIRS)(*args)
        for a, b in zip(got, wanted, strict=True):
            np.testing.assert_allclose(np.asarray(a), b, rtol=1e-5, atol=1e-5, err_msg=f"{start} {seed}")


def test_groups_roots_and_parts_at_the_ends() -> None:
    traced = trace(lambda x: x + 1.0, np.arange(12.0, dtype=np.float32).reshape(6, 2), state={})
    program = parse_program(
        """
        program {
          in  0 %0 P(sum)
          0: %0 R = all_reduce.ring %0 P(sum)
          1: %0 S(0) = slice %0 R on {0,2}
          2: %0 R = all_gather.exact %0 S(0) on {0,2}
          3: %0 P(max) = own %0 R on {0,2}
          4: %0 S(1) = reduce_scatter.padded %0 P(max) on {0,2}
          5: %0 R = send.direct %0 R from 2 on {1,2}
          6: %0 R = broadcast.tree %0 R from 1
          7: %1 R = add#0(%0 R, 1.0 R)
          8: %1 P(sum) = own %1 R
          out 0 %1 P(sum)
        }
        """
    )
    x = np.arange(12.0, dtype=np.float32).reshape(6, 2)
    for ratios in (EVEN, (0.4, 0.0, 0.4, 0.2), (0.5, 0.2, 0.3)):
        run = SpmdExecutable(traced, program, ratios)
        assert not run.even
        (got,) = run(x)
        assert np.array_equal(got.gather(), x + 1.0) and np.array_equal(np.asarray(got), x + 1.0)


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


def test_bad_input() -> None:
    _, args, plan = planned("mlp", "zero", UNEVEN)
    assert plan.traced is not None
    run = SpmdExecutable(plan.traced, plan.program, UNEVEN)
    flat = jax.tree.leaves(args)
    got = run(*flat)
    names = list(plan.traced.graph.input_names)
    with pytest.raises(InputError, match=r"^x: is float32\[7,6\], it was planned for float32\[9,6\]"):
        run(*[leaf[:7] if name == "x" else leaf for name, leaf in zip(names, flat, strict=True)])
    with pytest.raises(InputError, match="7 leaves were given, it was planned for 8"):
        run(*flat[1:])
    other = SpmdExecutable(plan.traced, plan.program, PAIRS)
    state = {inp: got[out] for out, inp in plan.traced.graph.state.items()}
    with pytest.raises(PlanError, match=r"lies as another plan placed it.*Pass its gather\(\)"):
        other(*[state.get(i, leaf) for i, leaf in enumerate(flat)])
    gathered = [state[i].gather() if isinstance(state.get(i), PaddedArray) else x for i, x in enumerate(flat)]
    other(*gathered)
    with pytest.raises(PlanError, match=r"uses 5 devices, JAX has 4 \(cpu\)"):
        SpmdExecutable(plan.traced, plan.program, (0.2,) * 5)


def test_what_devices_compute_for_themselves_stays_equal() -> None:
    """Replicated results are the same bits everywhere."""
    step, args = STEPS["mlp"]()
    traced: Traced = trace(step, *args)
    run = SpmdExecutable(traced, build(traced.graph, starts(traced.graph)["data"]), UNEVEN)
    for x in run(*jax.tree.leaves(args)):
        assert isinstance(x, jax.Array)
        copies = {np.asarray(shard.data).tobytes() for shard in x.addressable_shards}
        assert len(copies) == 1 and len(x.addressable_shards) == 4


def test_devices_that_are_left_out() -> None:
    from shardwright.backends.spmd.layout import mesh_of
    from shardwright.ir.wiring import Seats

    here = jax.devices()
    assert mesh_of(2, Seats((1, 3), 4)).devices.tolist() == [here[1], here[3]]
    assert mesh_of(2, Seats((1, 3), 8)).devices.tolist() == here[:2]
    assert mesh_of(3).devices.tolist() == here[:3]


def test_one_device_is_plain_jit() -> None:
    step, args = STEPS["mlp"]()
    traced = trace(step, *args)
    equations = traced.graph.equations
    whole = [Compute(e.index, Signature((R,) * len(e.inputs), (R,) * len(e.outputs))) for e in equations]
    program = Program((R,) * len(traced.graph.inputs), tuple(whole), (R,) * len(traced.graph.outputs))
    run = SpmdExecutable(traced, program, (1.0,))
    assert run.even
    for got, wanted in zip(run(*jax.tree.leaves(args)), jax.tree.leaves(jax.jit(step)(*args)), strict=True):
        assert np.array_equal(got, wanted)


if __name__ == "__main__":
    for name, check in list(globals().items()):
        if name.startswith("test_"):
            print(name, flush=True)
            check()
