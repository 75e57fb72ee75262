"""Prices: from factors and a cost model to tables of seconds.

    PriceList   every instruction that a program of the space could contain, as one stack of costs
    Prices      what they cost at given shares, or at least under any (for the bound); the tables of factors

A price list is made once per step and fleet; prices are made for every set of shares, and all of their
arithmetic is done on whole arrays: kernels and exchanges by their stack, the cheapest ways between
placements for all types of tensors at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from shardwright.cost.bill import Cut, Shares, cut_of
from shardwright.cost.model import CostModel
from shardwright.cost.share_cost import CostStack, Floats, ShareCost
from shardwright.ir.collectives import between
from shardwright.ir.collectives import registry as collectives
from shardwright.ir.graph import TensorType
from shardwright.ir.placement import Placement
from shardwright.ir.rules import Signature
from shardwright.synth.conversions import Domain, Routes
from shardwright.synth.factors import EquationFactor, Factor, TableFactor

#: Seconds of lines of a price list, given their costs and how each is cut (see `PriceList.fresh`).
Evaluate: TypeAlias = Callable[..., Floats]


@dataclass(frozen=True, slots=True)
class Step:
    """One move between two placements: its strategies as lines of the price list."""

    kind: str
    pre: Placement
    post: Placement
    strategies: tuple[str, ...]
    lines: tuple[int, ...]


class Listed(Protocol):
    """A price list, as `Prices` reads it: of programs on one mesh axis, or on two."""

    @property
    def model(self) -> CostModel:
        """Prices on one axis."""
        ...

    def __len__(self) -> int:
        """Lines so far."""
        ...

    def fresh(self, known: int) -> tuple[Any, Any]:
        """The lines from number `known` on: a stack of their costs, and how each is cut."""
        ...

    def kernels(self, factor: EquationFactor) -> NDArray[np.intp]:
        """The lines of an equation's kernels, one per signature."""
        ...

    def steps(self, routes: Routes) -> tuple[Step, ...]:
        """All single moves between placements of a tensor."""
        ...

    def step(self, tensor: TensorType, pre: Placement, post: Placement) -> Step | None:
        """The move from `pre` to `post`, None where there is none."""
        ...


class PriceList:
    """The lines of all instructions asked for so far; equal costs of equally cut axes are one line."""

    def __init__(self, model: CostModel) -> None:
        self.model = model
        self.costs: list[ShareCost] = []
        self.units: list[int] = []
        self._lines: dict[tuple[int, int], int] = {}
        self._steps: dict[Routes, tuple[Step, ...]] = {}
        self._kernels: dict[EquationFactor, NDArray[np.intp]] = {}
        self._stack: CostStack | None = None

    def line(self, cost: ShareCost, cut: Cut | None) -> int:
        """The line of an instruction that costs `cost` and cuts the axis `cut`."""
        units = cut[0] // cut[1] if cut is not None and cost.varies else 0
        key = (id(cost), units)
        found = self._lines.get(key)
        if found is None:
            found = self._lines[key] = len(self.costs)
            self.costs.append(cost)
            self.units.append(units)
        return found

    def kernels(self, factor: EquationFactor) -> NDArray[np.intp]:
        """The lines of an equation's kernels, one per signature."""
        found = self._kernels.get(factor)
        if found is None:
            equation = factor.equation
            tensors = (*equation.input_types, *equation.output_types)
            lines: list[int] = []
            for signature in factor.signatures:
                cost = self.model.compute(equation, factor.rule, signature, factor.traffic)
                lines.append(self.line(cost, cut_of(tensors, (*signature.ins, *signature.outs))))
            found = self._kernels[factor] = np.array(lines, dtype=np.intp)
        return found

    def steps(self, routes: Routes) -> tuple[Step, ...]:
        """All single moves between placements of a tensor."""
        found = self._steps.get(routes)
        if found is None:
            pairs = [(a, b) for a in routes.placements for b in routes.placements if a != b]
            steps = (self.step(routes.type, a, b) for a, b in pairs)
            found = self._steps[routes] = tuple(step for step in steps if step is not None)
        return found

    def step(self, tensor: TensorType, pre: Placement, post: Placement) -> Step | None:
        """The move from `pre` to `post`, None where there is none."""
        collective = between(pre, post)
        if collective is None:
            return None
        kind, cut = collective.kind, cut_of((tensor, tensor), (pre, post))
        strategies = self.model.strategies(kind, pre, post)
        lines = tuple([self.line(self.model.move(kind, s, tensor, pre, post), cut) for s in strategies])
        return Step(kind, pre, post, strategies, lines)

    def __len__(self) -> int:
        return len(self.costs)

    def fresh(self, known: int) -> tuple[CostStack, NDArray[np.int64]]:
        """The lines from number `known` on: their costs, and the units of the axis each cuts (0: none)."""
        lines = np.arange(known, len(self.costs))
        return self.stack().take(lines), np.array(self.units[known:], dtype=np.int64)

    def stack(self) -> CostStack:
        """The costs of all lines so far."""
        if self._stack is None or len(self._stack.constant) < len(self.costs):
            self._stack = CostStack.of(self.costs)
        return self._stack


class Prices:
    """One set of prices. What is asked for together is worked out together: see `tables`."""

    def __init__(self, listed: Listed, evaluate: Evaluate, allowed: frozenset[str] | None = None) -> None:
        self.list = listed
        self.model = listed.model
        self._evaluate = evaluate
        self._allowed = allowed
        self._seconds: Floats = np.zeros(0)
        self._ways: dict[Routes, tuple[Floats, NDArray[np.intp]]] = {}
        self._use: dict[Domain, Floats] = {}
        self._derive: dict[Domain, Floats] = {}
        self._tables: dict[Factor, Floats] = {}
        self._strategies: dict[tuple[Routes, Placement, Placement], tuple[str, str, int]] = {}
        self._best: dict[tuple[EquationFactor, tuple[int, ...]], int] = {}

    @staticmethod
    def at(
        model: CostModel | PriceList, ratios: Sequence[float], allowed: frozenset[str] | None = None
    ) -> Prices:
        """Prices at the shares per device that `ratios` round to.

        Args:
            model: prices instructions; a price list of it, where there is one.
            ratios: share per device of the fleet.
            allowed: kinds of exchanges that may be used at all (for baselines); None for all.
        """
        listed = model if isinstance(model, PriceList) else PriceList(model)
        shares = Shares(ratios, listed.model.class_of)
        return Prices(listed, shares.stack, allowed)

    @staticmethod
    def floors(model: CostModel | PriceList, largest: tuple[float, float] | None = None) -> Prices:
        """What every instruction costs at least, under shares of its own.

        Args:
            model: prices instructions; a price list of it, where there is one.
            largest: range in which the largest ratio of a device lies; None for any.
        """
        listed = model if isinstance(model, PriceList) else PriceList(model)
        counts, devices = listed.model.counts, len(listed.model.class_of)

        def evaluate(costs: CostStack, units: NDArray[np.int64]) -> Floats:
            if largest is None:
                return costs.floor(counts)
            return costs.floor_within(counts, *_rounded_range(*largest, units, devices))

        return Prices(listed, evaluate)

    @staticmethod
    def floors_between(listed: PriceList, least: Floats, most: Floats) -> Prices:
        """What every instruction costs at least if each device's ratio is in a range.

        Args:
            listed: price list of the model.
            least, most: ratios by class.
        """
        counts = listed.model.counts

        def evaluate(costs: CostStack, units: NDArray[np.int64]) -> Floats:
            # Rounding gives a device its ratio rounded up or down to whole units.
            whole = np.maximum(units, 1)[:, None]
            down = np.maximum(np.floor(units[:, None] * least - 1 + 1e-9), 0) / whole
            up = np.minimum(np.floor(units[:, None] * most + 1e-9) + 1, whole) / whole
            cut = units[:, None] > 0
            return costs.floor_between(counts, np.where(cut, down, least), np.where(cut, up, most))

        return Prices(listed, evaluate)

    # -- lines ---------------------------------------------------------------------------------------

    @property
    def seconds(self) -> Floats:
        """Seconds of every line of the list."""
        known = len(self._seconds)
        if known < len(self.list):
            self._seconds = np.concatenate([self._seconds, self._evaluate(*self.list.fresh(known))])
        return self._seconds

    def evaluate(self, cost: ShareCost, cut: Cut | None) -> float:
        """Seconds of one instruction that cuts the axis `cut`."""
        assert isinstance(self.list, PriceList), "on two axes instructions are not cut along one"
        line = self.list.line(cost, cut)
        return float(self.seconds[line])

    def step(self, tensor: TensorType, pre: Placement, post: Placement) -> float:
        """Seconds of one move by its cheapest strategy; infinite where there is none."""
        found = self.list.step(tensor, pre, post)
        if found is None or not self._may(found.kind):
            return float("inf")
        return float(self.seconds[list(found.lines)].min())

    # -- conversions ---------------------------------------------------------------------------------

    def _learn(self, routes: Iterable[Routes]) -> None:
        """Find the cheapest ways of all `routes` at once: all-pairs shortest paths (Floyd-Warshall)."""
        fresh = [r for r in dict.fromkeys(routes) if r not in self._ways]
        if not fresh:
            return
        steps = [self.list.steps(r) for r in fresh]
        n = max(len(r.placements) for r in fresh)
        cost = np.full((len(fresh), n, n), np.inf)
        cost[:, range(n), range(n)] = 0.0
        flat = [(k, step) for k, mine in enumerate(steps) for step in mine]
        if flat:
            seconds = self.seconds
            lines = [step.lines for _, step in flat]
            starts = np.cumsum([0, *(len(options) for options in lines[:-1])])
            cheapest = np.minimum.reduceat(seconds[[line for options in lines for line in options]], starts)
            if self._allowed is not None:
                barred = [not self._may(step.kind) for _, step in flat]
                cheapest = np.where(barred, np.inf, cheapest)
            pre = [fresh[k].index[step.pre] for k, step in flat]
            post = [fresh[k].index[step.post] for k, step in flat]
            cost[[k for k, _ in flat], pre, post] = cheapest
        follow = np.broadcast_to(np.arange(n), cost.shape).copy()
        for k in range(n):
            through = cost[:, :, k, None] + cost[:, None, k, :]
            shorter = through < cost - 1e-15
            follow = np.where(shorter, follow[:, :, k, None], follow)
            cost = np.where(shorter, through, cost)
        for k, r in enumerate(fresh):
            size = len(r.placements)
            self._ways[r] = cost[k, :size, :size], follow[k, :size, :size]

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
        self._prepare(fresh)
        for factor in fresh:
            self._tables[factor] = self._table(factor)
        return [self._tables[f] for f in wanted]

    def _prepare(self, factors: Iterable[Factor]) -> None:
        """Price all lines that factors need at once."""
        fresh = list(factors)
        for factor in fresh:
            if isinstance(factor, EquationFactor):
                self.list.kernels(factor)
        routes = list(dict.fromkeys(domain.routes for factor in fresh for domain in factor.domains))
        for r in routes:
            self.list.steps(r)
        self._learn(routes)

    def table(self, factor: Factor) -> Floats:
        """The table of one factor."""
        return self.tables((factor,))[0]

    def _table(self, factor: EquationFactor | TableFactor) -> Floats:
        if not isinstance(factor, EquationFactor):
            return factor.table(self)
        kernels, vectors = self._parts(factor)
        # (signatures, holdings of the first choice, of the second, ...), then the cheapest signature.
        total = kernels
        for vector in vectors:
            total = total[..., None] + vector.reshape(len(vector), *(1,) * (total.ndim - 1), -1)
        return total.min(axis=0) * factor.weight

    def _parts(self, factor: EquationFactor) -> tuple[Floats, list[Floats]]:
        """Seconds of the kernels by signature; per choice, of conversions by signature and holding."""
        kernels = self.seconds[self.list.kernels(factor)]
        vectors: list[Floats] = [np.zeros((len(kernels), len(domain))) for domain in factor.domains]
        for slot, needed in zip(factor.slots, _by_operand(factor.signatures), strict=True):
            if slot is not None:
                vectors[slot.position] = vectors[slot.position] + self._conversion(
                    factor.domains[slot.position], slot.mode, needed
                )
        possible = np.all([np.isfinite(vector).any(axis=1) for vector in vectors], axis=0)
        if not possible.all() and possible.any():
            return kernels[possible], [vector[possible] for vector in vectors]
        return kernels, vectors

    def _conversion(self, domain: Domain, mode: str, needed: Sequence[Placement]) -> Floats:
        """[signature, holding]: seconds of bringing the placements needed and the holding together."""
        index = domain.routes.index
        where = [index.get(p, -1) for p in needed]
        if mode == "exact":
            return np.where(domain.base[None, :] == np.array(where)[:, None], 0.0, np.inf)
        found = (self.use(domain) if mode == "use" else self.derive(domain)).T[where]
        unknown = [k < 0 for k in where]
        if any(unknown):
            found[unknown] = np.inf
        return found

    def best(self, factor: EquationFactor, at: tuple[int, ...]) -> int:
        """Number of the cheapest signature when the choices in scope are `at`; of equals fewest moves win."""
        key = (factor, at)
        found = self._best.get(key)
        if found is None:
            found = self._best[key] = self._cheapest(factor, at)
        return found

    def _cheapest(self, factor: EquationFactor, at: tuple[int, ...]) -> int:
        seconds = self.seconds[self.list.kernels(factor)]
        moves = np.zeros(len(seconds))
        for slot, needed in zip(factor.slots, _by_operand(factor.signatures), strict=True):
            if slot is not None:
                domain = factor.domains[slot.position]
                holding = at[slot.position]
                seconds = seconds + self._conversion(domain, slot.mode, needed)[:, holding]
                held = domain.holdings[holding].all
                moves = moves + [placement not in held for placement in needed]
        return min(range(len(seconds)), key=lambda k: (round(float(seconds[k]), 15), moves[k]))


def _by_operand(signatures: Sequence[Signature]) -> list[tuple[Placement, ...]]:
    """Per operand and result, the placement that every signature needs."""
    return list(zip(*((*s.ins, *s.outs) for s in signatures), strict=True))


def _rounded_range(low: float, high: float, units: NDArray[np.int64], devices: int) -> tuple[Floats, Floats]:
    """Range of the largest share of an axis of `units`, if the largest ratio is between `low` and `high`.

    Rounding gives a device its ratio rounded up or down to whole units, and some device has the average
    at least. Where nothing is cut (0 units) the ratios themselves matter.
    """
    whole = np.maximum(units, 1)
    least = np.maximum(np.floor(units * low + 1e-9), np.ceil(units / devices)) / whole
    most = np.minimum(np.floor(units * high + 1e-9) + 1, units) / whole
    return np.where(units > 0, least, low), np.where(units > 0, most, high)
