"""Pieces of an array: piece k of `count` has every `count`-th unit of a dimension from unit k on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from shardwright.ir.placement import Shard


def in_pieces(x: Any, cut: Shard, count: int) -> Any:
    """All pieces of an array, stacked."""
    apart = _apart(x, cut, count)
    return jnp.moveaxis(apart, cut.dim + 1, 0).reshape(count, *_of_one(x.shape, cut, count))


def piece_of(x: Any, cut: Shard, count: int, number: Any) -> Any:
    """One piece of an array."""
    piece = jax.lax.dynamic_index_in_dim(_apart(x, cut, count), number, cut.dim + 1, keepdims=False)
    return piece.reshape(_of_one(x.shape, cut, count))


def together(x: Any, shape: Sequence[int], cut: Shard, count: int) -> Any:
    """The array of some shape whose stacked pieces these are."""
    size, rest = shape[: cut.dim], shape[cut.dim + 1 :]
    apart = x.reshape(count, *size, shape[cut.dim] // (count * cut.unit), cut.unit, *rest)
    return jnp.moveaxis(apart, 0, cut.dim + 1).reshape(shape)


def _apart(x: Any, cut: Shard, count: int) -> Any:
    """The array with the number of the piece, and the units of each before it, as dimensions of their own."""
    units = x.shape[cut.dim] // (count * cut.unit)
    return x.reshape(*x.shape[: cut.dim], units, count, cut.unit, *x.shape[cut.dim + 1 :])


def _of_one(shape: Sequence[int], cut: Shard, count: int) -> tuple[int, ...]:
    """The shape of a piece."""
    return (*shape[: cut.dim], shape[cut.dim] // count, *shape[cut.dim + 1 :])


def with_piece(x: Any, piece: Any, cut: Shard, count: int, number: Any) -> Any:
    """The array with another piece of it."""
    apart = _apart(x, cut, count)
    units = x.shape[cut.dim] // (count * cut.unit)
    mine = piece.reshape(*x.shape[: cut.dim], units, cut.unit, *x.shape[cut.dim + 1 :])
    return jax.lax.dynamic_update_index_in_dim(apart, mine, number, cut.dim + 1).reshape(x.shape)
