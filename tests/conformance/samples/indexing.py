"""Gathers and scatters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from tests.conformance.samples.draw import Draw, Program, add, sample


@sample("gather", "scatter-add")
def embedding(draw: Draw) -> Program:
    """Forward and backward of a lookup of many tokens."""

    def look_up(table: Any, tokens: Any, cotangent: Any) -> Any:
        out, pull = jax.vjp(lambda t: t.at[tokens].get(mode="promise_in_bounds"), table)
        return out, pull(cotangent)

    tokens = draw.ints(draw.n(3, 4), draw.n(5, 3), low=0, high=6)
    return look_up, (
        draw.floats(draw.n(7, 8), draw.n(4, 3)),
        tokens,
        draw.floats(*tokens.shape, draw.n(4, 3)),
    )


@sample("gather", "scatter-add")
def along_axis(draw: Draw) -> Program:
    """Forward and backward of take_along_axis: batching dimensions."""
    b, v = draw.n(5, 4), draw.n(7, 8)

    def pick(x: Any, i: Any, cotangent: Any) -> Any:
        out, pull = jax.vjp(lambda y: jnp.take_along_axis(y, i, axis=1), x)
        return out, pull(cotangent)

    return pick, (draw.floats(b, v), draw.ints(b, 2, low=-9, high=9), draw.floats(b, 2))


@sample("gather", "scatter-add")
def one_index(draw: Draw) -> Program:
    """x[:, 0]: the indices are a single vector."""
    a, b = draw.ab

    def pick(x: Any, i: Any, cotangent: Any) -> Any:
        out, pull = jax.vjp(lambda y: jnp.take(y, i, axis=1), x)
        return out, pull(cotangent)

    return pick, (draw.floats(a, b), jnp.int32(1), draw.floats(a))


@sample("gather", "scatter-add")
def two_indices(draw: Draw) -> Program:
    """x[i, :, j]: two indexed dimensions, some indices out of range."""
    n = draw.n(6, 5)
    shape = (draw.n(5, 6), 3, draw.n(4, 5))

    def pick(x: Any, i: Any, j: Any, cotangent: Any) -> Any:
        out, pull = jax.vjp(lambda y: y.at[i, :, j].get(mode="fill", fill_value=0), x)
        return out, pull(cotangent)

    indices = (draw.ints(n, low=-9, high=9), draw.ints(n, low=-9, high=9))
    return pick, (draw.floats(*shape), *indices, draw.floats(n, 3))


@sample("gather")
def windows(draw: Draw) -> Program:
    """Windows of three rows, clamped at the end."""
    numbers = lax.GatherDimensionNumbers((1, 2), (), (0,))
    n, m = draw.n(7, 9), draw.n(4, 5)
    return (
        lambda x, i: lax.gather(x, i, numbers, (3, m), mode="clip"),
        (draw.floats(n, m), draw.ints(draw.n(5, 4), 1, low=-3, high=12)),
    )


def _gather_as(title: str, table: Callable[[Draw], Any], **params: Any) -> None:
    def make(draw: Draw) -> Program:
        index = draw.ints(draw.n(5, 6), low=-12, high=12, dtype=params.get("dtype", jnp.int32))
        options = {"mode": "fill", **{k: v for k, v in params.items() if k != "dtype"}}
        return lambda x, i: x.at[i].get(**options), (table(draw), index)

    add("gather", title, make)


_gather_as("clipped", lambda d: d.floats(d.n(7, 8), d.n(4, 3)), mode="clip")
_gather_as("dropped", lambda d: d.floats(d.n(7, 8), d.n(4, 3)))
_gather_as("logic", lambda d: d.bools(d.n(7, 8)))
_gather_as("integers", lambda d: d.bits(d.n(7, 8)))
_gather_as("keys", lambda d: d.keys(d.n(7, 8)), mode="clip")
_gather_as("filled", lambda d: d.floats(d.n(7, 8)), fill_value=3.0)
_gather_as("byte_indices", lambda d: d.floats(d.n(7, 8)), dtype=jnp.int8)


@sample("gather")
def more_rows_than_bytes(draw: Draw) -> Program:
    numbers = lax.GatherDimensionNumbers((), (0,), (0,))
    index = draw.bits(draw.n(6, 7), 1, dtype=jnp.int8)
    return lambda x, i: lax.gather(x, i, numbers, (1,), mode="clip"), (draw.floats(draw.n(200, 210)), index)


@sample("scatter")
def set_unique(draw: Draw) -> Program:
    n, m = draw.n(7, 8), draw.n(4, 3)
    index = jnp.asarray(draw.rng.permutation(n + 2)[:5] - 1)
    return (
        lambda x, i, u: x.at[i].set(u, unique_indices=True, mode="drop"),
        (draw.floats(n, m), index, draw.floats(5, m)),
    )


@sample("scatter")
def set_one(draw: Draw) -> Program:
    n, m = draw.n(7, 8), draw.n(4, 3)
    return lambda x, u: x.at[2].set(u), (draw.floats(n, m), draw.floats(m))


@sample("scatter")
def applied(draw: Draw) -> Program:
    """A function of what is there, for which no updates are read."""
    index = jnp.asarray(draw.rng.permutation(7)[:3])
    args = (draw.floats(*draw.ab), index)
    return lambda x, i: x.at[i].apply(lambda v: 2 - v * v, unique_indices=True), args


def _scattered(name: str, method: str, mode: str = "drop") -> None:
    def make(draw: Draw) -> Program:
        n, m = draw.n(7, 8), draw.n(4, 3)
        index = draw.ints(draw.n(5, 6), low=-12, high=12)
        return (
            lambda x, i, u: getattr(x.at[i], method)(u, mode=mode),
            (draw.floats(n, m), index, draw.floats(len(index), m)),
        )

    add(name, f"{method}_{mode}", make)


_scattered("scatter", "set")
_scattered("scatter-mul", "multiply")
_scattered("scatter-max", "max")
_scattered("scatter-min", "min")
_scattered("scatter-sub", "subtract")
_scattered("scatter-max", "max", "clip")
_scattered("scatter-add", "add", "clip")
