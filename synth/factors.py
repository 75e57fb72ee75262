"""Choices and the factors that price them.

A *choice* is what one tensor (or one fused class of tensors) is held in; a *factor* is the price of
what its choices make necessary. The price of a program is the sum of its factors.

    factor             choices in its scope                     price
    equation           operands, results                        least over signatures: kernel + conversions
    exit               class or port, the tensor's holding      making the holding from that placement
    hold               an input                                 making its second placement
    enter, leave       outside and inside of a region           conversion on the way in and out
    return             what is made, what it must be            conversion (state, carries, results)
    same, whole        bases that must agree, or be R           none, or impossible
    first dimension    an input pinned by a baseline            none, or impossible
    hand out (whole)   an output of the step                    conversion to anything but Partial, or to R

Tables are filled by `Prices`: at given shares, or with what each instruction costs at least under any
shares (for the bound). Factors of equal key have equal tables; repeated layers are priced once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import numpy as np

from shardwright.cost.bill import Cut, Shares, cut_of
from shardwright.cost.model import CostModel, Traffic
from shardwright.cost.share_cost import Floats, ShareCost
from shardwright.ir.collectives import registry as collectives
from shardwright.ir.graph import Equation, TensorType
from shardwright.ir.placement import Partial, Placement, R, Shard
from shardwright.ir.regions import outer_placement
from shardwright.ir.rules import Rule, Signature
from shardwright.synth.conversions import Conversions, Costs, Domain

#: Prices one instruction and the axis it cuts: at the search's rounded shares, or its floor for the bound.
Evaluate: TypeAlias = Callable[[ShareCost, Cut | None], float]


@dataclass(frozen=True, slots=True, eq=False)
class Choice:
    """One decision: what a tensor is held in. Compared by identity."""

    index: int
    name: str
    domain: Domain


class Key:
    """What makes the tables of two factors equal, hashed once."""

    __slots__ = ("_hash", "parts")

    def __init__(self, parts: tuple[object, ...]) -> None:
        self.parts = parts
        self._hash = hash(parts)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Key) and self.parts == other.parts)


@dataclass(frozen=True, slots=True)
class Slot:
    """How a choice meets the placement that one operand or result of an equation needs.

    mode "exact": the choice is that placement; "use": the placement is made from what is held;
    "derive": what is held is made from that placement.
    """

    choice: Choice
    mode: str

    def costs(self, convert: Conversions, needed: Placement) -> Costs:
        """Seconds per holding in the choice's domain."""
        domain = self.choice.domain
        if self.mode == "exact":
            return np.array([0.0 if h.base == needed else np.inf for h in domain.holdings])
        return convert.use(domain, needed) if self.mode == "use" else convert.derive(domain, needed)


@dataclass(frozen=True, eq=False)
class EquationFactor:
    """An equation with its signatures; literal operands have no slot."""

    equation: Equation
    rule: Rule
    traffic: Traffic
    signatures: tuple[Signature, ...]  # one object per distinct list: keys compare it by identity
    slots: tuple[Slot | None, ...]
    weight: float

    @cached_property
    def scope(self) -> tuple[Choice, ...]:
        return tuple(dict.fromkeys(slot.choice for slot in self.slots if slot is not None))

    @cached_property
    def key(self) -> Key:
        """Equal keys have equal tables: repeated layers are priced once."""
        scope = self.scope
        slots = tuple((scope.index(s.choice), s.mode, s.choice.domain) if s else None for s in self.slots)
        equation = self.equation
        types = (equation.input_types, equation.output_types, str(equation.params.get("precision")))
        return Key((equation.primitive, types, self.traffic, id(self.signatures), slots, self.weight))

    def parts(self, prices: Prices, signature: Signature) -> tuple[float, list[Costs]]:
        """Seconds of the kernel, and per choice in scope the seconds of conversions by holding."""
        equation = self.equation
        tensors = (*equation.input_types, *equation.output_types)
        cost = prices.model.compute(equation, self.rule, signature, self.traffic)
        kernel = prices.evaluate(cost, cut_of(tensors, (*signature.ins, *signature.outs)))
        scope = self.scope
        vectors = [np.zeros(len(choice.domain.holdings)) for choice in scope]
        for slot, placement in zip(self.slots, (*signature.ins, *signature.outs), strict=True):
            if slot is not None:
                k = scope.index(slot.choice)
                vectors[k] = vectors[k] + slot.costs(prices.convert, placement)
        return kernel, vectors

    def table(self, prices: Prices) -> Floats:
        scope = self.scope
        total = np.full([len(choice.domain.holdings) for choice in scope], np.inf)
        for signature in self.signatures:
            kernel, vectors = self.parts(prices, signature)
            if any(np.isinf(vector).all() for vector in vectors):
                continue
            total = np.minimum(total, _outer_sum(kernel, vectors))
        return total * self.weight

    def best(self, prices: Prices, assignment: Sequence[int]) -> Signature:
        """The cheapest signature under an assignment; of equals the one with fewest moves, then the first."""
        scope = self.scope
        at = tuple(assignment[choice.index] for choice in scope)

        def order(signature: Signature) -> tuple[float, int]:
            kernel, vectors = self.parts(prices, signature)
            seconds = kernel + sum(float(v[k]) for v, k in zip(vectors, at, strict=True))
            moves = 0
            for slot, needed in zip(self.slots, (*signature.ins, *signature.outs), strict=True):
                if slot is not None:
                    moves += needed not in slot.choice.domain.holdings[assignment[slot.choice.index]].all
            return round(seconds, 15), moves

        return min(self.signatures, key=order)


@dataclass(frozen=True, eq=False)
class LinkFactor:
    """A price between choices that is no equation; `kind` and `extra` say which (see the table above)."""

    kind: str
    scope: tuple[Choice, ...]
    weight: float
    stacked: bool = False

    @cached_property
    def key(self) -> Key:
        return Key((self.kind, tuple(choice.domain for choice in self.scope), self.weight, self.stacked))

    def table(self, prices: Prices) -> Floats:
        """Seconds by holding, one axis per choice in scope."""
        convert = prices.convert
        domains = [choice.domain for choice in self.scope]
        first, last = domains[0], domains[-1]
        if self.kind == "hold":
            return convert.hold(first) * self.weight
        if self.kind == "hand out":
            rows = [convert.use(first, p) for p in placements(first) if not isinstance(p, Partial)]
            return np.min(rows, axis=0) * self.weight
        if self.kind == "hand out whole":
            return convert.use(first, R) * self.weight
        if self.kind == "whole":
            return np.array([0.0 if h.base == R else np.inf for h in first.holdings])
        if self.kind == "first dimension":
            return np.array(
                [0.0 if isinstance(h.base, Shard) and h.base.dim == 0 else np.inf for h in first.holdings]
            )
        if self.kind == "not partial":
            return np.array([np.inf if isinstance(h.base, Partial) else 0.0 for h in first.holdings])
        if self.kind in ("exit", "leave"):
            made = [outer_placement(h.base, self.kind == "leave") for h in first.holdings]
            return np.stack([convert.derive(last, p) for p in made]) * self.weight
        if self.kind == "same":
            return np.array(
                [[0.0 if a.base == b.base else np.inf for b in last.holdings] for a in first.holdings]
            )
        assert self.kind in ("return", "enter"), self.kind
        needed = [outer_placement(h.base, self.stacked) for h in last.holdings]
        return np.stack([convert.use(first, p) for p in needed], axis=1) * self.weight


def placements(domain: Domain) -> tuple[Placement, ...]:
    """The single placements of a domain."""
    return tuple(h.base for h in domain.holdings if h.extra is None)


def _outer_sum(kernel: float, vectors: Sequence[Costs]) -> Floats:
    """Kernel + vectors[0][i] + vectors[1][j] + ..."""
    total = np.asarray(kernel)
    for vector in vectors:
        total = total[..., None] + vector
    return total


Factor: TypeAlias = EquationFactor | LinkFactor


class Prices:
    """One set of prices: how costs become numbers. Equal factors share their tables and best signatures."""

    def __init__(self, model: CostModel, evaluate: Evaluate, allowed: frozenset[str] | None = None) -> None:
        self.model = model
        self.evaluate = evaluate
        self.convert = Conversions(self.step)
        self._allowed = allowed
        self._tables: dict[Key, Floats] = {}
        self._best: dict[tuple[Key, tuple[int, ...]], Signature] = {}

    @staticmethod
    def at(model: CostModel, ratios: Sequence[float], allowed: frozenset[str] | None = None) -> Prices:
        """Prices at the shares per device that `ratios` round to.

        Args:
            model: prices instructions.
            ratios: share per device of the fleet.
            allowed: kinds of exchanges that may be used at all (for baselines); None for all.
        """
        return Prices(model, Shares(ratios, model.class_of).seconds, allowed)

    @staticmethod
    def floors(model: CostModel, largest: tuple[float, float] | None = None) -> Prices:
        """What every instruction costs at least, under shares of its own.

        Args:
            model: prices instructions.
            largest: range in which the largest ratio of a device lies; None for any.
        """
        if largest is None:
            return Prices(model, lambda cost, cut: model.floor(cost))

        def evaluate(cost: ShareCost, cut: Cut | None) -> float:
            return model.floor_within(cost, cut[0] // cut[1] if cut is not None else None, *largest)

        return Prices(model, evaluate)

    def strategy(self, kind: str, tensor: TensorType, pre: Placement, post: Placement) -> tuple[str, float]:
        """The cheapest strategy of one move and its seconds; the first listed wins a tie."""
        collective = collectives()[kind]
        if self._allowed is not None and not collective.local and kind not in self._allowed:
            return collective.strategies[0], np.inf
        cut = cut_of((tensor, tensor), (pre, post))
        costs = [(s, self.model.move(kind, s, tensor, pre, post)) for s in collective.strategies]
        options = [(s, self.evaluate(cost, cut)) for s, cost in costs]
        return min(options, key=lambda option: round(option[1], 15))

    def step(self, kind: str, tensor: TensorType, pre: Placement, post: Placement) -> float:
        """Seconds of one move by its cheapest strategy."""
        return self.strategy(kind, tensor, pre, post)[1]

    def table(self, factor: Factor) -> Floats:
        """The factor's table."""
        if factor.key not in self._tables:
            self._tables[factor.key] = factor.table(self)
        return self._tables[factor.key]

    def best(self, factor: EquationFactor, assignment: Sequence[int]) -> Signature:
        """The factor's cheapest signature under an assignment."""
        key = (factor.key, tuple(assignment[choice.index] for choice in factor.scope))
        if key not in self._best:
            self._best[key] = factor.best(self, assignment)
        return self._best[key]
