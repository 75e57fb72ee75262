"""Which arguments of a step are the batch that comes in pieces, and what a refusal says of them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rewriting_cases import evaluated

from shardwright.ir.rewrites.microbatch import microbatched
from shardwright.ir.rewrites.pieces import NotInPiecesError
from shardwright.ir.rewrites.stages import staged
from shardwright.ir.trace import trace


def normal(*sizes: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).normal(size=sizes).astype(np.float32)


def test_frozen_parameters_are_no_batch_however_large() -> None:
    """They are no state either, and their rows, here a contracted dimension, come in pieces too."""

    def step(tuned: Any, frozen: Any, mask: Any, x: Any, y: Any) -> Any:
        def loss_of(tuned: Any) -> Any:
            return jnp.mean((jnp.tanh(x @ (frozen["up"] + tuned)) * mask[0] @ frozen["down"] - y) ** 2)

        loss, gradient = jax.value_and_grad(loss_of)(tuned)
        return tuned - 0.1 * gradient, loss

    frozen = {"up": normal(16, 128), "down": normal(128, 16, seed=1)}
    args = (normal(16, 128, seed=2), frozen, normal(64, 128), normal(30, 16), normal(30, 16, seed=3))
    traced = trace(step, *args)
    pieces = microbatched(traced, 3)
    flat = jax.tree.leaves(args)
    pairs = zip(evaluated(pieces, flat), evaluated(traced, flat), strict=True)
    for got, expected in pairs:
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)
    with pytest.raises(NotInPiecesError, match="a batch of 30 has no 4 equal pieces"):
        microbatched(traced, 4)


def test_a_step_in_no_pieces_is_refused_by_what_is_in_their_way() -> None:
    """Of arguments of several sizes the batch is that by which most of the step would come in pieces."""

    def step(tuned: Any, table: Any, tokens: Any, mask: Any) -> Any:
        def loss_of(tuned: Any) -> Any:
            errors = jnp.sum((jnp.tanh(table[tokens] @ tuned) @ table.T) ** 2, -1)
            return jnp.sum(errors**2 * mask) / jnp.sum(errors)

        return tuned - 0.1 * jax.grad(loss_of)(tuned)

    tokens = np.zeros((10, 12), np.int32)
    for rows in (37, 40):
        traced = trace(step, normal(20, 20), normal(rows, 20), tokens, normal(10, 12))
        with pytest.raises(NotInPiecesError, match="a batch of 10 has no 4 equal pieces"):
            microbatched(traced, 4)
        with pytest.raises(NotInPiecesError, match=r"test_batch.*needs a sum over the whole batch"):
            microbatched(traced, 2)


def test_without_state_a_refusal_says_so() -> None:
    """A counter that comes back in another dtype makes nothing of the first argument state."""

    def step(state: Any, x: Any) -> Any:
        weight, count = state
        gradient = jax.grad(lambda w: jnp.mean((x @ w) ** 2))(weight)
        return (weight - 0.1 * gradient, count + 1.0), jnp.mean(x)

    args = ((normal(16, 16), jnp.uint32(3)), normal(8, 16))
    microbatched(trace(step, *args), 2)  # by what comes in pieces it is known which the batch is
    with pytest.raises(NotInPiecesError, match=r"no state was found, .* Say with state=.*microbatches=1"):
        microbatched(trace(step, *args), 3)
    with pytest.raises(NotInPiecesError, match=r"no state was found, .* Say with state=.*stages='off'"):
        staged(trace(step, *args), 3)
