"""Pieces of training steps to time as wholes: what kernels take in each other's company.

Kernels of a step find their operands where others left them, lie in layouts that suit others, and are fused
as the compiler likes: their sum is not what a step takes. A plan runs forward and backward in different
segments, so they are different pieces: the forward one hands out what the backward one needs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

#: A function and its arguments, or their shapes.
Step: TypeAlias = tuple[Callable[..., Any], tuple[Any, ...]]


#: As many numbers are drawn for an operand, and repeated where it has more.
MOST_DRAWN = 1 << 20


def drawn(draw: Callable[[int], NDArray[Any]], shape: tuple[int, ...]) -> NDArray[Any]:
    """An operand of numbers that `draw` makes, so many at a time."""
    return np.resize(draw(min(prod(shape), MOST_DRAWN)), shape)


def _typed(*shapes: tuple[int, ...]) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct(shape, "float32") for shape in shapes]


def _normalised(x: jax.Array, scale: jax.Array) -> jax.Array:
    mean = x.mean(-1, keepdims=True)
    return (x - mean) * jax.lax.rsqrt(jnp.square(x - mean).mean(-1, keepdims=True) + 1e-5) * scale


def mlp(batch: int, length: int, width: int, hidden: int) -> Step:
    """Normalisation, two products with a GELU between them, residual."""

    def layer(x: jax.Array, scale: jax.Array, w1: jax.Array, b1: jax.Array, w2: jax.Array) -> jax.Array:
        inner = jax.nn.gelu(jnp.einsum("bsd,dh->bsh", _normalised(x, scale), w1) + b1)
        return x + jnp.einsum("bsh,hd->bsd", inner, w2)

    shapes = ((batch, length, width), (width,), (width, hidden), (hidden,), (hidden, width))
    return layer, tuple(_typed(*shapes))


def attention(batch: int, length: int, width: int, heads: int, head: int) -> Step:
    """Normalisation, masked self-attention with heads, residual."""
    mask = np.tril(np.ones((length, length), bool))

    def layer(x: jax.Array, scale: jax.Array, qkv: jax.Array, out: jax.Array) -> jax.Array:
        q, k, v = jnp.moveaxis(jnp.einsum("bsd,dthw->bsthw", _normalised(x, scale), qkv), 2, 0)
        scores = jnp.einsum("bshw,bthw->bhst", q, k) / np.float32(np.sqrt(head))
        weights = jax.nn.softmax(jnp.where(mask, scores, np.float32(-1e9)))
        mixed = jnp.einsum("bhst,bthw->bshw", weights, v)
        return x + jnp.einsum("bshw,hwd->bsd", mixed, out)

    shapes = ((batch, length, width), (width,), (width, 3, heads, head), (heads, head, width))
    return layer, tuple(_typed(*shapes))


def classifier(rows: int, width: int, classes: int) -> Step:
    """A product and the cross entropy of its softmax."""
    labels = np.arange(rows) % classes

    def loss(x: jax.Array, weight: jax.Array) -> jax.Array:
        scores = jax.nn.log_softmax(jnp.einsum("rd,cd->rc", x, weight))
        return -jnp.take_along_axis(scores, labels[:, None], 1).mean()

    return loss, tuple(_typed((rows, width), (classes, width)))


def embedding(rows: int, entries: int, width: int) -> Step:
    """A look-up in a table; backwards, a scatter."""
    places = np.random.default_rng(1).integers(entries, size=rows)

    def layer(table: jax.Array) -> jax.Array:
        return jnp.take(table, places, axis=0)

    return layer, tuple(_typed((entries, width)))


def convolution(batch: int, side: int, fan_in: int, features: int, window: int, stride: int) -> Step:
    """A two-dimensional convolution and its bias."""

    def layer(x: jax.Array, kernel: jax.Array, bias: jax.Array) -> jax.Array:
        numbers = ("NHWC", "HWIO", "NHWC")
        found = jax.lax.conv_general_dilated(x, kernel, (stride,) * 2, "SAME", dimension_numbers=numbers)
        return jax.nn.relu(found + bias)

    return layer, tuple(_typed((batch, side, side, fan_in), (window, window, fan_in, features), (features,)))


def clip(tensors: int, rows: int, width: int) -> Step:
    """Gradients scaled down to a global norm."""

    def step(gradients: list[jax.Array]) -> list[jax.Array]:
        norm = jnp.sqrt(sum(jnp.sum(g * g) for g in gradients))
        return [jnp.where(norm < 1, g, g / norm) for g in gradients]

    return step, (_typed(*[(rows, width)] * tensors),)


def adam(tensors: int, rows: int, width: int) -> Step:
    """The update of so many tensors by Adam."""

    def update(p: jax.Array, g: jax.Array, m: jax.Array, v: jax.Array) -> tuple[jax.Array, ...]:
        m, v = 0.9 * m + 0.1 * g, 0.99 * v + 0.01 * g * g
        return p - 1e-3 * (m / (jnp.sqrt(v) + 1e-8) + 0.01 * p), m, v

    def step(*groups: list[jax.Array]) -> list[tuple[jax.Array, ...]]:
        return [update(*group) for group in zip(*groups, strict=True)]

    return step, tuple(_typed(*[(rows, width)] * tensors) for _ in range(4))


_LAYERS: Mapping[str, Callable[..., Step]] = {
    "mlp": mlp,
    "attention": attention,
    "classifier": classifier,
    "embedding": embedding,
    "convolution": convolution,
    "clip": clip,
    "adam": adam,
}


def piece(op: str, sizes: tuple[int, ...], *, shapes_only: bool = False) -> Step:
    """The function and arguments of "forward:LAYER", "backward:LAYER" or "update:OPTIMIZER".

    With `shapes_only` the arguments are shapes; nothing is drawn or computed.
    """
    direction, _, name = op.partition(":")
    layer, shapes = _LAYERS[name](*sizes)
    random = np.random.default_rng(0)

    def filled(shape: jax.ShapeDtypeStruct) -> jax.Array:
        numbers = jnp.asarray(drawn(lambda n: random.normal(0, 0.1, n), shape.shape), shape.dtype)
        # What optimizers take the root of is not negative.
        return jnp.abs(numbers) if direction == "update" else numbers

    def forward(*args: Any) -> Any:
        return jax.vjp(layer, *args)

    def backward(back: Any, cotangent: Any) -> Any:
        return back(cotangent)

    arguments = shapes if shapes_only else jax.tree.map(filled, shapes)
    if direction == "update":
        return layer, arguments
    if direction == "forward":
        return forward, arguments
    out, back = jax.eval_shape(forward, *arguments) if shapes_only else jax.jit(forward)(*arguments)
    return backward, (back, out)


def is_piece(op: str) -> bool:
    """Whether `piece` knows the operation."""
    return op.partition(":")[0] in ("forward", "backward", "update")
