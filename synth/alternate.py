"""Program and ratios together: search and LP in turns, from several starts.

    ratios --search--> program --LP--> shares --rounding--> ratios --search--> ...

The first start is the program that is best when every instruction has the shares it likes most, which is
also what proves the bound; others follow while the certified gap is wide. A start ends when it no longer gets
better. The pair with the least exact cost after rounding is kept; program, ratios and cost returned
therefore belong together. Where it does not fit the devices' memory, the turns are taken again with
memory as rows of the LP, and what fits is better than whatever does not. `synth/judge.py` says what fits.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from itertools import islice

import numpy as np

from shardwright.cost.bill import Item, Tally, bill, seconds
from shardwright.cost.memory import Footprint, Peaks
from shardwright.cost.model import CostModel
from shardwright.cost.share_cost import Floats
from shardwright.ir.graph import Graph
from shardwright.ir.program import Program, verify
from shardwright.synth.bounds import ENOUGH, Certificate
from shardwright.synth.budgets import HALVINGS, SCALES, Limits, Renting
from shardwright.synth.emit import emit
from shardwright.synth.factors import Use
from shardwright.synth.judge import MOST_LOOKS, Judge, Look
from shardwright.synth.ledger import Ledger
from shardwright.synth.pricing import PriceList, Prices
from shardwright.synth.ratios import solve_ratios
from shardwright.synth.rent import too_small
from shardwright.synth.rounding import round_ratios
from shardwright.synth.solve import Solution, SpaceSolver
from shardwright.synth.space import Space

_MOST_TURNS = 4

#: Steps of no more choices are small (see `_closed`); programs gone through, times choices.
_FEW_CHOICES = 40
_MOST_CELLS = 1500

#: As many programs, times those, may be passed over because their inputs alone do not fit.
_PASSED_OVER = 10


@dataclass(frozen=True, slots=True)
class Synthesis:
    """The best pair found.

    Attributes:
        program: verified program.
        ratios: share per device.
        cost_s: exact cost of the program at the rounded shares.
        bound_s: what no program of the space can be cheaper than, whatever its ratios.
        search_gap: how much cheaper, as a fraction, a program could be at these ratios at most.
        expanded: nodes expanded by A* in all searches.
        searches: searches run.
        notes: what went otherwise than hoped, in words.
        items: the program's bill.
        memory: the program's footprint.
        certificate: raises the bound further, if there is one.
    """

    program: Program
    ratios: tuple[float, ...]
    cost_s: float
    bound_s: float
    search_gap: float
    expanded: int
    searches: int
    notes: tuple[str, ...]
    items: tuple[Item, ...]
    memory: Footprint | Peaks
    certificate: Certificate | None = None


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
    def limited(self) -> bool:
        """Whether there is a time limit."""
        return self._end is not None

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
class _Found:
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


class _Turns:
    """Search and LP in turns; remembers what was tried."""

    def __init__(
        self,
        space: Space,
        listed: PriceList,
        timer: Timer,
        solver: SpaceSolver,
        stop: Callable[[], bool],
        judge: Judge,
        extra: Sequence[Use] = (),
    ) -> None:
        self.judge, self.extra = judge, extra
        self.space, self.listed, self.timer, self.solver, self.stop = space, listed, timer, solver, stop
        self.model = listed.model
        self.ledger = Ledger(space.uses)
        self.expanded = self.searches = 0
        self._seen: dict[tuple[float, ...], tuple[Solution, Prices]] = {}

    def search(self, ratios: tuple[float, ...]) -> tuple[Solution, Prices]:
        """The best program at some ratios."""
        if ratios not in self._seen:
            with self.timer.search():
                prices = Prices.at(self.listed, ratios)
                solution = self.solver.solve(prices, stop=self.stop)
            self.expanded, self.searches = self.expanded + solution.expanded, self.searches + 1
            self._seen[ratios] = solution, prices
        return self._seen[ratios]

    def best_ratios(
        self, items: list[Item], ratios: tuple[float, ...], memory: Footprint | None = None
    ) -> tuple[tuple[float, ...], float]:
        """The LP's ratios after rounding, or `ratios` themselves, whichever is better; and the cost there."""
        model, tally = self.model, Tally(items, self.model)

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

    def take(self, ratios: tuple[float, ...]) -> _Found:
        """Turns from `ratios` on, until it no longer gets better."""
        reached: _Found | None = None
        for _ in range(_MOST_TURNS):
            solution, prices = self.search(ratios)
            with self.timer.ratios():
                items = self.ledger.bill(solution.assignment, prices)
                ratios, cost_s = self.best_ratios(items, ratios)
            if reached is not None and not cost_s < reached.cost_s * (1 - 1e-9):
                break
            reached = _Found(solution, prices, ratios, cost_s)
            if self.stop():
                break
        assert reached is not None
        return reached


@dataclass(frozen=True, slots=True)
class _Candidate:
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

    def beats(self, other: _Candidate | None) -> bool:
        if other is None or self.fits != other.fits:
            return other is None or self.fits
        return self.cost_s < other.cost_s * (1 - 1e-9)


def synthesize(
    graph: Graph,
    space: Space,
    model: CostModel,
    timer: Timer,
    extra: Sequence[Use] = (),
    *,
    solver: SpaceSolver | None = None,
    floors: Prices | None = None,
    ideal: Solution | None = None,
    first: tuple[float, ...] | None = None,
    look: Look | None = None,
) -> Synthesis:
    """Search for program and ratios; see the module's docstring.

    Args:
        graph: the step.
        space: its programs.
        model: prices.
        timer: is told where time goes, and says when it is over.
        extra: factors that pin choices.
        solver: of the space with these factors, where there is one already; it serves any prices.
        floors: the floors of the model's prices, where they are known already.
        ideal: what the search finds at the floors, where it is known already.
        first: shares to start from, before all others.
        look: what says how much memory a program takes; by default the model of `cost/memory.py`.

    Raises:
        PlanError: no program keeps to the pins.
    """
    stop = timer.late
    judge = Judge(graph, model, look)
    with timer.search():
        solver = solver or SpaceSolver(space, extra)
        floors = floors or Prices.floors(model)
        assert isinstance(floors.list, PriceList), "floors are of programs on one axis"
        turns = _Turns(space, floors.list, timer, solver, stop, judge, extra)
        ideal = ideal or solver.solve(floors, stop=stop)
    found: _Found | None = None
    bound_s = ideal.bound_s
    certificate = Certificate(solver, turns.listed, bound_s, stop)
    for ratios in _starts(turns, ideal, floors, first):
        reached = turns.take(ratios)
        if found is None:
            # Is there anything left to find? The bound says so before other starts are tried.
            with timer.search():
                bound_s = certificate.reach(reached.cost_s * (1 - ENOUGH))
        if found is None or reached.cost_s < found.cost_s * (1 - 1e-9):
            found = reached
        if stop() or bound_s >= found.cost_s * (1 - ENOUGH):
            break
    assert found is not None
    best = _settle(graph, turns, found)
    limits = Limits.of(model)
    renting = cache(lambda: Renting(graph, space, limits, extra))
    best, memory = _judged(turns, best, found.cost_s, renting)
    # Where memory made the plan dearer, it has a say in the bound, too.
    dearer = best.fits and best.cost_s > found.cost_s * (1 + 1e-6)
    if dearer and bound_s < best.cost_s * (1 - ENOUGH):
        with timer.search():
            bound_s = max(bound_s, renting().bound_within(turns.listed, bound_s, best.cost_s, stop))
    with timer.search():
        verify(best.program, graph)
        solution, _ = turns.search(best.ratios)
    bound_s = min(bound_s, best.cost_s)
    # What the search found at these ratios is what was emitted, unless memory forbade it.
    same = best.cost_s <= solution.seconds * (1 + 1e-9)
    least = solution.bound_s if same else min(solution.bound_s, best.cost_s)
    search_gap = max(0.0, 1 - least / (solution.seconds if same else best.cost_s)) if least > 0 else 0.0
    notes: list[str] = []
    if not best.fits:
        notes.append(_shortage(best, memory, model))
    if solution.bound_s < solution.seconds:
        notes.append(f"the search stopped early: at these ratios a program could be {search_gap:.1%} cheaper")
    if stop():
        notes.append("the time limit ended the search before all starts were tried")
    return Synthesis(
        best.program,
        best.ratios,
        best.cost_s,
        bound_s,
        search_gap,
        turns.expanded,
        turns.searches,
        tuple(notes),
        best.items,
        memory,
        certificate,
    )


def _judged(
    turns: _Turns, best: _Candidate, free_s: float, renting: Callable[[], Renting]
) -> tuple[_Candidate, Footprint | Peaks]:
    """The best candidate that fits as it will run; searched for with rent where the best of all does not.

    Args:
        turns: the search so far.
        best: what it found, with memory in the linear program where it would not fit otherwise.
        free_s: what it found if memory were no limit.
        renting: makes programs smaller.
    """
    judge, stop = turns.judge, turns.stop
    if judge.roomy:
        return best, best.memory
    fallen: tuple[_Candidate, Peaks] | None = None
    fitting: tuple[_Candidate, Peaks] | None = None
    for rounds in range(MOST_LOOKS + 1):
        with turns.timer.ratios():
            peaks = judge.peaks(best.program, best.ratios, best.memory)
        over = judge.excess(peaks)
        best = replace(best, fits=over <= 1, over=over)
        if best.fits:
            if fitting is None or best.cost_s < fitting[0].cost_s:
                fitting = best, peaks
            if rounds or best.cost_s <= free_s * (1 + ENOUGH):
                return fitting
        elif fallen is None or over < fallen[0].over:
            fallen = best, peaks
        if rounds == MOST_LOOKS or (rounds and stop()):
            break
        if not best.fits:
            judge.learn(peaks, best.ratios, best.memory, rounds)
        found = _closed(turns, _within(turns, _again(turns, best), renting()), renting())
        if rounds and not found.fits and found.over > 1.1:
            break
        best = found
    if fitting is not None:
        return fitting
    assert fallen is not None
    best, peaks = fallen
    if not peaks.seen:
        peaks = judge.peaks(best.program, best.ratios, best.memory, sure=True)
        over = judge.excess(peaks)
        best = replace(best, fits=over <= 1, over=over)
    return best, peaks


def _closed(turns: _Turns, best: _Candidate, renting: Renting) -> _Candidate:
    """The best that fits, after a small step's programs were gone through in order of their costs.

    Rent finds the corners of what cost and memory allow, and misses what lies between. At the ratios that are
    likely to be good, the first program that fits is the best.
    """
    choices = len(turns.space.choices)
    model, limits = turns.model, renting.limits.nbytes
    if choices > _FEW_CHOICES or too_small(renting.graph, limits):
        return best
    whole = renting.rents.whole_tables()
    inputs = renting.rents.input_bytes
    budgets = turns.judge.budgets[model.class_of]
    shares = [best.ratios, tuple(limit / sum(limits) for limit in limits)]
    shares += [tuple(float(each[c]) for c in model.class_of) for each in starts(model)]
    solver = SpaceSolver(turns.space, turns.extra, stages=())
    for ratios in dict.fromkeys(shares):
        with turns.timer.search():
            prices = Prices.at(turns.listed, ratios)
            programs = solver.in_order(prices)
        left = _MOST_CELLS // max(choices, 1)
        room = float(((budgets - inputs * np.array(ratios)) / np.maximum(1 - np.array(ratios), 1e-9)).min())
        for assignment, cost_s in islice(programs, _PASSED_OVER * left):
            if left < 0 or turns.stop() or (best.fits and cost_s >= best.cost_s * (1 - 1e-9)):
                break
            if sum([table[assignment[choice]] for choice, table in whole]) > room:
                continue  # what every device holds of the inputs leaves no room for its share of the rest
            left -= 1
            program = emit(turns.space, assignment, prices)
            memory = turns.judge.footprint(program)
            if turns.judge.over(memory, ratios) > 1 and best.fits:
                continue
            items = bill(program, renting.graph, model)
            here = _candidate(turns, program, ratios, items, memory)
            best = here if here.beats(best) and (here.fits or here.over < best.over) else best
    return best


def _again(turns: _Turns, found: _Candidate) -> _Candidate:
    """The same by the model's present budgets."""
    over = turns.judge.over(found.memory, found.ratios)
    return replace(found, over=over, fits=over <= 1)


def _shortage(best: _Candidate, memory: Footprint | Peaks, model: CostModel) -> str:
    """What the smallest program found would need."""
    devices = model.fleet.devices
    peaks = memory.peak(np.asarray(best.ratios))
    limits = np.array([device.type.memory_bytes for device in devices])
    worst = int((peaks / limits).argmax())
    name = f"{devices[worst].name} ({devices[worst].type.name})"
    return (
        f"no program found fits into every device's memory: the smallest needs {peaks[worst] / 1e9:.4g} GB "
        f"on {name}, which has {limits[worst] / 1e9:.4g} GB; with {best.over:.3g} times the memory "
        "everywhere it would fit"
    )


def _starts(
    turns: _Turns, ideal: Solution, floors: Prices, first: tuple[float, ...] | None
) -> Iterator[tuple[float, ...]]:
    model = turns.model
    if first is not None and len(model.types) > 1:
        yield first
    even = (1.0 / len(model.class_of),) * len(model.class_of)
    if len(model.types) == 1:
        yield even
        return
    with turns.timer.ratios():
        liked, _ = turns.best_ratios(turns.ledger.bill(ideal.assignment, floors), even)
    yield liked
    for shares in starts(model):
        yield tuple(float(shares[c]) for c in model.class_of)


def _within(turns: _Turns, found: _Candidate, renting: Renting) -> _Candidate:
    """The cheapest program found under rent that fits, or else the smallest."""
    model, stop, graph = turns.model, turns.stop, renting.graph
    limits = renting.limits.nbytes
    unit = found.cost_s / sum(limits)
    by_memory = tuple(limit / sum(limits) for limit in limits)
    best = found
    tried: dict[tuple[tuple[int, ...], tuple[float, ...]], bool] = {}

    def rented(scale: float) -> bool:
        """Whether a program fits at that rent; the best so far is kept."""
        if turns_from(best.ratios, scale):
            return True
        return not best.fits and turns_from(by_memory, scale)

    def turns_from(ratios: tuple[float, ...], scale: float) -> bool:
        nonlocal best
        fits = False
        for _ in range(2):
            with turns.timer.search():
                prices = Prices.at(turns.listed, ratios)
                solution = renting.solve(prices, ratios, scale * unit, stop)
                turns.searches, turns.expanded = turns.searches + 1, turns.expanded + solution.expanded
            key = solution.assignment, ratios
            if key in tried:
                fits = fits or tried[key]
                break
            with turns.timer.ratios():
                program = emit(turns.space, solution.assignment, prices)
                items, memory = bill(program, graph, model), turns.judge.footprint(program)
                near, _ = turns.best_ratios(items, ratios, memory)
                here = _candidate(turns, program, near, items, memory)
            if not here.fits:
                # Nothing in the linear program keeps the ratios small where its program cannot fit.
                there = _candidate(turns, program, ratios, items, memory)
                here = there if there.over < here.over else here
            fits = fits or here.fits
            tried[key] = here.fits
            better = here.beats(best) if here.fits or best.fits else here.over < best.over
            best = here if better else best
            if near == ratios:
                break
            ratios = near
        return fits

    possible = not too_small(graph, limits)
    last = len(SCALES) - 1
    top = min(renting.helped + 1, last) if renting.helped else last
    if possible and not rented(SCALES[top]):
        # Where the highest rent makes nothing small enough, a lower one hardly does.
        if top == last or not rented(SCALES[last]):
            return best
        top = last
    if not possible:
        for scale in SCALES[3:5]:
            if stop() or rented(scale):
                break
        return best
    # The least rent that helps, by bisection: first among the scales, then between two of them.
    low, high = -1, top
    while high - low > 1 and not stop():
        middle = (low + high) // 2
        low, high = (low, middle) if rented(SCALES[middle]) else (middle, high)
    renting.helped = high
    least, most = (SCALES[low] if low >= 0 else 0.0), SCALES[high]
    for _ in range(HALVINGS):
        if stop():
            break
        scale = (least * most) ** 0.5 if least else most / 4
        least, most = (least, scale) if rented(scale) else (scale, most)
    return best


def _settle(graph: Graph, turns: _Turns, found: _Found) -> _Candidate:
    """The program of what was found, priced as it will run; with memory in the LP if it does not fit."""
    best: _Candidate | None = None
    ratios, memory = found.ratios, None
    for turn in range(_MOST_TURNS):
        solution, prices = turns.search(ratios)
        with turns.timer.ratios():
            program = emit(turns.space, solution.assignment, prices)
            items, memory = bill(program, graph, turns.model), turns.judge.footprint(program)
            here = _candidate(turns, program, ratios, items, memory)
            if turn or not here.fits:
                ratios, _ = turns.best_ratios(items, ratios, memory)
                here = _candidate(turns, program, ratios, items, memory)
        if not here.beats(best):
            break
        best = here
        if best.fits and not turn:
            break
    assert best is not None
    return best


def _candidate(
    turns: _Turns, program: Program, ratios: tuple[float, ...], items: list[Item], memory: Footprint
) -> _Candidate:
    over = turns.judge.over(memory, ratios)
    cost_s = seconds(items, turns.model, ratios)
    return _Candidate(program, ratios, cost_s, over <= 1, tuple(items), memory, over)
