"""One equation on one device's shards: what every backend traces into its compiled segments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import jax
import jax.extend.random  # pyright: ignore[reportUnusedImport]  (localizers reach threefry2x32 through it)
import jax.numpy as jnp

from shardwright.ir.collectives import identity
from shardwright.ir.graph import Equation, Literal, TensorType
from shardwright.ir.placement import Partial, Placement, R, Shard, lengths
from shardwright.ir.rules import Extent, Local, Signature, registry, rule_of


def extents(
    tensor: TensorType, placement: Placement, device: int, ratios: Sequence[float]
) -> tuple[Extent, ...]:
    """What `device` holds of every dimension of a tensor placed as `placement`."""
    dims = [Extent(size, 0, size) for size in tensor.shape]
    if isinstance(placement, Shard):
        size = tensor.shape[placement.dim]
        cut = lengths(size, placement.unit, ratios)
        dims[placement.dim] = Extent(size, sum(cut[:device]), cut[device])
    return tuple(dims)


def local_shape(
    tensor: TensorType, placement: Placement, device: int, ratios: Sequence[float]
) -> tuple[int, ...]:
    """Shape of what `device` holds."""
    return tuple(extent.length for extent in extents(tensor, placement, device, ratios))


def filled(tensor: TensorType, shape: tuple[int, ...], value: Any) -> jax.Array:
    """A constant array of the tensor's dtype; typed PRNG keys are never filled but with zero data."""
    if tensor.dtype.startswith("key<"):
        return jnp.broadcast_to(jax.random.key(0, impl=key_implementation(tensor.dtype)), shape)
    return jnp.full(shape, value, dtype=tensor.dtype)


@cache
def key_implementation(dtype: str) -> str:
    """Name of the random number generator of a key dtype: `key<fry>` -> `threefry2x32`."""
    names = ("threefry2x32", "rbg", "unsafe_rbg", "threefry4x32", "philox2x32", "philox4x32")
    return next(name for name in names if str(jax.random.key(0, impl=name).dtype) == dtype)


def neutral(tensor: TensorType, shape: tuple[int, ...], placement: Placement) -> jax.Array:
    """What a device without work contributes: nothing to a shard, the identity to a Partial."""
    if isinstance(placement, Partial):
        return filled(tensor, shape, identity(placement.op, jnp.dtype(tensor.dtype)))
    return filled(tensor, shape, 0)


def operand(atom: Literal, placement: Placement, device: int) -> jax.Array:
    """A literal on one device: known everywhere, of a Partial kept by the first device alone."""
    value = jnp.asarray(atom.value, dtype=atom.type.dtype)
    return neutral(atom.type, (), placement) if isinstance(placement, Partial) and device else value


def evaluate(
    equation: Equation,
    signature: Signature,
    primitive: Any,
    device: int,
    ratios: Sequence[float],
    args: Sequence[jax.Array],
    *,
    view: Callable[[TensorType, Placement], tuple[Extent, ...]] | None = None,
) -> list[jax.Array]:
    """Results of `equation` on `device`, whose operands `args` are placed as `signature.ins` says.

    A device whose stretch of the sharded axis is empty yields empty shards, or the identity where the
    result is Partial, without calling the primitive (some, such as gather, reject empty operands),
    unless a result is replicated: that one it owes in full.

    Args:
        view: what the device holds of a tensor, by default its `extents`.
    """
    view = view or (lambda tensor, placement: extents(tensor, placement, device, ratios))
    ins = tuple(view(t, p) for t, p in zip(equation.input_types, signature.ins, strict=True))
    outs = tuple(view(t, p) for t, p in zip(equation.output_types, signature.outs, strict=True))
    shapes = [tuple(extent.length for extent in dims) for dims in outs]
    owed = any(placement == R for placement in signature.outs)
    if not owed and _idle((*signature.ins, *signature.outs), (*ins, *outs)):
        accumulator = rule_of(equation).accumulator
        if accumulator is not None and isinstance(signature.ins[accumulator], Partial):
            return [args[accumulator]]  # nothing is added to the part that this device holds
        return [
            neutral(t, shape, p)
            for t, shape, p in zip(equation.output_types, shapes, signature.outs, strict=True)
        ]
    op = registry().get(equation.primitive)
    params = dict(equation.params)
    if op is not None:
        params.update(dict.fromkeys(op.shape_params, shapes[0]))
    if op is None or op.localize is None:
        result = primitive.bind(*args, **params)
    else:
        result = op.localize(Local(params, ins, outs, signature.ins, primitive.bind, jax), *args)
    return list(result) if primitive.multiple_results or isinstance(result, (tuple, list)) else [result]


def _idle(placements: Sequence[Placement], dims: Sequence[Sequence[Extent]]) -> bool:
    """Whether this device has an empty stretch of an axis that is not empty as a whole."""
    for placement, extent in zip(placements, dims, strict=True):
        if (
            isinstance(placement, Shard)
            and extent[placement.dim].length == 0
            and extent[placement.dim].size > 0
        ):
            return True
    return False
