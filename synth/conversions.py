"""Cheapest ways from one placement of a tensor to another, and to sets of placements.

A tensor is *held* in one or two placements at once (`Holding`): gathered once, used many times. What a
user needs and finds held is free; otherwise the user converts from whatever held placement is nearest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from shardwright.ir.collectives import between
from shardwright.ir.graph import TensorType
from shardwright.ir.placement import REDUCE_OPS, Partial, Placement, R, ReduceOp, Shard

Costs: TypeAlias = NDArray[np.float64]

#: Seconds of one step between two placements.
StepPrice: TypeAlias = Callable[[str, TensorType, Placement, Placement], float]


@dataclass(frozen=True, slots=True)
class Holding:
    """Placements a tensor is held in: `base`, in which it was handed in or made first, and `extra`."""

    base: Placement
    extra: Placement | None = None

    @property
    def all(self) -> tuple[Placement, ...]:
        return (self.base,) if self.extra is None else (self.base, self.extra)

    def __str__(self) -> str:
        return "+".join(map(str, self.all))


@dataclass(frozen=True, slots=True, eq=False)
class Domain:
    """What one choice may be: holdings of tensors of one type and one set of units. Made by `Domains`."""

    type: TensorType
    units: tuple[int, ...]
    holdings: tuple[Holding, ...]


def shards(units: Sequence[int]) -> tuple[Shard, ...]:
    """All ways to shard a tensor with these units per dimension (0: cannot be cut)."""
    return tuple(Shard(dim, unit) for dim, unit in enumerate(units) if unit)


class Domains:
    """Makes domains, one object for equal content, so that they compare by identity."""

    def __init__(self) -> None:
        self._made: dict[tuple[object, ...], Domain] = {}

    def _domain(self, tensor: TensorType, units: tuple[int, ...], holdings: tuple[Holding, ...]) -> Domain:
        return self._made.setdefault((tensor, units, holdings), Domain(tensor, units, holdings))

    def whole(self, tensor: TensorType, units: tuple[int, ...]) -> Domain:
        """A tensor every device has."""
        return self._domain(tensor, units, (Holding(R),))

    def single(self, tensor: TensorType, units: tuple[int, ...], partials: Iterable[ReduceOp]) -> Domain:
        """A tensor held in one placement."""
        placements = (R, *shards(units), *(Partial(op) for op in REDUCE_OPS if op in partials))
        return self._domain(tensor, units, tuple(Holding(p) for p in placements))

    def multiple(self, tensor: TensorType, units: tuple[int, ...], partials: Iterable[ReduceOp]) -> Domain:
        """A tensor with several users, held in one placement or two. Beside R no other is ever missing."""
        one = self.single(tensor, units, partials)
        apart = [h.base for h in one.holdings if h.base != R]
        pairs = tuple(Holding(a, b) for a, b in combinations(apart, 2))
        return self._domain(tensor, units, one.holdings + pairs)

    def given(self, tensor: TensorType, units: tuple[int, ...], partials: Iterable[ReduceOp]) -> Domain:
        """A tensor handed in, with several users: where it lies, and a second placement made from that."""
        one = self.single(tensor, units, partials)
        bases = [h.base for h in one.holdings if h.base != R]
        pairs = tuple(
            Holding(a, b) for a in bases for b in (R, *bases) if a != b and not isinstance(b, Partial)
        )
        return self._domain(tensor, units, one.holdings + pairs)


@dataclass(slots=True)
class Conversions:
    """Shortest paths between placements at one set of prices; all results are cached."""

    price: StepPrice
    _tables: dict[tuple[TensorType, tuple[int, ...]], _Table] = field(default_factory=dict)

    def table(self, tensor: TensorType, units: tuple[int, ...]) -> _Table:
        key = (tensor, units)
        if key not in self._tables:
            self._tables[key] = _table(tensor, units, self.price)
        return self._tables[key]

    def cost(self, tensor: TensorType, units: tuple[int, ...], pre: Placement, post: Placement) -> float:
        """Seconds of the cheapest way from `pre` to `post`, infinite where there is none."""
        table = self.table(tensor, units)
        return float(table.cost[table.index[pre], table.index[post]])

    def path(
        self, tensor: TensorType, units: tuple[int, ...], pre: Placement, post: Placement
    ) -> list[tuple[Placement, Placement]]:
        """The steps of the cheapest way."""
        table = self.table(tensor, units)
        at, end = table.index[pre], table.index[post]
        steps: list[tuple[Placement, Placement]] = []
        while at != end:
            following = int(table.follow[at, end])
            steps.append((table.placements[at], table.placements[following]))
            at = following
        return steps

    def use(self, domain: Domain, needed: Placement) -> Costs:
        """Per holding of `domain`: seconds until a user has `needed`."""
        table = self.table(domain.type, domain.units)
        end = table.index.get(needed)
        if end is None:
            return np.full(len(domain.holdings), np.inf)
        column = table.cost[:, end]
        return np.array([min(column[table.index[p]] for p in h.all) for h in domain.holdings])

    def derive(self, domain: Domain, made: Placement) -> Costs:
        """Per holding of `domain`: seconds until all of it is held, from a tensor made in `made`."""
        table = self.table(domain.type, domain.units)
        start = table.index.get(made)
        if start is None:
            return np.full(len(domain.holdings), np.inf)
        cost, index = table.cost, table.index
        result = np.empty(len(domain.holdings))
        for k, holding in enumerate(domain.holdings):
            a = index[holding.base]
            if holding.extra is None:
                result[k] = cost[start, a]
                continue
            b = index[holding.extra]
            result[k] = min(cost[start, a] + min(cost[start, b], cost[a, b]), cost[start, b] + cost[b, a])
        return result

    def hold(self, domain: Domain) -> Costs:
        """Per holding of a tensor handed in as `base`: seconds until `extra` is held too."""
        table = self.table(domain.type, domain.units)
        return np.array(
            [
                0.0 if h.extra is None else table.cost[table.index[h.base], table.index[h.extra]]
                for h in domain.holdings
            ]
        )


@dataclass(frozen=True, slots=True)
class _Table:
    placements: tuple[Placement, ...]
    index: dict[Placement, int]
    cost: Costs
    follow: NDArray[np.int64]


def _table(tensor: TensorType, units: tuple[int, ...], price: StepPrice) -> _Table:
    """All-pairs shortest paths (Floyd-Warshall) over the placements of one tensor."""
    placements = (R, *shards(units), *(Partial(op) for op in REDUCE_OPS))
    n = len(placements)
    cost = np.full((n, n), np.inf)
    follow = np.tile(np.arange(n), (n, 1))
    for i, pre in enumerate(placements):
        cost[i, i] = 0.0
        for j, post in enumerate(placements):
            step = between(pre, post)
            if i != j and step is not None:
                cost[i, j] = price(step.kind, tensor, pre, post)
    for k in range(n):
        through = cost[:, k, None] + cost[None, k, :]
        shorter = through < cost - 1e-15
        follow = np.where(shorter, follow[:, k, None], follow)
        cost = np.where(shorter, through, cost)
    return _Table(placements, {p: i for i, p in enumerate(placements)}, cost, follow)
