"""Arrays between XLA and the wire: aligned memory that both can use."""

from __future__ import annotations

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from shardwright.backends.layout import from_numpy
from shardwright.backends.schedule.ops import ALIGNMENT
from shardwright.ir.dtypes import dtype_of, is_key

Array = NDArray[Any]


def aligned(shape: tuple[int, ...], dtype: Any) -> Array:
    """An uninitialised array that XLA can alias."""
    dtype = np.dtype(dtype)
    nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    raw = np.empty(nbytes + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + nbytes].view(dtype).reshape(shape)


def to_jax(array: Array, dtype: str) -> jax.Array:
    """The array as JAX's, without a copy where it is aligned; the caller must not write to it again."""
    if is_key(dtype) or array.size == 0:
        return from_numpy(array, dtype)
    assert array.dtype == dtype_of(dtype)
    if not (array.flags.c_contiguous and array.flags.writeable and array.ctypes.data % ALIGNMENT == 0):
        return jnp.asarray(array)
    # The extended types, such as bfloat16, are unknown to numpy's DLPack; `device_put` aliases them, too.
    # A device with memory of its own gets a copy, and numpy's array lives until that is done.
    return jax.dlpack.from_dlpack(array) if _is_builtin(array) and on_host() else jax.device_put(array)


def to_segment(array: Array, dtype: str) -> Any:
    """The array as an operand of a compiled function: numpy's own where XLA reads it without a copy.

    XLA keeps it alive as long as it reads it. Wrapping it as JAX's takes as long as calling a function.
    """
    if is_key(dtype) or array.size == 0 or not on_host() or not _is_builtin(array):
        return to_jax(array, dtype)
    shared = array.flags.c_contiguous and array.ctypes.data % ALIGNMENT == 0
    return array if shared else jnp.asarray(array)


def _is_builtin(array: Array) -> bool:
    return array.dtype.kind in "fiubc" and array.dtype.isbuiltin == 1


@cache
def on_host() -> bool:
    """Whether JAX computes on host memory."""
    return jax.default_backend() == "cpu"


def as_bytes(array: Array) -> Array:
    """The memory of a contiguous array."""
    return array.reshape(-1).view(np.uint8)
