"""The reference backend: collectives against their definition, programs against one device."""

import json
import random
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import Case, before, cases, expected, same
from greedy import build, several
from steps import STEPS, starts

from shardwright.backends.compile import Device
from shardwright.backends.layout import members
from shardwright.backends.reference import ReferenceExecutable, collective
from shardwright.ir import collectives
from shardwright.ir.dtypes import dtype_of
from shardwright.ir.errors import InputError
from shardwright.ir.graph import Graph, Value
from shardwright.ir.placement import REDUCE_OPS, Partial, R, Shard
from shardwright.ir.program import Move, Program, Property
from shardwright.ir.serialize import program_from_json, program_to_json
from shardwright.ir.text import format_program, parse_program
from shardwright.ir.trace import Traced, trace

RATIOS = (0.5, 0.0, 0.3, 0.2)


def traced_step(name: str) -> tuple[Traced, list[Any], list[Any]]:
    """The traced step, its flat arguments and what one device makes of them."""
    step, args = STEPS[name]()
    return trace(step, *args), jax.tree.leaves(args), jax.tree.leaves(jax.jit(step)(*args))


def assert_close(got: list[Any], wanted: list[Any], tolerance: float) -> None:
    assert len(got) == len(wanted)
    for i, (a, b) in enumerate(zip(got, wanted, strict=True)):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert a.shape == b.shape
        error = float(np.max(np.abs(a - b), initial=0.0))
        assert error <= tolerance * float(np.max(np.abs(b), initial=1e-3)), f"output {i}: {error}"


def test_moves_conform() -> None:
    kinds: set[str] = set()
    for case in cases(3, local=False):
        arrays = before(case)
        got = collective(case.move, case.tensor, arrays, case.ratios)
        assert all(map(same, got, expected(case, arrays))), str(case)
        kinds.add(case.move.kind)
    assert kinds == {kind for kind, c in collectives.registry().items() if not c.local}


NARROW = [
    *("bfloat16", "float8_e3m4", "float8_e4m3", "float8_e4m3b11fnuz", "float8_e4m3fn", "float8_e4m3fnuz"),
    *("float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn", "int2", "int4", "uint2", "uint4"),
]


@pytest.mark.parametrize("dtype", ["bool", "float16", "float32", "int8", "uint8", *NARROW])
def test_the_identity_changes_nothing(dtype: str) -> None:
    """Among the values: what is infinite, where a dtype has that, and the ends of the others."""
    if dtype == "bool":
        values = np.array([False, True])
    elif "int" in dtype:
        values = np.arange(jnp.iinfo(dtype).min, int(jnp.iinfo(dtype).max) + 1).astype(dtype_of(dtype))
    else:
        limits = jnp.finfo(dtype)
        infinite = np.array([-np.inf, np.inf]).astype(dtype_of(dtype))
        ends = [limits.min, limits.max, *infinite[np.isinf(infinite)], 0.5, 1.0, 2.0]
        values = np.array(ends).astype(dtype_of(dtype))
    # (An exponent alone is never zero.)
    for op in [op for op in REDUCE_OPS if (op, dtype) != ("sum", "float8_e8m0fnu")]:
        neutral = np.full_like(values, collectives.identity(op, values.dtype))
        for pair in ([neutral, values], [values, neutral]):
            assert same(collectives.combine(op, pair), values), op


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "int4", "bfloat16"])
def test_a_device_without_work_changes_no_maximum(dtype: str) -> None:
    def step(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        narrow = x.astype(dtype)
        return narrow.max(axis=0).astype(jnp.float32), narrow.min(axis=0).astype(jnp.float32)

    x = np.array([[-2.0, 3.0], [-4.0, 5.0], [-3.0, 2.0]], np.float32)
    traced = trace(step, x)
    program = build(traced.graph, [Shard(0)])
    assert any(isinstance(move, Move) and isinstance(move.pre, Partial) for move in program.instructions)
    got = ReferenceExecutable(traced, program, (0.7, 0.0, 0.3))(x)
    np.testing.assert_array_equal(got, [[-2.0, 5.0], [-4.0, 2.0]])


def local_after(case: Case, arrays: list[Any]) -> list[Any]:
    graph = Graph((Value(0, case.tensor),), {}, (), ())
    after: list[Any] = [None] * len(arrays)
    for device in members(case.move.group, len(arrays)):
        env = {Property(0, R): arrays[device]}
        Device(device, case.ratios, {}).run(case.move, graph, env)
        after[device] = env[Property(0, case.move.post, case.move.group)]
    return after


def test_local_moves_conform() -> None:
    kinds: set[str] = set()
    for case in cases(3, local=True):
        arrays = before(case)
        assert all(map(same, local_after(case, arrays), expected(case, arrays))), str(case)
        kinds.add(case.move.kind)
    assert kinds == {kind for kind, c in collectives.registry().items() if c.local}


@pytest.mark.parametrize("start", ["data", "zero", "last"])
@pytest.mark.parametrize("name", STEPS)
def test_programs_equal_one_device(name: str, start: str) -> None:
    traced, flat, wanted = traced_step(name)
    program = build(traced.graph, starts(traced.graph)[start])
    got = ReferenceExecutable(traced, program, RATIOS)(*flat)
    assert_close(got, wanted, 2e-2 if name == "half" else 1e-5)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", STEPS)
def test_random_programs_equal_one_device(name: str, seed: int) -> None:
    traced, flat, wanted = traced_step(name)
    rng = random.Random(seed)
    start = rng.choice(list(starts(traced.graph).values()))
    ratios = ((0.5, 0.5), (0.2, 0.0, 0.8), RATIOS)[seed % 3]
    program = build(traced.graph, start, rng)
    if seed % 2:
        program = several(program, traced.graph, len(ratios), rng)
        assert parse_program(format_program(program, traced.graph)) == program
        assert program_from_json(json.loads(json.dumps(program_to_json(program)))) == program
    got = ReferenceExecutable(traced, program, ratios)(*flat)
    assert_close(got, wanted, 2e-2 if name == "half" else 1e-5)


def test_state_goes_round() -> None:
    """Ten steps of the loop, distributed and alone."""
    step, args = STEPS["mlp"]()
    traced = trace(step, *args)
    run = ReferenceExecutable(traced, build(traced.graph, starts(traced.graph)["zero"]), RATIOS)
    flat, alone = jax.tree.leaves(args), jax.tree.leaves(args)
    single = jax.jit(step)
    for _ in range(10):
        outputs = run(*flat)
        wanted = jax.tree.leaves(single(*jax.tree.unflatten(traced.in_tree, alone)))
        assert_close([outputs[-1]], [wanted[-1]], 1e-5)
        flat = [*outputs[:-1], *flat[len(outputs) - 1 :]]
        alone = [*wanted[:-1], *alone[len(wanted) - 1 :]]


def test_groups_and_roots() -> None:
    traced = trace(lambda x: x + 1.0, np.arange(12.0, dtype=np.float32).reshape(6, 2), state={})
    program = parse_program(
        """
        program {
          in  0 %0 R
          0: %0 S(0) = slice %0 R on {0,2}
          1: %0 R = all_gather.exact %0 S(0) on {0,2}
          2: %0 P(max) = own %0 R on {0,2}
          3: %0 S(1) = reduce_scatter.padded %0 P(max) on {0,2}
          4: %0 R = send.direct %0 R from 2 on {1,2}
          5: %0 R = broadcast.tree %0 R from 1
          6: %1 R = add#0(%0 R, 1.0 R)
          out 0 %1 R
        }
        """
    )
    x = np.random.default_rng(0).normal(size=(6, 2)).astype(np.float32)
    (got,) = ReferenceExecutable(traced, program, (0.25, 0.5, 0.25))(x)
    assert np.array_equal(got, x + 1)


def test_typed_keys_are_sharded_and_gathered() -> None:
    def step(keys: Any, x: Any) -> tuple[Any, Any]:
        return jax.random.fold_in(keys[0], 1), x * 2

    keys = jax.random.split(jax.random.key(0), 5)
    traced = trace(step, keys, np.ones((4, 3), np.float32), state={})
    program = build(traced.graph, [Shard(0), Shard(0)])
    got = ReferenceExecutable(traced, program, (0.4, 0.0, 0.6))(keys, np.ones((4, 3), np.float32))
    assert got[0].dtype == keys.dtype
    assert np.array_equal(jax.random.key_data(got[0]), jax.random.key_data(step(keys, 1)[0]))


def test_constants_and_literal_outputs() -> None:
    table = np.arange(6.0, dtype=np.float32)
    traced = trace(lambda x: (x + table, 3.0), np.ones((4, 6), np.float32), state={})
    got = ReferenceExecutable(traced, build(traced.graph, [Shard(1)]), (0.5, 0.5))(
        np.ones((4, 6), np.float32)
    )
    assert np.array_equal(got[0], np.ones((4, 6)) + table)
    assert float(got[1]) == 3.0


def test_equal_devices_and_layers_share_executables() -> None:
    def step(x: Any, w: Any) -> Any:
        for _ in range(4):
            x = jax.numpy.tanh(x @ w)
        return x

    traced = trace(step, np.ones((8, 6), np.float32), np.ones((6, 6), np.float32), state={})
    layer = """
          {0}: %{v} R = all_gather.padded %{v} S(0)
          {1}: %{v} S(0) = slice %{v} R
          {2}: %{d} S(0) = dot_general#{e}(%{v} S(0), %1 R)
          {3}: %{t} S(0) = tanh#{f}(%{d} S(0))"""
    names = [0, *(e.outputs[0].index for e in traced.graph.equations)]
    body = "".join(
        layer.format(*range(4 * i, 4 * i + 4), v=names[e], d=names[e + 1], t=names[e + 2], e=e, f=e + 1)
        for i, e in enumerate(range(0, 8, 2))
    )
    text = f"program {{\n in 0 %0 S(0)\n in 1 %1 R {body}\n out 0 %{names[-1]} S(0)\n}}"
    run = ReferenceExecutable(traced, parse_program(text), (0.25, 0.25, 0.25, 0.25))
    run(np.ones((8, 6), np.float32), np.ones((6, 6), np.float32))
    # The slices start at another offset on every device; all else is shared by devices and layers.
    assert len(run.machine.compiler) == 4


@pytest.mark.parametrize(
    ("leaves", "message"),
    [
        ([np.ones((3, 6), np.float32)], "x: is float32[3,6], it was planned for float32[4,6]"),
        ([np.ones((4, 6), np.int32)], "x: is int32[4,6], it was planned for float32[4,6]"),
        ([], "0 leaves were given, it was planned for 1"),
    ],
)
def test_wrong_arguments_are_named(leaves: list[Any], message: str) -> None:
    traced = trace(lambda x: x * 2, np.ones((4, 6), np.float32), state={})
    run = ReferenceExecutable(traced, Program((R,), build(traced.graph, [R]).instructions, (R,)), (1.0,))
    with pytest.raises(InputError) as caught:
        run(*leaves)
    assert message in str(caught.value)


def test_an_error_names_the_instruction(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Any:
        raise ZeroDivisionError

    traced, flat, _ = traced_step("mlp")
    run = ReferenceExecutable(traced, build(traced.graph, starts(traced.graph)["data"]), RATIOS)
    monkeypatch.setattr("shardwright.backends.reference.collective", broken)
    with pytest.raises(ZeroDivisionError) as caught:
        run(*flat)
    assert any("at instruction" in note and " = all_" in note for note in caught.value.__notes__)
