"""Slices at static and at dynamic positions.

A sliced dimension may be sharded: each device puts what it holds of the slice in its place among zeros,
a Partial(sum) (for booleans Partial(max)) no larger than the slice. Devices may also each make their own
stretch of the slice from a whole operand.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardwright.ir.graph import Equation
from shardwright.ir.ops.axes import clamped, names, placing, string
from shardwright.ir.registry import Extent, Local, OpDef, register
from shardwright.ir.rules import Rule


def _slice(equation: Equation) -> Rule:
    source, target = equation.inputs[0].type, equation.output_types[0]
    ins, outs = list(names("e", source.rank)), list(names("e", source.rank))
    for i, (size, out) in enumerate(zip(source.shape, target.shape, strict=True)):
        stride = _side_by_side(equation.params, i, size, out)
        if stride > 1:
            ins[i] = f"(e{i} {stride})"
        elif not stride:
            ins[i], outs[i] = f"x{i}", f"y{i}"
    return Rule(
        string([ins], [outs]), placing(source.dtype), linear="each", monotone="each", flop_per_point=0.0
    )


def _side_by_side(params: Mapping[str, Any], dim: int, size: int, out: int) -> int:
    """How many elements stay together where the slice takes one of them each; 0 where it cuts some off."""
    stride = params["strides"][dim] if params["strides"] else 1
    return stride if size == out * stride and params["start_indices"][dim] < stride else 0


def _localize_slice(local: Local, operand: Any) -> Any:
    params = local.params
    starts, limits = list(params["start_indices"]), list(params["limit_indices"])
    padding = [(0, 0, 0)] * len(starts)
    for i, (into, out) in enumerate(zip(local.inputs[0], local.outputs[0], strict=True)):
        start, stride = starts[i], params["strides"][i] if params["strides"] else 1
        if _side_by_side(params, i, into.size, out.size):
            limits[i] = into.length
            continue
        first, last = out.offset, out.offset + out.length
        if not into.whole:
            # Which elements of the slice lie in this stretch.
            end = last
            first = max(first, -(-(into.offset - start) // stride))
            last = max(first, min(end, -(-(into.offset + into.length - start) // stride)))
            padding[i] = (first - out.offset, end - last, 0) if first < last else (out.length, 0, 0)
        starts[i] = start + first * stride - into.offset if first < last else 0
        limits[i] = starts[i] + (last - first - 1) * stride + 1 if first < last else 0
    result = local.bind(
        operand, start_indices=tuple(starts), limit_indices=tuple(limits), strides=params["strides"]
    )
    if any(map(any, padding)):
        return local.jax.lax.pad(result, local.jax.numpy.zeros((), operand.dtype), padding)
    return result


register(OpDef("slice", _slice, "movement", localize=_localize_slice))


def _dynamic_slice(equation: Equation) -> Rule:
    source, target = equation.inputs[0].type, equation.output_types[0]
    ins = [
        f"e{i}" if a == b else f"x{i}"
        for i, (a, b) in enumerate(zip(source.shape, target.shape, strict=True))
    ]
    outs = [
        f"e{i}" if a == b else f"y{i}"
        for i, (a, b) in enumerate(zip(source.shape, target.shape, strict=True))
    ]
    starts = [()] * (len(equation.inputs) - 1)
    return Rule(
        string([ins, *starts], [outs]),
        placing(source.dtype),
        linear=((0,),),
        monotone=((0,),),
        flop_per_point=0.0,
    )


def _localize_dynamic_slice(local: Local, operand: Any, *starts: Any) -> Any:
    jnp = local.jax.numpy
    at, sizes = list(starts), list(local.params["slice_sizes"])
    masked: list[int] = []
    for i, (into, out) in enumerate(zip(local.inputs[0], local.outputs[0], strict=True)):
        if into.size == out.size:
            at[i], sizes[i] = jnp.zeros((), "int32"), into.length
            continue
        at[i] = clamped(local.jax, at[i], into.size - out.size)
        if into.whole:
            at[i], sizes[i] = at[i] + out.offset, out.length
        else:
            masked.append(i)
    kept = [jnp.zeros((), "int32") if i in masked else start for i, start in enumerate(at)]
    sizes = [local.inputs[0][i].length if i in masked else size for i, size in enumerate(sizes)]
    result = local.bind(operand, *_one_dtype(kept), slice_sizes=tuple(sizes))
    for i in masked:
        out = local.outputs[0][i]
        extent, wanted = local.inputs[0][i], out.offset + jnp.arange(out.length)
        result = _masked_take(local.jax, result, i, at[i] + wanted.astype(at[i].dtype), extent)
    return result


def _one_dtype(starts: list[Any]) -> list[Any]:
    wide = any(str(start.dtype) == "int64" for start in starts)
    return [start.astype("int64" if wide else "int32") for start in starts]


def _masked_take(jax: Any, operand: Any, dim: int, positions: Any, extent: Extent) -> Any:
    """Elements at global `positions` of `dim`, zero where another device holds them."""
    jnp = jax.numpy
    here = positions - extent.offset
    held = (here >= 0) & (here < extent.length)
    taken = jnp.take(operand, jnp.clip(here, 0, max(extent.length - 1, 0)), axis=dim, mode="clip")
    mask = held.reshape([-1 if i == dim else 1 for i in range(taken.ndim)])
    return jnp.where(mask, taken, jnp.zeros((), operand.dtype))


register(OpDef("dynamic_slice", _dynamic_slice, "movement", localize=_localize_dynamic_slice))


def _dynamic_update_slice(equation: Equation) -> Rule:
    """A dimension that is updated in part may be sharded: each device writes what falls into its stretch."""
    operand, update = equation.input_types[:2]
    letters = names("e", operand.rank)
    updates = [
        a if m == n else f"x{i}!"
        for i, (a, m, n) in enumerate(zip(letters, operand.shape, update.shape, strict=True))
    ]
    starts = [()] * (len(equation.inputs) - 2)
    return Rule(
        string([letters, updates, *starts], [letters]),
        reduce=None,
        linear=((0, 1),),
        monotone=((0, 1),),
        flop_per_point=0.0,
    )


def _localize_dynamic_update_slice(local: Local, operand: Any, update: Any, *starts: Any) -> Any:
    jnp = local.jax.numpy
    pairs = list(enumerate(zip(local.inputs[0], local.inputs[1], strict=True)))
    # On two mesh axes there may be two such dimensions. An empty update writes nothing, wherever it begins.
    cut = [i for i, (whole, part) in pairs if part.size not in (0, whole.size) and not whole.whole]
    if not cut:
        return local.bind(operand, update, *starts, **local.params)
    mask: Any = True
    for i in cut:
        extent, size = local.inputs[0][i], local.inputs[1][i].size
        start = clamped(local.jax, starts[i], extent.size - size)
        # What the update would put at each position of this stretch, and whether it does.
        at = jnp.arange(extent.length, dtype=start.dtype) + extent.offset - start
        update = jnp.take(update, jnp.clip(at, 0, max(size - 1, 0)), axis=i, mode="clip")
        mask &= ((at >= 0) & (at < size)).reshape([-1 if d == i else 1 for d in range(operand.ndim)])
    others = [
        jnp.zeros((), "int32") if i in cut else clamped(local.jax, s, _room(local, i))
        for i, s in enumerate(starts)
    ]
    written = local.bind(operand, update, *_one_dtype(others), **local.params)
    return jnp.where(mask, written, operand)


def _room(local: Local, dim: int) -> int:
    return local.inputs[0][dim].length - local.inputs[1][dim].length


register(
    OpDef("dynamic_update_slice", _dynamic_update_slice, "movement", localize=_localize_dynamic_update_slice)
)
