"""Program and ratios together: search and LP in turns, from several starts.

    ratios --search--> program --LP--> shares --rounding--> ratios --search--> ...

The first start is the program that is best when every instruction has the shares it likes most, which is
also what proves the bound; others follow while the certified gap is wide. A start ends when it no longer gets
better. The pair with the least exact cost after rounding is kept; program, ratios and cost returned
therefore belong together. Where it does not fit the devices' memory, the turns are taken again with
memory as rows of the LP, and what fits is better than whatever does not. `synth/programs/judge.py` says what
fits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property

from shardwright.cost.bill import Item, charges
from shardwright.cost.memory.liveness import Footprint, Peaks
from shardwright.cost.model import CostModel
from shardwright.ir.graph import Graph
from shardwright.ir.program import Program, verify
from shardwright.synth.memory.budgets import SCALES, Limits, Renting
from shardwright.synth.memory.crowded import WIDE, uncrowded
from shardwright.synth.memory.lean import hardly_fits
from shardwright.synth.memory.pool import FEW_CHOICES, Pool
from shardwright.synth.memory.rent import too_small
from shardwright.synth.memory.stretched import stretched
from shardwright.synth.memory.within import FAR_DEARER, hopeless, judged, next_to_nothing, overlooked
from shardwright.synth.prices.lists import PriceList
from shardwright.synth.prices.tables import Prices
from shardwright.synth.programs.emit import emit
from shardwright.synth.programs.judge import Judge, Look, shortage
from shardwright.synth.search.solution import Solution
from shardwright.synth.search.solve import SpaceSolver
from shardwright.synth.segments import WORTH, Segmented, apart, apart_s
from shardwright.synth.shares.bounds import ENOUGH, Certificate
from shardwright.synth.shares.turns import MOST_TURNS, Candidate, Found, Turns, candidate, starting_ratios
from shardwright.synth.space.factors import Use
from shardwright.synth.space.space import Space
from shardwright.synth.timer import Timer

#: Costs that differ by less than this part are the same; starts from which the search found no more than so
#: much less need not be tried for what is similar.
_SAME, _ALIKE = 1e-9, 1e-4

#: Beside a rival that costs up to so many times what a step does without a limit of memory, what needs far
#: too much is not made to fit.
_NEAR = 1.03


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
        dearer: whether it does not fit, or memory made it dearer than what was found without.
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
    dearer: bool = False


@dataclass(frozen=True)
class Free:
    """What is found before memory is looked at, and what found it.

    Attributes:
        turns: the search so far.
        found: the best program at the best ratios, if memory were no limit.
        best: it as it will run; with memory in the linear program if it does not fit otherwise.
        over: the largest part of its memory that a device takes for it, by the model.
        certificate: of all programs and ratios.
        ideal: the cheapest program at the floors of all prices.
        agree: whether no further start led to anything much cheaper than the first.
    """

    turns: Turns
    found: Found
    best: Candidate
    over: float
    certificate: Certificate
    ideal: Solution
    agree: bool

    @cached_property
    def pool(self) -> Pool | None:
        """Programs within whatever memory, of a small step that may fit."""
        turns = self.turns
        if len(turns.space.choices) > FEW_CHOICES or len(turns.model.class_of) == 1:
            return None
        limits = Limits.of(turns.model)
        if too_small(turns.judge.graph, limits.nbytes):
            return None
        return Pool(turns, self.found, self.renting(limits))

    @cached_property
    def hardly_fits(self) -> bool:
        """Whether the best program should need far too much memory in any order."""
        return hardly_fits(self.turns, self.best)

    @cached_property
    def apart_s(self) -> float:
        """About what the program costs with several vectors of ratios, memory aside."""
        best = self.best
        return apart_s(self.turns.judge.graph, self.turns.model, best.program, best.ratios, best.items)

    def certified(self) -> float:
        """What no program costs less than, as closely as a plan wants to know."""
        with self.turns.timer.search():
            return self.certificate.reach(self.found.cost_s * (1 - ENOUGH))

    def bounded(self, seconds: float) -> bool:
        """Whether no program costs less than that, looked at closely if need be."""
        return self.certificate.bound_s >= seconds or self.certified() >= seconds

    def renting(self, limits: Limits) -> Renting:
        """What makes programs smaller."""
        turns = self.turns
        return Renting(turns.judge.graph, turns.space, limits, turns.extra, self.ideal, turns.solver)


def synthesize(
    graph: Graph,
    space: Space,
    model: CostModel,
    timer: Timer,
    extra: Sequence[Use] = (),
    *,
    first: tuple[float, ...] | None = None,
    look: Look | None = None,
) -> Synthesis:
    """Search for program and ratios; see the module's docstring, `freely` and `within_memory`."""
    return within_memory(freely(graph, space, model, timer, extra, first=first, look=look))


def freely(
    graph: Graph,
    space: Space,
    model: CostModel,
    timer: Timer,
    extra: Sequence[Use] = (),
    *,
    solver: SpaceSolver | None = None,
    floors: Prices | None = None,
    known: Mapping[tuple[float, ...], Prices] | None = None,
    first: tuple[float, ...] | None = None,
    look: Look | None = None,
    roughly: bool = False,
    starts_agree: bool = False,
) -> Free:
    """Search for program and ratios as if memory were no limit.

    Args:
        graph: the step.
        space: its programs.
        model: prices.
        timer: is told where time goes, and says when it is over.
        extra: factors that pin choices.
        solver: of the space with these factors, where there is one already; it serves any prices.
        floors: the floors of the model's prices, where they are known already.
        known: other prices of their list that are known already, by ratios.
        first: shares to start from, before all others.
        look: what says how much memory a program takes; by default the model of `cost/memory/liveness.py`.
        roughly: leave the bound as it is without large tables, if choices are many; see `Free.certified`.
        starts_agree: start from one vector of ratios alone: others are likely to lead to the same.

    Raises:
        PlanError: no program keeps to the pins.
    """
    stop = timer.late
    judge = Judge(graph, model, look)
    with timer.search():
        solver = solver or SpaceSolver(space, extra)
        floors = floors or Prices.floors(model)
        assert isinstance(floors.list, PriceList), "floors are of programs on one axis"
        turns = Turns(space, floors.list, timer, solver, stop, judge, extra, known)
        ideal = solver.solve(floors, stop=stop)
    found: Found | None = None
    bound_s = ideal.bound_s
    certificate = Certificate(solver, turns.listed, bound_s, stop)
    agree, closely = True, not roughly or len(space.choices) <= FEW_CHOICES
    for ratios in starting_ratios(model, first, alone=starts_agree):
        reached = _liked(turns, ideal, floors) if ratios is None else turns.take(ratios)
        if found is None:
            # Is there anything left to find? The bound says so before other starts are tried.
            with timer.search():
                bound_s = certificate.reach(reached.cost_s * (1 - ENOUGH), closely=closely)
        agree = agree and (found is None or reached.cost_s >= found.cost_s * (1 - _ALIKE))
        if found is None or reached.cost_s < found.cost_s * (1 - 1e-9):
            found = reached
        if stop() or bound_s >= found.cost_s * (1 - ENOUGH):
            break
    assert found is not None
    free = Free(turns, found, *_settle(graph, turns, found), certificate, ideal, agree)
    # What a pool has to offer within less memory is then no cheaper than what is found without a limit.
    while free.pool is not None and not stop() and free.found.cost_s > bound_s * (1 + _SAME):
        found = turns.take(free.pool.likes())
        if found.cost_s >= free.found.cost_s * (1 - _SAME):
            break
        free = Free(turns, found, *_settle(graph, turns, found), certificate, ideal, agree)
    return free


def within_memory(
    free: Free, rival_s: float = math.inf, *, briefly: bool = False, glance: bool = False
) -> Synthesis:
    """What was found, or what fits in its place where it does not.

    Args:
        free: what was found.
        rival_s: what a plan that fits costs already: the search for what fits ends where it sees that nothing
            cheaper will.
        briefly: do not search for what fits at all.
        glance: do not even look at what needs far too much by the model, where that is not all there is.
    """
    turns, found, best, certificate = free.turns, free.found, free.best, free.certificate
    graph, model, stop = turns.judge.graph, turns.model, turns.stop
    renting = cache(lambda: free.renting(Limits.of(model)))
    pool, within = None if turns.judge.roomy else free.pool, None
    alone = len(model.class_of) == 1
    if pool is not None and not hopeless(turns, renting, found.cost_s, rival_s):
        within = pool.cheapest(rival_s)
    if within is not None:
        first, memory = best, memory = within
        renting().helped = SCALES.index(1.0)
    elif pool is None and not alone and (glance or rival_s <= found.cost_s * _NEAR) and free.hardly_fits:
        first, memory = best, best.memory
    else:
        # On one device all programs are one.
        brief = briefly or alone or (pool is not None and rival_s < math.inf)
        first, memory = judged(turns, best, found, renting, rival_s, briefly=brief)
        best, memory = overlooked(turns, first, memory, found.cost_s, rival_s, briefly=brief)
        if not brief and _wide(free, best, rival_s, renting):
            cheaper, theirs = uncrowded(turns, best, memory, rival_s)
            first = first if cheaper is best else cheaper
            best, memory = cheaper, theirs
        if best.fits and not brief:
            best, memory = stretched(turns, best, memory, found.cost_s)
    mixed = len(model.types) > 1
    little = _SAME if pool is not None else min(next_to_nothing(graph), WORTH if mixed else math.inf)
    dearer = not best.fits or best.cost_s > found.cost_s * (1 + little)
    given_up = (briefly and dearer) or (not best.fits and rival_s < math.inf)
    several: tuple[Segmented, float] | None = None
    others = () if within is None or pool is None else pool.below(best.cost_s * (1 - WORTH), found.ratios)
    larger = mixed and len(turns.space.choices) > FEW_CHOICES
    larger = larger and not too_small(graph, Limits.of(model).nbytes)

    def cut_apart(one: Candidate) -> None:
        nonlocal several
        found_apart = apart(turns, one, found, renting, others, larger=larger, rival_s=rival_s)
        if found_apart is not None and (several is None or found_apart[0].cost_s < several[0].cost_s):
            several = found_apart

    # Several ratios save less than that of what memory made so much dearer than a plan there is.
    beaten = pool is None and best.cost_s > rival_s * FAR_DEARER
    # The bound is of plans with several ratios, too.
    if not (given_up or beaten or (best.fits and certificate.bound_s >= best.cost_s * (1 - WORTH))):
        cut_apart(best)
        if others and pool is not None:
            # What is found within less memory fits as well, and may be cheaper.
            pool.tighter(cut_apart)
    if several is None and not (given_up or beaten) and first is not best:
        several = apart(turns, first, found, renting)
    if several is not None and (several[0].cost_s < best.cost_s or not best.fits):
        return _several(turns, *several, found, certificate, renting)
    # Where memory made the plan dearer, it has a say in the bound, too.
    bounded = given_up or not best.fits or best.cost_s <= found.cost_s * (1 + 1e-6)
    within_s = 0.0
    if not (bounded or free.bounded(best.cost_s * (1 - ENOUGH))):
        with turns.timer.search():
            within_s = renting().bound_within(turns.listed, certificate.bound_s, best.cost_s, stop)
    with turns.timer.search():
        verify(best.program, graph)
        solution, _ = turns.search(best.ratios)
    bound_s = min(max(within_s, certificate.bound_s), best.cost_s)
    # What the search found at these ratios is what was emitted, unless memory forbade it.
    same = best.cost_s <= solution.seconds * (1 + 1e-9)
    least = solution.bound_s if same else min(solution.bound_s, best.cost_s)
    search_gap = max(0.0, 1 - least / (solution.seconds if same else best.cost_s)) if least > 0 else 0.0
    notes: list[str] = []
    if not best.fits:
        notes.append(shortage(best.ratios, memory, model))
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
        dearer,
    )


def _wide(free: Free, best: Candidate, rival_s: float, renting: Callable[[], Renting]) -> bool:
    """Whether memory leaves a wide gap between what was found and what nothing can cost less than."""
    turns, least_s = free.turns, min(rival_s, best.cost_s if best.fits else math.inf)
    if turns.judge.roomy or free.bounded(least_s * (1 - WIDE)):
        return False
    bound_s = free.certificate.bound_s
    if least_s < math.inf:
        with turns.timer.search():
            bound_s = renting().bound_within(turns.listed, bound_s, least_s, turns.stop)
    return bound_s < least_s * (1 - WIDE)


def _several(
    turns: Turns,
    best: Segmented,
    least_s: float,
    free: Found,
    certificate: Certificate,
    renting: Callable[[], Renting],
) -> Synthesis:
    """A plan with several ratios; `least_s`: what no program at these can be cheaper than."""
    bound_s = certificate.bound_s
    if best.cost_s > free.cost_s * (1 + 1e-6) and bound_s < best.cost_s * (1 - ENOUGH):
        with turns.timer.search():
            bound_s = max(bound_s, renting().bound_within(turns.listed, bound_s, best.cost_s, turns.stop))
    late = ("the time limit ended the search before all starts were tried",)
    return Synthesis(
        best.program,
        best.ratios,
        best.cost_s,
        min(bound_s, best.cost_s),
        max(0.0, 1 - max(least_s, bound_s) / best.cost_s) if best.cost_s > 0 else 0.0,
        turns.expanded,
        turns.searches,
        late if turns.stop() else (),
        best.items,
        best.memory,
        certificate,
    )


def _liked(turns: Turns, ideal: Solution, floors: Prices) -> Found:
    """Turns from the ratios on that the best program at the floors likes."""
    liked = turns.like(ideal, floors)
    solution, _ = turns.search(liked.ratios, liked)
    return liked if solution is ideal else turns.take(liked.ratios)


def _settle(graph: Graph, turns: Turns, found: Found) -> tuple[Candidate, float]:
    """The program of what was found, priced as it will run; with memory in the LP if it does not fit.

    And the largest part of its memory that a device would take without.
    """
    best: Candidate | None = None
    over = 0.0
    ratios, memory = found.ratios, None
    for turn in range(MOST_TURNS):
        searched = ratios
        solution, prices = turns.search(ratios)
        with turns.timer.ratios():
            program = emit(turns.space, solution.assignment, prices, turns.extra)
            items, memory = charges(program, graph, turns.model), turns.judge.footprint(program)
            here = candidate(turns, program, ratios, items, memory)
            over = over if turn else here.over
            if turn or not here.fits:
                ratios, cost_s = turns.best_ratios(items, ratios, memory)
                here = candidate(turns, program, ratios, items, memory, cost_s)
        if not here.beats(best):
            break
        best = here
        if (best.fits and not turn) or ratios == searched:
            break
    assert best is not None
    return best, over
