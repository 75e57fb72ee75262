"""Rent for what is in memory when it is full: where all that is kept paying alike leaves a wide gap.

`within.py` charges everything that is kept for the backward part, whenever it is there. Where the plan
that was found so is far above its bound, or none fits, rent is charged once more, now from those tensors
alone that are there at moments when a device needs more than it has, as the program will run; the more it
lacks, the more. Every round finds the best program under the rents so far, and adds to those of the tensors
in its way. Where rounds jump between a program that is a little too large and one that is far dearer, the
former is tried at other ratios, and the tensors in its way are made dear one by one: what changes with one of
them lies between.

It comes after `within`, and is for steps that are searched in a moment: no two choices share a rent, so
that equal layers are not folded.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np

from shardwright.cost.bill import bill
from shardwright.cost.memory.liveness import Footprint, Peaks
from shardwright.cost.share_cost import Floats
from shardwright.ir.graph import Graph, Value
from shardwright.ir.placement import Shard
from shardwright.synth.memory.rent import RentFactor, too_small
from shardwright.synth.memory.sparing import Sparing
from shardwright.synth.prices.tables import Prices
from shardwright.synth.programs.emit import emit
from shardwright.synth.programs.judge import CloseLook
from shardwright.synth.search.priced import SpaceSolver
from shardwright.synth.shares.turns import Candidate, Turns, candidate
from shardwright.synth.space.factors import Factor, Use
from shardwright.synth.space.space import Space

#: Gap to the bound, as a fraction of the cost, beyond which this is worth its time; choices of a step at
#: most.
WIDE, MOST_CHOICES = 0.08, 1200

#: Rounds; so many without coming within this multiple of the memory, or without anything new, are enough.
_ROUNDS, _FEW_ROUNDS, _FAR = 12, 4, 1.3

#: What a round adds to rents, as a multiple of a step's cost per byte of memory, times the part of the memory
#: that is lacking, or this at least; by what it grows where a round changed nothing; and what is left of all
#: rents where a program fits.
_STEP, _LEAST, _GROWTH, _LESS = 1.2, 0.02, 2.0, 0.7

#: Programs up to this multiple of the memory, so many of them, from which tensors are made dear, by this part
#: of the cost; so many tensors, each of which has this part of what is lacking.
_LITTLE, _NEAR, _DEARER, _TENSORS, _PART = 1.1, 2, 0.1, 16, 0.25

#: Vectors of ratios that differ by no more than this anywhere are the same; looks at other ratios of a
#: program.
_APART, _ADJUSTED = 0.02, 3

#: Nodes expanded at most for a program under some rents: what memory costs there is a guess in any case.
_NODES = 1000

#: Too much memory by one part weighs as much as so many parts of the cost.
_WEIGHT = 4


@dataclass(frozen=True, slots=True, eq=False)
class _Look:
    """A program and what is in its way: of every moment that takes too much, bytes, and whose they are.

    `limit` is the memory of the device that lacks most.
    """

    found: Candidate
    peaks: Peaks
    limit: float
    crowds: Sequence[tuple[int, Mapping[int, int]]]


class _Crowds:
    """The search at some ratios; see the module's docstring."""

    def __init__(self, turns: Turns, ratios: tuple[float, ...], close: CloseLook) -> None:
        self.turns, self.ratios, self.close = turns, ratios, close
        graph, space = turns.judge.graph, turns.space
        self.prices = Prices.at(turns.listed, ratios)
        self.values = _values(graph, space)
        self.choice_of = {value.index: c for c, some in self.values.items() for value in some}
        domains = {c: space.choices[c].domain for c in self.values}
        self.factors = {c: RentFactor(domain, 0, 0) for c, domain in domains.items()}
        uses = [Use(factor, (c,)) for c, factor in self.factors.items()]
        self.solver = SpaceSolver(space, (*turns.extra, *uses))
        # A second placement is there for some of the time.
        self.cut = {
            c: np.array(
                [[isinstance(h.base, Shard), h.extra is None, isinstance(h.extra, Shard)] for h in d.holdings]
            )
            for c, d in domains.items()
        }
        self.fullest = 0
        self.known: dict[tuple[int, ...], _Look] = {}
        self.adjusted: list[_Look] = []

    def _held(self, choice: int) -> Floats:
        """[holding]: about what part of a tensor the fullest device holds of it."""
        base, alone, extra = self.cut[choice].T
        share = self.ratios[self.fullest]
        return np.where(base, share, 1.0) + np.where(alone, 0.0, np.where(extra, share, 1.0) / 2)

    def look(self, rents: Mapping[int, float]) -> _Look:
        """The best program under rents, seconds per byte by value, and what it needs as it will run."""
        turns, judge = self.turns, self.turns.judge
        tables: dict[Factor, Floats] = {}
        for choice, values in self.values.items():
            rent_s = sum(rents.get(value.index, 0.0) * value.type.nbytes for value in values)
            tables[self.factors[choice]] = rent_s * self._held(choice)
        with turns.timer.search():
            solution = self.solver.solve(self.prices, _NODES, turns.stop, tables)
            turns.searches, turns.expanded = turns.searches + 1, turns.expanded + solution.expanded
        if solution.assignment not in self.known:
            with turns.timer.ratios():
                program = emit(turns.space, solution.assignment, self.prices, turns.extra)
                sparing = Sparing(program, judge.graph)
                program = sparing.again(0) if sparing.possible else program
                memory, items = judge.footprint(program), bill(program, judge.graph, turns.model)
                found = candidate(turns, program, self.ratios, items, memory)
                peaks = judge.peaks(program, self.ratios, memory, sure=True)
                over = np.asarray(peaks.bytes) / judge.limits[turns.model.class_of]
                self.fullest = device = int(over.argmax())
                limit = float(judge.limits[turns.model.class_of[device]])
                crowds = self.close.crowds(program, self.ratios, device, limit) if over.max() > 1 else ()
                found = replace(found, over=float(over.max()), fits=bool(over.max() <= 1))
                self.known[solution.assignment] = _Look(found, peaks, limit, crowds)
        return self.known[solution.assignment]


def uncrowded(
    turns: Turns, best: Candidate, memory: Footprint | Peaks, rival_s: float = math.inf
) -> tuple[Candidate, Footprint | Peaks]:
    """A cheaper program that fits as it will run, or one that fits where none was found.

    Args:
        turns: the search so far.
        best: what it found.
        memory: of that.
        rival_s: what a plan that fits costs already.
    """
    close = turns.judge.look
    limits = [float(device.type.memory_bytes) for device in turns.model.fleet.devices]
    if not isinstance(close, CloseLook) or len(turns.space.choices) > MOST_CHOICES:
        return best, memory
    if too_small(turns.judge.graph, limits):
        return best, memory
    # Where nothing fits, ratios were found for what does not.
    vectors = [tuple(limit / sum(limits) for limit in limits)]
    if best.fits and np.abs(np.subtract(best.ratios, vectors[0])).max() > _APART:
        vectors.insert(0, best.ratios)
    unit_s = best.cost_s
    for ratios in vectors:
        least_s = min(rival_s, best.cost_s if best.fits else math.inf)
        found = _searched(_Crowds(turns, ratios, close), unit_s, least_s)
        if found is not None:
            best, memory = found.found, found.peaks
    return best, memory


@dataclass(slots=True)
class _Cheapest:
    """The cheapest program found that fits and costs less than `least_s`, which it lowers."""

    least_s: float
    look: _Look | None = None

    def consider(self, here: _Look) -> None:
        if here.found.fits and here.found.cost_s < self.least_s * (1 - 1e-9):
            self.look, self.least_s = here, here.found.cost_s


#: A program that is too large, and the rents under which it is the best.
_Near: TypeAlias = tuple[_Look, Mapping[int, float]]


def _searched(search: _Crowds, unit_s: float, least_s: float) -> _Look | None:
    """The cheapest program found that fits and costs less than `least_s`."""
    best = _Cheapest(least_s)
    near = _under_rents(search, unit_s, best)
    if near is not None and near[0].found.over <= _LITTLE and near[0].found.cost_s < best.least_s:
        best.consider(_adjusted(search, near[0]))
    for _ in range(_NEAR):
        # What fits is no cheaper than what nearly does.
        if near is None or near[0].found.cost_s >= best.least_s:
            break
        if near[0].found.over > _LITTLE or search.turns.stop():
            break
        near = _beside(search, *near, unit_s, best)
    return best.look


def _under_rents(search: _Crowds, unit_s: float, best: _Cheapest) -> _Near | None:
    """Raise the rents of what is in the way, and lower all where nothing is; the best that is too large."""
    rents: dict[int, float] = defaultdict(float)
    near: _Near | None = None
    last: _Look | None = None
    step, same = _STEP, 0
    for rounds in range(_ROUNDS):
        here = search.look(rents)
        best.consider(here)
        step, same = (step * _GROWTH, same + 1) if here is last else (_STEP, 0)
        last = here
        if not here.found.fits and (near is None or _badness(here) < _badness(near[0])):
            near = here, dict(rents)
        far = near is not None and near[0].found.over > _FAR and best.look is None
        if search.turns.stop() or (rounds + 1 >= _FEW_ROUNDS and (far or same >= _FEW_ROUNDS)):
            break
        if here.found.fits:
            rents = defaultdict(float, {value: _LESS ** (1 + same) * each for value, each in rents.items()})
        elif here.found.cost_s >= best.least_s:
            break  # under more rent nothing is cheaper
        for nbytes, mine in here.crowds:
            more_s = step * max(nbytes / here.limit - 1, _LEAST) * unit_s / here.limit
            for value in mine:
                rents[value] += more_s
    return near


def _beside(
    search: _Crowds, here: _Look, under: Mapping[int, float], unit_s: float, best: _Cheapest
) -> _Near | None:
    """Make each of the large tensors in the way much dearer; what then is nearer to fitting, if anything."""
    near: _Near | None = None
    nbytes, mine = max(here.crowds, key=lambda crowd: crowd[0])
    lacking = nbytes - here.limit
    large = sorted((value for value in mine if mine[value] >= _PART * lacking), key=lambda v: (-mine[v], v))
    for choice in list(dict.fromkeys(search.choice_of[value] for value in large))[:_TENSORS]:
        dearer = dict(under)
        for value in search.values[choice]:
            more_s = _DEARER * unit_s / max(value.type.nbytes, 1)
            dearer[value.index] = dearer.get(value.index, 0.0) + more_s
        other = search.look(dearer)
        best.consider(other)
        less = 1 < other.found.over < here.found.over
        if other.found.over <= _LITTLE and other.found.cost_s < best.least_s:
            best.consider(_adjusted(search, other))
        if less and (near is None or _badness(other) < _badness(near[0])):
            near = other, dearer
        if search.turns.stop():
            break
    return near


def _adjusted(search: _Crowds, here: _Look) -> _Look:
    """The same program at ratios at which it fits, if the model of memory says some; or it as it is."""
    turns, judge = search.turns, search.turns.judge
    found, peaks, learned = here.found, here.peaks, judge.budgets
    if here in search.adjusted or found.fits:
        return here
    search.adjusted.append(here)
    with turns.timer.ratios():
        for rounds in range(_ADJUSTED):
            judge.learn(peaks, found.ratios, found.memory, rounds)
            ratios, cost_s = turns.best_ratios(list(found.items), found.ratios, found.memory)
            if ratios == found.ratios:
                break
            peaks = judge.peaks(found.program, ratios, found.memory, sure=True)
            over = judge.excess(peaks)
            found = replace(found, ratios=ratios, cost_s=cost_s, over=over, fits=over <= 1)
            if found.fits:
                break
    judge.budgets = learned
    return replace(here, found=found, peaks=peaks) if found.fits else here


def _badness(look: _Look) -> float:
    """What a program costs; more if it is too large."""
    return look.found.cost_s * max(look.found.over, 1.0) ** _WEIGHT


def _values(graph: Graph, space: Space) -> dict[int, list[Value]]:
    """The tensors of a step, by the choice of what each is held in."""
    found: dict[int, list[Value]] = {}
    for value in (*graph.inputs, *(v for equation in graph.equations for v in equation.outputs)):
        found.setdefault(space.root.held(value).index, []).append(value)
    return found
