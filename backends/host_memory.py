"""Arrays between a device's memory and its host's, by JAX's memory kinds."""

from __future__ import annotations

import jax

#: Where arrays wait: memory of the host that the device reads and writes by itself.
HOST = "pinned_host"


def to_host(array: jax.Array) -> jax.Array:
    """A copy in the host's memory, when it is complete: the array may be freed."""
    return jax.block_until_ready(jax.device_put(array, array.sharding.with_memory_kind(HOST)))


def to_device(array: jax.Array) -> jax.Array:
    """A copy in the device's own memory."""
    (device,) = array.sharding.device_set
    kind = device.default_memory().kind
    return jax.device_put(array, array.sharding.with_memory_kind(kind))


def is_away(array: object) -> bool:
    """Whether an array is in the host's memory."""
    return isinstance(array, jax.Array) and array.sharding.memory_kind == HOST
