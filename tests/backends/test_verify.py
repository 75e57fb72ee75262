"""Verification: passes what is right however ill-conditioned, catches what is wrong however small."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from greedy import build
from steps import STEPS, array, starts

from shardwright.backends import compile as compiling
from shardwright.backends import reference
from shardwright.backends.closeness import rel_error
from shardwright.backends.single import evaluate_graph
from shardwright.backends.verify import VerifyResult, verify_program
from shardwright.ir.graph import TensorType
from shardwright.ir.placement import Partial, R, Shard, grid
from shardwright.ir.program import Compute, Move, Program
from shardwright.ir.rules import Signature
from shardwright.ir.trace import Traced, trace

RATIOS = (0.5, 0.0, 0.5)
F32 = TensorType((2,), "float32")


def verified(name: str, start: str, ratios: Sequence[float] = RATIOS) -> VerifyResult:
    step, args = STEPS[name]()
    traced = trace(step, *args)
    flat = jax.tree.leaves(args)

    def alone(*leaves: Any) -> list[Any]:
        return jax.tree.leaves(step(*jax.tree.unflatten(traced.in_tree, leaves)))

    return verify_program(traced, build(traced.graph, starts(traced.graph)[start]), ratios, flat, alone)


@pytest.mark.parametrize("start", ["data", "last"])
@pytest.mark.parametrize("name", STEPS)
def test_right_programs_pass(name: str, start: str) -> None:
    result = verified(name, start)
    assert result.ok, str(result)
    assert result.max_rel_error <= 1e-5
    assert result.groups > 20
    assert str(result).startswith("verified: ")
    assert (result.max_rel_error_narrow > 0) == (name == "half")


@pytest.mark.parametrize("name", ["scanned", "controlled"])
def test_without_the_step_a_program_is_compared_with_its_graph(name: str) -> None:
    """Control flow in it is run as JAX runs it."""
    step, args = STEPS[name]()
    traced, flat = trace(step, *args), jax.tree.leaves(args)
    assert any(equation.regions for equation in traced.graph.equations)
    result = verify_program(traced, build(traced.graph, starts(traced.graph)["data"]), RATIOS, flat)
    assert result.ok, str(result)
    wanted = jax.tree.leaves(step(*args))
    for got, leaf in zip(evaluate_graph(traced.graph, traced.primitives, flat), wanted, strict=True):
        np.testing.assert_allclose(got, leaf, rtol=1e-5, atol=1e-6)


def handmade(function: Any, arrays: Sequence[Any], program: Program) -> VerifyResult:
    traced: Traced = trace(function, *arrays, state={})
    return verify_program(traced, program, RATIOS, arrays)


def test_a_sum_that_cancels_is_no_mismatch() -> None:
    """Its rounding noise is as large as its result; measured by its terms it is right."""
    x = array(1000)
    x = np.random.default_rng(1).permutation(np.concatenate([x, -x]))
    split = Program(
        (Shard(0),),
        (
            Compute(0, Signature((Shard(0),), (Partial(),))),
            Compute(1, Signature((Partial(), R), (Partial(),))),
            Move("all_reduce", 2, Partial(), R, "ring"),
        ),
        (R,),
    )
    result = handmade(lambda x: x.sum() * 3.0, [x], split)
    assert result.max_rel_error < 1e-6
    # End to end, too: one device finds as much for arguments that are nearly the same.
    assert result.loss_rel_error < 1e-5


def test_terms_too_small_for_normal_numbers_are_no_mismatch() -> None:
    """Alone they are taken for zero, added to a larger sum they are not: gradients that vanish over time."""
    a = np.full((4, 96), 1.5e-19, dtype=np.float32)
    a[:, 48:] = 0.9e-19
    split = Program(
        (Shard(1), Shard(0)),
        (
            Compute(0, Signature((Shard(1), Shard(0)), (Partial(),))),
            Move("all_reduce", 2, Partial(), R, "ring"),
        ),
        (R,),
    )
    result = handmade(jnp.matmul, [a, np.full((96, 4), 1.1e-19, dtype=np.float32)], split)
    assert result.ok, str(result)


def test_a_metric_that_is_noise_for_all_arguments_is_no_mismatch() -> None:
    """The mean of what was normalized, as policy losses and divergences begin."""

    def step(w: Any, x: Any) -> Any:
        normal = (x - x.mean(0)) / x.std(0)
        return w + (x.T @ normal) / 1e3, normal.mean(), jnp.mean(normal * (x[:, :1] > 9))

    traced = trace(step, array(5, 5), array(84, 5))
    args = [array(5, 5), array(84, 5)]
    program = build(traced.graph, starts(traced.graph)["data"])
    result = verify_program(traced, program, (0.5, 0.2, 0.3), args)
    assert result.ok, str(result)


def test_a_sum_that_cancels_but_lacks_a_device_is_caught() -> None:
    x = array(1000)
    x = np.random.default_rng(1).permutation(np.concatenate([x, -x]))
    program = Program(
        (Shard(0),),
        (
            Compute(0, Signature((Shard(0),), (Partial(),))),
            Move("all_reduce", 1, Partial(), R, "ring"),
        ),
        (R,),
    )
    traced = trace(lambda x: x.sum(), x, state={})
    result = verify_program(traced, program, RATIOS, [x], lambda x: [x[:-9].sum()])
    assert not result.ok
    assert "end to end" in result.worst


@pytest.mark.parametrize("part", [lambda x: x * 3j, jnp.real, jnp.imag], ids=["product", "real", "imaginary"])
def test_complex_sums_that_cancel_are_no_mismatch(part: Any) -> None:
    x = array(1000)
    x = 1j * np.random.default_rng(1).permutation(np.concatenate([x, -x])).astype(np.complex64)
    split = Program(
        (Shard(0),),
        (
            Compute(0, Signature((Shard(0),), (Partial(),))),
            Compute(1, Signature((Partial(), R)[: 2 if part(1j) == -3 else 1], (Partial(),))),
            Move("all_reduce", 2, Partial(), R, "ring"),
        ),
        (R,),
    )
    assert handmade(lambda x: part(x.sum()), [x], split).max_rel_error < 1e-6


def test_infinities_and_nans_are_compared_by_place() -> None:
    x = np.array([1.0, np.inf, -np.inf, np.nan, 0.0, 2.0], np.float32)
    program = Program((Shard(0),), (Compute(0, Signature((Shard(0),), (Shard(0),))),), (Shard(0),))
    assert handmade(lambda x: -x, [x], program).max_rel_error == 0.0


def test_infinities_that_meet_in_an_exchange_give_no_warning() -> None:
    """Warnings are errors here: adding up what devices hold is no place to warn of the user's NaNs."""
    program = Program(
        (Shard(0),),
        (Compute(0, Signature((Shard(0),), (Partial(),))), Move("all_reduce", 1, Partial(), R, "ring")),
        (R,),
    )
    assert handmade(jnp.sum, [np.array([np.inf, -np.inf], np.float32)], program).ok


def test_a_wrong_rule_is_caught() -> None:
    """tanh of a sum is not the sum of tanh; the program verifier would refuse it, so it is not asked."""
    total = Move("all_reduce", 2, Partial(), R, "ring")
    wrong = (
        Compute(0, Signature((Shard(0),), (Partial(),))),
        Compute(1, Signature((Partial(),), (Partial(),))),
        total,
    )
    result = handmade(lambda x: jnp.tanh(x.sum(0)), [array(8, 4)], Program((Shard(0),), wrong, (R,)))
    assert not result.ok
    assert "tanh" in result.worst
    assert "test_verify.py" in result.worst
    assert str(result).startswith("MISMATCH")


def test_wrong_local_numbers_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    right = compiling.evaluate

    def slightly_off(equation: Any, signature: Any, primitive: Any, device: int, *rest: Any) -> list[Any]:
        results = right(equation, signature, primitive, device, *rest)
        if device == 2 and equation.primitive == "tanh":
            results[0] = results[0] * (1 + 1e-4)
        return results

    monkeypatch.setattr(compiling, "evaluate", slightly_off)
    result = verified("mlp", "data")
    assert not result.ok
    assert "tanh" in result.worst


def test_a_wrong_collective_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    right = reference.collective

    def reversed_order(move: Move, tensor: Any, value: list[Any], ratios: Sequence[float]) -> list[Any]:
        if move.kind == "all_gather":
            value = [value[2], value[1], value[0]]
        return right(move, tensor, value, ratios)

    monkeypatch.setattr(reference, "collective", reversed_order)
    result = verified("mlp", "zero")
    assert not result.ok
    assert "all_gather" in result.worst


def test_one_wrong_replica_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    right = reference.collective

    def off_on_the_last(move: Move, tensor: Any, value: list[Any], ratios: Sequence[float]) -> list[Any]:
        result = right(move, tensor, value, ratios)
        if move.kind == "all_reduce":
            result[2] = result[2] * 1.001
        return result

    monkeypatch.setattr(reference, "collective", off_on_the_last)
    assert not verified("mlp", "data").ok


@pytest.mark.parametrize("placement", [grid(R, Shard(0), (2, 2)), grid(Shard(0), R, (2, 2))], ids=str)
@pytest.mark.parametrize("device", range(4))
def test_a_wrong_replica_on_one_of_two_axes_is_caught(
    placement: Any, device: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = compiling.evaluate

    def off(equation: Any, signature: Any, primitive: Any, where: int, *rest: Any) -> list[Any]:
        (result,) = right(equation, signature, primitive, where, *rest)
        return [result * 1.01 if where == device else result]

    monkeypatch.setattr(compiling, "evaluate", off)
    program = Program((placement,), (Compute(0, Signature((placement,), (placement,))),), (placement,))
    x = array(8)
    traced = trace(jnp.tanh, x, state={})
    result = verify_program(traced, program, (0.3, 0.2, 0.1, 0.4), [x])
    assert not result.ok and "tanh" in result.worst


def test_sums_of_nodes_that_have_rounded_apart_are_no_mismatch() -> None:
    """What is nearly zero since terms cancel differs from node to node, and so do sums of it in each."""
    cut, part = grid(R, Shard(0), (2, 2)), grid(R, Partial(), (2, 2))
    x = array(1000)
    x = np.random.default_rng(1).permutation(np.concatenate([x, -x]))
    noise = Compute(0, Signature((cut,), (part,))), Move("all_reduce", 2, part, R, "tree")
    times = Compute(1, Signature((R, cut), (cut,))), Compute(2, Signature((cut,), (part,)))
    program = Program((cut, cut), (*noise, *times, Move("all_reduce", 4, part, R, "tree")), (R,))
    traced = trace(lambda x, y: (x.sum() * y).sum(), x, np.abs(x), state={})
    result = verify_program(traced, program, (0.3, 0.2, 0.1, 0.4), [x, np.abs(x)])
    assert result.ok, str(result)


def test_a_wrong_loss_is_caught() -> None:
    step, args = STEPS["mlp"]()
    traced = trace(step, *args)
    program = build(traced.graph, starts(traced.graph)["data"])

    def other(*leaves: Any) -> list[Any]:
        outputs = jax.tree.leaves(step(*jax.tree.unflatten(traced.in_tree, leaves)))
        return [x * 1.0001 for x in outputs]

    result = verify_program(traced, program, RATIOS, jax.tree.leaves(args), other)
    assert not result.ok
    assert result.max_rel_error <= 1e-5
    assert "end to end" in result.worst


@pytest.mark.parametrize(
    ("got", "wanted", "tensor", "error"),
    [
        ([1.0, 2.0], [1.0, 4.0], F32, 0.5),
        ([0.0, 0.0], [0.0, 0.0], F32, 0.0),
        ([np.nan, 1.0], [np.nan, 1.0], F32, 0.0),
        ([np.nan, 1.0], [1.0, np.nan], F32, np.inf),
        ([np.inf, 1.0], [-np.inf, 1.0], F32, np.inf),
        ([1e-39, 0.0], [0.0, 0.0], F32, 0.0),
        ([3, 4], [3, 4], TensorType((2,), "int32"), 0.0),
        ([3, 4], [3, 5], TensorType((2,), "int32"), np.inf),
        ([True, False], [True, True], TensorType((2,), "bool"), np.inf),
        ([1 + 1j, 0j], [1 - 1j, 0j], TensorType((2,), "complex64"), np.sqrt(2)),
    ],
)
def test_error_of_a_tensor(got: Any, wanted: Any, tensor: TensorType, error: float) -> None:
    arrays = [jnp.asarray(x, dtype=tensor.dtype) for x in (got, wanted)]
    assert rel_error(*arrays, tensor) == pytest.approx(error, rel=1e-6)


def test_error_against_zero_is_large() -> None:
    assert rel_error(jnp.ones(2), jnp.zeros(2), F32) > 1.0
    assert rel_error(jnp.ones(2), jnp.zeros(2), F32, terms=1e6) == pytest.approx(1e-6)


def test_functions_are_shared_whatever_their_arguments_hold() -> None:
    compiler = compiling.Compiler(compiling.QUICK)

    def shared(factor: int, x: Any) -> Any:
        return compiler.share(lambda x: x * factor, (x,))

    first = shared(2, jnp.arange(3.0))
    assert shared(2, jnp.ones(3)) is first
    assert first not in (shared(3, jnp.ones(3)), shared(2, jnp.ones(4)))
    assert len(compiler) == 3
