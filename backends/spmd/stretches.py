"""Stretches along one dimension, cut and moved in code that all devices share: what exchanges are made of.

A device holds its stretch padded to the longest, a *block*. A *slot* is what it would hold were the dimension
cut evenly. All lengths are static; which device runs the code (`me`) is known when it runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

from shardwright.backends.spmd.layout import AXIS, starts

#: Devices that exchange among each other, as `axis_index_groups`; None: all do.
Groups: TypeAlias = tuple[tuple[int, ...], ...] | None


def to_blocks(whole: Any, dim: int, lengths: Sequence[int]) -> Any:
    """From stretches one after another to one block each, as long as the longest."""
    block = max(lengths)
    if min(lengths) == block:
        return whole
    pieces: list[Any] = []
    for start, length in zip(starts(lengths), lengths, strict=True):
        piece = jax.lax.slice_in_dim(whole, start, start + length, axis=dim)
        pieces.append(extended(piece, dim, block - length))
    return jnp.concatenate(pieces, axis=dim)


def from_blocks(blocks: Any, dim: int, lengths: Sequence[int]) -> Any:
    """Inverse of `to_blocks`."""
    block = max(lengths)
    if min(lengths) == block:
        return blocks
    pieces = [
        jax.lax.slice_in_dim(blocks, i * block, i * block + n, axis=dim) for i, n in enumerate(lengths) if n
    ]
    return jnp.concatenate(pieces, axis=dim)


def extended(array: Any, dim: int, more: int) -> Any:
    """With so many zeros at the end of a dimension."""
    widths = [(0, more if i == dim else 0, 0) for i in range(array.ndim)]
    return jax.lax.pad(array, jnp.zeros((), array.dtype), widths) if more else array


def own_stretch(whole: Any, dim: int, lengths: Sequence[int], me: Any) -> Any:
    """This participant's stretch of the whole, padded (with whatever comes next)."""
    block, at = max(lengths), starts(lengths)
    # A slice that runs over the end would be moved back.
    whole = extended(whole, dim, max(0, max(at) + block - whole.shape[dim]))
    return jax.lax.dynamic_slice_in_dim(whole, jnp.asarray(at)[me], block, axis=dim)


def slots(total: int, count: int) -> tuple[int, ...]:
    """Lengths of `total` elements cut evenly: the last ones are shorter where that leaves a remainder."""
    slot = -(-total // count)
    return tuple(max(0, min(slot, total - i * slot)) for i in range(count))


@dataclass(frozen=True, slots=True)
class Shift:
    """The way from stretches of some lengths to stretches of others: everyone sends everyone what is theirs.

    Attributes:
        before: lengths per participant.
        after: lengths per participant afterwards, of the same sum.
    """

    before: tuple[int, ...]
    after: tuple[int, ...]

    def size(self, i: int, j: int) -> int:
        """Elements that participant i has for j."""
        firsts, seconds = starts(self.before), starts(self.after)
        first, last = firsts[i] + self.before[i], seconds[j] + self.after[j]
        return max(0, min(first, last) - max(firsts[i], seconds[j]))

    def taken_at(self, i: int, j: int) -> int:
        """Where in the stretch of i that begins."""
        at = max(0, starts(self.after)[j] - starts(self.before)[i])
        return at if self.size(i, j) else 0

    def put_at(self, i: int, j: int) -> int:
        """Where it begins in the new stretch of j, or would; i may be before the first or after the last."""
        if i < 0:
            return 0
        if i >= len(self.before):
            return self.after[j]
        return min(max(starts(self.before)[i] - starts(self.after)[j], 0), self.after[j])

    def rounds(self) -> dict[int, int]:
        """Distances j - i over which something moves, with the longest piece; the first of a stretch first.

        That is in the order of the sender, for every receiver.
        """
        count = len(self.before)
        pieces = {d: max(self._sizes(d)) for d in range(count - 1, -count, -1)}
        return {distance: piece for distance, piece in pieces.items() if piece}

    def _sizes(self, distance: int) -> list[int]:
        count = len(self.before)
        return [self.size(i, i + distance) for i in range(count) if 0 <= i + distance < count]

    @property
    def moved(self) -> int:
        """Elements that each participant sends and receives, padding included."""
        return min(self._by_rounds, self._at_once)

    @property
    def _by_rounds(self) -> int:
        return sum(piece for distance, piece in self.rounds().items() if distance)

    @property
    def _at_once(self) -> int:
        return len(self.before) * max(self.rounds().values(), default=0)

    def __call__(self, array: Any, dim: int, me: Any, groups: Groups) -> Any:
        """The new stretch of this participant, padded, from the old one, padded.

        Args:
            array: the old stretch.
            dim: the dimension that is cut.
            me: traced, which participant this is.
            groups: participants that exchange among each other.
        """
        # Every round is a collective of its own: only where they move much less.
        if 2 * self._by_rounds <= self._at_once:
            pieces = self._pieces_by_rounds(array, dim, me, groups)
        else:
            pieces = self._pieces_at_once(array, dim, me, groups)
        block = max(self.after)
        room = max((max(at) + piece.shape[dim] for at, piece in pieces), default=0)
        shape = list(array.shape)
        shape[dim] = max(block, room)
        result = jnp.zeros(shape, array.dtype)
        for at, piece in pieces:
            # In order: what runs over the end of a piece, or is none, is overwritten by those that follow.
            result = jax.lax.dynamic_update_slice_in_dim(result, piece, jnp.asarray(at)[me], axis=dim)
        return jax.lax.slice_in_dim(result, 0, block, axis=dim)

    def _pieces_by_rounds(self, array: Any, dim: int, me: Any, groups: Groups) -> list[tuple[list[int], Any]]:
        """A permutation for each distance; every piece with where participants put it."""
        everyone = range(len(self.before))
        found: list[tuple[list[int], Any]] = []
        for distance, length in self.rounds().items():
            pairs = [(i, i + distance) for i in everyone if i + distance in everyone]
            pairs = [(i, j) for i, j in pairs if self.size(i, j)]
            taken = [self.taken_at(i, i + distance) if i + distance in everyone else 0 for i in everyone]
            room = extended(array, dim, max(0, max(taken) + length - array.shape[dim]))
            piece = jax.lax.dynamic_slice_in_dim(room, jnp.asarray(taken)[me], length, axis=dim)
            if distance:
                devices = groups or (tuple(everyone),)
                piece = jax.lax.ppermute(piece, AXIS, [(own[i], own[j]) for own in devices for i, j in pairs])
            found.append(([self.put_at(j - distance, j) for j in everyone], piece))
        return found

    def _pieces_at_once(self, array: Any, dim: int, me: Any, groups: Groups) -> list[tuple[list[int], Any]]:
        """One all-to-all of pieces as long as the longest."""
        everyone = range(len(self.before))
        length = max(self.rounds().values(), default=0)
        room = extended(array, dim, length)
        table = jnp.asarray([[self.taken_at(i, j) for j in everyone] for i in everyone])[me]
        sent = [jax.lax.dynamic_slice_in_dim(room, table[j], length, axis=dim) for j in everyone]
        received = jax.lax.all_to_all(
            jnp.concatenate(sent, axis=dim), AXIS, dim, dim, tiled=True, axis_index_groups=groups
        )
        found: list[tuple[list[int], Any]] = []
        for i in everyone:
            piece = jax.lax.slice_in_dim(received, i * length, (i + 1) * length, axis=dim)
            found.append(([self.put_at(i, j) for j in everyone], piece))
        return found
