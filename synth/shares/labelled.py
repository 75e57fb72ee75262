"""Prices that know which stretches of a program may have ratios of their own, for a closer bound.

A plan's contractions, and what goes from one sharded placement to another, are cut by its ratios; stretches
without either may be cut by any (`synth/segments.py`). `Prices.floors` within a range of the largest ratio
therefore grants every other line whatever shares it likes, although most elementwise work is tied to some
contraction. Here every sharded placement carries a label, whether it is cut by the plan's ratios or by
others, and is paid for accordingly:

    an instruction on local shards     has all of them cut alike; contractions, by the plan's ratios
    an exchange with one sharded side  is priced by that side's label
    an exchange between two            is one of the plan's ratios
    from label to label                there is no way but through a whole tensor or a Partial

A tensor held in one sharded placement is a choice between labels, of two placements at once any labels do
(which is a bound). `synth/shares/bounds.py` asks for this where it is content with a range no sooner.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from itertools import product
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardwright.cost.share_cost import CostStack, Floats
from shardwright.ir.placement import Placement, R, Shard, reduction
from shardwright.synth.prices.lists import PriceList, is_tied
from shardwright.synth.prices.tables import Prices
from shardwright.synth.search.solve import Solver
from shardwright.synth.space.conversions import Domain, Routes
from shardwright.synth.space.factors import EquationFactor, Factor, LinkFactor, Use, positions

#: Labels: cut by the plan's ratios, or by others.
_PLAN, _OTHER = 0, 1
_LABELS = (_PLAN, _OTHER)


class _Holdings(NamedTuple):
    """The holdings of a domain with labels.

    Attributes:
        of: [labelled holding] position of the holding in the domain.
        allowed: [label, labelled holding] whether its first placement may have the label, or has none.
    """

    of: NDArray[np.intp]
    allowed: NDArray[np.bool_]


@cache
def _labelled(domain: Domain) -> _Holdings:
    of, allowed = list[int](), list[tuple[bool, bool]]()
    for k, holding in enumerate(domain.holdings):
        if holding.extra is None and isinstance(holding.base, Shard):
            of += [k, k]
            allowed += [(True, False), (False, True)]
        else:
            of.append(k)
            allowed.append((True, True))
    return _Holdings(np.array(of, dtype=np.intp), np.array(allowed, dtype=np.bool_).T)


class LabelledSolver:
    """Bounds of a space's programs with labels, at any ranges of the largest ratio.

    Args:
        uses: the factors of the space and those that pin choices, with the choices each ties.
        domains: of every choice.
    """

    def __init__(self, uses: Sequence[Use], domains: Sequence[Domain]) -> None:
        numbers: dict[Factor, int] = {}
        scopes = [(numbers.setdefault(use.factor, len(numbers)), use.scope) for use in uses]
        sizes = {domain: _labelled(domain) for domain in dict.fromkeys(domains)}
        self._factors = tuple(numbers)
        self._holdings = sizes
        self._solver = Solver(domains, [len(sizes[domain].of) for domain in domains], scopes)

    def bound(
        self,
        listed: PriceList,
        largest: tuple[float, float] | None,
        stop: Callable[[], bool],
        enough: float,
    ) -> float:
        """A lower bound on the cost of every program if the largest of its ratios is in a range.

        The least cost, where A* gets there, unless something below it is `enough`.

        Args:
            listed: the prices.
            largest: the range; None for any.
            stop: asked now and then whether to leave it at that.
            enough: a bound with which to be content, in seconds.
        """
        tables = _Tables(listed, largest)
        return self._solver.least([tables.table(factor) for factor in self._factors], stop, enough)


class _Ways(NamedTuple):
    """The cheapest ways between labelled placements of one type of tensors.

    Attributes:
        cost: [labelled placement, labelled placement] seconds.
        at: [label, placement] the labelled placement of a placement in the routes.
    """

    cost: Floats
    at: NDArray[np.intp]


class _Tables:
    """Tables of factors with labels, within one range of the largest ratio."""

    def __init__(self, listed: PriceList, largest: tuple[float, float] | None) -> None:
        self._listed = listed
        self._free = free = Prices.floors(listed, largest)

        def all_tied(costs: CostStack, units: NDArray[np.int64], tied: NDArray[np.bool_]) -> Floats:
            return free.work_out(costs, units, np.ones_like(tied))

        self._tied = Prices(listed, all_tied)
        self._known: dict[Routes, _Ways] = {}
        self._matrices: dict[Domain, tuple[Floats, Floats, Floats]] = {}
        self._conversions: dict[tuple[Domain, str, int], Floats] = {}

    def table(self, factor: Factor) -> Floats:
        """Seconds by labelled holding, one axis per choice in scope."""
        if isinstance(factor, EquationFactor):
            return self._equation(factor)
        if isinstance(factor, LinkFactor):
            found = self._link(factor)
            if found is not None:
                return found * factor.weight
        table = self._free.table(factor)
        for axis, domain in enumerate(factor.domains):
            table = table.take(_labelled(domain).of, axis=axis)
        return table

    def _equation(self, factor: EquationFactor) -> Floats:
        needs = factor.needs()
        lines = self._listed.kernels(factor)[needs.signatures]
        # Whatever contracts is cut by the plan's ratios.
        contracts = any(is_tied(self._listed.catalogue.lines[line]) for line in lines.tolist())
        least: Floats | None = None
        for label in (_PLAN,) if contracts else _LABELS:
            total = (self._free if label else self._tied).seconds[lines]
            for position, domain in enumerate(factor.domains):
                vector: Floats | None = None
                for mode, where in needs.of[position]:
                    found = self._conversion(domain, mode, label)[where]
                    vector = found if vector is None else vector + found
                assert vector is not None, "a choice in scope is some operand's or result's"
                if 0 < position == len(factor.domains) - 1:
                    columns = vector.reshape(len(total), *(1,) * (total.ndim - 1), -1)
                    total = np.stack(
                        [(total + column).min(axis=0) for column in np.moveaxis(columns, -1, 0)], -1
                    )
                else:
                    total = total[..., None] + vector.reshape(len(total), *(1,) * position, -1)
            if len(factor.domains) < 2:
                total = total.min(axis=0)
            least = total if least is None else np.minimum(least, total)
        assert least is not None, "an equation has a label at least"
        return least * factor.weight

    def _link(self, factor: LinkFactor) -> Floats | None:
        """None where labels do not matter."""
        first, last = factor.domains[0], factor.domains[-1]
        mine, other = _labelled(first), _labelled(last)
        if factor.kind == "hold":
            return self._of(first)[2]
        if factor.kind in ("hand out", "hand out whole"):
            some = [R] if factor.kind == "hand out whole" else first.routes.placements
            whole = [k for k, p in enumerate(first.routes.placements) if p in some and reduction(p) is None]
            return self._of(first)[0][:, self._ways(first.routes).at[:, whole].ravel()].min(axis=1)
        if factor.kind == "same":
            agree = (mine.allowed[:, :, None] & other.allowed[:, None, :]).any(axis=0)
            bases = np.array([[a.base == b.base for b in last.holdings] for a in first.holdings])
            return np.where(agree & bases[mine.of][:, other.of], 0.0, np.inf)
        made, needed = factor.made(), factor.needed()
        if made is not None:
            return self._handed(last, 1, made, mine)
        return None if needed is None else self._handed(first, 0, needed, other).T

    def _handed(
        self, domain: Domain, matrix: int, placements: Sequence[Placement | None], holders: _Holdings
    ) -> Floats:
        """[labelled holding of another choice, of this one]: seconds from or to its first placement."""
        costs, ways = self._of(domain)[matrix], self._ways(domain.routes)
        known = positions(domain, placements)[holders.of]
        least = np.full((len(known), len(costs)), np.inf)
        for label in _LABELS:
            mine = (known >= 0) & holders.allowed[label]
            least[mine] = np.minimum(least[mine], costs.T[ways.at[label][known[mine]]])
        return least

    def _conversion(self, domain: Domain, mode: str, label: int) -> Floats:
        """[placement, labelled holding]: see `Prices`; the last row is of a placement that is not known."""
        key = domain, mode, label
        found = self._conversions.get(key)
        if found is None:
            holdings, at = _labelled(domain), self._ways(domain.routes).at[label]
            found = np.full((len(at) + 1, len(holdings.of)), np.inf)
            if mode == "exact":
                here = domain.base[holdings.of] == np.arange(len(at))[:, None]
                found[:-1][here & holdings.allowed[label]] = 0.0
            else:
                found[:-1] = self._of(domain)[0 if mode == "use" else 1][:, at].T
            self._conversions[key] = found
        return found

    def _of(self, domain: Domain) -> tuple[Floats, Floats, Floats]:
        """See `Domain.use`, `derive` and `hold`: [labelled holding, labelled placement], or the former."""
        found = self._matrices.get(domain)
        if found is None:
            found = self._matrices[domain] = self._matrices_of(domain)
        return found

    def _matrices_of(self, domain: Domain) -> tuple[Floats, Floats, Floats]:
        (cost, at), holdings = self._ways(domain.routes), _labelled(domain)
        alone = np.array([h.extra is None for h in domain.holdings])[holdings.of]
        use = np.full((len(alone), len(cost)), np.inf)
        derive, hold = use.copy(), np.full(len(alone), np.inf)
        for label, second in product(_LABELS, _LABELS):
            base, extra = at[label][domain.base[holdings.of]], at[second][domain.extra[holdings.of]]
            some = holdings.allowed[label] & (~alone | (label == second))
            base, extra = base[some], extra[some]
            use[some] = np.minimum(use[some], np.minimum(cost[base], cost[extra]))
            to_base, to_extra = cost[:, base].T, cost[:, extra].T
            first = to_base + np.minimum(to_extra, cost[base, extra][:, None])
            either = np.minimum(first, to_extra + cost[extra, base][:, None])
            derive[some] = np.minimum(derive[some], either)
            hold[some] = np.minimum(hold[some], cost[base, extra])
        return use, derive, hold

    def _ways(self, routes: Routes) -> _Ways:
        found = self._known.get(routes)
        if found is None:
            found = self._known[routes] = self._ways_of(routes)
        return found

    def _ways_of(self, routes: Routes) -> _Ways:
        cut = np.array([isinstance(placement, Shard) for placement in routes.placements])
        count = len(cut)
        at = np.array([np.arange(count), np.where(cut, count - 1 + np.cumsum(cut), np.arange(count))])
        free, tied = (self._steps(routes, prices) for prices in (self._free, self._tied))
        cost = np.full((count + cut.sum(),) * 2, np.inf)
        np.fill_diagonal(cost, 0.0)
        between = cut[:, None] | cut
        cost[:count, :count] = np.where(between, tied, free)
        others = at[_OTHER]
        cost[np.ix_(others[cut], others[~cut])] = free[np.ix_(cut, ~cut)]
        cost[np.ix_(others[~cut], others[cut])] = free[np.ix_(~cut, cut)]
        for k in range(len(cost)):
            np.minimum(cost, cost[:, k, None] + cost[k], out=cost)
        return _Ways(cost, at)

    @staticmethod
    def _steps(routes: Routes, prices: Prices) -> Floats:
        """[from, to]: seconds of single moves."""
        assert isinstance(prices.list, PriceList), "labels are for programs on one axis"
        moves = prices.list.moves((routes,))
        count = len(routes.placements)
        found = np.full((count, count), np.inf)
        np.fill_diagonal(found, 0.0)
        if len(moves.lines):
            found[moves.pre, moves.post] = np.minimum.reduceat(prices.seconds[moves.lines], moves.starts)
        return found
