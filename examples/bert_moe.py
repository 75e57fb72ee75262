"""BERT-MoE: BERT with a mixture of experts in every second layer, with adamw.

Tokens are dispatched by dense einsums within groups, one group per sequence, as in
GShard (Lepikhin et al. 2021): each token goes to its two best experts, and an expert
takes at most 2.5 · sequence / experts tokens of a group; what is over passes by on the
residual path. The step also returns the load-balance loss.
"""

import math
from functools import partial
from typing import Any

import bert
import jax
import jax.numpy as jnp
import optax
from _layers import (
    Params,
    attention,
    attention_shapes,
    exact_gelu,
    feed_forward,
    initial,
    norm_shapes,
)
from bert import embed, masked_batch, masked_lm_loss, norm

CAPACITY_FACTOR = 2.5
BALANCE_WEIGHT = 0.01

optimizer = optax.adamw(1e-4, weight_decay=0.01)


def route(router: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Where the tokens of x (group, sequence, d) go, and how unbalanced that is.

    The first result (group, sequence, expert, slot) holds a token's gate at the slot
    that it takes in an expert's queue, else 0: all first choices queue before all
    second ones, and nobody takes a slot past the capacity.
    """
    sequence, experts = x.shape[1], router.shape[1]
    capacity = math.ceil(CAPACITY_FACTOR * sequence / experts)

    probabilities = jax.nn.softmax(x @ router)
    gates, choices = jax.lax.top_k(probabilities, 2)
    gates = gates / gates.sum(axis=-1, keepdims=True)

    combine = jnp.zeros((*x.shape[:2], experts, capacity))
    queued = jnp.zeros((x.shape[0], 1, experts), jnp.int32)
    for rank in range(2):
        chosen = jax.nn.one_hot(choices[..., rank], experts, dtype=jnp.int32)
        place = ((jnp.cumsum(chosen, axis=1) - chosen + queued) * chosen).sum(axis=-1)
        slot = jax.nn.one_hot(place, capacity)
        gate = gates[..., rank, None] * chosen
        combine = combine + jnp.einsum("gse,gsc->gsec", gate, slot)
        queued = queued + chosen.sum(axis=1, keepdims=True)

    first = jax.nn.one_hot(choices[..., 0], experts)
    load = first.mean(axis=1) * probabilities.mean(axis=1)
    return combine, experts * load.sum(axis=-1).mean()


def mixture(p: Params, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The experts' outputs for x (group, sequence, d), and the load-balance loss."""
    combine, balance = route(p["router"], x)
    dispatch = (combine > 0).astype(x.dtype)
    inputs = jnp.einsum("gsec,gsd->egcd", dispatch, x)
    hidden = jnp.einsum("egcd,edf->egcf", inputs, p["up"]) + p["up_bias"][:, None, None]
    outputs = jnp.einsum("egcf,efd->egcd", exact_gelu(hidden), p["down"])
    outputs = outputs + p["down_bias"][:, None, None]
    return jnp.einsum("gsec,egcd->gsd", combine, outputs), balance


def loss_of(
    params: Params,
    tokens: jax.Array,
    segments: jax.Array,
    labels: jax.Array,
    weights: jax.Array,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    x = embed(params, tokens, segments)
    balance = jnp.zeros(())
    for p in params["blocks"]:
        x = norm(p["norm1"], x + attention(p["attention"], x))
        if "router" in p:
            y, unbalanced = mixture(p, x)
            balance = balance + unbalanced
        else:
            y = feed_forward(p, x, exact_gelu)
        x = norm(p["norm2"], x + y)
    loss = masked_lm_loss(params, x, labels, weights)
    return loss + BALANCE_WEIGHT * balance, {"balance": balance}


def train_step(
    params: Params,
    opt_state: optax.OptState,
    tokens: jax.Array,
    segments: jax.Array,
    labels: jax.Array,
    weights: jax.Array,
) -> tuple[Params, optax.OptState, jax.Array, dict[str, jax.Array]]:
    (loss, metrics), gradients = jax.value_and_grad(loss_of, has_aux=True)(
        params, tokens, segments, labels, weights
    )
    updates, opt_state = optimizer.update(gradients, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss, metrics


def moe_block_shapes(d: int, heads: int, hidden: int, experts: int) -> Params:
    return {
        "norm1": norm_shapes(d),
        "attention": attention_shapes(d, heads),
        "norm2": norm_shapes(d),
        "router": (d, experts),
        "up": (experts, d, hidden),
        "up_bias": (experts, hidden),
        "down": (experts, hidden, d),
        "down_bias": (experts, d),
    }


def shapes(d: int, heads: int, layers: int, experts: int, **sizes: int) -> Params:
    """BERT's shapes, with experts in every second layer."""
    moe = moe_block_shapes(d, heads, 4 * d, experts)
    whole = bert.shapes(d=d, heads=heads, layers=layers, **sizes)
    blocks = [moe if layer % 2 else plain for layer, plain in enumerate(whole["blocks"])]
    return {**whole, "blocks": blocks}


def arguments(batch: int, sequence: int, **sizes: int) -> tuple[Any, ...]:
    params = initial(shapes(**sizes))
    return params, optimizer.init(params), *masked_batch(batch, sequence, sizes["vocabulary"])


def base(experts: int = 128, batch: int = 2048) -> tuple[Any, Any]:
    """BERT-Base in which 6 of 12 layers have 128 experts: 3,708,597,306 parameters.

    That is two experts and 32 sequences of 128 tokens for each of 64 devices. Shapes only.
    """
    sizes = {**bert.BASE, "batch": batch, "experts": experts}
    return train_step, jax.eval_shape(partial(arguments, **sizes))


def tiny() -> tuple[Any, Any]:
    """Two layers, the second of 6 experts; 72,965 parameters, concrete arrays."""
    return train_step, jax.jit(partial(arguments, **bert.TINY, experts=6))()
