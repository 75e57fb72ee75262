"""Prices: from factors and a price list to tables of seconds.

Seconds at given shares, or at least under any (for the bound), are worked out for every set of shares. All
arithmetic is done on whole arrays: kernels and exchanges by their stack, the cheapest ways between
placements for all types of tensors at once. Several sets of prices of one catalogue may be worked out
together (`Prices.of_all`): everything then has an axis in front, one entry per set.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from shardwright.cost.bill import Cut, Shares
from shardwright.cost.model import CostModel
from shardwright.cost.share_cost import CostStack, Floats, ShareCost
from shardwright.ir.collectives import registry as collectives
from shardwright.ir.graph import TensorType
from shardwright.ir.placement import Placement
from shardwright.synth.prices.cheapest import cheapest
from shardwright.synth.prices.lists import Listed, PriceList, learn_products
from shardwright.synth.space.conversions import Domain, Routes
from shardwright.synth.space.factors import EquationFactor, Factor, Needs, TableFactor

#: Seconds of lines of a price list, given their costs and how each is cut (see `PriceList.fresh`).
Evaluate: TypeAlias = Callable[..., Floats]

#: The costs of lines; of several prices, those of each.
Stacked: TypeAlias = "CostStack | list[Stacked]"


class Several:
    """Prices of one catalogue, to be evaluated together; each may itself be of several."""

    def __init__(self, prices: Sequence[Prices]) -> None:
        self.prices = tuple(prices)
        listed = [each.list for each in prices]
        self.lists = tuple([each for each in listed if isinstance(each, (PriceList, Several))])
        assert len(self.lists) == len(prices), "on two axes there is no catalogue"
        first = self.lists[0]
        self.model, self.catalogue = first.model, first.catalogue
        self.kernels, self.moves, self.step = first.kernels, first.moves, first.step

    def __len__(self) -> int:
        return len(self.catalogue.lines)

    def fresh(self, known: int) -> tuple[list[Stacked], NDArray[np.int64], NDArray[np.bool_]]:
        """See `PriceList.fresh`: a stack for each."""
        learn_products(tuple(self._single()), known)
        _, units, tied = self.catalogue.since(known)
        return self._stacks(known), units, tied

    def _single(self) -> Iterator[PriceList]:
        for each in self.lists:
            if isinstance(each, Several):
                yield from each._single()
            else:
                yield each

    def _stacks(self, known: int) -> list[Stacked]:
        some = self.lists
        return [each._stacks(known) if isinstance(each, Several) else each.fresh(known)[0] for each in some]


class Prices:
    """One set of prices. What is asked for together is worked out together: see `tables`."""

    def __init__(self, listed: Listed, evaluate: Evaluate, allowed: frozenset[str] | None = None) -> None:
        self.list = listed
        self.model = listed.model
        self.work_out = evaluate
        self._allowed = allowed
        self._seconds: Floats = np.zeros(0)
        self._ways: dict[Routes, tuple[Floats, NDArray[np.intp]]] = {}
        self._use: dict[Domain, Floats] = {}
        self._derive: dict[Domain, Floats] = {}
        self._needing: dict[tuple[Domain, str], Floats] = {}
        self._tables: dict[Factor, Floats] = {}
        self._strategies: dict[tuple[Routes, Placement, Placement], tuple[str, str, int]] = {}
        self._best: dict[tuple[EquationFactor, tuple[int, ...]], int] = {}

    @staticmethod
    def at(
        model: CostModel | PriceList,
        ratios: Sequence[float],
        allowed: frozenset[str] | None = None,
        others: Sequence[Sequence[float]] = (),
    ) -> Prices:
        """Prices at the shares per device that `ratios` round to.

        Args:
            model: prices instructions; a price list of it, where there is one.
            ratios: share per device of the fleet.
            allowed: kinds of exchanges that may be used at all (for baselines); None for all.
            others: ratios that what is not tied to `ratios` may be cut by, whichever it likes best.
        """
        listed = model if isinstance(model, PriceList) else PriceList(model)
        several = [Shares(other, listed.model.class_of) for other in others]
        shares = Shares(ratios, listed.model.class_of)

        def evaluate(costs: CostStack, units: NDArray[np.int64], tied: NDArray[np.bool_]) -> Floats:
            found = shares.stack(costs, units)
            for other in several:
                found = np.where(tied, found, np.minimum(found, other.stack(costs, units)))
            return found

        return Prices(listed, evaluate, allowed)

    @staticmethod
    def floors(model: CostModel | PriceList, largest: tuple[float, float] | None = None) -> Prices:
        """What every instruction costs at least, under shares of its own, in whole units.

        Of an axis of few units some device has more than the average. On devices that are all alike, floors
        are thereby mostly what instructions cost at even ratios.

        Args:
            model: prices instructions; a price list of it, where there is one.
            largest: range in which the largest of the plan's ratios lies; None for any. What may be cut by
                other ratios does not know of it.
        """
        listed = model if isinstance(model, PriceList) else PriceList(model)
        counts, devices = listed.model.counts, len(listed.model.class_of)

        def evaluate(costs: CostStack, units: NDArray[np.int64], tied: NDArray[np.bool_]) -> Floats:
            if largest is None:
                return costs.floor_within(counts, *_rounded_range(0.0, 1.0, units, devices), units)
            found, own = np.empty(len(units)), np.flatnonzero(tied)
            free = np.flatnonzero(~tied)
            found[free] = costs.take(free).floor(counts, units=units[free])
            within = _rounded_range(*largest, units[own], devices)
            found[own] = costs.take(own).floor_within(counts, *within, units[own])
            return found

        return Prices(listed, evaluate)

    @staticmethod
    def of_all(some: Sequence[Prices]) -> Prices:
        """Several prices of one catalogue at once; whatever is asked of them has an axis in front."""

        def evaluate(stacks: Sequence[Stacked], units: NDArray[np.int64], tied: NDArray[np.bool_]) -> Floats:
            pairs = zip(some, stacks, strict=True)
            return np.stack([each.work_out(stack, units, tied) for each, stack in pairs])

        return Prices(Several(some), evaluate)

    @staticmethod
    def least_of(some: Sequence[Prices]) -> Prices:
        """The least of several prices of one catalogue, line by line: nothing costs less at any."""

        def evaluate(stacks: Sequence[Stacked], units: NDArray[np.int64], tied: NDArray[np.bool_]) -> Floats:
            pairs = zip(some, stacks, strict=True)
            return np.minimum.reduce([each.work_out(stack, units, tied) for each, stack in pairs])

        return Prices(Several(some), evaluate)

    def one(self, number: int) -> Prices:
        """One of several prices by itself, with all that is known of it."""
        assert isinstance(self.list, Several), "these prices are not several"
        each = self.list.prices[number]
        each.take_over(self, number)
        return each

    def take_over(self, several: Prices, number: int) -> None:
        """Take over what was worked out for several prices, of which these are one."""
        seconds = several.seconds
        self._seconds = seconds[number] if len(seconds) else seconds  # no lines, no prices of any
        self._ways = {r: (cost[number], follow[number]) for r, (cost, follow) in several._ways.items()}
        self._tables = {
            factor: table[number] if table.ndim > len(factor.domains) else table
            for factor, table in several._tables.items()
        }

    # -- lines ---------------------------------------------------------------------------------------

    @property
    def seconds(self) -> Floats:
        """Seconds of every line of the list."""
        known = self._seconds.shape[-1]
        if known < len(self.list):
            fresh = self.work_out(*self.list.fresh(known))
            self._seconds = np.concatenate([self._seconds, fresh], axis=-1) if known else fresh
        return self._seconds

    def evaluate(self, cost: ShareCost, cut: Cut | None) -> float:
        """Seconds of one instruction that cuts the axis `cut`."""
        units = cut[0] // cut[1] if cut is not None and cost.varies else 0
        return float(self.work_out(CostStack.of([cost]), np.array([units]), np.array([True]))[0])

    def step(self, tensor: TensorType, pre: Placement, post: Placement) -> float:
        """Seconds of one move by its cheapest strategy; infinite where there is none."""
        found = self.list.step(tensor, pre, post)
        if found is None or not self._may(found.kind):
            return float("inf")
        return float(self.seconds[list(found.lines)].min())

    # -- conversions ---------------------------------------------------------------------------------

    def _learn(self, routes: Iterable[Routes]) -> None:
        """Find the cheapest ways of all `routes` at once: all-pairs shortest paths (Floyd-Warshall)."""
        fresh = tuple([r for r in dict.fromkeys(routes) if r not in self._ways])
        if not fresh:
            return
        moves = self.list.moves(fresh)
        seconds = self.seconds
        sizes = np.array([len(r.placements) for r in fresh])
        # Of equally many placements together: where one has more, all others would be as large.
        place = np.empty(len(fresh), dtype=np.intp)
        costs: dict[int, Floats] = {}
        for n in np.unique(sizes).tolist():
            mine = np.flatnonzero(sizes == n)
            place[mine] = np.arange(len(mine))
            costs[n] = np.full((*seconds.shape[:-1], len(mine), n, n), np.inf)
            costs[n][..., range(n), range(n)] = 0.0
        if len(moves.lines):
            cheapest = np.minimum.reduceat(seconds[..., moves.lines], moves.starts, axis=-1)
            if self._allowed is not None:
                barred = [not self._may(kind) for kind in moves.kinds]
                cheapest = np.where(barred, np.inf, cheapest)
            of_move = sizes[moves.routes]
            for n, cost in costs.items():
                mine = np.flatnonzero(of_move == n)
                at = place[moves.routes[mine]], moves.pre[mine], moves.post[mine]
                cost[(..., *at)] = cheapest[..., mine]
        follow = {n: _shorten(cost) for n, cost in costs.items()}
        for r, k, n in zip(fresh, place.tolist(), sizes.tolist(), strict=True):
            self._ways[r] = costs[n][..., k, :, :], follow[n][..., k, :, :]

    def _may(self, kind: str) -> bool:
        return self._allowed is None or collectives()[kind].local or kind in self._allowed

    def _cost(self, routes: Routes) -> Floats:
        if routes not in self._ways:
            self._learn((routes,))
        return self._ways[routes][0]

    def use(self, domain: Domain) -> Floats:
        """See `Domain.use`."""
        found = self._use.get(domain)
        if found is None:
            found = self._use[domain] = domain.use(self._cost(domain.routes))
        return found

    def derive(self, domain: Domain) -> Floats:
        """See `Domain.derive`."""
        found = self._derive.get(domain)
        if found is None:
            found = self._derive[domain] = domain.derive(self._cost(domain.routes))
        return found

    def hold(self, domain: Domain) -> Floats:
        """See `Domain.hold`."""
        return domain.hold(self._cost(domain.routes))

    def distance(self, routes: Routes, pre: Placement, post: Placement) -> float:
        """Seconds of the cheapest way from `pre` to `post`, infinite where there is none."""
        return float(self._cost(routes)[routes.index[pre], routes.index[post]])

    def path(self, routes: Routes, pre: Placement, post: Placement) -> list[tuple[Placement, Placement]]:
        """The moves of the cheapest way."""
        self._cost(routes)
        follow, placements = self._ways[routes][1], routes.placements
        at, end = routes.index[pre], routes.index[post]
        steps: list[tuple[Placement, Placement]] = []
        while at != end:
            following = int(follow[at, end])
            steps.append((placements[at], placements[following]))
            at = following
        return steps

    def strategy(self, routes: Routes, pre: Placement, post: Placement) -> tuple[str, str, int]:
        """Kind, cheapest strategy and line of one move; the first listed wins a tie."""
        key = (routes, pre, post)
        found = self._strategies.get(key)
        if found is None:
            step = self.list.step(routes.type, pre, post)
            assert step is not None and self._may(step.kind), f"no move from {pre} to {post}"
            seconds = self.seconds
            best = min(range(len(step.lines)), key=lambda k: round(float(seconds[step.lines[k]]), 15))
            found = self._strategies[key] = step.kind, step.strategies[best], step.lines[best]
        return found

    # -- factors -------------------------------------------------------------------------------------

    def tables(self, factors: Iterable[Factor]) -> list[Floats]:
        """The tables of factors, those asked for the first time worked out together."""
        wanted = list(factors)
        fresh = [f for f in wanted if f not in self._tables]
        self.prepare(fresh)
        for factor in fresh:
            self._tables[factor] = self._table(factor)
        return [self._tables[f] for f in wanted]

    def prepare(self, factors: Iterable[Factor]) -> None:
        """Price all lines that factors need, and find all ways between placements, at once."""
        self._learn(self._routes(factors))

    def enlist(self, factors: Iterable[Factor]) -> None:
        """Put all lines that factors need on the list, without pricing them."""
        self.list.moves(self._routes(factors))

    def _routes(self, factors: Iterable[Factor]) -> tuple[Routes, ...]:
        """What the tensors of factors are converted along; their kernels are on the list then."""
        fresh = list(factors)
        for factor in fresh:
            if isinstance(factor, EquationFactor):
                self.list.kernels(factor)
        return tuple(dict.fromkeys([domain.routes for factor in fresh for domain in factor.domains]))

    def table(self, factor: Factor) -> Floats:
        """The table of one factor."""
        return self.tables((factor,))[0]

    def _table(self, factor: EquationFactor | TableFactor) -> Floats:
        if not isinstance(factor, EquationFactor):
            return factor.table(self)
        needs = factor.needs()
        kernels = self.seconds[..., self.list.kernels(factor)[needs.signatures]]
        return cheapest(kernels, needs, factor.domains, self._conversions) * factor.weight

    def _conversions(self, domain: Domain, mode: str) -> Floats:
        """[placement, holding]: seconds of bringing a placement that is needed and the holding together.

        The last row is for a placement that the tensor does not know (position -1): infinite.
        """
        key = domain, mode
        found = self._needing.get(key)
        if found is None:
            count = len(domain.routes.placements)
            if mode == "exact":
                found = np.where(domain.base == np.arange(count + 1)[:, None], 0.0, np.inf)
            else:
                costs = self.use(domain) if mode == "use" else self.derive(domain)
                found = np.full((*costs.shape[:-2], count + 1, len(domain)), np.inf)
                found[..., :count, :] = costs.swapaxes(-1, -2)
            self._needing[key] = found
        return found

    def best(self, factor: EquationFactor, at: tuple[int, ...]) -> int:
        """Number of the cheapest signature when the choices in scope are `at`; of equals fewest moves win."""
        key = (factor, at)
        found = self._best.get(key)
        if found is None:
            found = self._best[key] = self._cheapest(factor, at)
        return found

    def _cheapest(self, factor: EquationFactor, at: tuple[int, ...]) -> int:
        needs = factor.needs()
        seconds = self.seconds[self.list.kernels(factor)[needs.signatures]]
        for domain, holding, slots in zip(factor.domains, at, needs.of, strict=True):
            for mode, where in slots:
                seconds = seconds + self._conversions(domain, mode)[where, holding]
        # Prices that differ in the last digits only count as equal.
        near: list[int] = (seconds <= seconds.min() + 1e-14).nonzero()[0].tolist()
        if len(near) > 1:
            near.sort(key=lambda k: (round(float(seconds[k]), 15), _moves(factor, at, needs, k)))
        return int(needs.signatures[near[0]])


def _shorten(cost: Floats) -> NDArray[np.intp]:
    """Make costs, (..., from, to), those of the cheapest ways; where each of these goes first."""
    n = cost.shape[-1]
    follow = np.broadcast_to(np.arange(n), cost.shape).copy()
    for k in range(n):
        through = cost[..., k, None] + cost[..., None, k, :]
        shorter = through < cost - 1e-15
        if shorter.any():
            np.copyto(follow, follow[..., k, None], where=shorter)
            np.copyto(cost, through, where=shorter)
    return follow


def _moves(factor: EquationFactor, at: tuple[int, ...], needs: Needs, number: int) -> int:
    """Placements that a signature needs and that are not held, when the choices in scope are `at`."""
    count = 0
    for domain, holding, slots in zip(factor.domains, at, needs.of, strict=True):
        held = domain.base[holding], domain.extra[holding]
        count += sum(where[number] not in held for _, where in slots)
    return count


def _rounded_range(low: float, high: float, units: NDArray[np.int64], devices: int) -> tuple[Floats, Floats]:
    """Range of the largest share of an axis of `units`, if the largest ratio is between `low` and `high`.

    Rounding gives a device its ratio rounded up or down to whole units, and some device has the average
    at least. Where nothing is cut (0 units) the ratios themselves matter.
    """
    whole = np.maximum(units, 1)
    least = np.maximum(np.floor(units * low + 1e-9), np.ceil(units / devices)) / whole
    most = np.minimum(np.floor(units * high + 1e-9) + 1, units) / whole
    return np.where(units > 0, least, low), np.where(units > 0, most, high)
