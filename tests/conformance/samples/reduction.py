"""Reductions, running reductions, sorting and windows."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from tests.conformance.samples.draw import Draw, Program, add, bind, bits, reals, sample


def _reduction(
    name: str,
    title: str,
    function: Callable[..., Any],
    kind: Callable[..., Any] = reals,
    axis: Any = 1,
    rank: int = 2,
) -> None:
    add(name, title, lambda draw: (lambda x: function(x, axis=axis), (kind(draw, *(*draw.ab, 3)[:rank]),)))


for _name in ("sum", "max", "min", "prod"):
    _reduction(f"reduce_{_name}", "one_axis", getattr(jnp, _name))
    _reduction(f"reduce_{_name}", "bits", getattr(jnp, _name), bits, 0)
_reduction("reduce_sum", "two_axes", jnp.sum, axis=(0, 2), rank=3)
_reduction("reduce_max", "all", jnp.max, axis=None)
_reduction("reduce_and", "logic", jnp.all, lambda draw, *shape: draw.bools(*shape) | draw.bools(*shape))
_reduction("reduce_or", "logic", jnp.any, lambda draw, *shape: draw.bools(*shape) & draw.bools(*shape))
for _name in ("and", "or", "xor"):
    _fold = bind(f"reduce_{_name}", axes=(0,))
    add(f"reduce_{_name}", "bits", partial(lambda draw, f: (f, (draw.bits(*draw.ab),)), f=_fold))
for _name in ("argmax", "argmin"):
    _reduction(_name, "one_axis", getattr(jnp, _name))
for _name in ("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"):
    _reduction(_name, "running", getattr(lax, _name))
_reduction("cumsum", "backwards", partial(lax.cumsum, reverse=True), bits, 0)
_reduction("sort", "alone", lambda x, axis: lax.sort(x, dimension=axis))
_reduction("top_k", "one_axis", lambda x, axis: lax.top_k(x, 2, axis=axis))
_reduction("approx_top_k", "one_axis", lambda x, axis: lax.approx_max_k(x, 2, axis - x.ndim))


@sample("sort")
def sorted_pairs(draw: Draw) -> Program:
    a, b = draw.ab
    return lambda x, y: lax.sort((x, y), dimension=0, num_keys=1), (draw.floats(a, b), draw.floats(a, b))


@sample("reduce")
def custom_reduction(draw: Draw) -> Program:
    return lambda x: lax.reduce(x, np.float32(0), lambda a, b: a + 2 * b, (1,)), (draw.floats(*draw.ab),)


for _name in ("psum", "pmax", "pmin"):
    add(
        _name,
        "over_vmap",
        partial(
            lambda d, f: (jax.vmap(lambda x: f(x, "i"), axis_name="i", out_axes=None), (d.floats(*d.ab),)),
            f=getattr(lax, _name),
        ),
    )


def _distinct(draw: Draw) -> jax.Array:
    """Numbers of which no two are equal, so that the largest of a window is one."""
    shape = draw.n(4, 3), draw.n(12, 18)
    return jnp.asarray(draw.rng.permutation(np.prod(shape)).reshape(shape) / 4 - 7, jnp.float32)


def _pool(size: tuple[int, ...], strides: tuple[int, ...], padding: Any) -> dict[str, Callable[..., Any]]:
    """Windowed reductions and, by differentiating them, what belongs to them."""

    def window(x: Any, start: Any, function: Any) -> Any:
        return lax.reduce_window(x, start, function, size, strides, padding)

    def largest(x: Any) -> Any:
        return window(x, -jnp.inf, lax.max)

    return {
        "reduce_window_sum": lambda x: window(x, 0.0, lax.add),
        "reduce_window_max": largest,
        "reduce_window_min": lambda x: window(x, jnp.inf, lax.min),
        "reduce_window": lambda x: window(x, np.float32(0), lambda a, b: a + 2 * b),
        "select_and_scatter_add": lambda x: jax.vjp(largest, x)[1](2 * largest(x)),
        "select_and_gather_add": lambda x: jax.jvp(largest, (x,), (jnp.sin(8 * x),))[1],
    }


for _title, _pooling in {
    "side_by_side": ((1, 2), (1, 2), "VALID"),
    "overlapping": ((1, 3), (1, 2), "VALID"),
    "padded": ((1, 3), (1, 1), "SAME"),
    "sparse": ((1, 2), (1, 3), "VALID"),
}.items():
    for _name, _function in _pool(*_pooling).items():
        add(_name, _title, partial(lambda draw, f: (f, (_distinct(draw),)), f=_function))
