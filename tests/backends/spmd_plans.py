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
from spmd_cases import EVEN, PAIRS, UNEVEN, assert_close, fleet, planned, run_all
from steps import STEPS, array, starts

from shardwright import Fleet, synthesize
from shardwright.backends.schedule.order import arrange
from shardwright.backends.spmd.executable import BUCKET_BYTES, SpmdExecutable
from shardwright.backends.spmd.layout import AXIS, PaddedArray
from shardwright.ir.errors import InputError, PlanError
from shardwright.ir.placement import Partial, R, Shard
from shardwright.ir.program import Compute, Move, Program
from shardwright.ir.rules import Signature
from shardwright.ir.segments import Segment
from shardwright.ir.text import parse_program
from shardwright.ir.trace import trace


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


def test_what_is_not_a_number_is_the_largest_and_the_least() -> None:
    """XLA's maxima across devices lose it on CPUs, so numbers travel as integers of their order."""
    x = np.array([[-1, 5, -np.inf, np.nan], [-3, np.nan, -np.inf, 2], [-2, 6, -np.inf, np.inf]] * 3)
    for dtype in ("float32", "bfloat16", "float8_e4m3fn"):
        for op, function in (("max", jnp.max), ("min", jnp.min)):
            whole = jnp.asarray(x[:, :2] if dtype == "float8_e4m3fn" else x, dtype)
            traced = trace(lambda x, function=function: function(x, axis=0), whole, state={})
            parts = Compute(0, Signature((Shard(0),), (Partial(op),)))  # type: ignore[arg-type]
            total = Move("all_reduce", traced.graph.outputs[0].index, Partial(op), R, "ring")  # type: ignore[arg-type, union-attr]
            (got,) = SpmdExecutable(traced, Program((Shard(0),), (parts, total), (R,)), UNEVEN)(whole)
            wanted = function(whole, axis=0)
            np.testing.assert_array_equal(np.asarray(got, np.float32), np.asarray(wanted, np.float32))


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
    run_all(globals())
