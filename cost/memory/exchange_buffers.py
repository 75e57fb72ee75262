"""Memory that an exchange takes beside its operand, as `backends/mpi/moves.py` carries it out."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from shardwright.cost.memory.tenancy import Bytes, Size
from shardwright.ir.graph import TensorType
from shardwright.ir.placement import Placement, Shard, cuts, lengths, region
from shardwright.ir.program import Move


def exchange_bytes(move: Move, tensor: TensorType, device: int, ratios: Sequence[float]) -> int:
    """Bytes of the result, of padding and of packed pieces on one device.

    Args:
        move: the exchange, among all devices of the program.
        tensor: the whole tensor.
        device: position in the program.
        ratios: share of every device.
    """
    result = held_bytes(tensor, move.post, device, ratios)
    if move.strategy == "padded":
        sharded = move.pre if isinstance(move.pre, Shard) else move.post
        if isinstance(sharded, Shard) and tensor.shape[sharded.dim]:
            cut = lengths(tensor.shape[sharded.dim], sharded.unit, sharded.ratios(ratios))
            row = tensor.nbytes // tensor.shape[sharded.dim]
            if min(cut) < max(cut):  # equal blocks for all, and the device's own block
                return result + row * max(cut) * (len(cut) + 1)
    if move.kind == "all_to_all":  # pieces are packed to be sent, and unpacked where they arrive
        return 2 * result + held_bytes(tensor, move.pre, device, ratios)
    return result


def packed_beside(move: Move, tensor: TensorType, size: Size) -> list[Bytes]:
    """What an exchange takes beside its operand and result, where `size` says what a device holds."""
    if move.strategy == "padded":  # equal blocks for all, and the device's own
        # On two axes both may be cut: the one that is cut further is the device's own.
        cut = max(move.pre, move.post, key=lambda p: len(cuts(p)))
        return [(float(tensor.nbytes), *size(tensor, cut)[1:])]
    if move.kind == "all_to_all":
        return [size(tensor, move.pre), size(tensor, move.post)]
    return []


def held_bytes(tensor: TensorType, placement: Placement, device: int, ratios: Sequence[float]) -> int:
    """Bytes that a device holds of a tensor in a placement."""
    if not tensor.size:
        return 0
    own = prod(length for _, length in region(tensor.shape, placement, device, tuple(ratios)))
    return tensor.nbytes // tensor.size * own
