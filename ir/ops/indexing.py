"""gather and scatter: embedding lookups, take_along_axis, `x.at[i]`, and their derivatives.

An indexed dimension of the operand may be sharded (vocabulary-parallel). Every device then applies the
out-of-range mode to the *global* indices, subtracts its offset and masks what others hold; fill values
come from the device that holds the first element. The promises of the equation (indices unique, sorted,
in bounds) are dropped, for they need not hold on a stretch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from shardwright.ir.graph import Equation
from shardwright.ir.ops.axes import clamped, placing, string
from shardwright.ir.placement import ReduceOp
from shardwright.ir.registry import Local, OpDef, register
from shardwright.ir.rules import Passing, Rule, counted

_ONE_HOT = "mode one_hot"


@dataclass(frozen=True, slots=True)
class _Layout:
    """How operand dimensions, index dimensions and the dimensions of slices correspond.

    Attributes:
        window: operand dimension -> dimension of the result (gather) or updates (scatter) that it becomes.
        batch: index dimension -> dimension of the result or updates.
        paired: operand dimension -> index dimension that walks along with it (batching dimensions).
        indexed: operand dimension -> column of the index vectors.
        single: operand dimensions of which one element is taken per index.
    """

    window: Mapping[int, int]
    batch: Mapping[int, int]
    paired: Mapping[int, int]
    indexed: Mapping[int, int]
    single: tuple[int, ...]


def _layout(
    rank: int,
    slices_rank: int,
    window_dims: tuple[int, ...],
    single: tuple[int, ...],
    index_map: tuple[int, ...],
    operand_batching: tuple[int, ...],
    indices_batching: tuple[int, ...],
) -> _Layout:
    kept = [d for d in range(rank) if d not in single and d not in operand_batching]
    batch_dims = [d for d in range(slices_rank) if d not in window_dims]
    return _Layout(
        window=dict(zip(kept, window_dims, strict=True)),
        batch=dict(enumerate(batch_dims)),
        paired=dict(zip(operand_batching, indices_batching, strict=True)),
        indexed={d: column for column, d in enumerate(index_map)},
        single=single,
    )


def _gather_layout(params: Mapping[str, Any], rank: int, result_rank: int) -> _Layout:
    d = params["dimension_numbers"]
    return _layout(
        rank,
        result_rank,
        d.offset_dims,
        d.collapsed_slice_dims,
        d.start_index_map,
        d.operand_batching_dims,
        d.start_indices_batching_dims,
    )


def _scatter_layout(params: Mapping[str, Any], rank: int, updates_rank: int) -> _Layout:
    d = params["dimension_numbers"]
    return _layout(
        rank,
        updates_rank,
        d.update_window_dims,
        d.inserted_window_dims,
        d.scatter_dims_to_operand_dims,
        d.operand_batching_dims,
        d.scatter_indices_batching_dims,
    )


def _columns(jax: Any, indices: Any, limits: Mapping[int, int]) -> tuple[list[Any], Any]:
    """Index columns clamped to [0, limit], and whether all of them were in range to begin with."""
    jnp = jax.numpy
    columns: list[Any] = []
    valid = jnp.ones(indices.shape[:-1], bool)
    for column, limit in sorted(limits.items()):
        index = indices[..., column]
        close = clamped(jax, index, limit)
        # Compared in the index's own dtype: a clamped value that differs was out of range.
        valid = valid & (close.astype(index.dtype) == index)
        columns.append(close)
    return columns, valid


def _join(jax: Any, columns: list[Any], like: Any) -> Any:
    if not columns:
        return like.astype("int32")
    wide = any(str(column.dtype) == "int64" for column in columns)
    return jax.numpy.stack([column.astype("int64" if wide else "int32") for column in columns], axis=-1)


# ---------------------------------------------------------------------------------------------------
# gather


def _gather(equation: Equation) -> Rule:
    operand, indices = equation.input_types
    output, params = equation.output_types[0], equation.params
    layout = _gather_layout(params, operand.rank, output.rank)
    if params["mode"].name == "ONE_HOT":
        layout = _Layout({}, layout.batch, layout.paired, layout.indexed, ())
    ins = [f"x{d}!" for d in range(operand.rank)]
    index = [f"b{d}" for d in range(indices.rank - 1)] + ["v!"]
    outs = [f"y{d}!" for d in range(output.rank)]
    for d, out in layout.batch.items():
        outs[out] = index[d]
    for d, of_index in layout.paired.items():
        ins[d] = index[of_index]
    for d in layout.single:
        ins[d] = f"i{d}"
    for d, out in layout.window.items():
        if params["slice_sizes"][d] == operand.shape[d]:
            ins[d] = outs[out] = f"w{d}"
    # A fill value that every device adds must be zero, or not a number; a maximum of equal ones is safe.
    fill = params["fill_value"]
    once = params["mode"].name != "FILL_OR_DROP" or (fill is not None and (fill == 0 or fill != fill))
    return Rule(
        string([ins, index], [outs]),
        placing(operand.dtype),
        linear=((0,),) if once else (),
        monotone=((0,),),
        flop_per_point=0.0,
    )


def _localize_gather(local: Local, operand: Any, indices: Any) -> Any:
    params, extents = local.params, local.inputs[0]
    layout = _gather_layout(params, len(extents), len(local.outputs[0]))
    # What is taken whole is taken locally whole.
    sizes = [
        extent.length if taken == extent.size or (d in layout.paired and not extent.length) else taken
        for d, (taken, extent) in enumerate(zip(params["slice_sizes"], extents, strict=True))
    ]
    sizes = [1 if d in layout.single or d in layout.paired else size for d, size in enumerate(sizes)]
    cut = [d for d in layout.single if not extents[d].whole]
    if not cut:
        return local.bind(operand, indices, **{**params, "slice_sizes": tuple(sizes)})
    jnp = local.jax.numpy
    limits = {column: extents[e].size - params["slice_sizes"][e] for e, column in layout.indexed.items()}
    columns, valid = _columns(local.jax, indices, limits)
    held, first = jnp.ones(indices.shape[:-1], bool), jnp.ones((), bool)
    for d in cut:  # two of them on two mesh axes
        extent = extents[d]
        first = first & (extent.offset == 0)
        if d in layout.indexed:
            here = columns[layout.indexed[d]] - extent.offset
            held = held & (here >= 0) & (here < extent.length)
            columns[layout.indexed[d]] = jnp.clip(here, 0, extent.length - 1)
        else:
            held = held & (extent.offset == 0)
    clip = {
        **params,
        "slice_sizes": tuple(sizes),
        "mode": type(params["mode"]).CLIP,
        "fill_value": None,
        "unique_indices": False,
        "indices_are_sorted": False,
    }
    taken = local.bind(operand, _join(local.jax, columns, indices), **clip)

    def spread(mask: Any) -> Any:
        shape = [1] * taken.ndim
        for index_dim, out in layout.batch.items():
            shape[out] = mask.shape[index_dim]
        return mask.reshape(shape)

    zero = jnp.zeros((), operand.dtype)
    if params["mode"].name != "FILL_OR_DROP":
        return jnp.where(spread(held), taken, zero)
    fill = jnp.where(first, jnp.asarray(params["fill_value"], operand.dtype), zero)
    return jnp.where(spread(valid), jnp.where(spread(held), taken, zero), fill)


register(OpDef("gather", _gather, "index", localize=_localize_gather))


# ---------------------------------------------------------------------------------------------------
# scatter


def _scatter(
    reduce: ReduceOp | None = None,
    linear: Passing = (),
    monotone: Passing = (),
    upper: Passing = (),
    lower: Passing = (),
    unique: bool = False,
) -> Callable[[Equation], Rule]:
    """Rule of one of the scatters.

    Args:
        reduce: how updates from several devices are put together; None where their order matters.
        linear, monotone, upper, lower: as in `Rule`.
        unique: they hold only where no two updates meet (otherwise which of them wins may differ
            from device to device), and where these replace what is there (`x.at[i].apply` has the same
            primitive, with any function).
    """

    def rule(equation: Equation) -> Rule:
        operand, indices, updates = equation.input_types
        params = equation.params
        layout = _scatter_layout(params, operand.rank, updates.rank)
        ins = [f"x{d}!" for d in range(operand.rank)]
        index = [f"b{d}" for d in range(indices.rank - 1)] + ["v!"]
        update = [f"y{d}!" for d in range(updates.rank)]
        for d, out in layout.batch.items():
            update[out] = index[d]
        for d, of_index in layout.paired.items():
            ins[d] = index[of_index]
        for d in layout.single:
            ins[d] = f"i{d}" if d in layout.indexed else f"x{d}!"
        for d, out in layout.window.items():
            if updates.shape[out] == operand.shape[d]:
                ins[d] = update[out] = f"w{d}"
        passes = not unique or (params["unique_indices"] and params["update_jaxpr"] is None)
        found = Rule(
            string([ins, index, update], [ins]),
            reduce,
            linear=linear if passes else (),
            monotone=monotone if passes else (),
            upper=upper if passes else (),
            lower=lower if passes else (),
            accumulator=0,
        )
        return counted(found, equation, 0.0 if reduce is None else updates.size)

    return rule


def _localize_scatter(local: Local, operand: Any, indices: Any, updates: Any) -> Any:
    params, extents = local.params, local.inputs[0]
    layout = _scatter_layout(params, len(extents), len(local.inputs[2]))
    cut = [d for d in layout.single if not extents[d].whole]
    if not cut:
        return local.bind(operand, indices, updates, **params)
    jnp = local.jax.numpy
    taken = {e: local.inputs[2][out].size for e, out in layout.window.items()}
    limits = {column: extents[e].size - taken.get(e, 1) for e, column in layout.indexed.items()}
    columns, valid = _columns(local.jax, indices, limits)
    held = jnp.ones(indices.shape[:-1], bool) if params["mode"].name == "CLIP" else valid
    for d in cut:  # two of them on two mesh axes
        here = columns[layout.indexed[d]] - extents[d].offset
        held = held & (here >= 0) & (here < extents[d].length)
        columns[layout.indexed[d]] = here
    for d in cut:  # An index past the end is dropped.
        column = layout.indexed[d]
        columns[column] = jnp.where(held, columns[column], extents[d].length)
    drop = {
        **params,
        "mode": type(params["mode"]).FILL_OR_DROP,
        "unique_indices": False,
        "indices_are_sorted": False,
    }
    if math.prod(indices.shape[:-1]) == 1:
        # XLA turns this scatter into slices at positions that it clamps, and forgets to where it joins them
        # with a slice that cuts the stretch out (spmd): the last row would become one of another device.
        operand = local.jax.lax.optimization_barrier(operand)
    return local.bind(operand, _join(local.jax, columns, indices), updates, **drop)


_BOTH: Passing = ((0, 2),)
for _name, _rule in {
    "scatter-add": _scatter("sum", linear=_BOTH),
    "scatter-sub": _scatter("sum", linear=_BOTH),
    "scatter-mul": _scatter(linear=((0,),)),
    "scatter-max": _scatter("max", upper=_BOTH, lower=((0,),)),
    "scatter-min": _scatter("min", lower=_BOTH, upper=((0,),)),
    "scatter": _scatter(linear=_BOTH, monotone=_BOTH, unique=True),
}.items():
    register(OpDef(_name, _rule, "index", localize=_localize_scatter))
