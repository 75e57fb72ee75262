"""Plans know their step, verify, and compute what one device computes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from plan_cases import array, assert_same, fleet, mlp, mlp_step

import shardwright.attach
from shardwright import (
    InputError,
    Plan,
    PlanError,
    synthesize,
)


def test_plans_know_their_step(made: Plan) -> None:
    step, args = mlp()

    def other(params: Any, momentum: Any, x: Any, y: Any) -> Any:
        return mlp_step(params, momentum, x * 2, y)

    _, wider = mlp(width=24)
    _, larger = mlp(batch=24)
    cases = (
        (other, args, r"plan: was made for another step .* jax "),
        (step, wider, r"params\['b1'\]: is float32\[24\], it was planned for float32\[16\]"),
        (step, larger, r"^x: is float32\[24,8\], it was planned for float32\[12,8\]"),
        (lambda params, momentum, x: (params, momentum, x), args[:3], r"^y: is no argument, it was planned"),
    )
    for another, arguments, said in cases:
        for use in (made.attach, made.verify, made.compile(another)):
            with pytest.raises(PlanError, match=said):
                use(*arguments) if use not in (made.attach, made.verify) else use(another, *arguments)


def test_numbers_may_be_arrays_and_arrays_numbers() -> None:
    """A count that began as a number is an array after a step; only the dtype has to be the planned one."""

    def step(w: Any, count: Any, x: Any, rate: Any) -> Any:
        return w - rate * x.astype(jnp.bfloat16).sum(), count + 1

    w, x = array(4), array(3, seed=1)
    for count, rate in ((0, 0.1), (np.int32(0), np.float32(0.1))):
        plan = synthesize(step, w, count, x, rate, fleet=fleet(2, 1))
        loaded = Plan.from_dict(plan.to_dict())
        wanted = loaded.compile(step)(w, count, x, rate)[0]
        for other in ((jnp.int32(0), 0.1), (0, jnp.float32(0.1)), (jnp.asarray(0), jnp.asarray(0.1))):
            found = loaded.compile(step)(w, other[0], x, other[1])[0]
            assert found.dtype == wanted.dtype and np.array_equal(found, wanted)
        with pytest.raises(PlanError, match=r"rate: is weak int32\[\], it was planned for .*float32\[\]"):
            loaded.compile(step)(w, count, x, 1)


def test_later_calls_are_checked_too(made: Plan) -> None:
    step, args = mlp()
    compiled = made.compile(step)
    compiled(*args)
    _, larger = mlp(batch=24)
    with pytest.raises(InputError, match=r"x: is float32\[24,8\]"):
        compiled(*larger)
    for others, said in (
        ((*args[:3], [args[3]]), r"y: is a tree with leaves such as y\[0\], it was planned for float32"),
        ((*args[:3], None), r"y: is not given, it was planned for float32\[12,4\]"),
        ((*args, args[3]), "arg4: was not there when it was planned"),
        (({**args[0], "w3": args[3]}, *args[1:]), r"params\['w3'\]: was not there"),
        ((OrderedDict(args[0]), *args[1:]), r"params: is PyTreeDef\(.*OrderedDict.* planned for PyTreeDef"),
    ):
        with pytest.raises(InputError, match=said):
            compiled(*others)


def test_arguments_that_are_no_arrays_any_more_are_named(made: Plan) -> None:
    step, args = mlp()
    compiled = made.compile(step)
    compiled(*args)
    deleted = jnp.array(args[3])
    deleted.delete()
    for use in (compiled, lambda *them: made.verify(step, *them)):
        with pytest.raises(InputError, match="y: was passed to an earlier step, which took its memory"):
            use(*args[:3], deleted)
    with pytest.raises(InputError, match=r"y: is a str, it was planned for float32\[12,4\]"):
        compiled(*args[:3], "text")


def test_a_first_call_that_cannot_be_traced_is_compared_with_the_plan(made: Plan) -> None:
    step, args = mlp()
    for others, said in (
        ((*args[:3], None), r"y: is not given, it was planned for float32\[12,4\]"),
        ((*args[:2], args[2][:, :5], args[3]), r"x: is float32\[12,5\], it was planned for float32\[12,8\]"),
        (({"w1": args[0]["w1"]}, *args[1:]), r"params\['b1'\]: is not given"),
    ):
        for use in (made.compile(step), lambda *them: made.verify(step, *them)):
            with pytest.raises(PlanError, match=said):
                use(*others)


def test_keywords_are_put_in_the_step_s_order(made: Plan) -> None:
    step, (params, momentum, x, y) = mlp()
    compiled = made.compile(step)
    assert_same(compiled(params, momentum, y=y, x=x), compiled(params, momentum, x, y))
    with pytest.raises(InputError, match=r"arguments z: do not fit the step: .*Pass them by position"):
        compiled(params, momentum, x, z=y)


def test_shapes_cannot_be_run(made: Plan) -> None:
    step, args = mlp()
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), args)
    for use in (lambda: made.verify(step, *shapes), lambda: made.compile(step)(*shapes)):
        with pytest.raises(InputError, match="shapes without values"):
            use()


def test_there_is_no_such_backend(made: Plan) -> None:
    with pytest.raises(PlanError, match=r"'tpu' does not exist\. Choose from reference, mpi"):
        made.compile(mlp_step, backend="tpu")


@pytest.mark.parametrize("speeds", [(3, 1), (30, 20, 10), (8, 8, 1)], ids=str)
def test_verifies_on_unequal_devices(speeds: Sequence[float]) -> None:
    step, args = mlp()
    plan = synthesize(step, *args, fleet=fleet(*speeds))
    result = plan.verify(step, *args)
    assert result.ok
    assert result.max_rel_error <= 1e-5
    assert result.loss_rel_error <= 1e-5
    assert result.groups > 20
    assert str(result).startswith("verified")


def test_corruption_is_found(made: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: a primitive that computes something else on shards."""
    step, args = mlp()
    traced = made.attach(step, *args)
    planted = {**traced.primitives, "tanh": _Off(traced.primitives["tanh"])}
    broken = replace(traced, primitives=planted)
    monkeypatch.setattr(shardwright.attach, "trace", lambda *args, **kwargs: broken)
    result = made.verify(step, *args)
    assert not result.ok
    assert 1e-3 < result.max_rel_error < 1e-1
    assert str(result).startswith("MISMATCH")


class _Off:
    """A primitive that is right on whole arrays and wrong on shards."""

    def __init__(self, real: Any) -> None:
        self.real = real
        self.multiple_results = real.multiple_results

    def bind(self, *args: Any, **params: Any) -> Any:
        result = self.real.bind(*args, **params)
        return result if result.shape in ((12, 16),) else result * 1.01


@pytest.mark.parametrize("speeds", [(1,), (3, 1), (30, 20, 10)], ids=str)
def test_compiled_on_reference_equals_jit_in_a_loop(speeds: Sequence[float]) -> None:
    step, args = mlp()
    compiled = synthesize(step, *args, fleet=fleet(*speeds)).compile(step)
    single = jax.jit(step)
    params, momentum, x, y = args
    wanted = (params, momentum, None)
    got = wanted
    for number in range(3):
        batch = x + number, y - number
        got, wanted = compiled(got[0], got[1], *batch), single(wanted[0], wanted[1], *batch)
        assert_same(got, wanted)


def test_a_saved_plan_runs_in_another_process_s_place(made: Plan, tmp_path: Path) -> None:
    step, args = mlp()
    made.save(tmp_path / "plan.json")
    assert_same(Plan.load(tmp_path / "plan.json").compile(step)(*args), jax.jit(step)(*args))


def test_a_single_device() -> None:
    step, args = mlp()
    plan = synthesize(step, *args, fleet=fleet(1))
    assert plan.ratios == (1.0,)
    assert not [e for e in plan.exchanges if e.seconds > 0]
    assert plan.verify(step, *args).ok


@pytest.mark.parametrize("batch", [1, 2])
def test_a_batch_smaller_than_the_number_of_devices(batch: int) -> None:
    """No error: another axis is sharded, or some devices get nothing."""
    step, args = mlp(batch=batch, width=64)
    plan = synthesize(step, *args, fleet=fleet(30, 20, 10, 5, 3))
    assert any(p.startswith("S") for p in plan.held.values())
    assert plan.verify(step, *args).ok
    assert_same(plan.compile(step)(*args), jax.jit(step)(*args))


def test_fewer_elements_than_devices() -> None:
    def step(w: Any, x: Any) -> Any:
        return w - 0.1 * jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w)))(w), x.sum()

    args = (array(2, 2), array(2, 2, seed=1))
    plan = synthesize(step, *args, fleet=fleet(5, 4, 3, 2, 1))
    assert plan.verify(step, *args).ok


def test_a_device_that_is_not_worth_it_gets_nothing() -> None:
    """What it would have to compute of a small tensor takes it longer than the others need for all of it."""

    def step(w: Any, x: Any) -> Any:
        return w, x @ w

    args = (array(64, 64), array(6, 64, seed=1))
    plan = synthesize(step, *args, fleet=fleet(100, 90, 1), devices="all")
    assert plan.ratios[2] == 0
    assert plan.verify(step, *args).ok
    assert_same(plan.compile(step)(*args), jax.jit(step)(*args))
    assert "0.00%" in str(plan)


@pytest.mark.parametrize("seed", range(4))
def test_any_ratios_will_do(made: Plan, seed: int) -> None:
    """The program is right at every ratio; where a device has none, its shards are empty."""
    step, args = mlp()
    weights = np.random.default_rng(seed).exponential(size=3)
    weights[seed % 3] = 0
    weights[(seed + 1) % 3] *= seed > 1
    plan = replace(made, ratios=tuple(float(w) for w in weights / weights.sum()))
    assert plan.verify(step, *args).ok
    assert_same(plan.compile(step)(*args), jax.jit(step)(*args))


def test_python_scalars_and_numpy_float64_as_arguments() -> None:
    def step(w: Any, x: Any, rate: Any) -> Any:
        return w - rate * jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w)))(w), rate

    args = (array(8, 8).astype(np.float64), array(12, 8, seed=1), 0.5)
    plan = synthesize(step, *args, fleet=fleet(2, 1))
    assert plan.verify(step, *args).ok
    assert_same(plan.compile(step)(*args), jax.jit(step)(*args))
