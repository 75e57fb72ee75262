"""Programs that fit into memory where the best of all does not."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from shardwright.cost.bill import charges
from shardwright.cost.memory.liveness import Footprint, Peaks
from shardwright.ir.graph import Graph
from shardwright.synth.combinations import SMALL
from shardwright.synth.memory.budgets import SCALES, Renting
from shardwright.synth.memory.lean import in_turn, leaner, spared
from shardwright.synth.memory.least import LeastRent
from shardwright.synth.memory.rent import too_small
from shardwright.synth.prices.tables import Prices
from shardwright.synth.programs.emit import emit
from shardwright.synth.programs.judge import MOST_LOOKS
from shardwright.synth.shares.bounds import ENOUGH
from shardwright.synth.shares.turns import Candidate, Found, Turns, candidate

#: See `next_to_nothing`.
_NOTHING = 1e-3

#: Looks at programs that cost less than the best that fits by the model; at each, and at other ratios of it;
#: unless the model has it need more than so many times the memory.
_LOOKS, _ADJUSTED = 2, 3
_FEARED = 1.5

#: What the model has need more than so many times the memory is not looked at: it was seen to take programs
#: for half as large again as they are.
_TOO_LARGE = 2.0

#: Part of its cost that a program should save to be looked at: that takes a while.
_WORTH_A_LOOK = 0.01

#: What costs more than this multiple of a plan that fits is not made to fit by other means: ratios of its own
#: save less.
FAR_DEARER = 1.2

#: Beyond this multiple of the cost without a limit of memory, no bound is tried against a rival.
_FAR_ABOVE = 1.5


def judged(
    turns: Turns,
    best: Candidate,
    free: Found,
    renting: Callable[[], Renting],
    rival_s: float = math.inf,
    *,
    briefly: bool = False,
) -> tuple[Candidate, Footprint | Peaks]:
    """The best candidate that fits as it will run; searched for with rent where the best of all does not.

    Args:
        turns: the search so far.
        best: what it found, with memory in the linear program where it would not fit otherwise.
        free: what it found if memory were no limit.
        renting: makes programs smaller.
        rival_s: what a plan that fits costs already: nobody looks for a dearer one.
        briefly: look at the candidate, and for no other one.
    """
    judge, stop, free_s = turns.judge, turns.stop, free.cost_s
    if best.cost_s <= free_s * (1 + ENOUGH) and judge.ample(best.memory, best.ratios):
        return best, best.memory
    possible = not too_small(judge.graph, [device.type.memory_bytes for device in turns.model.fleet.devices])
    enough = next_to_nothing(judge.graph)
    fallen: tuple[Candidate, Peaks] | None = None
    fitting: tuple[Candidate, Peaks] | None = None
    for rounds in range(MOST_LOOKS + 1):
        with turns.timer.ratios():
            peaks = judge.peaks(best.program, best.ratios, best.memory, never=briefly and not possible)
        over = judge.excess(peaks)
        best = replace(best, fits=over <= 1, over=over)
        if best.fits:
            if fitting is None or best.cost_s < fitting[0].cost_s:
                fitting = best, peaks
            if rounds or best.cost_s <= free_s * (1 + enough):
                return fitting
        elif fallen is None or over < fallen[0].over:
            fallen = best, peaks
        if not (best.fits or rounds or briefly):
            if hopeless(turns, renting, free_s, rival_s):
                break
            # Beside a plan that fits, nobody wants to know by how much the smallest program does not.
            if rival_s < math.inf and over > _FEARED and _smallest(turns, best, renting()).over > _FEARED:
                break
        if not best.fits and not rounds and (possible or not briefly):
            # The same, or nearly so, in another order may do; what the model learns is about the smaller one.
            smaller = best if briefly else leaner(turns, best, renting())
            if not briefly and smaller.fits:
                renting().enough = True
            # In another order it is no cheaper.
            beaten = smaller.cost_s > rival_s * FAR_DEARER
            small = None if beaten else spared(turns, smaller, sure=not briefly)
            if small is not None and small[0].fits:
                fitting = small
                if small[0].cost_s <= free_s * (1 + enough):
                    return fitting
            elif small is not None and small[0].over < over:
                fallen = best, peaks = small
        if rounds == MOST_LOOKS or (rounds and stop()) or briefly or not (best.fits or possible):
            break
        dearer = not best.fits or best.cost_s > rival_s
        rival_s = min(rival_s, math.inf if fitting is None else fitting[0].cost_s)
        if not rounds and dearer and hopeless(turns, renting, free_s, rival_s):
            break
        # The model takes some programs too large: what it learns from one that fits makes room for others.
        judge.learn(peaks, best.ratios, best.memory, rounds)
        found = LeastRent(turns, _again(turns, best), renting(), rival_s).search()
        if not found.fits and found.over > (1.1 if rounds else _FEARED):
            break
        best = found
    if fitting is not None:
        return fitting
    assert fallen is not None
    best, peaks = fallen
    # Beside a plan that fits nobody will see this one: a look is for what may fit after all.
    wanted = rival_s == math.inf or judge.feared(best.memory, best.ratios) <= _FEARED
    if not peaks.seen and wanted and not (briefly and not possible):
        peaks = judge.peaks(best.program, best.ratios, best.memory, sure=True)
        over = judge.excess(peaks)
        best = replace(best, fits=over <= 1, over=over)
    return best, peaks


def overlooked(
    turns: Turns,
    best: Candidate,
    memory: Footprint | Peaks,
    free_s: float,
    *,
    briefly: bool = False,
) -> tuple[Candidate, Footprint | Peaks]:
    """The cheapest program weighed that fits as it will run, even where the model feared that it does not.

    One that does not fit as it stands may at other ratios: the model learns how far it is off about this one.

    Args:
        turns: the search so far.
        best: what it found.
        memory: of that.
        free_s: what was found if memory were no limit.
        briefly: look at one program.
    """
    judge, learned = turns.judge, turns.judge.budgets
    if best.fits and best.cost_s <= free_s * (1 + ENOUGH):
        return best, memory
    few, worth = 1 if briefly else _LOOKS, 1 - _WORTH_A_LOOK
    cheaper = [each for each in turns.weighed if not best.fits or each.cost_s < best.cost_s * worth]
    distinct = {
        (each.program, each.ratios): each
        for each in cheaper
        if judge.feared(each.memory, each.ratios) <= _TOO_LARGE
    }
    for each in sorted(distinct.values(), key=lambda each: each.cost_s):
        if best.fits and each.cost_s >= best.cost_s * (1 - 1e-9):
            break
        for rounds in range(_ADJUSTED):
            if not few or turns.stop():
                break
            few -= 1
            with turns.timer.ratios():
                peaks = judge.peaks(each.program, each.ratios, each.memory)
                over = judge.excess(peaks)
                if over <= 1:
                    best, memory = replace(each, fits=True, over=over), peaks
                    break
                judge.learn(peaks, each.ratios, each.memory, rounds)
                near, cost_s = turns.best_ratios(list(each.items), each.ratios, each.memory)
            if near == each.ratios or (best.fits and cost_s >= best.cost_s * (1 - 1e-9)):
                break
            each = replace(each, ratios=near, cost_s=cost_s)
    judge.budgets = learned
    return best, memory


def next_to_nothing(graph: Graph) -> float:
    """By what part memory may make a step dearer without a further search; small ones take a moment."""
    return _NOTHING if len(graph.equations) <= SMALL else ENOUGH


def hopeless(turns: Turns, renting: Callable[[], Renting], free_s: float, rival_s: float) -> bool:
    """Whether a bound proves that no program that fits costs less than a rival."""
    if rival_s == math.inf or rival_s > free_s * _FAR_ABOVE:
        return False
    with turns.timer.search():
        wanted_s = rival_s * (1 - 1e-3)
        return renting().bound_within(turns.listed, 0.0, rival_s, turns.stop, wanted_s) >= wanted_s


def _again(turns: Turns, found: Candidate) -> Candidate:
    """The same by the model's present budgets."""
    over = turns.judge.over(found.memory, found.ratios)
    return replace(found, over=over, fits=over <= 1)


def _smallest(turns: Turns, found: Candidate, renting: Renting) -> Candidate:
    """The program found under the highest rent, at the same ratios, in the order that needs least."""
    limits, ratios = renting.limits.nbytes, found.ratios
    with turns.timer.search():
        prices = Prices.at(turns.listed, ratios)
        solution = renting.solve(prices, ratios, SCALES[-1] * found.cost_s / sum(limits), turns.stop)
        turns.searches, turns.expanded = turns.searches + 1, turns.expanded + solution.expanded
    with turns.timer.ratios():
        program = emit(turns.space, solution.assignment, prices, turns.extra)
        items, memory = charges(program, renting.graph, turns.model), turns.judge.footprint(program)
        here = candidate(turns, program, ratios, items, memory)
    there = None if here.fits else in_turn(turns, here)
    return there if there is not None and there.over < here.over else here
