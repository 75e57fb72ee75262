"""Steps with side effects are refused, by equation and line."""

import inspect
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.experimental import io_callback
from trace_cases import X, primitives

from shardwright.ir.errors import TraceError
from shardwright.ir.trace import trace


def line_of(function: Callable[..., Any], marker: str) -> str:
    lines, first = inspect.getsourcelines(function)
    (offset,) = [i for i, line in enumerate(lines) if marker in line]
    return f"{Path(__file__)}:{first + offset}"


def prints(x: jax.Array) -> jax.Array:
    jax.debug.print("x = {}", x)  # here
    return x


def calls_back(x: jax.Array) -> jax.Array:
    jax.debug.callback(lambda _: None, x)  # here
    return x


def orders(x: jax.Array) -> jax.Array:
    return io_callback(np.sin, jax.ShapeDtypeStruct(x.shape, x.dtype), x, ordered=True)  # here


def does_not_order(x: jax.Array) -> jax.Array:
    return io_callback(np.sin, jax.ShapeDtypeStruct(x.shape, x.dtype), x)  # here


def prints_in_scan(x: jax.Array) -> jax.Array:
    def body(c: jax.Array, row: jax.Array) -> tuple[jax.Array, None]:
        jax.debug.print("row = {}", row)  # here
        return c + row, None

    return jax.lax.scan(body, x[0], x)[0]


def prints_in_while(x: jax.Array) -> jax.Array:
    def body(y: jax.Array) -> jax.Array:
        jax.debug.print("y = {}", y)  # here
        return y * 2

    return jax.lax.while_loop(lambda y: y.sum() < 5, body, x)


def prints_in_cond(x: jax.Array) -> jax.Array:
    def told(y: jax.Array) -> jax.Array:
        jax.debug.print("y = {}", y)  # here
        return y * 2

    return jax.lax.cond(x.sum() < 5, told, lambda y: y, x)


def orders_in_jit_in_remat(x: jax.Array) -> jax.Array:
    @jax.jit
    def inner(y: jax.Array) -> jax.Array:
        jax.debug.print("y = {}", y)  # here
        return y * 2

    return jax.jit(inner)(x)


def writes_a_ref(x: jax.Array) -> jax.Array:
    ref = jax.new_ref(x)
    ref[...] = x * 2  # here
    return ref[...]


@pytest.mark.parametrize(
    ("step", "primitive"),
    [
        (prints, "debug_print"),
        (calls_back, "debug_callback"),
        (orders, "io_callback"),
        (does_not_order, "io_callback"),
        (prints_in_scan, "debug_print"),
        (prints_in_while, "debug_print"),
        (prints_in_cond, "debug_print"),
        (orders_in_jit_in_remat, "debug_print"),
    ],
)
def test_effects_name_equation_and_line(step: Callable[..., Any], primitive: str) -> None:
    with pytest.raises(TraceError) as caught:
        trace(step, X)
    assert primitive in caught.value.place
    assert line_of(step, "# here") in caught.value.place
    assert "side effects" in caught.value.reason


def test_mutable_references_are_refused() -> None:
    with pytest.raises(TraceError, match="side effects") as caught:
        trace(writes_a_ref, X)
    assert str(Path(__file__)) in caught.value.place
    assert "Ref" in caught.value.remedy


def test_a_pure_callback_is_an_equation_like_any_other() -> None:
    step = partial(jax.pure_callback, np.sin, jax.ShapeDtypeStruct(X.shape, X.dtype))
    assert primitives(trace(step, X).graph) == ["pure_callback"]


@pytest.mark.parametrize("wrapped", ["shard_map", "pmap"])
def test_steps_that_distribute_themselves_are_refused(wrapped: str) -> None:
    mesh = jax.sharding.Mesh(np.asarray(jax.devices()[:1]), ("d",))
    spec = jax.sharding.PartitionSpec("d")

    def step(x: jax.Array) -> jax.Array:
        if wrapped == "pmap":
            return jax.pmap(lambda x: 2 * x)(x[None])[0]  # here
        return jax.shard_map(lambda x: 2 * x, mesh=mesh, in_specs=spec, out_specs=spec)(x)

    with pytest.raises(TraceError, match="a plan is made for a single-device step") as caught:
        trace(step, X)
    assert str(Path(__file__)) in caught.value.place
