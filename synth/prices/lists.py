"""Price lists: every instruction that a program of a space could contain, and what it costs on a fleet.

    Catalogue   the lines, whatever the fleet
    PriceList   what they cost on one fleet, or on a part of it, as one stack of costs

A catalogue is made once per step, a price list once per part of a fleet.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from shardwright.cost.bill import Cut, Item, cut_of
from shardwright.cost.lines import Exchange, Grouped, Line, kernel_lines
from shardwright.cost.model import CostModel
from shardwright.cost.op_classes import PRODUCTS
from shardwright.cost.share_cost import CostStack
from shardwright.ir.collectives import Collective, between
from shardwright.ir.graph import TensorType
from shardwright.ir.placement import Placement
from shardwright.synth.space.conversions import Routes
from shardwright.synth.space.factors import EquationFactor


@dataclass(frozen=True, slots=True)
class Step:
    """One move between two placements: its strategies as lines of the price list."""

    kind: str
    pre: Placement
    post: Placement
    strategies: tuple[str, ...]
    lines: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Moves:
    """The single moves of several routes, as arrays: their lines, one stretch of strategies per move."""

    lines: NDArray[np.intp]
    starts: NDArray[np.intp]
    kinds: tuple[str, ...]
    routes: NDArray[np.intp]
    pre: NDArray[np.intp]
    post: NDArray[np.intp]


class Listed(Protocol):
    """A price list, as `Prices` reads it: of programs on one mesh axis, or on two."""

    @property
    def model(self) -> CostModel:
        """Prices on one axis."""
        ...

    def __len__(self) -> int:
        """Lines so far."""
        ...

    def fresh(self, known: int) -> tuple[Any, ...]:
        """The lines from number `known` on: a stack of their costs, and how each is cut."""
        ...

    def kernels(self, factor: EquationFactor) -> NDArray[np.intp]:
        """The lines of an equation's kernels, one per signature."""
        ...

    def moves(self, routes: tuple[Routes, ...]) -> Moves:
        """All single moves between placements of some tensors."""
        ...

    def step(self, tensor: TensorType, pre: Placement, post: Placement) -> Step | None:
        """The move from `pre` to `post`, None where there is none."""
        ...


class Catalogue:
    """The lines of all instructions asked for so far; equal instructions that cut equal axes are one line."""

    def __init__(self) -> None:
        self.lines: list[Line] = []
        self.units: list[int] = []
        self._numbers: dict[tuple[Line, int], int] = {}
        self._moves: dict[tuple[Routes, ...], Moves] = {}
        self._grouped: dict[tuple[int, int], tuple[Grouped, NDArray[np.int64], NDArray[np.bool_]]] = {}
        self._steps: dict[Routes, tuple[Step, ...]] = {}
        self._between: dict[tuple[Placement, Placement], Collective | None] = {}
        self._kernels: dict[EquationFactor, NDArray[np.intp]] = {}
        self._of_kernels: dict[tuple[object, ...], NDArray[np.intp]] = {}

    def line(self, line: Line, units: int) -> int:
        """The number of an instruction that cuts an axis of so many units (0: none)."""
        key = (line, units if line is not None else 0)
        found = self._numbers.get(key)
        if found is None:
            found = self._numbers[key] = len(self.lines)
            self.lines.append(line)
            self.units.append(key[1])
        return found

    def since(self, known: int) -> tuple[Grouped, NDArray[np.int64], NDArray[np.bool_]]:
        """The lines from number `known` on, for all parts of a fleet: see `PriceList.fresh`."""
        key = (known, len(self.lines))
        if key not in self._grouped:
            lines = self.lines[known:]
            units = np.array(self.units[known:], dtype=np.int64)
            tied = np.array([is_tied(line) for line in lines], dtype=np.bool_)
            self._grouped[key] = Grouped.of(lines), units, tied
        return self._grouped[key]

    def kernels(self, factor: EquationFactor) -> NDArray[np.intp]:
        """The lines of an equation's kernels, one per signature."""
        found = self._kernels.get(factor)
        if found is None:
            equation = factor.equation
            key = (equation.form, id(factor.rule), id(factor.signatures), factor.traffic)
            found = self._of_kernels.get(key)
            if found is None:
                kernels = kernel_lines(equation, factor.rule, factor.signatures, factor.traffic)
                numbers = [self.line(kernel, 0 if kernel is None else kernel.units) for kernel in kernels]
                found = self._of_kernels[key] = np.array(numbers, dtype=np.intp)
            self._kernels[factor] = found
        return found

    def steps(self, routes: Routes) -> tuple[Step, ...]:
        """All single moves between placements of a tensor."""
        found = self._steps.get(routes)
        if found is None:
            pairs = [(a, b) for a in routes.placements for b in routes.placements if a != b]
            steps = (self.step(routes.type, a, b) for a, b in pairs)
            found = self._steps[routes] = tuple([step for step in steps if step is not None])
        return found

    def moves(self, routes: tuple[Routes, ...]) -> Moves:
        """All single moves between placements of some tensors; all prices of a space ask for the same."""
        found = self._moves.get(routes)
        if found is None:
            flat = [(k, r, step) for k, r in enumerate(routes) for step in self.steps(r)]
            counts = [len(step.lines) for _, _, step in flat]
            found = self._moves[routes] = Moves(
                np.array([line for _, _, step in flat for line in step.lines], dtype=np.intp),
                np.cumsum([0, *counts[:-1]], dtype=np.intp),
                tuple([step.kind for _, _, step in flat]),
                np.array([k for k, _, _ in flat], dtype=np.intp),
                np.array([r.index[step.pre] for _, r, step in flat], dtype=np.intp),
                np.array([r.index[step.post] for _, r, step in flat], dtype=np.intp),
            )
        return found

    def step(self, tensor: TensorType, pre: Placement, post: Placement) -> Step | None:
        """The move from `pre` to `post`, None where there is none."""
        pair = pre, post
        if pair not in self._between:
            self._between[pair] = between(pre, post)
        collective = self._between[pair]
        if collective is None:
            return None
        kind, nbytes, names = collective.kind, tensor.nbytes, collective.strategies
        if collective.local:
            lines = [self.line(None, 0) for _ in names]
        else:
            cut = cut_of((tensor, tensor), (pre, post))
            units = 0 if cut is None else cut[0] // cut[1]
            lines = [self.line(Exchange(kind, name, nbytes, pre, post), units) for name in names]
        return Step(kind, pre, post, names, tuple(lines))


def is_tied(line: Line) -> bool:
    """Whether what is cut there is cut by the plan's ratios, whatever other ratios a program has.

    Contractions are, and what is exchanged between two sharded placements (see `synth/segments.py`).
    """
    if isinstance(line, Exchange):
        return line.kind == "all_to_all"
    return line is not None and line.op_class in PRODUCTS


class PriceList:
    """What the lines of a catalogue cost on one fleet.

    Args:
        model: prices instructions.
        catalogue: of the lines; one of its own by default.
    """

    def __init__(self, model: CostModel, catalogue: Catalogue | None = None) -> None:
        self.model = model
        self.catalogue = catalogue or Catalogue()
        self.kernels = self.catalogue.kernels
        self.step = self.catalogue.step
        self.moves = self.catalogue.moves
        self._stack: CostStack | None = None

    def __len__(self) -> int:
        return len(self.catalogue.lines)

    def fresh(self, known: int) -> tuple[CostStack, NDArray[np.int64], NDArray[np.bool_]]:
        """The lines from number `known` on.

        Returns:
            Costs, units of the axis each cuts (0: none), and whether that is cut by the plan's ratios.
        """
        stack = self.stack()
        _, units, tied = self.catalogue.since(known)
        return (stack.take(np.arange(known, len(self))) if known else stack), units, tied

    def stack(self) -> CostStack:
        """The costs of all lines so far."""
        stack = self._stack
        known = 0 if stack is None else len(stack.constant)
        if stack is None or known < len(self):
            fresh = self.model.costs(self.catalogue.since(known)[0])
            stack = self._stack = fresh if stack is None else CostStack.joined((stack, fresh))
        return stack

    def item(self, line: int, label: str, weight: float, exchange: bool) -> Item:
        """A line of a bill."""
        cost, units = self.model.cost(self.catalogue.lines[line]), self.catalogue.units[line]
        return Item(label, cost, weight, Cut(units or 1, 1), exchange)
