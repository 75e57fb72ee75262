"""Pieces of an array: piece k of `count` has every `count`-th unit of a dimension from unit k on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
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


def with_piece(x: Any, piece: Any, cut: Shard, count: int, number: Any, row: Any = None) -> Any:
    """The array with another piece of it; or of one of its rows, which `cut.dim` then does not count."""
    stacked = row is not None
    apart = _apart(x, replace(cut, dim=cut.dim + stacked), count)
    units = apart.shape[cut.dim + stacked]
    mine = piece.reshape(*piece.shape[: cut.dim], units, 1, cut.unit, *piece.shape[cut.dim + 1 :])
    starts = [jnp.zeros((), "int32")] * apart.ndim
    starts[cut.dim + stacked + 1] = number
    if stacked:
        mine, starts[0] = mine[None], row
    return jax.lax.dynamic_update_slice(apart, mine, starts).reshape(x.shape)


def _apart(x: Any, cut: Shard, count: int) -> Any:
    """The array with the number of the piece, and the units of each before it, as dimensions of their own."""
    units = x.shape[cut.dim] // (count * cut.unit)
    return x.reshape(*x.shape[: cut.dim], units, count, cut.unit, *x.shape[cut.dim + 1 :])


def _of_one(shape: Sequence[int], cut: Shard, count: int) -> tuple[int, ...]:
    """The shape of a piece."""
    return (*shape[: cut.dim], shape[cut.dim] // count, *shape[cut.dim + 1 :])
