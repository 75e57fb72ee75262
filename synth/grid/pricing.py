"""Price lists of programs on two mesh axes; see `synth/prices/tables.py` and `cost/grid/prices.py`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from shardwright.cost.grid.floor import Ranges, floors
from shardwright.cost.grid.kernels import grid_cut
from shardwright.cost.grid.model import GridModel
from shardwright.cost.grid.prices import WHOLE, GridCut, GridShares, GridStack
from shardwright.cost.model import CostModel, kernel_key
from shardwright.cost.share_cost import Floats
from shardwright.ir.collectives import between
from shardwright.ir.graph import TensorType
from shardwright.ir.placement import Placement, Shard, components
from shardwright.ir.rules import flop_count
from shardwright.synth.prices.lists import Moves, Step
from shardwright.synth.prices.tables import Prices
from shardwright.synth.space.conversions import Routes
from shardwright.synth.space.factors import EquationFactor, Factor


@dataclass(frozen=True, slots=True, eq=False)
class _Pattern:
    """All single moves between some placements, whatever the tensor.

    Attributes:
        kinds: of the moves.
        pre, post: positions of each one's placements.
        costs: what costs something of its own: what the price depends on, strategy, and a move that takes it.
        cuts: placements of moves that cut in ways of their own.
        cost, cut: numbers of these, of every strategy of every move.
        counts: strategies of every move.
    """

    kinds: tuple[str, ...]
    pre: NDArray[np.intp]
    post: NDArray[np.intp]
    costs: tuple[tuple[tuple[object, ...], str, str, Placement, Placement], ...]
    cuts: tuple[tuple[Placement, Placement], ...]
    cost: NDArray[np.int64]
    cut: NDArray[np.intp]
    counts: NDArray[np.intp]


@dataclass(frozen=True, slots=True)
class _Single:
    """One single move: its kind, placements and their positions, what its price depends on, and its cut."""

    kind: str
    pre: Placement
    post: Placement
    at: tuple[int, int]
    what: tuple[object, ...]
    cut: int


#: A line's cost and cut as one number.
_SHIFT = 32
_MASK = (1 << _SHIFT) - 1

#: All single moves between some placements, whatever the fleet and the tensor, and a move of every cut.
KnownMoves: TypeAlias = dict[
    tuple[Placement, ...], tuple[Sequence[_Single], tuple[tuple[Placement, Placement], ...]]
]


class GridPriceList:
    """The lines of all instructions asked for so far; equal costs of equally cut tensors are one line.

    Attributes:
        cuts: how each line cuts its tensors.

    Args:
        grid: prices them.
        between: single moves found by other lists, and by this one.
    """

    def __init__(self, grid: GridModel, between: KnownMoves | None = None) -> None:
        self.grid = grid
        self._between: KnownMoves = {} if between is None else between
        self.cuts: list[GridCut] = []
        self._cost_of: list[int] = []
        self._blocks: list[Floats] = []
        self._varies: list[bool] = []
        self._numbers: dict[tuple[object, ...], int] = {}
        self._ways = [WHOLE]
        self._known_ways = {WHOLE: 0}
        self._lines: dict[int, int] = {}
        self._moves: dict[tuple[Routes, ...], Moves] = {}
        self._patterns: dict[tuple[Placement, ...], _Pattern] = {}
        self._kernels: dict[tuple[object, ...], NDArray[np.intp]] = {}
        self._of_factor: dict[EquationFactor, NDArray[np.intp]] = {}
        self._stack: GridStack | None = None

    @property
    def model(self) -> CostModel:
        """Prices on one axis."""
        return self.grid.model

    @cached_property
    def floors(self) -> Prices:
        """What every instruction costs at least, under shares of its own."""
        return grid_floors(self)

    @cached_property
    def even(self) -> Prices:
        """What every instruction costs at even shares on both axes."""
        mesh = self.grid.mesh
        return grid_prices(self, mesh.ratios(*mesh.even()))

    def __len__(self) -> int:
        return len(self.cuts)

    def fresh(self, known: int) -> tuple[GridStack, Sequence[GridCut]]:
        """The lines from number `known` on: their costs, and how each is cut."""
        return self.stack().take(np.arange(known, len(self.cuts))), self.cuts[known:]

    def stack(self) -> GridStack:
        """The costs of all lines so far."""
        if self._stack is None or len(self._stack.terms) < len(self.cuts):
            costs = GridStack.of(self._blocks)
            self._blocks = [costs.terms]
            self._stack = costs.take(np.array(self._cost_of, dtype=np.intp))
        return self._stack

    def _add(self, terms: Floats) -> range:
        """Numbers of further costs, (costs, features, rows, classes)."""
        self._blocks.append(terms)
        known = len(self._varies)
        self._varies += (np.abs(terms[:, 1:]).max(axis=(1, 2, 3)) > 0).tolist()
        return range(known, len(self._varies))

    def _lines_at(self, codes: Sequence[int]) -> list[int]:
        """The lines of different instructions, by the number of their cost, shifted, and that of their cut.

        Those that are new are added. The cut of what does not vary is 0.
        """
        fresh = [code for code in codes if code not in self._lines]
        self._lines.update(zip(fresh, range(len(self.cuts), len(self.cuts) + len(fresh)), strict=True))
        self._cost_of += [code >> _SHIFT for code in fresh]
        self.cuts += [self._ways[code & _MASK] for code in fresh]
        return [self._lines[code] for code in codes]

    def kernels(self, factor: EquationFactor) -> NDArray[np.intp]:
        """The lines of an equation's kernels, one per signature."""
        if factor not in self._of_factor:
            self._of_factor[factor] = self._priced(factor)
        return self._of_factor[factor]

    def _priced(self, factor: EquationFactor) -> NDArray[np.intp]:
        """The same, for a factor that was not asked for before."""
        equation = factor.equation
        flop = flop_count(factor.rule, equation)
        key = (*kernel_key(equation, flop), id(factor.signatures), factor.traffic)
        found = self._kernels.get(key)
        if found is None:
            priced = self.grid.kernels(equation, factor.rule, factor.signatures, factor.traffic)
            known = len(self.cuts)
            costs = self._add(priced.terms)
            self._cost_of += costs
            each = zip(costs, priced.cuts, strict=True)
            self.cuts += [cut if self._varies[cost] else WHOLE for cost, cut in each]
            found = self._kernels[key] = known + priced.at
        return found

    def learn(self, factors: Iterable[Factor]) -> None:
        """Price the products of equations ahead, all in one go."""
        equations = [factor for factor in factors if isinstance(factor, EquationFactor)]
        self.grid.learn((f.equation, f.rule, f.signatures, f.traffic) for f in equations)

    def moves(self, routes: tuple[Routes, ...]) -> Moves:
        """All single moves between placements of some tensors."""
        found = self._moves.get(routes)
        if found is None:
            patterns = [self._pattern(r.placements) for r in routes]
            self._price(routes, patterns)
            found = self._moves[routes] = Moves(
                self._lines_of(routes, patterns),
                np.cumsum([0, *[count for p in patterns for count in p.counts.tolist()][:-1]], dtype=np.intp),
                tuple([kind for p in patterns for kind in p.kinds]),
                np.repeat(np.arange(len(routes)), [len(p.kinds) for p in patterns]),
                np.concatenate([p.pre for p in patterns]),
                np.concatenate([p.post for p in patterns]),
            )
        return found

    def _pattern(self, placements: tuple[Placement, ...]) -> _Pattern:
        found = self._patterns.get(placements)
        if found is None:
            singles, cutting = self._singles(placements)
            costs: dict[tuple[tuple[object, ...], str], int] = {}
            priced: list[tuple[tuple[object, ...], str, str, Placement, Placement]] = []
            names: dict[tuple[object, ...], tuple[str, ...]] = {}
            moves: list[tuple[str, int, int, int]] = []
            cost: list[int] = []
            cut: list[int] = []
            for one in singles:
                kind, what = one.kind, one.what
                if (kind, *what) not in names:
                    names[kind, *what] = self.grid.strategies(kind, one.pre, one.post)
                mine = names[kind, *what]
                for name in mine:
                    if (what, name) not in costs:
                        costs[what, name] = len(costs)
                        priced.append((what, name, kind, one.pre, one.post))
                    cost.append(costs[what, name])
                cut += [one.cut] * len(mine)
                moves.append((kind, *one.at, len(mine)))
            kinds, pre, post, counts = zip(*moves, strict=True) if moves else ((), (), (), ())
            found = self._patterns[placements] = _Pattern(
                kinds,
                np.array(pre, dtype=np.intp),
                np.array(post, dtype=np.intp),
                tuple(priced),
                cutting,
                np.array(cost, dtype=np.int64),
                np.array(cut, dtype=np.intp),
                np.array(counts, dtype=np.intp),
            )
        return found

    def _singles(
        self, placements: tuple[Placement, ...]
    ) -> tuple[Sequence[_Single], tuple[tuple[Placement, Placement], ...]]:
        """See `KnownMoves`."""
        found = self._between.get(placements)
        if found is None:
            cuts: dict[object, int] = {}
            cutting: list[tuple[Placement, Placement]] = []
            singles: list[_Single] = []
            for i, j in _steps(placements):
                a, b = placements[i], placements[j]
                collective = between(a, b)
                if collective is None:
                    continue
                way = _cutting(a, b)
                if way not in cuts:
                    cuts[way] = len(cuts)
                    cutting.append((a, b))
                what = self.grid.what(collective.kind, a, b)
                singles.append(_Single(collective.kind, a, b, (i, j), what, cuts[way]))
            found = self._between[placements] = singles, tuple(cutting)
        return found

    def _price(self, routes: Sequence[Routes], patterns: Sequence[_Pattern]) -> None:
        """Price moves of all tensors that are new, those that differ in nothing but bytes at once."""
        wanted: dict[tuple[tuple[object, ...], str], tuple[str, Placement, Placement, dict[int, None]]] = {}
        seen: set[tuple[int, int]] = set()
        for r, pattern in zip(routes, patterns, strict=True):
            size = r.type.nbytes
            if (id(pattern), size) in seen:
                continue
            seen.add((id(pattern), size))
            for what, name, kind, pre, post in pattern.costs:
                if (what, name, size) not in self._numbers:
                    wanted.setdefault((what, name), (kind, pre, post, {}))[3][size] = None
        for (what, name), (kind, pre, post, nbytes) in wanted.items():
            numbers = self._add(self.grid.moves(kind, name, list(nbytes), pre, post))
            self._numbers.update(((what, name, n), k) for n, k in zip(nbytes, numbers, strict=True))

    def _lines_of(self, routes: Sequence[Routes], patterns: Sequence[_Pattern]) -> NDArray[np.intp]:
        """The lines of all strategies of all moves, route by route."""
        costs: list[NDArray[np.int64]] = []
        cuts: list[NDArray[np.intp]] = []
        known: dict[tuple[int, int], NDArray[np.int64]] = {}
        for r, pattern in zip(routes, patterns, strict=True):
            mine = id(pattern), r.type.nbytes
            if mine not in known:
                numbers = [self._numbers[what, name, r.type.nbytes] for what, name, *_ in pattern.costs]
                known[mine] = np.array(numbers, dtype=np.int64)[pattern.cost]
            ways = [self._cut(r.type, *placements) for placements in pattern.cuts]
            costs.append(known[mine])
            cuts.append(np.array(ways, dtype=np.intp)[pattern.cut])
        cost, cut = np.concatenate(costs), np.concatenate(cuts)
        cut[~np.array(self._varies)[cost]] = 0
        codes, at = np.unique(cost << _SHIFT | cut, return_inverse=True)
        return np.array(self._lines_at(codes.tolist()), dtype=np.intp)[at.reshape(-1)]

    def _cut(self, tensor: TensorType, pre: Placement, post: Placement) -> int:
        """The number of how a move cuts a tensor."""
        way = grid_cut((tensor, tensor), (pre, post))
        found = self._known_ways.get(way)
        if found is None:
            found = self._known_ways[way] = len(self._ways)
            self._ways.append(way)
        return found

    def step(self, tensor: TensorType, pre: Placement, post: Placement) -> Step | None:
        """The move from `pre` to `post`, None where there is none."""
        collective = between(pre, post)
        if collective is None:
            return None
        kind, what = collective.kind, self.grid.what(collective.kind, pre, post)
        names, cut = self.grid.strategies(kind, pre, post), self._cut(tensor, pre, post)
        for name in names:
            if (what, name, tensor.nbytes) not in self._numbers:
                (number,) = self._add(self.grid.moves(kind, name, [tensor.nbytes], pre, post))
                self._numbers[what, name, tensor.nbytes] = number
        costs = [self._numbers[what, name, tensor.nbytes] for name in names]
        codes = [cost << _SHIFT | (cut if self._varies[cost] else 0) for cost in costs]
        return Step(kind, pre, post, names, tuple(self._lines_at(codes)))


def _steps(placements: Sequence[Placement]) -> list[tuple[int, int]]:
    """Pairs of placements that one move may lead between (see `step`), by their positions.

    One axis stays, or both change alike: most pairs need not be looked at.
    """
    numbers: dict[Placement, int] = {}
    pairs = [components(p) for p in placements]
    coded = np.array([[numbers.setdefault(p, len(numbers)) for p in pair] for pair in pairs])
    across, within = coded.reshape(-1, 2).T
    same, both = across == within, (across[:, None] == across) | (within[:, None] == within)
    both |= same[:, None] & same
    np.fill_diagonal(both, val=False)
    found = [each.tolist() for each in both.nonzero()]
    return list(zip(*found, strict=True))


def _cutting(pre: Placement, post: Placement) -> object:
    """What a move's cuts depend on besides the tensor."""
    (across, within), (to_across, to_within) = components(pre), components(post)
    nested = any(
        isinstance(a, Shard) and isinstance(w, Shard) and a.dim == w.dim
        for a, w in ((across, within), (to_across, to_within))
    )
    cut = (
        across if isinstance(across, Shard) else to_across,
        within if isinstance(within, Shard) else to_within,
    )
    return (*[p if isinstance(p, Shard) else None for p in cut], nested)


def grid_prices(listed: GridPriceList, ratios: Sequence[float]) -> Prices:
    """Prices at the shares per device that `ratios` round to, axis by axis."""
    return Prices(listed, GridShares(ratios, listed.grid.mesh).stack)


def grid_floors(listed: GridPriceList, ranges: Ranges | None = None) -> Prices:
    """What every instruction costs at least, under shares of its own.

    Args:
        listed: the price list.
        ranges: in which the nodes' shares lie; None for any.
    """
    mesh = listed.grid.mesh

    def evaluate(stack: GridStack, cuts: Sequence[GridCut]) -> Floats:
        return floors(stack, cuts, mesh, ranges)

    return Prices(listed, evaluate)
