"""Program and ratios if memory were no limit: search and LP in turns, from several starts.

The first start is the program that is best when every instruction has the shares it likes most, which is
also what proves the bound; others follow while the certified gap is wide. A start ends when it no longer gets
better.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from shardwright.cost.bill import charges
from shardwright.cost.memory.liveness import at_the_end
from shardwright.cost.model import CostModel
from shardwright.ir.graph import Graph
from shardwright.synth.apart import at_no_cost
from shardwright.synth.memory.budgets import Limits, Renting
from shardwright.synth.memory.lean import hardly_fits, leaner
from shardwright.synth.memory.pool import FEW_CHOICES, Pool
from shardwright.synth.memory.rent import too_small
from shardwright.synth.prices.lists import PriceList
from shardwright.synth.prices.tables import Prices
from shardwright.synth.programs.emit import emit
from shardwright.synth.programs.judge import Judge, Look
from shardwright.synth.search.priced import SpaceSolver
from shardwright.synth.search.solution import Solution
from shardwright.synth.segments import Segmented, apart_s
from shardwright.synth.shares.bounds import ENOUGH, Certificate
from shardwright.synth.shares.turns import MOST_TURNS, Candidate, Found, Turns, candidate, starting_ratios
from shardwright.synth.space.factors import Use
from shardwright.synth.space.space import Space
from shardwright.synth.timer import Timer

#: Costs that differ by less than this part are the same; starts from which the search found no more than so
#: much less need not be tried for what is similar.
_SAME, _ALIKE = 1e-9, 1e-4


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
        return Pool.of(turns, self.found, self.renting(limits))

    @cached_property
    def hardly_fits(self) -> bool:
        """Whether the best program should need far too much memory in any order."""
        return hardly_fits(self.turns, self.best)

    @cached_property
    def apart_s(self) -> float:
        """About what the program costs with several vectors of ratios, memory aside."""
        best = self.best
        return apart_s(self.turns.judge.graph, self.turns.model, best.program, best.ratios, best.items)

    @cached_property
    def at_no_cost(self) -> tuple[Segmented, float] | None:
        """What was found with several ratios, where it fits with these and is no dearer; of larger steps."""
        few = len(self.turns.space.choices) <= FEW_CHOICES
        limits = Limits.of(self.turns.model)
        return None if few else at_no_cost(self.turns, self.best, self.found, self.renting(limits))

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
    return _handed_less(free)


def _liked(turns: Turns, ideal: Solution, floors: Prices) -> Found:
    """Turns from the ratios on that the best program at the floors likes."""
    liked = turns.like(ideal, floors)
    solution, _ = turns.search(liked.ratios, liked)
    return liked if solution is ideal else turns.take(liked.ratios)


def _handed_less(free: Free) -> Free:
    """With a program that is handed less and hands out less, where that alone is too much for a device.

    It is found at a little rent; neither another order nor a step that keeps less would make this one fit.
    """
    turns, best = free.turns, free.best
    graph, limits = turns.judge.graph, Limits.of(turns.model)
    least = at_the_end(best.program, graph)
    if best.fits or turns.judge.feared(least, best.ratios) <= 1 or too_small(graph, limits.nbytes):
        return free
    smaller = leaner(turns, best, free.renting(limits), free.found.cost_s)
    return replace(free, best=smaller, over=smaller.over) if smaller.over < best.over else free


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
