"""BERT with its masked-language-model loss, as a whole training step with adamw.

Dropout is on: the step takes a typed PRNG key, fresh for every step.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from _layers import (
    Params,
    attention,
    block_shapes,
    dense,
    dense_shapes,
    exact_gelu,
    feed_forward,
    initial,
    layer_norm,
    norm_shapes,
)

optimizer = optax.adamw(1e-4, weight_decay=0.01)
norm = partial(layer_norm, epsilon=1e-12)


def dropout(x: jax.Array, key: jax.Array, rate: float = 0.1) -> jax.Array:
    keep = jax.random.bernoulli(key, 1 - rate, x.shape)
    return jnp.where(keep, x / (1 - rate), 0.0)


def embed(params: Params, tokens: jax.Array, segments: jax.Array) -> jax.Array:
    """(batch, sequence) tokens and segment numbers 0 or 1 to (batch, sequence, d)."""
    positions = params["positions"][: tokens.shape[1]]
    x = params["tokens"][tokens] + positions + params["segments"][segments]
    return norm(params["embed_norm"], x)


def block(p: Params, x: jax.Array, key: jax.Array) -> jax.Array:
    first, second, third = (partial(dropout, key=jax.random.fold_in(key, i)) for i in range(3))
    x = norm(p["norm1"], x + second(attention(p["attention"], x, dropout=first)))
    return norm(p["norm2"], x + third(feed_forward(p, x, exact_gelu)))


def masked_lm_loss(params: Params, x: jax.Array, labels: jax.Array, weights: jax.Array) -> jax.Array:
    """Cross entropy of labels, averaged over the positions that weights marks."""
    x = norm(params["head_norm"], exact_gelu(dense(params["head"], x)))
    scores = jnp.einsum("bsd,vd->bsv", x, params["tokens"]) + params["tokens_bias"]
    losses = optax.softmax_cross_entropy_with_integer_labels(scores, labels)
    return (losses * weights).sum() / weights.sum()


def loss_of(
    params: Params,
    tokens: jax.Array,
    segments: jax.Array,
    labels: jax.Array,
    weights: jax.Array,
    key: jax.Array,
) -> jax.Array:
    keys = jax.random.split(key, 1 + len(params["blocks"]))
    x = dropout(embed(params, tokens, segments), keys[0])
    for p, block_key in zip(params["blocks"], keys[1:], strict=True):
        x = block(p, x, block_key)
    return masked_lm_loss(params, x, labels, weights)


def train_step(
    params: Params,
    opt_state: optax.OptState,
    tokens: jax.Array,
    segments: jax.Array,
    labels: jax.Array,
    weights: jax.Array,
    key: jax.Array,
) -> tuple[Params, optax.OptState, jax.Array]:
    loss, gradients = jax.value_and_grad(loss_of)(params, tokens, segments, labels, weights, key)
    updates, opt_state = optimizer.update(gradients, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss


def shapes(vocabulary: int, positions: int, layers: int, d: int, heads: int) -> Params:
    return {
        "tokens": (vocabulary, d),
        "positions": (positions, d),
        "segments": (2, d),
        "embed_norm": norm_shapes(d),
        "blocks": [block_shapes(d, heads, 4 * d)] * layers,
        "head": dense_shapes(d, d),
        "head_norm": norm_shapes(d),
        "tokens_bias": (vocabulary,),
    }


def masked_batch(batch: int, sequence: int, vocabulary: int) -> tuple[jax.Array, ...]:
    """Random tokens and segments; 15 % of the tokens are hidden (token 0) and asked for."""
    labels_key, weights_key = jax.random.split(jax.random.key(1))
    labels = jax.random.randint(labels_key, (batch, sequence), 1, vocabulary)
    hidden = jax.random.bernoulli(weights_key, 0.15, (batch, sequence))
    tokens = jnp.where(hidden, 0, labels)
    segments = jnp.broadcast_to(jnp.arange(sequence) * 2 // sequence, (batch, sequence))
    return tokens, segments, labels, hidden.astype(jnp.float32)


def arguments(batch: int, sequence: int, vocabulary: int, **sizes: Any) -> tuple[Any, ...]:
    params = initial(shapes(vocabulary, **sizes))
    data = masked_batch(batch, sequence, vocabulary)
    return params, optimizer.init(params), *data, jax.random.key(2)


BASE = {
    "batch": 256,
    "sequence": 128,
    "vocabulary": 30522,
    "positions": 512,
    "layers": 12,
    "d": 768,
    "heads": 12,
}
TINY = {"batch": 8, "sequence": 16, "vocabulary": 101, "positions": 32, "layers": 2, "d": 32, "heads": 4}


def base() -> tuple[Any, Any]:
    """BERT-Base: 109,514,298 parameters; batch 256 of 128 tokens, shapes only."""
    return train_step, jax.eval_shape(partial(arguments, **BASE))


def tiny() -> tuple[Any, Any]:
    """Two layers, 31,013 parameters, concrete arrays."""
    return train_step, jax.jit(partial(arguments, **TINY))()
