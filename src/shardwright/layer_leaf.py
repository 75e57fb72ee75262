"""One layer's leaf of a stack that lies on several devices, which is not taken apart for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import numpy as np

from shardwright.backends.layout import typed
from shardwright.backends.local import extents
from shardwright.ir.registry import Extent

#: Where a part of a tensor begins, by dimension, and how long it is.
Bounds: TypeAlias = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class LayerLeaf:
    """What one layer has of a `ShardedArray`, or `PaddedArray`, of all layers; a leaf of JAX's pytrees.

    Passed back beside those of the other layers, it is their stack again, and nothing is moved.

    Attributes:
        stack: all layers', layers first.
        layer: which of them.
        weak_type: whether it is typed weakly.
    """

    stack: Any
    layer: int
    weak_type: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """Global shape."""
        return self.stack.shape[1:]

    @property
    def dtype(self) -> Any:
        return self.stack.dtype

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def held_by(self, device: int) -> Bounds | None:
        """Where what a device of the plan holds of it begins, by dimension, and how long it is.

        None if that is nothing. Of layers of a `ShardedArray` only.
        """
        if device < 0:
            return None
        layers, *rest = self._extents(device)
        if not layers.offset <= self.layer < layers.offset + layers.length or not all(e.length for e in rest):
            return None
        return tuple([(e.offset, e.length) for e in rest])

    def _extents(self, device: int) -> tuple[Extent, ...]:
        return extents(self.stack.tensor, self.stack.placement, device, self.stack.world.ratios)

    @property
    def local(self) -> Any:
        """What this rank holds of it, of layers of a `ShardedArray`; None if that is nothing."""
        here = self.stack.world.rank
        if self.stack.local is None or self.held_by(here) is None:
            return None
        return self.stack.local[self.layer - self._extents(here)[0].offset]

    def gather(self) -> jax.Array:
        """The global array, on every rank. A collective call: all ranks must make it.

        `shardwright.gather` of a tree gathers every stack once.

        Raises:
            InputError: the stack was donated to a step.
        """
        return self.of(self.stack.gather())

    def of(self, whole: jax.Array) -> jax.Array:
        """This layer's of the whole stack."""
        return typed(whole[self.layer], self.weak_type)

    def block_until_ready(self) -> LayerLeaf:
        """Wait until what this rank holds is computed; `jax.block_until_ready` does so for pytrees."""
        self.stack.block_until_ready()
        return self

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        """The global array, where its stack is one without communication."""
        return np.array(np.asarray(self.stack)[self.layer], dtype=dtype, copy=copy)

    def __repr__(self) -> str:
        return f"layer {self.layer} of {self.stack!r}"
