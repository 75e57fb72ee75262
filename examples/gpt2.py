"""GPT-2: a causal language model, as a whole training step with adamw.

Clips gradients by their global norm. The embedding is tied to the output layer.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from _layers import Params, block_shapes, initial, layer_norm, norm_shapes, pre_norm_block

optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(6e-4, b2=0.95, weight_decay=0.1))


def logits(params: Params, tokens: jax.Array) -> jax.Array:
    """(batch, sequence) tokens to (batch, sequence, vocabulary) scores of the next."""
    sequence = tokens.shape[1]
    mask = jnp.tril(jnp.ones((sequence, sequence), bool))
    block = partial(pre_norm_block, activation=jax.nn.gelu, epsilon=1e-5, mask=mask)

    x = params["tokens"][tokens] + params["positions"][:sequence]
    if isinstance(params["blocks"], list):
        for p in params["blocks"]:
            x = block(p, x)
    else:  # one tree whose leaves are stacked over layers
        x, _ = jax.lax.scan(lambda x, p: (block(p, x), None), x, params["blocks"])
    x = layer_norm(params["norm"], x, epsilon=1e-5)
    return jnp.einsum("bsd,vd->bsv", x, params["tokens"])


def loss_of(params: Params, tokens: jax.Array) -> jax.Array:
    """Mean cross entropy of tokens[:, 1:] given what stands before each."""
    scores = logits(params, tokens[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(scores, tokens[:, 1:]).mean()


def train_step(
    params: Params, opt_state: optax.OptState, tokens: jax.Array
) -> tuple[Params, optax.OptState, jax.Array]:
    loss, gradients = jax.value_and_grad(loss_of)(params, tokens)
    updates, opt_state = optimizer.update(gradients, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss


def shapes(vocabulary: int, sequence: int, layers: int, d: int, heads: int, scan: bool = False) -> Params:
    block = block_shapes(d, heads, 4 * d)
    blocks = [block] * layers
    if scan:
        blocks = jax.tree.map(
            lambda shape: (layers, *shape), block, is_leaf=lambda node: isinstance(node, tuple)
        )
    return {
        "tokens": (vocabulary, d),
        "positions": (sequence, d),
        "blocks": blocks,
        "norm": norm_shapes(d),
    }


def arguments(
    batch: int, vocabulary: int, sequence: int, **sizes: Any
) -> tuple[Params, optax.OptState, jax.Array]:
    params = initial(shapes(vocabulary, sequence, **sizes))
    tokens = jax.random.randint(jax.random.key(1), (batch, sequence + 1), 0, vocabulary)
    return params, optimizer.init(params), tokens


SMALL = {"batch": 64, "vocabulary": 50257, "sequence": 1024, "layers": 12, "d": 768, "heads": 12}
TINY = {"batch": 8, "vocabulary": 101, "sequence": 16, "layers": 2, "d": 32, "heads": 4}


def small(batch: int = 64) -> tuple[Any, Any]:
    """GPT-2 small: 124,439,808 parameters; a batch of sequences of 1024 tokens, shapes only."""
    return train_step, jax.eval_shape(partial(arguments, **(SMALL | {"batch": batch})))


def small_scan() -> tuple[Any, Any]:
    """`small` with a `lax.scan` over stacked layers: the same 124,439,808 parameters."""
    return train_step, jax.eval_shape(partial(arguments, **SMALL, scan=True))


def tiny() -> tuple[Any, Any]:
    """Two layers, 29,216 parameters, concrete arrays."""
    return train_step, jax.jit(partial(arguments, **TINY))()


def tiny_scan() -> tuple[Any, Any]:
    """`tiny` with a `lax.scan` over stacked layers: the same 29,216 parameters."""
    return train_step, jax.jit(partial(arguments, **TINY, scan=True))()
