"""Random numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.random import threefry2x32_p
from tests.conformance.samples.draw import Draw, Program, add, sample


def _bits(width: int, shape: Callable[[Draw], tuple[int, ...]]) -> None:
    add(
        "random_bits",
        f"bits{width}",
        lambda d: (lambda k: jax.random.bits(k, shape(d), f"uint{width}"), (d.keys(),)),
    )


_bits(8, lambda d: (d.n(5, 7),))
_bits(16, lambda d: (d.n(5, 7),))
_bits(32, lambda d: (d.n(5, 7), 3))


@sample("random_bits")
def per_key_bits(draw: Draw) -> Program:
    return jax.vmap(lambda k: jax.random.bits(k, (draw.n(6, 4),))), (draw.keys(draw.n(4, 5)),)


@sample("random_bits", "random_wrap")
def other_generator(draw: Draw) -> Program:
    def bits(data: Any) -> Any:
        return jax.random.bits(jax.random.wrap_key_data(data, impl="rbg"), (draw.n(5, 7),))

    return bits, (draw.bits(4, dtype=jnp.uint32),)


@sample("random_wrap")
def wrapped(draw: Draw) -> Program:
    return jax.random.wrap_key_data, (draw.bits(draw.n(5, 4), 2, dtype=jnp.uint32),)


@sample("random_unwrap")
def unwrapped(draw: Draw) -> Program:
    return jax.random.key_data, (draw.keys(draw.n(5, 4)),)


@sample("random_seed")
def seeded(draw: Draw) -> Program:
    return jax.vmap(jax.random.key), (draw.ints(draw.n(5, 4)),)


@sample("random_fold_in")
def folded(draw: Draw) -> Program:
    n = draw.n(5, 4)
    return jax.vmap(jax.random.fold_in), (draw.keys(n), draw.ints(n, low=0))


@sample("random_fold_in")
def folded_one(draw: Draw) -> Program:
    return jax.random.fold_in, (draw.keys(), jnp.uint32(3))


@sample("random_split")
def split_keys(draw: Draw) -> Program:
    return jax.vmap(lambda k: jax.random.split(k, 3)), (draw.keys(draw.n(5, 4)),)


def batch_keys(draw: Draw) -> jax.Array:
    """Keys of a generator that makes others in a batch than one by one."""
    return jax.random.wrap_key_data(draw.bits(draw.n(5, 4), 4, dtype=jnp.uint32), impl="unsafe_rbg")


@sample("random_split")
def split_in_a_batch(draw: Draw) -> Program:
    return jax.vmap(lambda k: jax.random.split(k, 3)), (batch_keys(draw),)


@sample("random_fold_in")
def folded_in_a_batch(draw: Draw) -> Program:
    keys = batch_keys(draw)
    return jax.vmap(jax.random.fold_in), (keys, draw.ints(len(keys), low=0))


@sample("random_clone")
def cloned(draw: Draw) -> Program:
    return jax.random.clone, (draw.keys(draw.n(5, 4)),)


@sample("threefry2x32")
def hashed(draw: Draw) -> Program:
    operands = tuple(draw.bits(draw.n(5, 7), dtype=jnp.uint32) for _ in range(4))
    return lambda a, b, c, d: threefry2x32_p.bind(a, b, c, d), operands


@sample("rng_bit_generator")
def generated(draw: Draw) -> Program:
    return lambda k: lax.rng_bit_generator(k, draw.ab), (draw.bits(4, dtype=jnp.uint32),)
