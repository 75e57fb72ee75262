"""Who holds what: device groups, their shares, and arrays between JAX and numpy.

Stretches within a group follow from the ratios of its members alone, scaled to sum to one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from shardwright.backends.local import neutral
from shardwright.ir.collectives import combine
from shardwright.ir.dtypes import dtype_of, is_key, key_data_shape, key_implementation
from shardwright.ir.errors import InputError
from shardwright.ir.graph import Graph, TensorType
from shardwright.ir.placement import (
    Grid,
    Partial,
    Placement,
    Shard,
    cuts,
    lengths,
    node_members,
    owns,
    region,
    stretches_of,
)
from shardwright.ir.program import Group, Property


def members(group: Group, devices: int) -> tuple[int, ...]:
    """Devices of a group, all of them for None."""
    return tuple(range(devices)) if group is None else group


def holds(prop: Property, device: int) -> bool:
    """Whether `device` has a part in a property."""
    return prop.group is None or device in prop.group


def shares(group: Group, ratios: Sequence[float]) -> tuple[float, ...]:
    """Ratios within a group, summing to one (even ones where no member has a share)."""
    if group is None:
        return tuple(ratios)
    own = [ratios[i] for i in group]
    total = sum(own)
    return tuple(x / total if total > 0 else 1 / len(own) for x in own)


def stretches(
    tensor: TensorType, placement: Placement, group: Group, ratios: Sequence[float]
) -> tuple[int, ...]:
    """Elements of the sharded dimension per member of `group`; () where nothing is sharded."""
    cut = cuts(placement)
    if isinstance(placement, Grid) and len(cut) == 2 and cut[0].dim == cut[1].dim:
        return stretches_of(tensor.shape[cut[0].dim], cut, ratios, placement.nodes)
    if not isinstance(placement, Shard):
        return ()
    own = shares(group, placement.ratios(ratios))
    return lengths(tensor.shape[placement.dim], placement.unit, own)


def to_numpy(array: Any) -> NDArray[Any]:
    """The array without a copy; of typed PRNG keys their data, which has one dimension more."""
    if jnp.issubdtype(array.dtype, jax.dtypes.extended):
        return np.asarray(jax.random.key_data(array))
    return np.asarray(array)


def from_numpy(data: NDArray[Any], dtype: str) -> jax.Array:
    """Inverse of `to_numpy`."""
    if is_key(dtype):
        return jax.random.wrap_key_data(jnp.asarray(data), impl=key_implementation(dtype))
    # Told the dtype that the data have, JAX compiles nothing.
    return jnp.asarray(np.asarray(data, dtype_of(dtype)), dtype=dtype_of(dtype))


def abstract(tensor: TensorType, shape: tuple[int, ...]) -> jax.ShapeDtypeStruct:
    """Abstract value of a local array of the tensor."""
    return jax.ShapeDtypeStruct(shape, dtype_of(tensor.dtype))


# ---------------------------------------------------------------------------------------------------
# Global arrays in and out


def check_inputs(flat: Sequence[Any], graph: Graph) -> None:
    """Raises InputError where the flat arguments are not those the step was traced with, or were donated."""
    if len(flat) != len(graph.inputs):
        raise InputError(
            place="arguments of the training step",
            reason=f"{len(flat)} leaves were given, it was planned for {len(graph.inputs)}",
            remedy="Call it with arguments of the same structure",
        )
    for i, (leaf, value) in enumerate(zip(flat, graph.inputs, strict=True)):
        number = isinstance(leaf, (bool, int, float, complex))
        given = type_of(leaf) if number or hasattr(leaf, "dtype") else f"a {type(leaf).__name__}"
        if given != value.type:
            raise InputError(
                place=graph.input_names[i] if i < len(graph.input_names) else f"argument leaf {i}",
                reason=f"is {given}, it was planned for {value.type}",
                remedy="Plan again for these arguments",
            )
        check_there(leaf, graph, i)


def check_there(array: Any, graph: Graph, number: int) -> None:
    """Raises InputError where the array of a flat argument was donated to an earlier step."""
    if isinstance(array, jax.Array) and array.is_deleted():
        raise InputError(
            place=graph.input_names[number] if number < len(graph.input_names) else f"argument leaf {number}",
            reason="was passed to an earlier step, which took its memory",
            remedy="Pass what that step returned, or compile with donate=False",
        )


def type_of(leaf: Any) -> TensorType:
    """Type of a leaf as jax.jit would see it (64 bit becomes 32 bit unless x64 is enabled)."""
    dtype = getattr(leaf, "dtype", None)
    if dtype is None:
        return TensorType(tuple(np.shape(leaf)), str(jax.dtypes.result_type(leaf)))
    if not jnp.issubdtype(dtype, jax.dtypes.extended):
        dtype = jax.dtypes.canonicalize_dtype(dtype)
    return TensorType(tuple(leaf.shape), str(dtype))


def weak_of(leaf: Any) -> bool:
    """Whether JAX types a leaf weakly: it takes the dtype of what it meets, as Python's numbers do."""
    number = isinstance(leaf, (int, float, complex)) and not isinstance(leaf, (bool, np.generic))
    return getattr(leaf, "weak_type", number)


def typed(array: jax.Array, weak: bool) -> jax.Array:
    """The same numbers, typed weakly or not; also of what is being traced."""
    if getattr(array, "weak_type", weak) == weak:  # keys are neither
        return array
    # JAX has a public name for the primitive alone: its function makes strong types.
    return jax.lax.convert_element_type_p.bind(array, new_dtype=array.dtype, weak_type=weak, sharding=None)


def as_array(leaf: Any, tensor: TensorType) -> jax.Array:
    """A leaf of the arguments as an array of the planned dtype.

    What is not JAX's is copied: whoever reads batches into one buffer writes to it again, and JAX takes
    aligned memory as it is. By numpy, as `jnp.array` compiles a copy for every shape.
    """
    if is_key(tensor.dtype):
        return jnp.asarray(leaf)
    if isinstance(leaf, jax.Array):
        return jnp.asarray(leaf, dtype=dtype_of(tensor.dtype))
    return jax.device_put(np.array(leaf, dtype=dtype_of(tensor.dtype)))


def cut(
    array: jax.Array, tensor: TensorType, placement: Placement, device: int, ratios: Sequence[float]
) -> jax.Array:
    """What `device` holds of a global array; of a Partial one owner keeps it all."""
    held = region(tensor.shape, placement, device, ratios)
    if not owns(placement, device):
        return neutral(tensor, tuple(length for _, length in held), placement)
    if not cuts(placement):
        return array
    starts = [offset for offset, _ in held]
    return jax.lax.slice(array, starts, [offset + length for offset, length in held])


def gather(parts: Sequence[Any], tensor: TensorType, placement: Placement) -> jax.Array:
    """The global array from what every device holds of it."""
    if isinstance(placement, Grid):
        of_nodes = [
            gather(parts[devices.start : devices.stop], tensor, placement.within)
            for devices in node_members(placement.nodes)
        ]
        return gather(of_nodes, tensor, placement.across)
    if isinstance(placement, Shard):
        return from_numpy(
            np.concatenate([to_numpy(part) for part in parts], axis=placement.dim), tensor.dtype
        )
    if isinstance(placement, Partial):
        return from_numpy(combine(placement.op, [to_numpy(part) for part in parts]), tensor.dtype)
    return parts[0]


def wire_type(tensor: TensorType) -> tuple[tuple[int, ...], Any]:
    """Shape and numpy dtype in which a tensor travels: of typed PRNG keys their data."""
    if not is_key(tensor.dtype):
        return tensor.shape, dtype_of(tensor.dtype)
    return (*tensor.shape, *key_data_shape(tensor.dtype)), np.dtype(np.uint32)
