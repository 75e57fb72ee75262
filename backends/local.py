"""One equation on one device's shards: what every backend traces into its compiled segments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.extend.random  # pyright: ignore[reportUnusedImport]  (localizers reach threefry2x32 through it)
import jax.numpy as jnp

from shardwright.ir.collectives import identity
from shardwright.ir.dtypes import key_implementation
from shardwright.ir.graph import Equation, Literal, TensorType
from shardwright.ir.placement import Grid, Partial, Placement, R, Shard, grid, owns, reduction, region
from shardwright.ir.registry import Extent, Local, registry, rule_of
from shardwright.ir.rules import Signature, on_axes


def extents(
    tensor: TensorType, placement: Placement, device: int, ratios: Sequence[float]
) -> tuple[Extent, ...]:
    """What `device` holds of every dimension of a tensor placed as `placement`."""
    held = region(tensor.shape, placement, device, ratios)
    return tuple(
        Extent(size, offset, length) for size, (offset, length) in zip(tensor.shape, held, strict=True)
    )


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


def neutral(tensor: TensorType, shape: tuple[int, ...], placement: Placement) -> jax.Array:
    """What a device without work contributes: nothing to a shard, the identity to a Partial."""
    op = reduction(placement)
    return filled(tensor, shape, 0 if op is None else identity(op, jnp.dtype(tensor.dtype)))


@partial(jax.jit, donate_argnums=0)
def written(rows: Sequence[jax.Array], number: Any, values: Sequence[jax.Array]) -> list[jax.Array]:
    """Each of `rows` with a value as its row of a number, in the same memory: the others are gone."""
    pairs = zip(rows, values, strict=True)
    return [jax.lax.dynamic_update_index_in_dim(into, value, number, 0) for into, value in pairs]


def operand(atom: Literal, placement: Placement, device: int) -> jax.Array:
    """A literal on one device: known everywhere, of a Partial kept by one owner alone."""
    value = jnp.asarray(atom.value, dtype=atom.type.dtype)
    return value if owns(placement, device) else neutral(atom.type, (), placement)


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
    idle = _idle(equation, signature, device, ratios)
    if idle is not None:
        accumulator = rule_of(equation).accumulator
        if accumulator is not None and isinstance(idle.ins[accumulator], Partial):
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


def _idle(equation: Equation, signature: Signature, device: int, ratios: Sequence[float]) -> Signature | None:
    """The signature on the axis where this device has an empty stretch and owes no result; None for none.

    What is empty as a whole does not count.
    """
    tensors = (*equation.input_types, *equation.output_types)
    nodes = next((p.nodes for p in (*signature.ins, *signature.outs) if isinstance(p, Grid)), None)
    for axis, single in enumerate(on_axes(signature)):
        if R in single.outs:
            continue
        for tensor, whole, placement in zip(
            tensors, (*signature.ins, *signature.outs), (*single.ins, *single.outs), strict=True
        ):
            if not isinstance(placement, Shard) or tensor.shape[placement.dim] == 0:
                continue
            # On the axis of the nodes only what the node has of the dimension counts.
            seen = grid(placement, R, nodes) if nodes is not None and axis == 0 else whole
            if region(tensor.shape, seen, device, ratios)[placement.dim][1] == 0:
                return single
    return None
