"""Replicated state that every rank computes for itself, kept alike.

Where cards are unlike, the same computation rounds differently, and what should be equal drifts apart. Every
K steps the ranks compare checksums; what differs is sent anew by its owner, device 0.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from shardwright.backends.layout import to_numpy
from shardwright.backends.mpi.link import mpi
from shardwright.backends.world import World
from shardwright.ir.dtypes import is_key
from shardwright.ir.graph import TensorType
from shardwright.ir.placement import R
from shardwright.ir.program import Move


@dataclass(frozen=True, slots=True)
class Drift:
    """A state tensor that was not alike on all ranks.

    Attributes:
        call: of the step after which it was found, from 1.
        name: of the output.
        difference: largest absolute difference of an element to the owner's; infinite for PRNG keys.
    """

    call: int
    name: str
    difference: float


def checksum(value: Any) -> int:
    """Of a local array's bytes, at the speed at which memory is read: the sum and the parity of its words."""
    array = to_numpy(value)
    if not array.flags.c_contiguous:
        array = np.ascontiguousarray(array)
    flat = array.reshape(-1).view(np.uint8)
    words = flat[: flat.size // 8 * 8].view(np.uint64)
    total, parity = int(np.add.reduce(words)), int(np.bitwise_xor.reduce(words))
    rest = zlib.crc32(flat[words.nbytes :].data)
    return (total ^ (parity << 1) ^ rest) & (2**62 - 1)


def resync(
    world: World, results: list[Any], outs: Mapping[int, tuple[str, TensorType]], call: int
) -> Sequence[Drift]:
    """Give every rank the owner's state where checksums differ; a collective call.

    Args:
        world: the ranks.
        results: local arrays; those that differ are replaced.
        outs: names and types of the replicated state, by position in `results`.
        call: number of the step.

    Returns:
        What had drifted, the same on every rank.
    """
    if not outs or world.comm.size == 1:
        return ()
    sums = np.array([checksum(results[i]) for i in outs], np.int64)
    # The least of x and of -x: one exchange tells whether all are equal.
    both = np.concatenate([sums, -sums])
    world.settle()
    world.wait([world.comm.Iallreduce(mpi().IN_PLACE, both, mpi().MIN)])
    apart = [
        i for i, low, high in zip(outs, both[: len(sums)], -both[len(sums) :], strict=True) if low != high
    ]
    if not apart:
        return ()
    differences = np.zeros(len(apart))
    for k, i in enumerate(apart):
        tensor = outs[i][1]
        mine = to_numpy(results[i])
        results[i] = world.move(Move("broadcast", 0, R, R, "tree", None, 0), tensor, results[i])
        differences[k] = _difference(mine, to_numpy(results[i]), tensor)
    world.wait([world.comm.Iallreduce(mpi().IN_PLACE, differences, mpi().MAX)])
    return tuple(
        Drift(call, outs[i][0], float(difference)) for i, difference in zip(apart, differences, strict=True)
    )


def _difference(mine: Any, owners: Any, tensor: TensorType) -> float:
    if is_key(tensor.dtype):
        return float("inf")
    wide = np.complex128 if tensor.dtype.startswith("complex") else np.float64
    apart = np.abs(np.asarray(mine, wide) - np.asarray(owners, wide))
    return float(np.max(apart, initial=0.0))
