"""Search and LP in turns: a program at ratios, ratios for the program, and what is kept of both."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import numpy as np

from shardwright.cost.bill import Item, Tally, seconds
from shardwright.cost.memory.liveness import Footprint
from shardwright.cost.model import CostModel
from shardwright.cost.share_cost import Floats
from shardwright.ir.program import Program
from shardwright.synth.prices.lists import PriceList
from shardwright.synth.prices.tables import Prices
from shardwright.synth.programs.judge import Judge
from shardwright.synth.programs.ledger import Ledger
from shardwright.synth.search.priced import SpaceSolver
from shardwright.synth.search.solution import SAME, Rival, Solution
from shardwright.synth.shares.ratios import solve_ratios
from shardwright.synth.shares.rounding import round_ratios
from shardwright.synth.space.factors import Use
from shardwright.synth.space.space import Space
from shardwright.synth.timer import Timer

MOST_TURNS = 4


def starts(model: CostModel) -> list[Floats]:
    """Shares per class to start from: even, by arithmetic, by memory bandwidth."""
    speeds = (
        np.ones(len(model.types)),
        np.array([device.flop_rate("float32", None)[0] for device in model.types]),
        np.array([device.bandwidth_byte_per_s for device in model.types]),
    )
    found: list[Floats] = []
    for speed in speeds:
        shares = speed / float(model.counts @ speed)
        if not any(np.allclose(shares, other, rtol=1e-3) for other in found):
            found.append(shares)
    return found


def starting_ratios(
    model: CostModel, first: tuple[float, ...] | None, *, alone: bool
) -> Iterator[tuple[float, ...] | None]:
    """Ratios to start from; None for those that the best program at the floors likes, if `alone` only these.

    Args:
        model: prices.
        first: ratios that come before all others.
        alone: whether any other start would lead to the same.
    """
    if first is not None and len(model.types) > 1:
        yield first
    yield None
    if len(model.types) > 1 and not alone:
        for shares in starts(model):
            yield tuple(float(shares[c]) for c in model.class_of)


@dataclass(frozen=True, slots=True)
class Found:
    """A program (as an assignment) at ratios.

    Attributes:
        solution: what the search found.
        prices: those it was found at.
        ratios: those it does best at.
        cost_s: what it costs there, by the ledger.
    """

    solution: Solution
    prices: Prices
    ratios: tuple[float, ...]
    cost_s: float


class Turns:
    """Search and LP in turns; remembers what was tried.

    Attributes:
        weighed: every program that was priced together with its memory.
    """

    def __init__(
        self,
        space: Space,
        listed: PriceList,
        timer: Timer,
        solver: SpaceSolver,
        stop: Callable[[], bool],
        judge: Judge,
        extra: Sequence[Use] = (),
        known: Mapping[tuple[float, ...], Prices] | None = None,
    ) -> None:
        self.judge, self.extra, self._known = judge, extra, known or {}
        self.weighed: list[Candidate] = []
        #: What was put in another order last, and the `InTurn` of `synth/memory/lean.py` that did, if any.
        self.in_order: tuple[Program, Any] | None = None
        self.space, self.listed, self.timer, self.solver, self.stop = space, listed, timer, solver, stop
        self.model = listed.model
        self.expanded = self.searches = 0
        self._seen: dict[tuple[float, ...], tuple[Solution, Prices]] = {}
        #: By ratios to start from, and by what is executed how often: ratios that are best, and the cost.
        self._best: dict[tuple[object, ...], tuple[tuple[float, ...], float]] = {}

    @cached_property
    def ledger(self) -> Ledger:
        """Bills of assignments."""
        return Ledger(self.space.uses)

    def search(self, ratios: tuple[float, ...], rival: Found | None = None) -> tuple[Solution, Prices]:
        """The best program at some ratios: a rival that likes them, where nothing is seen to cost less."""
        if ratios not in self._seen:
            other: Rival | None = None
            if rival is not None:
                other = Rival(rival.solution.assignment, rival.cost_s, rival.solution.expanded)
            with self.timer.search():
                prices = self._known.get(ratios) or Prices.at(self.listed, ratios)
                solution = self.solver.solve(prices, stop=self.stop, rival=other)
            self.expanded, self.searches = self.expanded + solution.expanded, self.searches + 1
            self._seen[ratios] = solution, prices
        return self._seen[ratios]

    def best_ratios(
        self, items: list[Item], ratios: tuple[float, ...], memory: Footprint | None = None
    ) -> tuple[tuple[float, ...], float]:
        """The LP's ratios after rounding, or `ratios` themselves, whichever is better; and the cost there."""
        model, tally = self.model, Tally(items, self.model)

        @cache
        def price(at: tuple[float, ...]) -> tuple[bool, float]:
            return memory is not None and self.judge.over(memory, at) > 1, tally.seconds(at)

        per_class = np.array([ratios[c.members[0]] for c in model.classes])
        solved = solve_ratios(items, model, per_class, memory, self.judge.budgets)
        if not solved.ok and memory is not None:
            solved = solve_ratios(items, model, per_class)
        options = [ratios]
        if solved.ok:
            options.append(round_ratios(items, model, solved.shares, price))
        best = min(options, key=price)
        return best, price(best)[1]

    def _liked(
        self, assignment: Sequence[int], prices: Prices, ratios: tuple[float, ...]
    ) -> tuple[tuple[float, ...], float]:
        """`best_ratios` of an assignment, found at these prices; equal bills are looked at once."""
        lines = self.ledger.lines(assignment, prices)
        key = ratios, frozenset(lines.items())
        if key not in self._best:
            self._best[key] = self.best_ratios(self.ledger.items(lines, prices), ratios)
        return self._best[key]

    def like(self, ideal: Solution, floors: Prices) -> Found:
        """The cheapest program at the floors of all prices, at the ratios it likes.

        The floors bound the prices at any ratios: where it costs no more there, no search at these ratios
        would find anything better, and none is made. Where all devices are alike, that is mostly so of even
        ratios, whatever the program.
        """
        even = (1.0 / len(self.model.class_of),) * len(self.model.class_of)
        with self.timer.ratios():
            if self._are_prices_at(even, floors):
                ratios, cost_s = even, ideal.seconds
            else:
                ratios, cost_s = self._liked(ideal.assignment, floors, even)
        if ideal.bound_s == ideal.seconds and cost_s <= ideal.seconds * (1 + SAME):
            self.expanded, self.searches = self.expanded + ideal.expanded, self.searches + 1
            self._seen.setdefault(ratios, (ideal, floors))
        return Found(ideal, floors, ratios, cost_s)

    def _are_prices_at(self, even: tuple[float, ...], floors: Prices) -> bool:
        """Whether devices are alike, and nothing costs more at even ratios than under shares of its own."""
        if len(self.model.counts) > 1:
            return False
        here = Prices.at(self.listed, even).seconds
        return bool((here <= floors.seconds * (1 + SAME)).all())

    def take(self, ratios: tuple[float, ...]) -> Found:
        """Turns from `ratios` on, until it no longer gets better.

        Where a program likes the ratios best at which it was found, the next turn would be the same again.
        """
        reached: Found | None = None
        for _ in range(MOST_TURNS):
            searched = ratios
            solution, prices = self.search(ratios)
            with self.timer.ratios():
                ratios, cost_s = self._liked(solution.assignment, prices, ratios)
            if reached is not None and not cost_s < reached.cost_s * (1 - 1e-9):
                break
            reached = Found(solution, prices, ratios, cost_s)
            if ratios == searched or self.stop():
                break
        assert reached is not None
        return reached


@dataclass(frozen=True, slots=True)
class Candidate:
    """A program at ratios; one that fits the devices' memory is better than any that does not.

    `over` is the largest part of its memory that a device would need.
    """

    program: Program
    ratios: tuple[float, ...]
    cost_s: float
    fits: bool
    items: tuple[Item, ...]
    memory: Footprint
    over: float

    def beats(self, other: Candidate | None) -> bool:
        if other is None or self.fits != other.fits:
            return other is None or self.fits
        return self.cost_s < other.cost_s * (1 - 1e-9)


@dataclass(frozen=True, slots=True)
class Billed:
    """A program, the ratios that it was found at, its bill and its footprint by the model."""

    program: Program
    ratios: tuple[float, ...]
    items: Sequence[Item]
    memory: Footprint


def candidate(
    turns: Turns,
    program: Program,
    ratios: tuple[float, ...],
    items: list[Item],
    memory: Footprint,
    cost_s: float | None = None,
) -> Candidate:
    """A program at ratios, with what it costs and whether the model has it fit; noted among those weighed.

    `cost_s` is what it costs there, if that is known.
    """
    over = turns.judge.over(memory, ratios)
    cost_s = seconds(items, turns.model, ratios) if cost_s is None else cost_s
    found = Candidate(program, ratios, cost_s, over <= 1, tuple(items), memory, over)
    turns.weighed.append(found)
    return found
