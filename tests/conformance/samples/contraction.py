"""Contractions."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from tests.conformance.samples.draw import Draw, Program, add, fine


def _dot(
    title: str, numbers: Any, left: Callable[[Draw], Any], right: Callable[[Draw], Any], **params: Any
) -> None:
    def make(draw: Draw) -> Program:
        return partial(lax.dot_general, dimension_numbers=numbers, **params), (left(draw), right(draw))

    add("dot_general", title, make, exact=title == "rounded")


_MATRIX = (((1,), (0,)), ((), ()))
_dot("matrix", _MATRIX, lambda d: d.floats(d.n(5, 7), d.n(4, 6)), lambda d: d.floats(d.n(4, 6), d.n(7, 5)))
_dot("vector", (((0,), (0,)), ((), ())), lambda d: d.floats(d.n(5, 7)), lambda d: d.floats(d.n(5, 7)))
_dot("outer", (((), ()), ((), ())), lambda d: d.floats(d.n(5, 7)), lambda d: d.floats(d.n(4, 6)))
_dot(
    "batched",
    (((2,), (1,)), ((0,), (0,))),
    lambda d: d.floats(d.n(4, 5), d.n(5, 6), d.n(6, 4)),
    lambda d: d.floats(d.n(4, 5), d.n(6, 4), d.n(7, 3)),
)
_dot(
    "two_contracted",
    (((0, 1), (0, 1)), ((), ())),
    lambda d: d.floats(d.n(4, 5), d.n(5, 3), d.n(3, 4)),
    lambda d: d.floats(d.n(4, 5), d.n(5, 3), d.n(6, 7)),
)
_dot(
    "half_preferred",
    _MATRIX,
    lambda d: d.floats(d.n(5, 7), d.n(4, 6), dtype=jnp.bfloat16),
    lambda d: d.floats(d.n(4, 6), d.n(7, 5), dtype=jnp.bfloat16),
    preferred_element_type=jnp.float32,
)
_dot(
    "rounded",
    _MATRIX,
    lambda d: fine(d, d.n(5, 7), d.n(4, 6)),
    lambda d: fine(d, d.n(4, 6), d.n(7, 5)),
    preferred_element_type=jnp.bfloat16,
)
_dot(
    "bytes_preferred",
    _MATRIX,
    lambda d: d.bits(d.n(5, 7), d.n(4, 6), dtype=jnp.int8),
    lambda d: d.bits(d.n(4, 6), d.n(7, 5), dtype=jnp.int8),
    preferred_element_type=jnp.int32,
)
_dot("integers", _MATRIX, lambda d: d.bits(d.n(5, 7), d.n(4, 6)), lambda d: d.bits(d.n(4, 6), d.n(7, 5)))


def _conv(
    title: str,
    lhs: Callable[[Draw], tuple[int, ...]],
    rhs: Callable[[Draw], tuple[int, ...]],
    dims: tuple[str, str, str],
    **params: Any,
) -> None:
    def make(draw: Draw) -> Program:
        a, b = draw.floats(*lhs(draw), low=-2, high=2), draw.floats(*rhs(draw), low=-2, high=2)
        options = {"window_strides": (1,) * (a.ndim - 2), "padding": [(0, 0)] * (a.ndim - 2), **params}
        return lambda x, y: lax.conv_general_dilated(x, y, dimension_numbers=dims, **options), (a, b)

    add("conv_general_dilated", title, make)


_LINE = ("NWC", "WIO", "NWC")
_conv(
    "overlapping",
    lambda d: (d.n(4, 5), 8, d.n(3, 4)),
    lambda d: (3, d.n(3, 4), d.n(5, 3)),
    _LINE,
    padding=[(1, 1)],
)
_conv(
    "channels_first",
    lambda d: (d.n(4, 5), d.n(3, 4), 6),
    lambda d: (d.n(5, 3), d.n(3, 4), 3),
    ("NCH", "OIH", "NCH"),
)
_conv(
    "image",
    lambda d: (d.n(3, 4), 5, 6, d.n(2, 3)),
    lambda d: (3, 2, d.n(2, 3), d.n(4, 3)),
    ("NHWC", "HWIO", "NHWC"),
    window_strides=(2, 1),
    padding="SAME",
)
_conv("pointwise", lambda d: (d.n(4, 5), d.n(6, 7), d.n(3, 4)), lambda d: (1, d.n(3, 4), d.n(5, 3)), _LINE)
_conv(
    "patches",
    lambda d: (d.n(4, 3), 4 * d.n(5, 6), d.n(2, 3)),
    lambda d: (4, d.n(2, 3), d.n(5, 3)),
    _LINE,
    window_strides=(4,),
)
_conv(
    "patch_weights",
    lambda d: (d.n(2, 3), 4 * d.n(5, 6), d.n(4, 3)),
    lambda d: (d.n(2, 3), d.n(5, 6), d.n(5, 7)),
    ("CWN", "IWO", "WNC"),
    rhs_dilation=(4,),
)
_conv(
    "spread_patches",
    lambda d: (d.n(4, 3), d.n(5, 6), d.n(2, 3)),
    lambda d: (3, d.n(2, 3), d.n(5, 3)),
    _LINE,
    lhs_dilation=(3,),
    padding=[(2, 2)],
)
_conv(
    "dense", lambda d: (d.n(4, 3), d.n(5, 6), d.n(2, 3)), lambda d: (d.n(5, 6), d.n(2, 3), d.n(5, 3)), _LINE
)


def _grouped(draw: Draw) -> Program:
    groups = draw.n(4, 5)
    x, y = draw.floats(draw.n(4, 3), 5, 2 * groups), draw.floats(2, 2, 3 * groups)
    convolve = partial(
        lax.conv_general_dilated, window_strides=(1,), padding="VALID", dimension_numbers=_LINE
    )
    return lambda a, b: convolve(a, b, feature_group_count=groups), (x, y)


def _depthwise(draw: Draw) -> Program:
    groups = draw.n(4, 5)
    x, y = draw.floats(draw.n(4, 3), 5, groups), draw.floats(3, 1, groups)
    convolve = partial(lax.conv_general_dilated, window_strides=(1,), padding="SAME", dimension_numbers=_LINE)
    return lambda a, b: convolve(a, b, feature_group_count=groups), (x, y)


def _batch_grouped(draw: Draw) -> Program:
    groups = draw.n(4, 5)
    x, y = draw.floats(2 * groups, 5, draw.n(3, 2)), draw.floats(3, draw.n(3, 2), 3 * groups)
    convolve = partial(
        lax.conv_general_dilated, window_strides=(1,), padding="VALID", dimension_numbers=_LINE
    )
    return lambda a, b: convolve(a, b, batch_group_count=groups), (x, y)


add("conv_general_dilated", "grouped", _grouped)
add("conv_general_dilated", "depthwise", _depthwise)
add("conv_general_dilated", "batch_grouped", _batch_grouped)


def _ragged(title: str, function: Callable[[Any, Any, Any], Any]) -> None:
    """Rows of several groups, one of them empty, and a matrix for each."""

    def make(draw: Draw) -> Program:
        a, b, c = draw.n(7, 9), draw.n(4, 6), draw.n(5, 3)
        sizes = jnp.asarray((3, 0, a - 4) if draw.variant else (1, a - 1), jnp.int32)
        return function, (draw.floats(a, b), draw.floats(len(sizes), b, c), sizes)

    add("ragged_dot_general", title, make)


_ragged("groups", lax.ragged_dot)
_ragged(
    "weights",
    lambda x, w, sizes: jax.grad(
        lambda w: (lax.ragged_dot(x, w, sizes) * jnp.arange(1.0, w.shape[2] + 1)).sum()
    )(w),
)
