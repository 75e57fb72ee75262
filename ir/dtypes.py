"""Names of dtypes as JAX's objects: numpy's, and those of typed PRNG keys, which have no numpy dtype."""

from __future__ import annotations

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp

_GENERATORS = ("threefry2x32", "rbg", "unsafe_rbg", "threefry4x32", "philox2x32", "philox4x32")


def is_key(dtype: str) -> bool:
    """Whether a dtype is that of typed PRNG keys."""
    return dtype.startswith("key<")


@cache
def key_implementation(dtype: str) -> str:
    """Name of the random number generator of a key dtype: `key<fry>` -> `threefry2x32`."""
    return next(name for name in _GENERATORS if str(_key(name).dtype) == dtype)


@cache
def dtype_of(name: str) -> Any:
    """The dtype object of a `TensorType.dtype`: numpy's, or JAX's for typed PRNG keys."""
    return _key(key_implementation(name)).dtype if is_key(name) else jnp.dtype(name)


def is_dtype(name: str) -> bool:
    """Whether `dtype_of` knows a name."""
    try:
        dtype_of(name)
    except (TypeError, StopIteration):
        return False
    return True


@cache
def key_data_shape(dtype: str) -> tuple[int, ...]:
    """Shape of the data of one typed PRNG key, which are uint32."""
    data = jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0, impl=key_implementation(dtype))))
    return tuple(data.shape)


def _key(implementation: str) -> jax.ShapeDtypeStruct:
    return jax.eval_shape(lambda: jax.random.key(0, impl=implementation))
