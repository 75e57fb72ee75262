"""Moves between placements: collectives, and the free local conversions.

    all_gather      S(d) -> R            reduce_scatter  P(op) -> S(d)
    all_reduce      P(op) -> R           all_to_all      S(d) -> S(e), or S(d:u) -> S(d:v)
    broadcast       R on {root} -> R     send            R on {root} -> R on {root, other}
    slice           R -> S(d)            own             R -> P(op)      both free: nothing is sent

On two mesh axes each of these runs `across` the nodes or `within` each of them, while the placement on the
other axis stays; where both axes change alike, it runs over all devices at once. `step` says which.

One final class per collective gives its triple and `reference`, its meaning on numpy arrays. A
strategy is one way to carry it out; prices live in `shardwright.cost.moves`, lowerings in the
backends, and the conformance tests iterate over the registry below.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, reduce
from typing import Any, ClassVar, Literal, Protocol, TypeAlias, final

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from shardwright.ir.placement import (
    Grid,
    Partial,
    Placement,
    ReduceOp,
    Replicate,
    Shard,
    Single,
    components,
)

Array: TypeAlias = NDArray[Any]

#: Local arrays of all participants, in order.
Shards: TypeAlias = Sequence[Array]


class Collective(Protocol):
    """What every collective states about itself."""

    kind: ClassVar[str]
    strategies: ClassVar[tuple[str, ...]]
    local: ClassVar[bool]
    rooted: ClassVar[bool]

    def allows(self, pre: Placement, post: Placement) -> bool:
        """Whether this collective turns `pre` into `post`."""
        ...

    def reference(
        self, shards: Shards, pre: Placement, post: Placement, lengths: Sequence[int], root: int | None
    ) -> list[Array]:
        """The meaning: the shards of all participants after, from those before.

        Args:
            shards: local array of every participant (for a rooted collective only `shards[root]` counts).
            pre: placement before.
            post: placement after.
            lengths: where `post` is `S(d)`, elements of dimension d per participant; else ignored.
            root: position of the root among the participants.
        """
        ...


def combine(op: ReduceOp, arrays: Sequence[Array]) -> Array:
    """Elementwise reduction in device order; the dtype is kept (booleans: or for max, and for min)."""
    # (numpy makes int8 of two int4.)
    of_two = {"sum": np.add, "max": np.maximum, "min": np.minimum}[op]
    with np.errstate(all="ignore"):  # infinities and NaNs of the step are no news, as to XLA
        return reduce(lambda a, b: of_two(a, b).astype(a.dtype, copy=False), arrays)


def identity(op: ReduceOp, dtype: Any) -> Any:
    """The neutral element of `op` in `dtype` (a numpy dtype, ml_dtypes' included)."""
    dtype = np.dtype(dtype)
    if op == "sum":
        return dtype.type(0)
    if dtype.kind == "b":
        return np.bool_(op == "min")
    try:
        limits = ml_dtypes.iinfo(dtype)
    except ValueError:  # no integers, which numpy does not say of ml_dtypes' own
        infinite = dtype.type(-np.inf if op == "max" else np.inf)
        if np.isinf(infinite):
            return infinite
        limits = ml_dtypes.finfo(dtype)  # some floats of 8 bits and fewer have nothing infinite
    return limits.min if op == "max" else limits.max


#: Strategies of an all-reduce that know of no nodes: exchanges by any of them may travel together.
FLAT = frozenset({"ring", "rs_ag", "tree"})
#: Bytes from which exchanges that travel together inside of a node are added up in parts. Recursive doubling
#: sends all that there is in every round, and every participant adds all of it up; on two ranks through
#: shared memory that took 5.8 ms for 7 MB, halving and doubling 4.5 ms. Between nodes another round may cost
#: more.
IN_PARTS_BYTES = 1 << 20


def together(kind: str, exchanges: Sequence[tuple[str, int]], *, near: bool) -> str:
    """The strategy by which exchanges travel in one message: theirs are for one tensor each.

    What is the best for the largest of them wastes no bandwidth on all.

    Args:
        kind: the collective.
        exchanges: strategy and bytes of each.
        near: whether all devices share a node.
    """
    strategy, _ = max(exchanges, key=lambda exchange: exchange[1])
    if kind != "all_reduce" or strategy != "tree" or len(exchanges) == 1 or not near:
        return strategy
    return "rs_ag" if sum(nbytes for _, nbytes in exchanges) >= IN_PARTS_BYTES else strategy


def gathered_as(kind: str, strategy: str) -> str:
    """What exchanges have in common that may travel together, beside their placements: a name."""
    return "flat" if kind == "all_reduce" and strategy in FLAT else strategy


def split(array: Array, dim: int, lengths: Sequence[int]) -> list[Array]:
    """Consecutive stretches of `array` along `dim`."""
    return np.split(array, np.cumsum(lengths)[:-1], axis=dim)


@final
@dataclass(frozen=True, slots=True)
class AllGather:
    """Every device gets every stretch."""

    kind: ClassVar[str] = "all_gather"
    strategies: ClassVar[tuple[str, ...]] = ("padded", "grouped", "exact", "hierarchical")
    local: ClassVar[bool] = False
    rooted: ClassVar[bool] = False

    def allows(self, pre: Placement, post: Placement) -> bool:
        return isinstance(pre, Shard) and isinstance(post, Replicate)

    def reference(
        self, shards: Shards, pre: Placement, post: Placement, lengths: Sequence[int], root: int | None
    ) -> list[Array]:
        assert isinstance(pre, Shard)
        whole = np.concatenate(shards, axis=pre.dim)
        return [whole for _ in shards]


@final
@dataclass(frozen=True, slots=True)
class AllReduce:
    """Every device gets the reduction of all."""

    kind: ClassVar[str] = "all_reduce"
    strategies: ClassVar[tuple[str, ...]] = ("ring", "rs_ag", "tree", "hierarchical")
    local: ClassVar[bool] = False
    rooted: ClassVar[bool] = False

    def allows(self, pre: Placement, post: Placement) -> bool:
        return isinstance(pre, Partial) and isinstance(post, Replicate)

    def reference(
        self, shards: Shards, pre: Placement, post: Placement, lengths: Sequence[int], root: int | None
    ) -> list[Array]:
        assert isinstance(pre, Partial)
        total = combine(pre.op, shards)
        return [total for _ in shards]


@final
@dataclass(frozen=True, slots=True)
class ReduceScatter:
    """Every device gets its stretch of the reduction of all."""

    kind: ClassVar[str] = "reduce_scatter"
    strategies: ClassVar[tuple[str, ...]] = ("padded", "grouped", "exact", "hierarchical")
    local: ClassVar[bool] = False
    rooted: ClassVar[bool] = False

    def allows(self, pre: Placement, post: Placement) -> bool:
        return isinstance(pre, Partial) and isinstance(post, Shard)

    def reference(
        self, shards: Shards, pre: Placement, post: Placement, lengths: Sequence[int], root: int | None
    ) -> list[Array]:
        assert isinstance(pre, Partial) and isinstance(post, Shard)
        return split(combine(pre.op, shards), post.dim, lengths)


@final
@dataclass(frozen=True, slots=True)
class AllToAll:
    """From stretches of one dimension to stretches of another, or to other stretches of the same."""

    kind: ClassVar[str] = "all_to_all"
    strategies: ClassVar[tuple[str, ...]] = ("exact", "hierarchical")
    local: ClassVar[bool] = False
    rooted: ClassVar[bool] = False

    def allows(self, pre: Placement, post: Placement) -> bool:
        return isinstance(pre, Shard) and isinstance(post, Shard) and pre != post

    def reference(
        self, shards: Shards, pre: Placement, post: Placement, lengths: Sequence[int], root: int | None
    ) -> list[Array]:
        assert isinstance(pre, Shard) and isinstance(post, Shard)
        return split(np.concatenate(shards, axis=pre.dim), post.dim, lengths)


@final
@dataclass(frozen=True, slots=True)
class Broadcast:
    """All devices of the group get the root's tensor."""

    kind: ClassVar[str] = "broadcast"
    strategies: ClassVar[tuple[str, ...]] = ("tree", "scatter_ag")
    local: ClassVar[bool] = False
    rooted: ClassVar[bool] = True

    def allows(self, pre: Placement, post: Placement) -> bool:
        return isinstance(pre, Replicate) and isinstance(post, Replicate)

    def reference(
        self, shards: Shards, pre: Placement, post: Placement, lengths: Sequence[int], root: int | None
    ) -> list[Array]:
        assert root is not None
        return [shards[root] for _ in shards]


@final
@dataclass(frozen=True, slots=True)
class Send:
    """The other device of a group of two gets the root's tensor (send on one side, receive on the other)."""

    kind: ClassVar[str] = "send"
    strategies: ClassVar[tuple[str, ...]] = ("direct",)
    local: ClassVar[bool] = False
    rooted: ClassVar[bool] = True

    def allows(self, pre: Placement, post: Placement) -> bool:
        return isinstance(pre, Replicate) and isinstance(post, Replicate)

    def reference(
        self, shards: Shards, pre: Placement, post: Placement, lengths: Sequence[int], root: int | None
    ) -> list[Array]:
        assert root is not None and len(shards) == 2
        return [shards[root] for _ in shards]


@final
@dataclass(frozen=True, slots=True)
class Slice:
    """Every device keeps its stretch of what it has whole."""

    kind: ClassVar[str] = "slice"
    strategies: ClassVar[tuple[str, ...]] = ("",)
    local: ClassVar[bool] = True
    rooted: ClassVar[bool] = False

    def allows(self, pre: Placement, post: Placement) -> bool:
        return isinstance(pre, Replicate) and isinstance(post, Shard)

    def reference(
        self, shards: Shards, pre: Placement, post: Placement, lengths: Sequence[int], root: int | None
    ) -> list[Array]:
        assert isinstance(post, Shard)
        return [split(shard, post.dim, lengths)[i] for i, shard in enumerate(shards)]


@final
@dataclass(frozen=True, slots=True)
class Own:
    """The first device keeps the value, the others hold the identity: a Partial of what all have."""

    kind: ClassVar[str] = "own"
    strategies: ClassVar[tuple[str, ...]] = ("",)
    local: ClassVar[bool] = True
    rooted: ClassVar[bool] = False

    def allows(self, pre: Placement, post: Placement) -> bool:
        return isinstance(pre, Replicate) and isinstance(post, Partial)

    def reference(
        self, shards: Shards, pre: Placement, post: Placement, lengths: Sequence[int], root: int | None
    ) -> list[Array]:
        assert isinstance(post, Partial)
        neutral = identity(post.op, shards[0].dtype)
        return [shard if i == 0 else np.full_like(shard, neutral) for i, shard in enumerate(shards)]


_ALL: tuple[Collective, ...] = (
    AllGather(),
    AllReduce(),
    ReduceScatter(),
    AllToAll(),
    Broadcast(),
    Send(),
    Slice(),
    Own(),
)
_REGISTRY: Mapping[str, Collective] = {collective.kind: collective for collective in _ALL}


def registry() -> Mapping[str, Collective]:
    """All collectives by kind."""
    return _REGISTRY


def name_strategy(kind: str, name: str) -> None:
    """Let programs name a strategy of a collective, if they may not yet."""
    collective = type(_REGISTRY[kind])
    if name not in collective.strategies:
        collective.strategies = (*collective.strategies, name)


#: Over which devices a move runs: all of them, one of each node, or those of every node for themselves.
Axis: TypeAlias = Literal["all", "across", "within"]


@dataclass(frozen=True, slots=True)
class Step:
    """What a single move does: its axis, and the placements on that axis before and after."""

    axis: Axis
    pre: Single
    post: Single


@cache
def step(pre: Placement, post: Placement) -> Step | None:
    """What a single move from `pre` to `post` has to do; None where it takes several.

    Across the nodes, devices talk whose stretches overlap: what they hold within their nodes must be whole
    or a stretch of a dimension that the move leaves alone, since an exchange would tear a nested cut apart.
    """
    if not isinstance(pre, Grid) and not isinstance(post, Grid):
        return Step("all", pre, post)
    if isinstance(pre, Shard) or isinstance(post, Shard):
        return None
    (across, within), (to_across, to_within) = components(pre), components(post)
    if across == to_across:
        return Step("within", within, to_within)
    if within == to_within:
        cut = {p.dim for p in (across, to_across) if isinstance(p, Shard)}
        apart = not (isinstance(within, Shard) and within.dim in cut)
        free = isinstance(across, Replicate)  # every node has it whole: nothing is sent
        sendable = free or not isinstance(within, Partial)
        return Step("across", across, to_across) if apart and sendable else None
    if across == within and to_across == to_within:
        return Step("all", across, to_across)
    return None


def carries_out(collective: Collective, pre: Placement, post: Placement) -> bool:
    """Whether one move of a collective turns `pre` into `post`, on one mesh axis or on two."""
    found = step(pre, post)
    return found is not None and collective.allows(found.pre, found.post)


@cache
def between(pre: Placement, post: Placement) -> Collective | None:
    """The one move that turns `pre` into `post` on all devices; None where it takes several, or none."""
    found = step(pre, post)
    if found is None:
        return None
    for collective in _ALL:
        if not collective.rooted and collective.allows(found.pre, found.post):
            return collective
    return None
