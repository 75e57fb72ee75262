"""Leaves of a tree that is saved: what of it is data, of which type, and the numbers as JAX holds them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.tree_util import keystr, tree_flatten_with_path
from numpy.typing import NDArray

from shardwright import shards
from shardwright.backends.layout import to_numpy, type_of, wire_type
from shardwright.ir.errors import InputError
from shardwright.ir.graph import TensorType
from shardwright.layer_leaf import LayerLeaf


def named(tree: Any) -> list[tuple[str, Any]]:
    """The leaves of a tree by path."""
    return [(keystr(path), leaf) for path, leaf in tree_flatten_with_path(tree)[0]]


def data_leaves(tree: Any) -> Mapping[str, Any]:
    """The leaves that are arrays or numbers, by path.

    Raises:
        InputError: JAX does not hold one of them as it is.
    """
    found = {name: leaf for name, leaf in named(tree) if shards.is_sharded(leaf) or _is_data(leaf)}
    for name, leaf in found.items():
        _check(f"leaf {name}", leaf)
    return found


def leaf_type(leaf: Any) -> TensorType:
    """Type of a leaf as JAX holds it."""
    return leaf.tensor if shards.is_sharded(leaf) else type_of(leaf)


def numbers_of(leaf: Any) -> NDArray[Any]:
    """The numbers of a leaf, of a sharded one those that lie here, in the dtype of its `leaf_type`."""
    held = leaf.local if shards.is_on_ranks(leaf) else leaf
    array = to_numpy(held) if hasattr(held, "dtype") else np.asarray(held)
    return np.asarray(array, wire_type(leaf_type(leaf))[1])


def _is_data(leaf: Any) -> bool:
    return isinstance(leaf, (bool, int, float, complex)) or (
        hasattr(leaf, "shape") and hasattr(leaf, "dtype")
    )


def _check(place: str, leaf: Any) -> None:
    """Raises InputError where JAX does not hold a leaf as it is: its type, its numbers, or none any more."""
    if isinstance(leaf, jax.ShapeDtypeStruct):
        raise InputError(place=place, reason="is a shape without values", remedy="Save arrays and numbers")
    lying = leaf.stack if isinstance(leaf, LayerLeaf) else leaf
    here = lying.local if shards.is_sharded(lying) else leaf
    if isinstance(here, jax.Array) and here.is_deleted():
        raise InputError(
            place=place,
            reason="was passed to a step that took its memory",
            remedy="Save what that step returned",
        )
    if shards.is_sharded(lying):
        return
    dtype = getattr(leaf, "dtype", None)
    try:
        if dtype is not None and not isinstance(leaf, jax.Array):
            jax.typeof(np.empty(0, dtype))
    except TypeError as error:
        raise InputError(
            place=place,
            reason=f"has the dtype {dtype}, which JAX has not",
            remedy="Save numbers in a dtype of JAX, in the byte order of this machine",
        ) from error
    _check_fits(place, leaf, type_of(leaf).dtype)


def _check_fits(place: str, leaf: Any, dtype: str) -> None:
    """Raises InputError for a number that its dtype, in most cases narrowed to 32 bits, does not have.

    Floats are rounded, but not to infinity.
    """
    if str(getattr(leaf, "dtype", "")) == dtype:
        return
    beyond: list[Any] = []
    if isinstance(leaf, int) and dtype != "bool":  # of any length
        beyond = [leaf] if not _least(dtype) <= leaf <= _greatest(dtype) else []
    else:
        given = np.asarray(leaf)
        if given.dtype.kind in "iu" and given.size:
            ends = int(given.min()), int(given.max())
            beyond = [end for end in ends if not _least(dtype) <= end <= _greatest(dtype)]
        elif given.dtype.kind in "fc":
            with np.errstate(over="ignore"):
                lost = np.isfinite(given) & ~np.isfinite(given.astype(dtype))
            beyond = given[lost].tolist()
    if beyond:
        raise InputError(
            place=place,
            reason=f"holds {beyond[0]}, which is beyond {dtype}, the dtype that JAX gives it",
            remedy="Save it in parts or in other units, or let JAX have 64 bits (jax_enable_x64)",
        )


def _least(dtype: str) -> int:
    return int(np.iinfo(dtype).min)


def _greatest(dtype: str) -> int:
    return int(np.iinfo(dtype).max)
