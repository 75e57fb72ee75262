"""What MPI needs to know of dtypes and memory: bytes on the wire, reductions, aligned buffers.

MPI has no 16-bit floats. Gathers move them as bytes; reductions widen them to float32 and round once.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from shardwright.backends.layout import dtype_of, from_numpy, is_key
from shardwright.ir.placement import ReduceOp

Array = NDArray[Any]

#: XLA aliases host memory only where it is aligned so.
ALIGNMENT = 64


def aligned(shape: tuple[int, ...], dtype: Any) -> Array:
    """An uninitialised array that XLA can alias."""
    dtype = np.dtype(dtype)
    nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    raw = np.empty(nbytes + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + nbytes].view(dtype).reshape(shape)


def to_jax(array: Array, dtype: str) -> jax.Array:
    """The array as JAX's, without a copy where it is aligned; the caller must not write to it again."""
    if is_key(dtype) or array.dtype.kind not in "fiu" or array.size == 0:
        return from_numpy(array, dtype)
    assert array.dtype == dtype_of(dtype)
    if array.flags.c_contiguous and array.flags.writeable and array.ctypes.data % ALIGNMENT == 0:
        return jax.dlpack.from_dlpack(array)
    return jnp.asarray(array)


def as_bytes(array: Array) -> Array:
    """The memory of a contiguous array."""
    return array.reshape(-1).view(np.uint8)


def reducible(array: Array, op: ReduceOp) -> tuple[Array, ReduceOp]:
    """The array in a dtype that MPI reduces, and the operation that `op` is there.

    Booleans travel as 0 and 1: their sum is "or", their maximum.
    """
    if array.dtype == np.bool_:
        return array.view(np.uint8), "max" if op == "sum" else op
    if array.dtype.kind in "fc" and array.dtype.itemsize > 2:
        return array, op
    if array.dtype.kind in "iu":
        return array, op
    # float16, and the extended types: bfloat16, float8 widen to float32; int4 to int8.
    name = str(array.dtype)
    return array.astype(
        np.int8 if name.startswith("int") else np.uint8 if name.startswith("uint") else np.float32
    ), op


def restored(array: Array, dtype: Any) -> Array:
    """A result of a reduction back in the value's dtype."""
    if np.dtype(dtype) == np.bool_:
        return array.view(np.bool_)
    return array if array.dtype == dtype else array.astype(dtype)


def leading(array: Array, dim: int) -> Array:
    """The array with `dim` moved to the front, contiguous: its stretches are consecutive memory."""
    return np.ascontiguousarray(np.moveaxis(array, dim, 0))


def returned(array: Array, dim: int) -> Array:
    """Inverse of `leading`, in aligned memory."""
    if dim == 0:
        return array
    moved = np.moveaxis(array, 0, dim)
    result = aligned(moved.shape, moved.dtype)
    result[...] = moved
    return result
