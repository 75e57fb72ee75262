"""Placements: how one tensor lies on the devices of one mesh axis.

    placement ::= R                 every device holds the whole tensor            (Replicate)
                | S(dim)            device i holds its stretch of dimension `dim`  (Shard)
                | S(dim:unit)       the same, cut only at multiples of `unit`
                | P(op)             the tensor is `op` over what the devices hold  (Partial)

A stretch may be empty. Which stretch a device holds follows from the ratios and `lengths` below, so
that two dimensions with the same number of units are always cut at the same points.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from shardwright.ir.errors import ProgramError

ReduceOp: TypeAlias = Literal["sum", "max", "min"]
REDUCE_OPS: tuple[ReduceOp, ...] = ("sum", "max", "min")


@dataclass(frozen=True, slots=True)
class Replicate:
    """Every device holds the whole tensor."""

    def __str__(self) -> str:
        return "R"


@dataclass(frozen=True, slots=True)
class Shard:
    """Device i holds a contiguous stretch of dimension `dim`, its ends at multiples of `unit` elements."""

    dim: int
    unit: int = 1

    def __str__(self) -> str:
        return f"S({self.dim})" if self.unit == 1 else f"S({self.dim}:{self.unit})"


@dataclass(frozen=True, slots=True)
class Partial:
    """The tensor is the elementwise `op` over the devices' local tensors, all of the full shape."""

    op: ReduceOp = "sum"

    def __str__(self) -> str:
        return f"P({self.op})"


Placement: TypeAlias = Replicate | Shard | Partial
R = Replicate()


def cuts(placement: Placement) -> tuple[Shard, ...]:
    """The shards in a placement."""
    return (placement,) if isinstance(placement, Shard) else ()


def reduction(placement: Placement) -> ReduceOp | None:
    """The reduction that a placement leaves to be done, None for none."""
    return placement.op if isinstance(placement, Partial) else None


_PLACEMENT = re.compile(r"R|S\((\d+)(?::([1-9]\d*))?\)|P\((sum|max|min)\)")


def parse_placement(text: str) -> Placement:
    """Inverse of `str(placement)`.

    Raises:
        ProgramError: `text` is no placement.
    """
    match = _PLACEMENT.fullmatch(text)
    if match is None:
        raise ProgramError(
            place=f"placement {text!r}",
            reason="is none of R, S(dim), S(dim:unit), P(op)",
            remedy="Correct the text",
        )
    if match[1] is not None:
        return Shard(int(match[1]), int(match[2] or 1))
    for op in REDUCE_OPS:
        if op == match[3]:
            return Partial(op)
    return R


def lengths(size: int, unit: int, ratios: Sequence[float]) -> tuple[int, ...]:
    """Cut a dimension of `size` elements into one stretch per device, in whole units.

    Largest remainder: every device gets the floor of its share in units, the units left over go to
    the largest remainders (the first device wins a tie). Depends on `size // unit` and `ratios`
    alone, so dimensions with equally many units are cut alike.

    Args:
        size: elements of the dimension, a multiple of `unit`.
        unit: elements that must stay together (a head, a tile).
        ratios: share of every device, non-negative, summing to one.

    Returns:
        Elements per device, summing to `size`; zeros are allowed.
    """
    return tuple((deal(size // unit, np.asarray(ratios, dtype=np.float64)) * unit).tolist())


def deal(units: int, ratios: NDArray[np.float64]) -> NDArray[np.int64]:
    """Whole units per device, by largest remainder; see `lengths`."""
    ideal = units * ratios
    # The guard keeps 2.9999999996 at 3: ratios come from a solver and from JSON.
    whole = np.floor(ideal + 1e-9).astype(np.int64)
    left = units - int(whole.sum())
    if left > 0:
        whole[np.argsort(np.round(whole - ideal, 9), kind="stable")[:left]] += 1
    return whole
