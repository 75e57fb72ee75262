"""Collectives of one jitted program: a function per (collective, strategy), traced under `jax.shard_map`.

XLA's collectives move equal pieces. Small stretches travel padded to the longest, many in one collective;
before large ones are gathered, what is uneven is moved, so that they are cut evenly and nothing is padded
(`stretches.py`). XLA picks the rounds: strategies that differ in rounds alone are one lowering here.

All devices run the same code. `Site` says, traced, which of them runs it; devices outside a group take part
in whatever way disturbs least, and what they end up with is never read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

from shardwright.backends.layout import members
from shardwright.backends.spmd.layout import AXIS, Layout, starts
from shardwright.backends.spmd.stretches import Shift, from_blocks, own_stretch, slots, to_blocks
from shardwright.ir.collectives import identity
from shardwright.ir.dtypes import is_key, key_implementation
from shardwright.ir.graph import TensorType
from shardwright.ir.placement import Partial, Placement, ReduceOp, Shard
from shardwright.ir.program import Group, Move


@dataclass(frozen=True, slots=True)
class Site:
    """A move as the code of all participants sees it.

    Attributes:
        shape: of the whole tensor, with the trailing dimensions of what it is made of (PRNG keys).
        pre: placement before.
        post: placement after.
        before: where `pre` is `S(d)`, elements of dimension d per participant.
        after: where `post` is `S(d)`, elements of dimension d per participant.
        me: traced, which participant this is.
        root: which participant has the tensor at first, where not all have.
        count: number of participants: those of a group, or all devices where `groups` is None.
        groups: devices that exchange among each other, for `axis_index_groups`; None: all do.
        joins: traced, whether this device's contribution counts; None: everyone's does.
        devices: the devices of the move's group, on the mesh axis.
    """

    shape: tuple[int, ...]
    pre: Placement
    post: Placement
    before: tuple[int, ...]
    after: tuple[int, ...]
    me: Any
    root: int | None
    count: int
    groups: tuple[tuple[int, ...], ...] | None
    joins: Any
    devices: tuple[int, ...]


#: The local array after the move, padded, from the one before it, padded.
Lowering: TypeAlias = Callable[[Site, Any], Any]

_LOWERINGS: dict[tuple[str, str], Lowering] = {}


def lowerings() -> dict[tuple[str, str], Lowering]:
    """All lowerings by (collective, strategy)."""
    return _LOWERINGS


def lowers(kind: str, *strategies: str) -> Callable[[Lowering], Lowering]:
    """Registers the decorated function as the lowering of strategies."""

    def register(function: Lowering) -> Lowering:
        for strategy in strategies:
            assert (kind, strategy) not in _LOWERINGS, f"{kind}.{strategy} is lowered twice"
            _LOWERINGS[kind, strategy] = function
        return function

    return register


def move(move: Move, tensor: TensorType, layout: Layout, here: Any, value: Any) -> Any:
    """Carry out a collective inside `jax.shard_map`.

    Args:
        move: what to do.
        tensor: global type of the value.
        layout: the devices.
        here: traced, this device's number.
        value: what this device holds, padded.

    Returns:
        What it holds afterwards, padded.
    """
    after = layout.padded(tensor, move.post, move.group)
    if 0 in tensor.shape:
        return jnp.zeros(after, value.dtype)
    keys = is_key(tensor.dtype)
    raw = jax.random.key_data(value) if keys else value
    trailing = raw.shape[value.ndim :]
    site = _site(move, tensor, layout, here, (*tensor.shape, *trailing))
    result = _LOWERINGS[move.kind, move.strategy](site, raw)
    assert result.shape == (*after, *trailing), f"{move}: {result.shape}, not {after}"
    return jax.random.wrap_key_data(result, impl=key_implementation(tensor.dtype)) if keys else result


def moved(
    moves: Sequence[Move],
    types: Mapping[int, TensorType],
    layout: Layout,
    here: Any,
    values: Sequence[Any],
) -> list[Any]:
    """Carry out collectives of one message, small ones that can in one collective of XLA's.

    Args:
        moves: what to do.
        types: global types of the values by number.
        layout: the devices.
        here: traced, this device's number.
        values: what this device holds, padded, one per move.

    Returns:
        What it holds afterwards, padded, one per move.
    """
    packs: dict[tuple[object, ...], list[int]] = {}
    for number, one in enumerate(moves):
        packs.setdefault(_pack(one, types[one.value]) or (number,), []).append(number)
    results: dict[int, Any] = {}
    for numbers in packs.values():
        if len(numbers) == 1:
            (number,) = numbers
            one = moves[number]
            results[number] = move(one, types[one.value], layout, here, values[number])
            continue
        sites = [
            _site(m, types[m.value], layout, here, types[m.value].shape)
            for m in map(moves.__getitem__, numbers)
        ]
        packed = _gathered if isinstance(sites[0].pre, Shard) else _summed
        results.update(zip(numbers, packed(sites, [values[i] for i in numbers]), strict=True))
    return [results[number] for number in range(len(moves))]


def _pack(move: Move, tensor: TensorType) -> tuple[object, ...] | None:
    """What moves have in common that can be in one collective; None: this one travels alone."""
    lowering = _LOWERINGS[move.kind, move.strategy]
    if is_key(tensor.dtype) or tensor.nbytes > PACK_BYTES or 0 in tensor.shape:
        return None
    if lowering is _all_gather:
        return "gather", move.group, tensor.dtype
    if lowering in (_all_reduce, _reduce_scatter) and move.pre == Partial("sum") and tensor.dtype != "bool":
        return "sum", move.group, tensor.dtype
    return None


def _site(move: Move, tensor: TensorType, layout: Layout, here: Any, shape: tuple[int, ...]) -> Site:
    own = members(move.group, layout.count)
    before = layout.lengths(tensor, move.pre, None if move.root is not None else move.group)
    after = layout.lengths(tensor, move.post, move.group)
    groups = _groups(move.group, layout.count)
    if groups is None:
        all_join = len(own) == layout.count
        joins = None if all_join else jnp.asarray([d in own for d in range(layout.count)])[here]
        return Site(
            shape, move.pre, move.post, before, after, here, move.root, layout.count, None, joins, own
        )
    me = jnp.asarray([next(g.index(d) for g in groups if d in g) for d in range(layout.count)])[here]
    root = None if move.root is None else own.index(move.root)
    before, after = (tuple(lengths[d] for d in own) if lengths else () for lengths in (before, after))
    return Site(shape, move.pre, move.post, before, after, me, root, len(own), groups, None, own)


def _groups(group: Group, count: int) -> tuple[tuple[int, ...], ...] | None:
    """The group, and groups as large of all other devices; None where they do not make such groups.

    XLA wants every device in exactly one group, and most of its backends groups of one size.
    """
    own = members(group, count)
    rest = [d for d in range(count) if d not in own]
    if not rest or len(rest) % len(own):
        return None
    others = (tuple(rest[i : i + len(own)]) for i in range(0, len(rest), len(own)))
    return (own, *others)


# ---------------------------------------------------------------------------------------------------
# Which way


#: Bytes of a tensor from which on more collectives are worth it, each a rendezvous of all devices, if no
#: padding is moved; and how many times less has to be moved.
SLOT_BYTES, SLOT_GAIN = 128 << 10, 1.25

#: Bytes of a tensor up to which it travels with others in one collective: it is copied once more.
PACK_BYTES = 64 << 10


def _padding_pays(lengths: Sequence[int]) -> bool:
    """Whether m blocks move less than an all-reduce: (m-1)·block against 2(m-1)/m · total elements.

    Where both move as much, the all-reduce is better: there are no blocks to be put together and taken apart.
    """
    return len(lengths) * max(lengths) < 2 * sum(lengths)


def _slots_pay(site: Site, dtype: Any) -> bool:
    """Whether to gather slots, and move what of them lies in another device's stretch beforehand.

    Padded blocks move m·block elements, and the whole has to be put together of them.
    """
    total, even = sum(site.before), slots(sum(site.before), site.count)
    if math.prod(site.shape) * dtype.itemsize < SLOT_BYTES or len(set(site.before)) == 1:
        return False
    by_slots = Shift(site.before, even).moved + total + max(even)
    return SLOT_GAIN * by_slots <= site.count * max(site.before) + total


def _chosen(site: Site, array: Any, mine: Any) -> Any:
    """The elements of whoever says that they are its own (`mine`, broadcast), at most one each; else zero.

    Added up as bits, so that what arrives is what was sent: negative zeros, NaNs and all.
    """
    dtype = array.dtype
    if dtype == jnp.bool_:
        raw = array.astype(jnp.uint8)
    elif jnp.issubdtype(dtype, jnp.complexfloating):
        parts = [_chosen(site, part, mine) for part in (array.real, array.imag)]
        return jax.lax.complex(*parts)
    elif jnp.issubdtype(dtype, jnp.integer):
        raw = array
    else:
        raw = jax.lax.bitcast_convert_type(array, f"uint{8 * dtype.itemsize}")
    # NCCL has no integers of 16 bits.
    wide = raw.astype(jnp.uint32) if raw.dtype.itemsize == 2 else raw
    total = jax.lax.psum(
        jnp.where(mine, wide, jnp.zeros((), wide.dtype)), AXIS, axis_index_groups=site.groups
    ).astype(raw.dtype)
    if dtype == jnp.bool_ or jnp.issubdtype(dtype, jnp.integer):
        return total.astype(dtype)
    return jax.lax.bitcast_convert_type(total, dtype)


# ---------------------------------------------------------------------------------------------------
# To all


@lowers("all_gather", "padded", "exact", "grouped", "hierarchical")
def _all_gather(site: Site, array: Any) -> Any:
    """An all-gather of padded blocks; of slots, if that moves less."""
    assert isinstance(site.pre, Shard)
    dim, total = site.pre.dim, site.shape[site.pre.dim]
    even = slots(total, site.count)
    through = _slots_pay(site, array.dtype)
    if through:
        array = Shift(site.before, even)(array, dim, site.me, site.groups)
    blocks = jax.lax.all_gather(array, AXIS, axis=dim, tiled=True, axis_index_groups=site.groups)
    return (
        jax.lax.slice_in_dim(blocks, 0, total, axis=dim) if through else from_blocks(blocks, dim, site.before)
    )


@lowers("broadcast", "tree", "scatter_ag")
def _broadcast(site: Site, array: Any) -> Any:
    return _chosen(site, array, site.me == site.root)


@lowers("send", "direct")
def _send(site: Site, array: Any) -> Any:
    """A permutation of two devices, of which one keeps what it has."""
    assert site.root is not None
    source = site.root if site.groups is None else site.devices[site.root]
    (target,) = (d for d in site.devices if d != source)
    received = jax.lax.ppermute(array, AXIS, [(source, target)])
    return jnp.where(site.me == site.root, array, received)


# ---------------------------------------------------------------------------------------------------
# Reductions


@lowers("all_reduce", "ring", "rs_ag", "tree", "hierarchical")
def _all_reduce(site: Site, array: Any) -> Any:
    assert isinstance(site.pre, Partial)
    return _reduced(site, array, site.pre.op)


def _reduced(site: Site, array: Any, op: ReduceOp) -> Any:
    if array.dtype == jnp.bool_:
        # A sum of booleans is "or", their maximum; zero changes neither.
        number = array.astype(jnp.uint8)
        return _reduced(site, number, "max" if op == "sum" else op).astype(jnp.bool_)
    reduce = {"sum": jax.lax.psum, "max": jax.lax.pmax, "min": jax.lax.pmin}[op]
    mine = contribution(site, array)
    if op == "sum" or not jnp.issubdtype(array.dtype, jnp.floating):
        return reduce(mine, AXIS, axis_index_groups=site.groups)
    return _unordered(reduce(_ordered(mine, op), AXIS, axis_index_groups=site.groups), array.dtype)


def _ordered(array: Any, op: ReduceOp) -> Any:
    """Floats as integers of the same order, NaNs beyond all of them: XLA's maxima on CPUs lose NaNs."""
    wide = array.astype(jnp.float32) if array.dtype.itemsize < 4 else array
    bits = jax.lax.bitcast_convert_type(wide, f"int{8 * wide.dtype.itemsize}")
    info = jnp.iinfo(bits.dtype)
    return jnp.where(jnp.isnan(wide), info.max if op == "max" else info.min, _turned(bits))


def _unordered(ordered: Any, dtype: Any) -> Any:
    """The floats again."""
    return jax.lax.bitcast_convert_type(_turned(ordered), f"float{8 * ordered.dtype.itemsize}").astype(dtype)


def _turned(bits: Any) -> Any:
    """Between the bits of floats and integers of their order: of negative floats the larger bits are less."""
    return bits ^ ((bits >> (8 * bits.dtype.itemsize - 1)) & jnp.iinfo(bits.dtype).max)


def contribution(site: Site, array: Any) -> Any:
    """What a device adds to a reduction: outside the group, what changes nothing."""
    assert isinstance(site.pre, Partial)
    if site.joins is None:
        return array
    return jnp.where(site.joins, array, jnp.asarray(identity(site.pre.op, array.dtype)))


@lowers("reduce_scatter", "padded", "exact", "grouped", "hierarchical")
def _reduce_scatter(site: Site, array: Any) -> Any:
    """One reduce-scatter of padded blocks; an all-reduce where that moves less, or where it is no sum."""
    assert isinstance(site.pre, Partial)
    assert isinstance(site.post, Shard)
    op, dim = site.pre.op, site.post.dim
    # Slots would move less, but XLA for CPUs transposes what is scattered along another dimension than the
    # first: 1 MiB took 6.4 ms of the processors in place of 2.2, and along the first no less than this.
    if op != "sum" or array.dtype == jnp.bool_ or not _padding_pays(site.after):
        return own_stretch(_reduced(site, array, op), dim, site.after, site.me)
    blocks = to_blocks(contribution(site, array), dim, site.after)
    return jax.lax.psum_scatter(
        blocks, AXIS, scatter_dimension=dim, tiled=True, axis_index_groups=site.groups
    )


# ---------------------------------------------------------------------------------------------------
# Several at once


def _gathered(sites: Sequence[Site], arrays: Sequence[Any]) -> list[Any]:
    """All-gathers in one, of blocks as rows of numbers."""
    flat = jnp.concatenate([array.reshape(-1) for array in arrays])
    rows = jax.lax.all_gather(flat, AXIS, axis_index_groups=sites[0].groups)
    results: list[Any] = []
    for site, array, start in zip(sites, arrays, starts([x.size for x in arrays]), strict=True):
        assert isinstance(site.pre, Shard)
        blocks = rows[:, start : start + array.size].reshape(-1, *array.shape)
        pieces = [
            jax.lax.slice_in_dim(blocks[i], 0, length, axis=site.pre.dim)
            for i, length in enumerate(site.before)
            if length
        ]
        results.append(jnp.concatenate(pieces, axis=site.pre.dim))
    return results


def _summed(sites: Sequence[Site], arrays: Sequence[Any]) -> list[Any]:
    """Sums in one; of a sum that is scattered a device keeps its stretch."""
    parts = [contribution(site, array) for site, array in zip(sites, arrays, strict=True)]
    flat = jnp.concatenate([part.reshape(-1) for part in parts])
    total = jax.lax.psum(flat, AXIS, axis_index_groups=sites[0].groups)
    results: list[Any] = []
    for site, array, start in zip(sites, arrays, starts([x.size for x in arrays]), strict=True):
        whole = jax.lax.slice_in_dim(total, start, start + array.size).reshape(array.shape)
        if isinstance(site.post, Shard):
            whole = own_stretch(whole, site.post.dim, site.after, site.me)
        results.append(whole)
    return results


# ---------------------------------------------------------------------------------------------------
# Stretches to stretches


@lowers("all_to_all", "exact", "hierarchical")
def _all_to_all(site: Site, array: Any) -> Any:
    """One all-to-all of padded pieces."""
    assert isinstance(site.pre, Shard)
    assert isinstance(site.post, Shard)
    if site.pre.dim == site.post.dim:
        return Shift(site.before, site.after)(array, site.pre.dim, site.me, site.groups)
    blocks = to_blocks(array, site.post.dim, site.after)
    swapped = jax.lax.all_to_all(
        blocks, AXIS, site.post.dim, site.pre.dim, tiled=True, axis_index_groups=site.groups
    )
    return from_blocks(swapped, site.pre.dim, site.before)
