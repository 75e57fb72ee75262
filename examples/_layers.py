"""Pieces that several examples share: plain functions on nested dictionaries of arrays.

A model is declared as a tree of shapes. Its sizes (layers, heads, experts) are read
off its weights, and the head axis stays explicit in them, so a train step needs no
configuration object.
"""

import math
from collections.abc import Callable
from itertools import accumulate
from typing import Any

import jax
import jax.numpy as jnp

Params = Any  # nested dictionaries of arrays, or of their shapes
Activation = Callable[[jax.Array], jax.Array]


def initial(shapes: Any, seed: int = 0, deviation: float = 0.02) -> Any:
    """Float32 arrays for a tree of shapes: biases 0, scales 1, the rest normal.

    All of them are cut from one random vector, which compiles in a fraction of a second.
    """
    leaves, structure = jax.tree.flatten_with_path(shapes, is_leaf=lambda node: isinstance(node, tuple))
    ends = list(accumulate(math.prod(shape) for _, shape in leaves))
    draws = deviation * jax.random.normal(jax.random.key(seed), (ends[-1],))

    def leaf(path: Any, shape: tuple[int, ...], draw: jax.Array) -> jax.Array:
        name = str(path[-1].key)
        if name.endswith("bias"):
            return jnp.zeros(shape)
        if name.endswith("scale"):
            return jnp.ones(shape)
        return draw.reshape(shape)

    pieces = jnp.split(draws, ends[:-1])
    return structure.unflatten(
        [leaf(path, shape, draw) for (path, shape), draw in zip(leaves, pieces, strict=True)]
    )


def norm_shapes(d: int) -> Params:
    return {"scale": (d,), "bias": (d,)}


def dense_shapes(inputs: int, outputs: int) -> Params:
    return {"weight": (inputs, outputs), "bias": (outputs,)}


def attention_shapes(d: int, heads: int) -> Params:
    width = d // heads
    return {
        "qkv": (d, 3, heads, width),
        "qkv_bias": (3, heads, width),
        "out": (heads, width, d),
        "out_bias": (d,),
    }


def block_shapes(d: int, heads: int, hidden: int) -> Params:
    """One transformer layer: 4 d² + 2 d·hidden weights, plus biases and two norms."""
    return {
        "norm1": norm_shapes(d),
        "attention": attention_shapes(d, heads),
        "norm2": norm_shapes(d),
        "up": dense_shapes(d, hidden),
        "down": dense_shapes(hidden, d),
    }


def layer_norm(p: Params, x: jax.Array, epsilon: float) -> jax.Array:
    centred = x - x.mean(axis=-1, keepdims=True)
    variance = jnp.square(centred).mean(axis=-1, keepdims=True)
    return centred * jax.lax.rsqrt(variance + epsilon) * p["scale"] + p["bias"]


def dense(p: Params, x: jax.Array) -> jax.Array:
    return x @ p["weight"] + p["bias"]


def attention(
    p: Params,
    x: jax.Array,
    mask: jax.Array | None = None,
    dropout: Activation | None = None,
) -> jax.Array:
    """Multi-head self-attention on x (batch, sequence, d).

    mask (query, key) is true where a query may look; dropout acts on the
    probabilities (batch, head, query, key).
    """
    qkv = jnp.einsum("bsd,dchk->bschk", x, p["qkv"]) + p["qkv_bias"]
    q, k, v = qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2]
    scores = jnp.einsum("bqhk,bthk->bhqt", q, k) / math.sqrt(q.shape[-1])
    if mask is not None:
        scores = jnp.where(mask, scores, jnp.finfo(scores.dtype).min)
    probabilities = jax.nn.softmax(scores)
    if dropout is not None:
        probabilities = dropout(probabilities)
    mixed = jnp.einsum("bhqt,bthk->bqhk", probabilities, v)
    return jnp.einsum("bqhk,hkd->bqd", mixed, p["out"]) + p["out_bias"]


def feed_forward(p: Params, x: jax.Array, activation: Activation) -> jax.Array:
    return dense(p["down"], activation(dense(p["up"], x)))


def pre_norm_block(
    p: Params,
    x: jax.Array,
    activation: Activation,
    epsilon: float,
    mask: jax.Array | None = None,
) -> jax.Array:
    x = x + attention(p["attention"], layer_norm(p["norm1"], x, epsilon), mask)
    return x + feed_forward(p, layer_norm(p["norm2"], x, epsilon), activation)


def exact_gelu(x: jax.Array) -> jax.Array:
    return jax.nn.gelu(x, approximate=False)
