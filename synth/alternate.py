"""Program and ratios together: search and LP in turns, from several starts.

    ratios --search--> program --LP--> shares --rounding--> ratios --search--> ...

The pair with the least exact cost, after rounding, is kept, one that fits the devices' memory before any
that does not; program, ratios and cost returned therefore belong together. A start ends when it no longer
gets better.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from shardwright.cost.bill import bill, seconds
from shardwright.cost.memory import footprint
from shardwright.cost.model import CostModel
from shardwright.cost.share_cost import Floats
from shardwright.ir.graph import Graph
from shardwright.ir.program import Program, verify
from shardwright.synth.bounds import certify
from shardwright.synth.emit import emit
from shardwright.synth.factors import Factor, Prices
from shardwright.synth.ratios import solve_ratios
from shardwright.synth.rounding import round_ratios
from shardwright.synth.solve import solve
from shardwright.synth.space import Space

_MOST_TURNS = 4


@dataclass(frozen=True, slots=True)
class Synthesis:
    """The best pair found.

    Attributes:
        program: verified program.
        ratios: share per device.
        cost_s: exact cost of the program at the rounded shares.
        bound_s: what no program of the space can be cheaper than, whatever its ratios.
        expanded: nodes expanded by A* in all searches.
        searches: searches run.
        notes: what went otherwise than hoped, in words.
        search_gap: how much cheaper a program could be at the ratios of a search that stopped early.
    """

    program: Program
    ratios: tuple[float, ...]
    cost_s: float
    bound_s: float
    expanded: int
    searches: int
    notes: tuple[str, ...]
    search_gap: float = 0.0


class Timer:
    """Where planning time goes, and when it is over.

    `tick` is told what begins, for progress displays; `limit_s` are seconds from now on, None for no end.
    """

    def __init__(self, tick: Callable[[str], None] = lambda what: None, limit_s: float | None = None) -> None:
        self.search_s = 0.0
        self.ratio_s = 0.0
        self._tick = tick
        self._end = None if limit_s is None else time.perf_counter() + limit_s

    @property
    def late(self) -> bool:
        """Whether the time limit has passed."""
        return self._end is not None and time.perf_counter() >= self._end

    @contextmanager
    def search(self) -> Generator[None]:
        """Time spent in the block is search time."""
        self._tick("searching programs")
        start = time.perf_counter()
        yield
        self.search_s += time.perf_counter() - start

    @contextmanager
    def ratios(self) -> Generator[None]:
        """Time spent in the block is ratio time."""
        self._tick("setting ratios")
        start = time.perf_counter()
        yield
        self.ratio_s += time.perf_counter() - start


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


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A program at ratios; one that fits the devices' memory is better than any that does not."""

    program: Program
    ratios: tuple[float, ...]
    cost_s: float
    fits: bool

    def beats(self, other: _Candidate | None) -> bool:
        if other is None or self.fits != other.fits:
            return other is None or self.fits
        return self.cost_s < other.cost_s * (1 - 1e-9)


def synthesize(
    graph: Graph, space: Space, model: CostModel, timer: Timer, extra: Sequence[Factor] = ()
) -> Synthesis:
    """Search for program and ratios; see the module's docstring. `extra` factors pin choices."""
    best: _Candidate | None = None
    expanded = searches = 0
    worst_gap = 0.0
    stopped = False
    seen: set[tuple[float, ...]] = set()
    for shares in starts(model):
        ratios = tuple(float(shares[c]) for c in model.class_of)
        reached: _Candidate | None = None
        for _ in range(_MOST_TURNS):
            stopped = best is not None and timer.late
            if ratios in seen or stopped:
                break
            seen.add(ratios)
            with timer.search():
                prices = Prices.at(model, ratios)
                solution = solve(space, prices, extra=extra)
                program = emit(space, solution.assignment, prices)
            expanded, searches = expanded + solution.expanded, searches + 1
            worst_gap = max(worst_gap, 1 - solution.bound_s / solution.seconds if solution.seconds else 0.0)
            with timer.ratios():
                found = _improve(program, ratios, graph, model)
            if found.beats(best):
                best = found
            if not found.beats(reached):
                break
            reached, ratios = found, found.ratios
    assert best is not None
    verify(best.program, graph)
    with timer.search():
        bound_s = certify(space, model, best.cost_s)
    notes: list[str] = []
    if not best.fits:
        notes.append("no ratios tried fit a program found into every device's memory")
    if stopped:
        notes.append("the time limit ended the search before all starts were tried")
    if worst_gap > 0:
        notes.append(f"a search stopped early: at its ratios a program could be {worst_gap:.1%} cheaper")
    return Synthesis(
        best.program, best.ratios, best.cost_s, bound_s, expanded, searches, tuple(notes), worst_gap
    )


def _improve(program: Program, ratios: tuple[float, ...], graph: Graph, model: CostModel) -> _Candidate:
    """The program at the LP's ratios after rounding, or at those it was found at, whichever is better."""
    items = bill(program, graph, model)
    memory = footprint(program, graph)
    limit = np.array([device.memory_bytes for device in model.types])[model.class_of]

    def price(at: tuple[float, ...]) -> tuple[bool, float]:
        over = bool((memory.peak(np.asarray(at)) > limit).any())
        return over, seconds(items, model, at)

    per_class = np.array([ratios[c.members[0]] for c in model.classes])
    solved = solve_ratios(items, model, per_class, memory)
    if not solved.ok:
        solved = solve_ratios(items, model, per_class)
    options = [ratios]
    if solved.ok:
        options.append(round_ratios(items, model, solved.shares, price))
    best = min(options, key=price)
    over, cost = price(best)
    return _Candidate(program, best, cost, not over)
