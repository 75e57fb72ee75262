"""The search for plans with several ratios, for `segments.py` to cut programs apart.

The program at hand comes first; where memory is short, so do programs that rents find whatever the memory
(`synth/memory/rented.py`). What is best is searched for once more at its ratios.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import islice

import numpy as np

from shardwright.cost.bill import charges
from shardwright.ir.program import own_ratios
from shardwright.synth.memory.budgets import SCALES, Renting
from shardwright.synth.memory.rented import rented
from shardwright.synth.prices.tables import Prices
from shardwright.synth.programs.emit import emit
from shardwright.synth.search.solution import Solution
from shardwright.synth.segments import FEARED, WORTH, Fear, Segmented, segmented
from shardwright.synth.shares.turns import Billed, Candidate, Found, Turns
from shardwright.synth.untied import untied

#: Part of the cost that one program with several should save over another.
_BETTER = 1e-3

#: Programs of next to no rent that are tried before anything dearer: one, in the orders that hold least.
_AT_NO_COST = 2


def apart(
    turns: Turns,
    best: Candidate,
    free: Found,
    renting: Callable[[], Renting],
    others: Iterable[Billed] = (),
    *,
    larger: bool = False,
    rival_s: float = np.inf,
) -> tuple[Segmented, float] | None:
    """A plan with several ratios that is better than one with one.

    The program at hand is given ratios of its own; where memory is short, so are programs that rent makes
    small at the ratios that computing would like. What is best then is searched for once more, at its ratios:
    whatever is not tied to the plan's takes those of them that it likes best.

    Args:
        turns: the search so far.
        best: what it found with one vector of ratios.
        free: what it found if memory were no limit.
        renting: makes programs smaller.
        others: programs that are tried as well, with ratios to start from.
        larger: whether programs that rents find whatever the memory are tried there, too.
        rival_s: what a plan that fits costs already: of these, none that is dearer is looked at.

    Returns:
        The plan, and what no program at its ratios can be cheaper than; None where there is none.
    """
    model, judge, graph, stop = turns.model, turns.judge, turns.judge.graph, turns.stop
    if len(model.counts) == 1 or stop():
        return None
    short = not judge.roomy and not (best.fits and best.cost_s <= free.cost_s * (1 + WORTH))
    found: Segmented | None = None
    fear = Fear(len(model.counts))

    def consider(each: Billed | Candidate, feared: Fear | None = None) -> bool:
        better = cut(each, feared)
        if not short:
            return better
        # Where memory is short, state may lie elsewhere than what computes with it.
        with turns.timer.ratios():
            program = untied(each.program, graph, model, each.ratios)
        if program is None:
            return better
        loose = Billed(program, each.ratios, charges(program, graph, model), each.memory)
        return cut(loose, feared) or better

    def cut(each: Billed | Candidate, feared: Fear | None) -> bool:
        nonlocal found
        fits, cost_s = (best.fits, best.cost_s) if found is None else (found.fits, found.cost_s)
        less = WORTH if found is None else _BETTER
        worth_s = cost_s * (1 - less) if fits else np.inf
        worth_s = worth_s if feared is None else min(worth_s, rival_s)
        with turns.timer.ratios():
            here = segmented(graph, model, judge, each, short=short, worth_s=worth_s, feared=feared)
        if here is None or not here.fits or here.cost_s >= worth_s:
            return False
        found = here
        return True

    def billed(solution: Solution, prices: Prices, ratios: tuple[float, ...]) -> Billed:
        program = emit(turns.space, solution.assignment, prices, turns.extra)
        return Billed(program, ratios, charges(program, graph, model), judge.footprint(program))

    def search(prices: Prices, rent_s: float) -> Solution:
        with turns.timer.search():
            if rent_s:
                return renting().solve(prices, free.ratios, rent_s, stop)
            return turns.solver.solve(prices, stop=stop)

    consider(best)
    for each in others:
        if not stop():
            consider(each)
    for each in rented(turns, free, renting()) if short and larger else ():
        if found is not None and found.cost_s <= free.cost_s * (1 + _BETTER):
            break  # memory makes that one no dearer
        consider(each, fear)
    rents: Sequence[float] = (0.0,)
    if short:
        unit, near = best.cost_s / float(judge.limits[model.class_of].sum()), renting().helped
        rents = [scale * unit for scale in SCALES[max(near - 2, 0) : near + 2]]
        for rent_s in () if larger else rents:
            if not stop():
                prices = Prices.at(turns.listed, free.ratios)
                if consider(billed(search(prices, rent_s), prices, free.ratios)):
                    rents = (rent_s,)
    least_s = 0.0
    while found is not None:
        prices = _prices_at(turns, found)
        solution = search(prices, 0.0)
        least_s = solution.bound_s
        smaller = search(prices, rents[0]) if short else solution
        if stop() or not consider(billed(smaller, prices, found.ratios)):
            break
    return None if found is None else (found, least_s)


def at_no_cost(
    turns: Turns, best: Candidate, free: Found, renting: Renting
) -> tuple[Segmented, float] | None:
    """What was found, or nearly the same of fewer bytes, with several ratios: where it fits and is no dearer.

    Args:
        turns: the search so far.
        best: what it found, too large with one vector of ratios.
        free: what it found if memory were no limit.
        renting: makes programs smaller.

    Returns:
        See `apart`.
    """
    model, judge, graph = turns.model, turns.judge, turns.judge.graph
    taken = float(best.memory.peak(np.asarray(best.ratios)).sum())
    if judge.roomy or len(model.counts) == 1 or taken > FEARED * float(judge.limits[model.class_of].sum()):
        return None
    fear, worth_s = Fear(len(model.counts)), free.cost_s * (1 + _BETTER)
    for each in islice(rented(turns, free, renting), _AT_NO_COST):
        with turns.timer.ratios():
            here = segmented(graph, model, judge, each, short=True, worth_s=worth_s, feared=fear)
        if here is not None and here.fits:
            with turns.timer.search():
                return here, turns.solver.solve(_prices_at(turns, here), stop=turns.stop).bound_s
    return None


def _prices_at(turns: Turns, found: Segmented) -> Prices:
    """Prices at all of its ratios."""
    own = [each.shares for each in own_ratios(found.program).values()]
    return Prices.at(turns.listed, found.ratios, others=own)
