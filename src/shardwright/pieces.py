"""Reading checkpoints: the pieces that overlap what a rank is to hold, each checked against its hash."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import jax
import numpy as np
from numpy.typing import NDArray

from shardwright import shards
from shardwright.backends.layout import from_numpy, typed, wire_type
from shardwright.backends.local import extents
from shardwright.ir.errors import PlanError
from shardwright.ir.graph import TensorType
from shardwright.ir.placement import Placement, reduction

if TYPE_CHECKING:
    from shardwright.backends.world import World

#: Bytes of leaves that are read at once: few calls, and never much more than is kept.
BATCH_BYTES = 1 << 28

#: Where a piece begins and how long it is, per dimension.
Bounds: TypeAlias = tuple[tuple[int, int], ...]


def damaged(folder: Path, reason: str) -> PlanError:
    """The error for a checkpoint that is not what was written."""
    return PlanError(place=str(folder), reason=reason, remedy="Go back to an earlier checkpoint")


class Reader:
    """The pieces of a checkpoint; those of several leaves are read at once.

    Args:
        orbax: the module.
        folder: the checkpoint.
        pieces: what the manifest says of them.
    """

    def __init__(self, orbax: Any, folder: Path, pieces: Sequence[Mapping[str, Any]]) -> None:
        self.orbax = orbax
        self.folder = folder
        self.of_leaf: dict[str, list[Mapping[str, Any]]] = {}
        for piece in pieces:
            self.of_leaf.setdefault(piece["leaf"], []).append(piece)
        self._read: dict[tuple[int, str], NDArray[Any]] = {}

    def leaves(self, targets: Sequence[Target]) -> Iterator[Any]:
        """Every leaf as its target says.

        Raises:
            PlanError: a piece is missing, or not what was written.
        """
        batch: list[Target] = []
        for target in targets:
            batch.append(target)
            if sum(each.tensor.nbytes for each in batch) >= BATCH_BYTES:
                yield from self._batch(batch)
                batch = []
        yield from self._batch(batch)

    def _batch(self, batch: Sequence[Target]) -> Iterator[Any]:
        wanted: dict[int, list[Mapping[str, Any]]] = {}
        for target in batch:
            for piece in self._overlapping(target):
                wanted.setdefault(piece["rank"], []).append(piece)
        self._read = {}
        for rank, pieces in wanted.items():
            self._fetch(rank, pieces)
        for target in batch:
            yield target.made(self)

    def _overlapping(self, target: Target) -> Iterator[Mapping[str, Any]]:
        if target.bounds is None:
            return
        for piece in self.of_leaf.get(target.name, ()):
            if _overlap(target.bounds, bounds_of(piece)) is not None:
                yield piece

    def _fetch(self, rank: int, pieces: Sequence[Mapping[str, Any]]) -> None:
        where, restore = self.folder.absolute() / f"rank-{rank}", self.orbax.RestoreArgs
        keys = [piece["key"] for piece in pieces]
        try:
            with self.orbax.PyTreeCheckpointer() as checkpointer:
                found = checkpointer.restore(
                    where,
                    args=self.orbax.args.PyTreeRestore(
                        item=dict.fromkeys(keys, 0),
                        restore_args={key: restore(restore_type=np.ndarray) for key in keys},
                        partial_restore=True,
                    ),
                )
        except (OSError, ValueError, KeyError) as error:
            raise damaged(self.folder, f"what rank {rank} wrote cannot be read") from error
        for piece in pieces:
            data = np.ascontiguousarray(found[piece["key"]])
            if hashlib.sha256(data.data).hexdigest() != piece["sha256"]:
                raise damaged(self.folder, f"{piece['leaf']} has changed since rank {rank} wrote it")
            self._read[rank, piece["key"]] = data

    def part(self, target: Target, bounds: Bounds) -> jax.Array:
        """A stretch of a leaf, put together from the pieces that overlap it.

        Raises:
            PlanError: pieces are missing.
        """
        tensor = target.tensor
        shape, dtype = wire_type(tensor)
        extra = shape[tensor.rank :]  # of keys, the dimension of their data
        result = np.empty((*(length for _, length in bounds), *extra), dtype)
        covered = 0
        for piece in self._overlapping(target):
            found = _overlap(bounds, bounds_of(piece))
            assert found is not None
            into, of = found
            data = self._read[piece["rank"], piece["key"]]
            held = (*piece["shape"], *extra)
            if data.nbytes != prod(held) * dtype.itemsize:
                wanted = f"{prod(held) * dtype.itemsize} for {list(held)} of {dtype}"
                raise damaged(self.folder, f"{target.name} has {data.nbytes} bytes, not {wanted}")
            part = np.frombuffer(data, dtype).reshape(held)[of]
            result[into] = part
            covered += part.size
        if covered != result.size:
            raise damaged(self.folder, f"{target.name} is not all there")
        return from_numpy(result, tensor.dtype)


@dataclass(frozen=True, slots=True)
class Target:
    """A leaf and where it is to lie: on these ranks in this placement, or whole in this process.

    Attributes:
        name: path of the leaf.
        tensor: its type.
        placement: how it is to lie; None: whole, as a `jax.Array`.
        here: the ranks.
        weak: whether it is to be typed weakly.
    """

    name: str
    tensor: TensorType
    placement: Placement | None = None
    here: World | None = None
    weak: bool = False

    @property
    def bounds(self) -> Bounds | None:
        """What this rank reads of it; None for nothing."""
        if self.placement is None or self.here is None or reduction(self.placement):
            return whole(self.tensor)
        if self.here.idle:
            return whole(self.tensor) if self.here.everywhere(self.tensor, self.placement) else None
        held = extents(self.tensor, self.placement, self.here.rank, self.here.ratios)
        return tuple((e.offset, e.length) for e in held)

    def made(self, reader: Reader) -> Any:
        """The leaf."""
        if self.placement is None or self.here is None:
            return typed(reader.part(self, whole(self.tensor)), self.weak)
        from shardwright.backends.world import ShardedArray

        if reduction(self.placement):
            local = typed(reader.part(self, whole(self.tensor)), self.weak)
            return shards.move(local, self.tensor, self.placement, self.here)
        local = None if self.bounds is None else reader.part(self, self.bounds)
        return ShardedArray(local, self.placement, self.tensor, self.here, self.weak)


def whole(tensor: TensorType) -> Bounds:
    """All of a tensor."""
    return tuple((0, size) for size in tensor.shape)


def bounds_of(piece: Mapping[str, Any]) -> Bounds:
    """The part of its leaf that a piece is."""
    return tuple(zip(piece["start"], piece["shape"], strict=True))


def _overlap(wanted: Bounds, held: Bounds) -> tuple[tuple[slice, ...], tuple[slice, ...]] | None:
    """The part of `wanted` that `held` covers, as slices of each; None for none."""
    into: list[slice] = []
    of: list[slice] = []
    for (start, length), (begins, long) in zip(wanted, held, strict=True):
        first, last = max(start, begins), min(start + length, begins + long)
        if first >= last:
            return None
        into.append(slice(first - start, last - start))
        of.append(slice(first - begins, last - begins))
    return tuple(into), tuple(of)
