"""Llama 3: a causal language model in bfloat16, as a whole training step with adam in float32.

Grouped-query attention with rotary positions, RMS norms, a gated feed-forward layer (SwiGLU), and an output
layer of its own (Grattafiori et al. 2024). The weights are kept in float32, which is what adam updates, and
rounded to bfloat16 for the forward and backward pass.
"""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from _layers import Params, initial

optimizer = optax.adam(3e-4, b2=0.95)


def rms_norm(scale: jax.Array, x: jax.Array, epsilon: float = 1e-5) -> jax.Array:
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.square(wide).mean(axis=-1, keepdims=True) + epsilon)
    return wide.astype(x.dtype) * scale


def rotated(x: jax.Array, base: float = 500_000.0) -> jax.Array:
    """Rotary positions: x (batch, sequence, ..., width), halves turned by an angle per position."""
    half = x.shape[-1] // 2
    angles = jnp.arange(x.shape[1])[:, None] * base ** (-jnp.arange(half) / half)
    shape = (1, x.shape[1], *(1,) * (x.ndim - 3), half)
    cos, sin = (turn(angles).reshape(shape).astype(x.dtype) for turn in (jnp.cos, jnp.sin))
    a, b = x[..., :half], x[..., half:]
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)


def attention(p: Params, x: jax.Array, mask: jax.Array) -> jax.Array:
    """Key and value heads serve several query heads each: queries are (batch, sequence, kv, group, width)."""
    q = rotated(jnp.einsum("bsd,dkgh->bskgh", x, p["queries"]))
    k = rotated(jnp.einsum("bsd,dkh->bskh", x, p["keys"]))
    v = jnp.einsum("bsd,dkh->bskh", x, p["values"])
    scores = jnp.einsum("bqkgh,btkh->bkgqt", q, k).astype(jnp.float32) / math.sqrt(q.shape[-1])
    probabilities = jax.nn.softmax(jnp.where(mask, scores, jnp.finfo(scores.dtype).min)).astype(x.dtype)
    mixed = jnp.einsum("bkgqt,btkh->bqkgh", probabilities, v)
    return jnp.einsum("bqkgh,kghd->bqd", mixed, p["out"])


def block(p: Params, x: jax.Array, mask: jax.Array) -> jax.Array:
    x = x + attention(p, rms_norm(p["norm1_scale"], x), mask)
    y = rms_norm(p["norm2_scale"], x)
    return x + (jax.nn.silu(y @ p["gate"]) * (y @ p["up"])) @ p["down"]


def loss_of(params: Params, tokens: jax.Array) -> jax.Array:
    """Mean cross entropy of tokens[:, 1:] given what stands before each."""
    params = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)
    inputs = tokens[:, :-1]
    mask = jnp.tril(jnp.ones((inputs.shape[1], inputs.shape[1]), bool))
    x = params["tokens"][inputs]
    if isinstance(params["blocks"], list):
        for p in params["blocks"]:
            x = block(p, x, mask)
    else:  # one tree whose leaves are stacked over layers
        x, _ = jax.lax.scan(lambda x, p: (block(p, x, mask), None), x, params["blocks"])
    scores = jnp.einsum("bsd,dv->bsv", rms_norm(params["norm_scale"], x), params["output"])
    scores = scores.astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(scores, tokens[:, 1:]).mean()


def train_step(
    params: Params, opt_state: optax.OptState, tokens: jax.Array
) -> tuple[Params, optax.OptState, jax.Array]:
    loss, gradients = jax.value_and_grad(loss_of)(params, tokens)
    updates, opt_state = optimizer.update(gradients, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss


def shapes(
    vocabulary: int, layers: int, d: int, heads: int, kv_heads: int, hidden: int, scan: bool = False
) -> Params:
    width, group = d // heads, heads // kv_heads
    layer = {
        "norm1_scale": (d,),
        "queries": (d, kv_heads, group, width),
        "keys": (d, kv_heads, width),
        "values": (d, kv_heads, width),
        "out": (kv_heads, group, width, d),
        "norm2_scale": (d,),
        "gate": (d, hidden),
        "up": (d, hidden),
        "down": (hidden, d),
    }
    blocks: Any = [layer] * layers
    if scan:
        blocks = {name: (layers, *shape) for name, shape in layer.items()}
    return {
        "tokens": (vocabulary, d),
        "blocks": blocks,
        "norm_scale": (d,),
        "output": (d, vocabulary),
    }


def arguments(
    batch: int, sequence: int, dtype: str = "float32", **sizes: Any
) -> tuple[Params, optax.OptState, jax.Array]:
    """Parameters, and adam's moments, in `dtype`; and tokens."""
    params = jax.tree.map(lambda p: p.astype(dtype), initial(shapes(**sizes)))
    tokens = jax.random.randint(jax.random.key(1), (batch, sequence + 1), 0, sizes["vocabulary"])
    return params, optimizer.init(params), tokens


SMALL = {
    "batch": 64,
    "vocabulary": 128_256,
    "sequence": 2048,
    "layers": 32,
    "d": 4096,
    "heads": 32,
    "kv_heads": 8,
    "hidden": 14_336,
}
LLAMA2 = {
    "batch": 16,
    "vocabulary": 32_000,
    "sequence": 2048,
    "layers": 32,
    "d": 4096,
    "heads": 32,
    "kv_heads": 32,
    "hidden": 11_008,
    "dtype": "bfloat16",
}
TINY = {
    "batch": 8,
    "vocabulary": 101,
    "sequence": 16,
    "layers": 2,
    "d": 32,
    "heads": 4,
    "kv_heads": 2,
    "hidden": 48,
}


def base() -> tuple[Any, Any]:
    """Llama-3-8B: 8,030,261,248 parameters; a batch of sequences of 2048 tokens, shapes only."""
    return train_step, jax.eval_shape(partial(arguments, **SMALL))


def base_scan() -> tuple[Any, Any]:
    """`base` with a `lax.scan` over stacked layers: the same 8,030,261,248 parameters."""
    return train_step, jax.eval_shape(partial(arguments, **SMALL, scan=True))


def llama2(batch: int = 16) -> tuple[Any, Any]:
    """The shape of Llama-2-7B (Touvron et al. 2023): 6,738,415,616 parameters.

    Parameters and moments are bfloat16, 40 GB together. Shapes only.
    """
    return train_step, jax.eval_shape(partial(arguments, **{**LLAMA2, "batch": batch}))


def llama2_scan(batch: int = 16) -> tuple[Any, Any]:
    """`llama2` with a `lax.scan` over stacked layers: the same 6,738,415,616 parameters."""
    return train_step, jax.eval_shape(partial(arguments, **{**LLAMA2, "batch": batch}, scan=True))


def tiny() -> tuple[Any, Any]:
    """Two layers, 21,984 parameters, concrete arrays."""
    return train_step, jax.jit(partial(arguments, **TINY))()


def tiny_scan() -> tuple[Any, Any]:
    """`tiny` with a `lax.scan` over stacked layers: the same 21,984 parameters."""
    return train_step, jax.jit(partial(arguments, **TINY, scan=True))()
