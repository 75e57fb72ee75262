"""Placements: how one tensor lies on the devices of one mesh axis, or of two.

    placement ::= R                 every device holds the whole tensor            (Replicate)
                | S(dim)            device i holds its stretch of dimension `dim`  (Shard)
                | S(dim:unit)       the same, cut only at multiples of `unit`
                | S(…)@n            the same, cut by ratios n of the program's own, not by the plan's
                | P(op)             the tensor is `op` over what the devices hold  (Partial)
                | across/within     first over the nodes, then what a node has of it over its devices (Grid)

A stretch may be empty. Which stretch a device holds follows from the ratios and `lengths` below, so
that two dimensions with the same number of units are always cut at the same points, if they are cut by
the same ratios.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache
from itertools import pairwise
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from shardwright.ir.errors import ProgramError

ReduceOp: TypeAlias = Literal["sum", "max", "min"]
REDUCE_OPS: tuple[ReduceOp, ...] = ("sum", "max", "min")

#: Hashes of placements that are no shards begin here, beyond those of shards with dimensions as there are.
_NO_SHARD = 1 << 20


@dataclass(frozen=True, slots=True)
class Replicate:
    """Every device holds the whole tensor."""

    def __hash__(self) -> int:
        return _NO_SHARD

    def __str__(self) -> str:
        return "R"


@dataclass(frozen=True, slots=True)
class OwnRatios:
    """Ratios beside those of the plan, which part of a program is cut by.

    Attributes:
        number: from 1 on; a program's ratios of one number are equal.
        shares: of every device of the program, not negative, summing to one.
    """

    number: int
    shares: tuple[float, ...]

    def __str__(self) -> str:
        return f"@{self.number}"


@dataclass(frozen=True, slots=True)
class Shard:
    """Device i holds a contiguous stretch of dimension `dim`, its ends at multiples of `unit` elements.

    `by` are the ratios that it is cut by; None: those of the plan.
    """

    dim: int
    unit: int = 1
    by: OwnRatios | None = None

    def __hash__(self) -> int:
        # Placements are keys of many tables, and few: cheaper than that of all fields.
        return self.dim * 8191 + self.unit

    def __str__(self) -> str:
        own = "" if self.by is None else str(self.by)
        return (f"S({self.dim})" if self.unit == 1 else f"S({self.dim}:{self.unit})") + own

    def ratios(self, plans: Sequence[float]) -> Sequence[float]:
        """The ratios that it is cut by, where `plans` are the plan's."""
        return plans if self.by is None else self.by.shares


@dataclass(frozen=True, slots=True)
class Partial:
    """The tensor is the elementwise `op` over the devices' local tensors, all of the full shape."""

    op: ReduceOp = "sum"

    def __hash__(self) -> int:
        # That of a string differs from process to process: a placement on two axes keeps its own.
        return _NO_SHARD + 1 + REDUCE_OPS.index(self.op)

    def __str__(self) -> str:
        return f"P({self.op})"


#: On one mesh axis.
Single: TypeAlias = Replicate | Shard | Partial
R = Replicate()


@dataclass(frozen=True, slots=True)
class Grid:
    """On two mesh axes: `across` the nodes, and `within` each of them.

    A node holds of the tensor what `across` says, and device j of the node what `within` says of that.
    Made by `grid`, which knows that some pairs are placements on all devices alike.

    Attributes:
        across: over the nodes, each with the ratios of its devices added up.
        within: over the devices of a node.
        nodes: devices of every node; the plan's devices are in order of nodes.
    """

    across: Single
    within: Single
    nodes: tuple[int, ...]
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        # Those that are kept together mostly have the nodes in common.
        object.__setattr__(self, "_hash", hash((self.across, self.within)))

    def __hash__(self) -> int:
        return self._hash

    def __str__(self) -> str:
        return f"{self.across}/{self.within}"


Placement: TypeAlias = Replicate | Shard | Partial | Grid


@cache
def grid(across: Single, within: Single, nodes: tuple[int, ...]) -> Placement:
    """The placement `across` the nodes and `within` them: R/R is R and P/P is P, on all devices.

    Equal ones are one object, which is found in a table without a look at what it consists of.
    """
    if across == within and not isinstance(across, Shard):
        return across
    if any(isinstance(p, Shard) and p.by is not None for p in (across, within)):
        raise ProgramError(
            place=f"placement {across}/{within}",
            reason="is cut by ratios of its own on one of two mesh axes",
            remedy="Use the plan's ratios there",
        )
    if isinstance(across, Partial) and isinstance(within, Partial):
        raise ProgramError(
            place=f"placement {across}/{within}",
            reason="leaves two different reductions to be done",
            remedy="Do one of them first",
        )
    return Grid(across, within, nodes)


def components(placement: Placement) -> tuple[Single, Single]:
    """The placement across the nodes and within them.

    Raises:
        ProgramError: it is a `Shard` over all devices, which knows of no nodes.
    """
    if isinstance(placement, Grid):
        return placement.across, placement.within
    if isinstance(placement, Shard):
        raise ProgramError(
            place=f"placement {placement}",
            reason="is over all devices, where one over nodes and one within them is needed",
            remedy="Use programs of one mesh axis and of two apart from each other",
        )
    return placement, placement


def axis_by_axis(placement: Placement) -> tuple[tuple[Placement, Placement], ...]:
    """The way from R to another placement, a mesh axis at a time: first over the nodes, then within them."""
    if placement == R:
        return ()
    if isinstance(placement, Grid) and placement.across != R and placement.within != R:
        over_nodes = grid(placement.across, R, placement.nodes)
        return (R, over_nodes), (over_nodes, placement)
    return ((R, placement),)


def cuts(placement: Placement) -> tuple[Shard, ...]:
    """The shards in a placement, that over the nodes first."""
    if isinstance(placement, Grid):
        return tuple(p for p in (placement.across, placement.within) if isinstance(p, Shard))
    return (placement,) if isinstance(placement, Shard) else ()


def reduction(placement: Placement) -> ReduceOp | None:
    """The reduction that a placement leaves to be done on some axis, None for none."""
    parts = (placement.across, placement.within) if isinstance(placement, Grid) else (placement,)
    return next((p.op for p in parts if isinstance(p, Partial)), None)


#: Numbers of up to 18 digits: no tensor has more, and Python reads no number of any length.
_PLACEMENT = re.compile(
    r"R|S\(([0-9]{1,18})(?::([1-9][0-9]{,17}))?\)(?:@([1-9][0-9]{,17}))?|P\((sum|max|min)\)"
)


def parse_placement(
    text: str, nodes: tuple[int, ...] | None = None, own: Mapping[int, OwnRatios] | None = None
) -> Placement:
    """Inverse of `str(placement)`.

    Args:
        text: of the placement.
        nodes: what lies on two axes needs the devices of every node.
        own: and what is cut by ratios of its own needs these, by number.

    Raises:
        ProgramError: `text` is no placement.
    """
    if nodes is not None and text.count("/") == 1:
        across, within = (_parse_single(part, {}) for part in text.split("/"))
        return grid(across, within, nodes)
    return _parse_single(text, own or {})


def own_to_json(own: Mapping[int, OwnRatios]) -> dict[str, list[float]]:
    """Ratios of a program's own as plain data, by number."""
    return {str(number): list(found.shares) for number, found in own.items()}


def own_from_json(data: Any) -> dict[int, OwnRatios]:
    """Inverse of `own_to_json`.

    Raises:
        ProgramError: it is something else.
    """
    try:
        return {int(n): OwnRatios(int(n), tuple(float(s) for s in shares)) for n, shares in data.items()}
    except (AttributeError, TypeError, ValueError):
        raise ProgramError(
            place="own_ratios",
            reason=f"is {data!r}, not shares by number",
            remedy="Write the file again with `shardwright plan`",
        ) from None


def _parse_single(text: str, own: Mapping[int, OwnRatios]) -> Single:
    match = _PLACEMENT.fullmatch(text)
    if match is None:
        raise ProgramError(
            place=f"placement {text!r}",
            reason="is none of R, S(dim), S(dim:unit), P(op)",
            remedy="Correct the text",
        )
    if match[3] is not None and int(match[3]) not in own:
        raise ProgramError(
            place=f"placement {text!r}",
            reason=f"is cut by ratios {match[3]}, which nothing says",
            remedy="Give them with the program, or leave out the @",
        )
    if match[1] is not None:
        return Shard(int(match[1]), int(match[2] or 1), own[int(match[3])] if match[3] else None)
    for op in REDUCE_OPS:
        if op == match[4]:
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
    return _lengths(size // unit, unit, tuple(ratios))


@lru_cache(maxsize=1 << 10)
def _lengths(units: int, unit: int, ratios: tuple[float, ...]) -> tuple[int, ...]:
    return tuple((deal(units, np.asarray(ratios, dtype=np.float64)) * unit).tolist())


def stretches_of(
    size: int, cut: Sequence[Shard], ratios: Sequence[float], nodes: tuple[int, ...]
) -> tuple[int, ...]:
    """Elements per device of a dimension that is cut over the nodes and again within them.

    Args:
        size: elements of the dimension.
        cut: the shard over the nodes and that within them, of this dimension and of equal units.
        ratios: share of every device.
        nodes: devices of every node.
    """
    across, inside = by_node(ratios, nodes)
    of_node = lengths(size, cut[0].unit, across)
    return tuple(
        n for part, own in zip(of_node, inside, strict=True) for n in lengths(part, cut[1].unit, own)
    )


def by_node(
    ratios: Sequence[float], nodes: tuple[int, ...]
) -> tuple[tuple[float, ...], tuple[tuple[float, ...], ...]]:
    """Shares of the nodes, and of every node those of its devices, each summing to one.

    The devices of a node without any share have equal ones.
    """
    parts = [tuple(ratios[devices.start : devices.stop]) for devices in node_members(nodes)]
    totals = tuple(sum(part) for part in parts)
    inside = tuple(
        tuple(x / total for x in part) if total > 0 else (1.0 / len(part),) * len(part)
        for part, total in zip(parts, totals, strict=True)
    )
    return totals, inside


def node_members(nodes: tuple[int, ...]) -> tuple[range, ...]:
    """Devices of every node."""
    ends = np.cumsum((0, *nodes)).tolist()
    return tuple(range(a, b) for a, b in pairwise(ends))


def seat(device: int, nodes: tuple[int, ...]) -> tuple[int, int]:
    """Node of a device, and its position there."""
    for node, count in enumerate(nodes):
        if device < count:
            return node, device
        device -= count
    raise IndexError(f"there are {sum(nodes)} devices")


def region(
    shape: Sequence[int], placement: Placement, device: int, ratios: Sequence[float]
) -> tuple[tuple[int, int], ...]:
    """What `device` holds of every dimension of a tensor: offset and length."""
    dims = [(0, size) for size in shape]
    if isinstance(placement, Shard):
        cut = lengths(shape[placement.dim], placement.unit, placement.ratios(ratios))
        dims[placement.dim] = sum(cut[:device]), cut[device]
    elif isinstance(placement, Grid):
        node, position = seat(device, placement.nodes)
        across, inside = by_node(ratios, placement.nodes)
        for part, own, place in (
            (placement.across, across, node),
            (placement.within, inside[node], position),
        ):
            if isinstance(part, Shard):
                offset, length = dims[part.dim]
                cut = lengths(length, part.unit, own)
                dims[part.dim] = offset + sum(cut[:place]), cut[place]
    return tuple(dims)


def owns(placement: Placement, device: int) -> bool:
    """Whether `device` keeps the value where one owner does (`R -> P`): the first on every Partial axis."""
    if isinstance(placement, Grid):
        node, position = seat(device, placement.nodes)
        return not (
            (isinstance(placement.across, Partial) and node)
            or (isinstance(placement.within, Partial) and position)
        )
    return not (isinstance(placement, Partial) and device)


def deal(units: int, ratios: NDArray[np.float64]) -> NDArray[np.int64]:
    """Whole units per device, by largest remainder; see `lengths`."""
    ideal = units * ratios
    # The guard keeps 2.9999999996 at 3: ratios come from a solver and from JSON.
    whole = np.floor(ideal + 1e-9).astype(np.int64)
    left = units - int(whole.sum())
    if left > 0:
        whole[np.argsort(np.round(whole - ideal, 9), kind="stable")[:left]] += 1
    return whole
