"""Price lists: every instruction that a program of a space could contain, and what it costs on a fleet.

    Catalogue   the lines, whatever the fleet
    PriceList   what they cost on one fleet, or on a part of it, as one stack of costs

A catalogue is made once per step, a price list once per part of a fleet.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from shardwright.cost.bill import Cut, Item
from shardwright.cost.kernels.contractions import Sizes
from shardwright.cost.lines import Beats, Exchange, Grouped, Line, kernel_lines
from shardwright.cost.model import CostModel
from shardwright.cost.op_classes import PRODUCTS
from shardwright.cost.share_cost import CostStack
from shardwright.ir.collectives import Collective, between
from shardwright.ir.graph import TensorType
from shardwright.ir.placement import Placement, Shard
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


class _Pair(NamedTuple):
    """Two placements with a move from one to the other.

    Attributes:
        kind: the collective that moves.
        local: whether nothing is sent.
        strategies: to choose from.
        cut: the placement whose stretches are sent.
    """

    kind: str
    local: bool
    strategies: tuple[str, ...]
    cut: Shard | None


#: Pairs of some placements, and the positions of both among these.
_Among: TypeAlias = tuple[tuple[_Pair, ...], NDArray[np.intp], NDArray[np.intp]]


class Catalogue:
    """The lines of all instructions asked for so far; equal instructions that cut equal axes are one line."""

    def __init__(self) -> None:
        self.lines: list[Line] = []
        self.units: list[int] = []
        self._numbers: dict[tuple[Line, int], int] = {}
        self._moves: dict[tuple[Routes, ...], Moves] = {}
        self._grouped: dict[tuple[int, int], tuple[Grouped, NDArray[np.int64], NDArray[np.bool_]]] = {}
        self._pairs: dict[tuple[Placement, Placement], _Pair | None] = {}
        self._pairs_among: dict[tuple[Placement, ...], _Among] = {}
        self._of_exchanges: dict[tuple[str, int, int], tuple[int, ...]] = {}
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
                kernels = list(kernel_lines(equation, factor.rule, factor.signatures, factor.traffic))
                # Equal ones are one object, and take a while to compare.
                distinct = {id(kernel): kernel for kernel in kernels}
                line = {k: self.line(kernel, kernel.units if kernel else 0) for k, kernel in distinct.items()}
                numbers = [line[id(kernel)] for kernel in kernels]
                found = self._of_kernels[key] = np.array(numbers, dtype=np.intp)
            self._kernels[factor] = found
        return found

    def moves(self, routes: tuple[Routes, ...]) -> Moves:
        """All single moves between placements of some tensors; all prices of a space ask for the same."""
        found = self._moves.get(routes)
        if found is None:
            among = [self._among(r.placements) for r in routes]
            lines = [
                self._exchanged(r.type, pair)
                for r, (pairs, *_) in zip(routes, among, strict=True)
                for pair in pairs
            ]
            counts = [len(each) for each in lines]
            none = np.zeros(0, dtype=np.intp)
            found = self._moves[routes] = Moves(
                np.array([line for each in lines for line in each], dtype=np.intp),
                np.cumsum([0, *counts[:-1]], dtype=np.intp),
                tuple([pair.kind for pairs, *_ in among for pair in pairs]),
                np.repeat(np.arange(len(routes)), [len(pairs) for pairs, *_ in among]),
                np.concatenate([none, *[pre for _, pre, _ in among]]),
                np.concatenate([none, *[post for _, _, post in among]]),
            )
        return found

    def step(self, tensor: TensorType, pre: Placement, post: Placement) -> Step | None:
        """The move from `pre` to `post`, None where there is none."""
        pair = self._pair(pre, post)
        if pair is None:
            return None
        lines = self._exchanged(tensor, pair)
        return Step(pair.kind, pre, post, pair.strategies, lines)

    def _among(self, placements: tuple[Placement, ...]) -> _Among:
        """The pairs of these placements with a move from one to the other, and where they are."""
        found = self._pairs_among.get(placements)
        if found is None:
            pairs: list[_Pair] = []
            ends: list[tuple[int, int]] = []
            for at in permutations(range(len(placements)), 2):
                pair = self._pair(*[placements[k] for k in at])
                if pair is not None:
                    pairs.append(pair)
                    ends.append(at)
            pre, post = np.array(ends, dtype=np.intp).reshape(-1, 2).T
            found = self._pairs_among[placements] = tuple(pairs), pre, post
        return found

    def _pair(self, pre: Placement, post: Placement) -> _Pair | None:
        if (pre, post) not in self._pairs:
            found = between(pre, post)
            pair: _Pair | None = None
            if found is not None:
                cut = next((p for p in (pre, post) if isinstance(p, Shard)), None)
                pair = _Pair(found.kind, found.local, self.strategies(found), cut)
            self._pairs[pre, post] = pair
        return self._pairs[pre, post]

    def strategies(self, collective: Collective) -> tuple[str, ...]:
        """Those that a move may choose from: all that there are."""
        return collective.strategies

    def _exchanged(self, tensor: TensorType, pair: _Pair) -> tuple[int, ...]:
        """The lines of moving a tensor, one per strategy."""
        kind, local, names, cut = pair
        if local:
            return (self.line(None, 0),) * len(names)
        nbytes, units = tensor.nbytes, 0 if cut is None else tensor.shape[cut.dim] // cut.unit
        key = kind, nbytes, units
        found = self._of_exchanges.get(key)
        if found is None:
            lines = [self.line(Exchange(kind, name, nbytes), units) for name in names]
            found = self._of_exchanges[key] = tuple(lines)
        return found


def is_tied(line: Line) -> bool:
    """Whether what is cut there is cut by the plan's ratios, whatever other ratios a program has.

    Contractions are, stages, and what is exchanged between two sharded placements (see `synth/segments.py`).
    """
    if isinstance(line, Exchange):
        return line.kind == "all_to_all"
    return isinstance(line, Beats) or (line is not None and line.op_class in PRODUCTS)


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
        #: Lines whose products are priced.
        self.learned = 0

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


def learn_products(lists: Sequence[PriceList], known: int = 0) -> None:
    """Price the products that lists of one catalogue ask for, from line number `known` on, in one go."""
    wanted: dict[tuple[str, bool], list[Sizes]] = {}
    lines, *_ = lists[0].catalogue.since(known)
    fresh = [each for each in lists if each.learned < len(each)]
    for each in fresh:
        each.learned = len(each)
        for key, shapes in each.model.products_of(lines.kernels).items():
            wanted.setdefault(key, []).extend(shapes)
    lists[0].model.learn(wanted)
