"""Cheapest ways from one placement of a tensor to another, and to sets of placements.

A tensor is *held* in one or two placements at once (`Holding`): gathered once, used many times. What a
user needs and finds held is free; otherwise the user converts from whatever held placement is nearest.
All tensors of one type and one set of units share their ways (`Routes`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from shardwright.ir.graph import TensorType
from shardwright.ir.placement import (
    REDUCE_OPS,
    Partial,
    Placement,
    R,
    ReduceOp,
    Shard,
    Single,
    components,
    grid,
    reduction,
)

Costs: TypeAlias = NDArray[np.float64]

_NONE = np.zeros(0, dtype=np.intp), np.zeros(0, dtype=np.intp)


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
class Routes:
    """The placements between which tensors of one type and one set of units are converted.

    `memo` remembers where what signatures need is among the placements (see
    `shardwright.synth.space.factors`).
    """

    type: TensorType
    units: tuple[int, ...]
    placements: tuple[Placement, ...]
    index: dict[Placement, int]
    memo: dict[tuple[int, ...], tuple[object, NDArray[np.intp], NDArray[np.bool_] | None]] = field(
        default_factory=dict, repr=False
    )


@dataclass(frozen=True, slots=True, eq=False)
class Domain:
    """What one choice may be: holdings of tensors of one type and one set of units. Made by `Domains`.

    Attributes:
        routes: how its tensors are converted.
        holdings: what it may be.
        base, extra: of every holding, as positions in `routes.placements`; where there is no extra
            placement, `extra` repeats `base`.
        alike: a number that it has in common with all whose placements and holdings are the same, whatever
            the type of their tensors.
        one: the holdings of one placement, where there are others that each have two of these placements;
            None elsewhere.
        nearer: of every holding, its two placements as positions in `one`.
    """

    routes: Routes
    holdings: tuple[Holding, ...]
    base: NDArray[np.intp]
    extra: NDArray[np.intp]
    alike: int
    one: NDArray[np.intp] | None = field(init=False, default=None)
    nearer: tuple[NDArray[np.intp], NDArray[np.intp]] = field(init=False, default=_NONE)

    def __post_init__(self) -> None:
        one = np.flatnonzero(self.base == self.extra)
        if 0 < len(one) < len(self.base):
            place = np.full(len(self.routes.placements), -1)
            place[self.base[one]] = np.arange(len(one))
            nearer = place[self.base], place[self.extra]
            if min(nearer[0].min(), nearer[1].min()) >= 0:
                object.__setattr__(self, "one", one)
                object.__setattr__(self, "nearer", nearer)

    @property
    def type(self) -> TensorType:
        return self.routes.type

    @property
    def units(self) -> tuple[int, ...]:
        return self.routes.units

    def __len__(self) -> int:
        return len(self.holdings)

    def use(self, cost: Costs) -> Costs:
        """[holding, placement]: seconds until a user has the placement, given those of `routes`."""
        return np.minimum(cost[..., self.base, :], cost[..., self.extra, :])

    def derive(self, cost: Costs) -> Costs:
        """[holding, placement]: seconds until all of it is held, from a tensor made in the placement."""
        to_base, to_extra = cost[..., self.base], cost[..., self.extra]
        onward, back = cost[..., None, self.base, self.extra], cost[..., None, self.extra, self.base]
        first = to_base + np.minimum(to_extra, onward)
        return np.swapaxes(np.minimum(first, to_extra + back), -1, -2)

    def hold(self, cost: Costs) -> Costs:
        """[holding]: seconds until `extra` is held too, of a tensor handed in as `base`."""
        return cost[..., self.base, self.extra]


def shards(units: Sequence[int]) -> tuple[Shard, ...]:
    """All ways to shard a tensor with these units per dimension (0: cannot be cut)."""
    return tuple(Shard(dim, unit) for dim, unit in enumerate(units) if unit)


class Domains:
    """Makes routes and domains, one object for equal content, so that they compare by identity.

    Args:
        nodes: devices of every node, where tensors lie on two mesh axes; None for one axis.
    """

    def __init__(self, nodes: tuple[int, ...] | None = None) -> None:
        self.nodes = nodes
        self._routes: dict[tuple[object, ...], Routes] = {}
        self._made: dict[tuple[object, ...], Domain] = {}
        self._alike: dict[tuple[object, ...], int] = {}
        self._met: dict[tuple[object, ...], tuple[TensorType, Domain]] = {}

    def routes(self, tensor: TensorType, units: tuple[int, ...], partials: Iterable[ReduceOp]) -> Routes:
        """The routes of tensors of this type and these units.

        On two axes only between what may arise: `partials` are reductions besides sums that a tensor may
        have outstanding.
        """
        ops: tuple[ReduceOp, ...] = REDUCE_OPS
        if self.nodes is not None:
            ops = tuple([op for op in REDUCE_OPS if op == "sum" or op in partials])
        key = (tensor, units, ops)
        found = self._routes.get(key)
        if found is None:
            single: tuple[Single, ...] = (R, *shards(units), *(Partial(op) for op in ops))
            placements = single if self.nodes is None else grids(single, self.nodes)
            found = Routes(tensor, units, placements, {p: k for k, p in enumerate(placements)})
            self._routes[key] = found
        return found

    def whole(self, tensor: TensorType, units: tuple[int, ...]) -> Domain:
        """A tensor every device has."""
        return self.domain("whole", tensor, units, ())

    def single(self, tensor: TensorType, units: tuple[int, ...], partials: Iterable[ReduceOp]) -> Domain:
        """A tensor held in one placement."""
        return self.domain("single", tensor, units, partials)

    def multiple(self, tensor: TensorType, units: tuple[int, ...], partials: Iterable[ReduceOp]) -> Domain:
        """A tensor with several users, held in one placement or two. Beside R no other is ever missing."""
        return self.domain("multiple", tensor, units, partials)

    def given(self, tensor: TensorType, units: tuple[int, ...], partials: Iterable[ReduceOp]) -> Domain:
        """A tensor handed in, with several users: where it lies, and a second placement made from that."""
        return self.domain("given", tensor, units, partials)

    def domain(
        self, what: str, tensor: TensorType, units: tuple[int, ...], partials: Iterable[ReduceOp]
    ) -> Domain:
        """Of one of these kinds: "whole", "single", "multiple", "given"."""
        quick = (what, id(tensor), units, partials)
        known = self._met.get(quick)
        if known is not None:
            return known[1]
        routes = self.routes(tensor, units, partials)
        key = (what, id(routes), partials)
        found = self._made.get(key)
        if found is None:
            ops: tuple[ReduceOp, ...] = tuple(op for op in REDUCE_OPS if op in partials)
            if self.nodes is None:
                holdings = _holdings(what, units, ops)
            else:
                holdings = _grid_holdings(what, units, ops, self.nodes)
            base = [routes.index[h.base] for h in holdings]
            extra = [routes.index[h.base if h.extra is None else h.extra] for h in holdings]
            same = (holdings, id(routes))
            alike = self._alike.setdefault((what, units, ops), len(self._alike))
            at = np.array([base, extra], dtype=np.intp)
            found = Domain(routes, holdings, at[0], at[1], alike)
            found = self._made[key] = self._made.setdefault(same, found)
        # What is remembered by identity is kept, lest something else comes to have it.
        self._met[quick] = tensor, found
        return found


def _holdings(what: str, units: Sequence[int], partials: Iterable[ReduceOp]) -> tuple[Holding, ...]:
    if what == "whole":
        return (Holding(R),)
    apart: list[Placement] = [*shards(units), *(Partial(op) for op in partials)]
    one = (Holding(R), *map(Holding, apart))
    if what == "multiple":
        return (*one, *(Holding(a, b) for a, b in combinations(apart, 2)))
    if what == "given":
        others: list[Placement] = [R, *apart]
        return (
            *one,
            *(Holding(a, b) for a in apart for b in others if a != b and not isinstance(b, Partial)),
        )
    return one


def grids(single: Sequence[Single], nodes: tuple[int, ...]) -> tuple[Placement, ...]:
    """All placements on two axes that are made of these on one, R first."""
    return tuple(
        dict.fromkeys(
            grid(a, b, nodes)
            for a in single
            for b in single
            if not (isinstance(a, Partial) and isinstance(b, Partial) and a != b)
        )
    )


def _grid_holdings(
    what: str, units: Sequence[int], partials: Iterable[ReduceOp], nodes: tuple[int, ...]
) -> tuple[Holding, ...]:
    """On two axes a tensor is held in one placement; one handed in also in what gathering makes of it."""
    if what == "whole":
        return (Holding(R),)
    apart = grids((R, *shards(units), *(Partial(op) for op in partials)), nodes)[1:]
    one = (Holding(R), *map(Holding, apart))
    if what != "given":
        return one
    pairs: dict[Holding, None] = {}
    for base in apart:
        across, within = components(base)
        gathered = (grid(R, within, nodes), grid(across, R, nodes), R)
        pairs.update((Holding(base, g), None) for g in gathered if g != base and reduction(g) is None)
    return (*one, *pairs)
