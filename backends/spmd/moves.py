"""Collectives of one jitted program: a function per (collective, strategy), traced under `jax.shard_map`.

XLA's collectives move equal pieces, so stretches travel padded to the longest; where that moves more than an
all-reduce of the whole would, the whole is reduced. XLA picks the rounds: strategies that differ in rounds
alone are one lowering here.

All devices run the same code. `Site` says, traced, which of them runs it; devices outside a group take part
in whatever way disturbs least, and what they end up with is never read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

from shardwright.backends.layout import is_key, members
from shardwright.backends.local import key_implementation
from shardwright.backends.spmd.layout import AXIS, Layout, starts
from shardwright.ir.collectives import identity
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
# Stretches


def _blocks(whole: Any, dim: int, lengths: Sequence[int]) -> Any:
    """From stretches one after another to one block each, as long as the longest."""
    block = max(lengths)
    if min(lengths) == block:
        return whole
    pieces: list[Any] = []
    for start, length in zip(starts(lengths), lengths, strict=True):
        piece = jax.lax.slice_in_dim(whole, start, start + length, axis=dim)
        pieces.append(_extended(piece, dim, block - length))
    return jnp.concatenate(pieces, axis=dim)


def _stretches(blocks: Any, dim: int, lengths: Sequence[int]) -> Any:
    """Inverse of `_blocks`."""
    block = max(lengths)
    if min(lengths) == block:
        return blocks
    pieces = [
        jax.lax.slice_in_dim(blocks, i * block, i * block + n, axis=dim) for i, n in enumerate(lengths) if n
    ]
    return jnp.concatenate(pieces, axis=dim)


def _extended(array: Any, dim: int, more: int) -> Any:
    widths = [(0, more if i == dim else 0, 0) for i in range(array.ndim)]
    return jax.lax.pad(array, jnp.zeros((), array.dtype), widths) if more else array


def own_stretch(whole: Any, dim: int, lengths: Sequence[int], me: Any) -> Any:
    """This participant's stretch of the whole, padded (with whatever comes next)."""
    block, at = max(lengths), starts(lengths)
    # A slice that runs over the end would be moved back.
    whole = _extended(whole, dim, max(0, max(at) + block - whole.shape[dim]))
    return jax.lax.dynamic_slice_in_dim(whole, jnp.asarray(at)[me], block, axis=dim)


def _padding_pays(lengths: Sequence[int]) -> bool:
    """Whether m blocks move less than an all-reduce: (m-1)·block against 2(m-1)/m · total elements.

    Where both move as much, the all-reduce is better: there are no blocks to be put together and taken apart.
    """
    return len(lengths) * max(lengths) < 2 * sum(lengths)


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


def _gather_blocks(site: Site, array: Any) -> Any:
    assert isinstance(site.pre, Shard)
    dim = site.pre.dim
    blocks = jax.lax.all_gather(array, AXIS, axis=dim, tiled=True, axis_index_groups=site.groups)
    return _stretches(blocks, dim, site.before)


lowers("all_gather", "padded")(_gather_blocks)


@lowers("all_gather", "exact", "grouped", "hierarchical")
def _all_gather(site: Site, array: Any) -> Any:
    """One all-gather of padded blocks; where most of it were padding, a sum of stretches in their places."""
    assert isinstance(site.pre, Shard)
    if _padding_pays(site.before):
        return _gather_blocks(site, array)
    dim, block = site.pre.dim, max(site.before)
    shape = list(site.shape)
    shape[dim] += block  # room for the padding of the last stretch
    at, length = (jnp.asarray(x)[site.me] for x in (starts(site.before), site.before))
    placed = jax.lax.dynamic_update_slice_in_dim(jnp.zeros(shape, array.dtype), array, at, axis=dim)
    placed = jax.lax.slice_in_dim(placed, 0, site.shape[dim], axis=dim)
    position = jax.lax.broadcasted_iota(at.dtype, placed.shape, dim)
    return _chosen(site, placed, (position >= at) & (position < at + length))


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
    return reduce(contribution(site, array), AXIS, axis_index_groups=site.groups)


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
    if op != "sum" or array.dtype == jnp.bool_ or not _padding_pays(site.after):
        return own_stretch(_reduced(site, array, op), dim, site.after, site.me)
    blocks = _blocks(contribution(site, array), dim, site.after)
    return jax.lax.psum_scatter(
        blocks, AXIS, scatter_dimension=dim, tiled=True, axis_index_groups=site.groups
    )


# ---------------------------------------------------------------------------------------------------
# Stretches to stretches


@lowers("all_to_all", "exact", "hierarchical")
def _all_to_all(site: Site, array: Any) -> Any:
    """One all-to-all of padded pieces."""
    assert isinstance(site.pre, Shard)
    assert isinstance(site.post, Shard)
    if site.pre.dim == site.post.dim:
        return _shifted(site, array, site.pre.dim)
    blocks = _blocks(array, site.post.dim, site.after)
    swapped = jax.lax.all_to_all(
        blocks, AXIS, site.post.dim, site.pre.dim, tiled=True, axis_index_groups=site.groups
    )
    return _stretches(swapped, site.pre.dim, site.before)


def _shifted(site: Site, array: Any, dim: int) -> Any:
    """The same dimension cut at other places: everyone sends everyone what of its stretch is theirs."""
    firsts, seconds = starts(site.before), starts(site.after)
    ends = [a + n for a, n in zip(firsts, site.before, strict=True)]
    limits = [b + n for b, n in zip(seconds, site.after, strict=True)]
    everyone = range(site.count)
    first = [[max(firsts[i], seconds[j]) for j in everyone] for i in everyone]
    size = [[max(0, min(ends[i], limits[j]) - first[i][j]) for j in everyone] for i in everyone]
    piece = max(map(max, size))
    # Where in the stretch of i the piece for j begins, and where in that of j the piece of i does, or would.
    there = [[first[i][j] - firsts[i] if size[i][j] else 0 for j in everyone] for i in everyone]
    back = [[min(max(firsts[i] - seconds[j], 0), site.after[j]) for i in everyone] for j in everyone]
    room = _extended(array, dim, piece)
    table = jnp.asarray(there)[site.me]
    pieces = [jax.lax.dynamic_slice_in_dim(room, table[j], piece, axis=dim) for j in everyone]
    received = jax.lax.all_to_all(
        jnp.concatenate(pieces, axis=dim), AXIS, dim, dim, tiled=True, axis_index_groups=site.groups
    )
    shape = list(array.shape)
    shape[dim] = max(site.after) + piece
    result = jnp.zeros(shape, array.dtype)
    table = jnp.asarray(back)[site.me]
    for i in everyone:
        # In order: what runs over the end of a piece, or is none, is overwritten by those that follow.
        part = jax.lax.slice_in_dim(received, i * piece, (i + 1) * piece, axis=dim)
        result = jax.lax.dynamic_update_slice_in_dim(result, part, table[i], axis=dim)
    return jax.lax.slice_in_dim(result, 0, max(site.after), axis=dim)
