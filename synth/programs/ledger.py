"""The bill of an assignment, without writing its program.

Equal factors with equal choices cost the same: a program of many equal layers is added up from few
entries. Where two users convert one tensor in the same way, the program pays once and this bill twice;
the plan is therefore priced again from the program in the end.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from shardwright.cost.bill import Item
from shardwright.ir.collectives import registry as collectives
from shardwright.ir.placement import Placement, reduction
from shardwright.ir.table import codes
from shardwright.synth.prices.lists import PriceList
from shardwright.synth.prices.tables import Prices
from shardwright.synth.search.fold import Scope
from shardwright.synth.space.conversions import Domain
from shardwright.synth.space.factors import Conversion, EquationFactor, Factor, Use


class Ledger:
    """Uses of factors, grouped once for any assignment."""

    def __init__(self, uses: Sequence[Use]) -> None:
        numbers: dict[Factor, int] = {}
        found: dict[int, list[tuple[int, int, Scope]]] = {}
        for position, use in enumerate(uses):
            number = numbers.setdefault(use.factor, len(numbers))
            found.setdefault(len(use.scope), []).append((number, position, use.scope))
        self._factors = tuple(numbers)
        #: By number of choices: factor and position of every use, and the choices.
        self._uses = [
            (
                np.array([(number, position) for number, position, _ in some], dtype=np.intp),
                np.array([scope for *_, scope in some], dtype=np.intp).reshape(len(some), arity),
            )
            for arity, some in found.items()
        ]

    def _counted(self, assignment: Sequence[int]) -> list[tuple[int, int, tuple[int, ...], int]]:
        """Factor, first position, values of its choices and how often, in order of factors and positions."""
        values = np.asarray(assignment, dtype=np.intp)
        found: list[tuple[int, int, tuple[int, ...], int]] = []
        for which, scopes in self._uses:
            rows = np.column_stack([which[:, 0], values[scopes]])
            _, first, times = np.unique(codes(rows), return_index=True, return_counts=True)
            at = map(tuple, rows[first].tolist())
            mine = zip(which[first].tolist(), at, times.tolist(), strict=True)
            found += [(number, position, row[1:], count) for (number, position), row, count in mine]
        return sorted(found)

    def lines(self, assignment: Sequence[int], prices: Prices) -> dict[tuple[int, str, bool], float]:
        """Executions per step by line of the price list, label and whether it is an exchange.

        Of the program that an assignment stands for, at the prices under which it was found.
        """
        weights: dict[tuple[int, str, bool], float] = {}
        for number, _, at, count in self._counted(assignment):
            factor = self._factors[number]
            for entry in _entries(factor, at, prices):
                weights[entry] = weights.get(entry, 0.0) + factor.weight * count
        return weights

    def bill(self, assignment: Sequence[int], prices: Prices) -> list[Item]:
        """The same as items of a bill, on one mesh axis."""
        return self.items(self.lines(assignment, prices), prices)

    @staticmethod
    def items(lines: Mapping[tuple[int, str, bool], float], prices: Prices) -> list[Item]:
        """Lines as items of a bill, on one mesh axis."""
        listed = prices.list
        assert isinstance(listed, PriceList), "items are of programs on one axis"
        return [
            listed.item(line, label, weight, exchange) for (line, label, exchange), weight in lines.items()
        ]


def _entries(factor: Factor, at: tuple[int, ...], prices: Prices) -> Iterator[tuple[int, str, bool]]:
    """Line, label and whether it is an exchange, of everything that one use makes necessary."""
    if isinstance(factor, EquationFactor):
        best = prices.best(factor, at)
        yield int(prices.list.kernels(factor)[best]), factor.equation.primitive, False
        signature = factor.signatures[best]
        needed = zip(factor.slots, (*signature.ins, *signature.outs), strict=True)
        conversions = tuple([Conversion(s.position, s.mode, p) for s, p in needed if s is not None])
    else:
        conversions = factor.conversions(at)
    for conversion in conversions:
        domain = factor.domains[conversion.position]
        for pre, post in _moves(domain, at[conversion.position], conversion, prices):
            kind, strategy, line = prices.strategy(domain.routes, pre, post)
            if not collectives()[kind].local:
                yield line, f"{kind}.{strategy}", True


def _moves(
    domain: Domain, holding: int, conversion: Conversion, prices: Prices
) -> Iterator[tuple[Placement, Placement]]:
    held, routes = domain.holdings[holding].all, domain.routes
    if conversion.mode == "exact":
        return
    if conversion.mode == "derive":
        established, missing = [conversion.placement], [p for p in held if p != conversion.placement]
    elif conversion.mode == "hold":
        established, missing = [held[0]], list(held[1:])
    else:
        established, missing = list(held), [_wanted(domain, held, conversion, prices)]
    while missing:
        options = [(prices.distance(routes, a, b), a, b) for b in missing for a in established]
        _, source, target = min(options, key=lambda option: option[0])
        missing.remove(target)
        for pre, post in prices.path(routes, source, target):
            if post not in established:
                yield pre, post
                established.append(post)


def _wanted(domain: Domain, held: Sequence[Placement], conversion: Conversion, prices: Prices) -> Placement:
    if conversion.mode != "whole":
        return conversion.placement
    whole = [p for p in domain.routes.placements if reduction(p) is None]
    return min(whole, key=lambda p: min(prices.distance(domain.routes, h, p) for h in held))
