"""Program and ratios together: search and LP in turns, and what fits into memory.

    ratios --search--> program --LP--> shares --rounding--> ratios --search--> ...

What is found if memory were no limit comes first (`synth/freely.py`). The pair with the least exact cost
after rounding is kept; program, ratios and cost returned therefore belong together. Where it does not fit the
devices' memory, the turns are taken again with memory as rows of the LP, and what fits is better than
whatever does not. `synth/programs/judge.py` says what fits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

from shardwright.cost.bill import Item
from shardwright.cost.memory.liveness import Footprint, Peaks
from shardwright.cost.model import CostModel
from shardwright.ir.graph import Graph
from shardwright.ir.program import Program, verify
from shardwright.synth.apart import apart
from shardwright.synth.combinations import SMALL
from shardwright.synth.freely import Free, freely
from shardwright.synth.memory.budgets import SCALES, Limits, Renting
from shardwright.synth.memory.crowded import MOST_CHOICES, WIDE, uncrowded
from shardwright.synth.memory.lean import BRIEFLY, HANDED_ON
from shardwright.synth.memory.rent import too_small
from shardwright.synth.memory.stretched import stretched
from shardwright.synth.memory.within import FAR_DEARER, hopeless, judged, next_to_nothing, overlooked
from shardwright.synth.programs.judge import Look, shortage
from shardwright.synth.segments import SEVERAL, WORTH, Segmented
from shardwright.synth.shares.bounds import ENOUGH, Certificate
from shardwright.synth.shares.turns import Billed, Candidate, Found, Turns
from shardwright.synth.space.factors import Use
from shardwright.synth.space.space import Space
from shardwright.synth.timer import Timer

#: Costs that differ by less than this part are the same.
_SAME = 1e-9

#: Beside a rival that costs up to so many times what a step does without a limit of memory, what needs far
#: too much is not made to fit.
_NEAR = 1.03

#: Beside one that costs up to so many times that, a large step is not searched for what fits: so little is
#: not worth what takes most of the time.
_AS_NEAR = 1.02

#: Beside one that costs more than so many times that, several ratios may save what memory made it dearer by:
#: 31 s a step were found where one vector took 65, and the plan there was 51.
_OPEN = 1.2


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
    alone, mixed = len(model.class_of) == 1, len(model.types) > 1
    opened = mixed and not briefly and rival_s > found.cost_s * _OPEN
    if pool is not None and not hopeless(turns, renting, found.cost_s, rival_s):
        within = pool.cheapest(rival_s)
    if within is not None:
        first, memory = best, memory = within
        renting().helped = SCALES.index(1.0)
    elif pool is None and not alone and (glance or rival_s <= found.cost_s * _NEAR) and free.hardly_fits:
        first, memory = best, best.memory
    else:
        # On one device all programs are one.
        large, near = len(graph.equations) > SMALL, rival_s <= found.cost_s * _AS_NEAR
        brief = briefly or alone or (pool is not None and rival_s < math.inf) or (large and near)
        # What fits and is dearer than a rival may be cheaper once it is cut apart.
        least_s = math.inf if opened else rival_s
        looked_at = judged(
            turns,
            best,
            found,
            renting,
            least_s,
            briefly=brief,
            handed_on=BRIEFLY if brief and large else HANDED_ON,
            apart=lambda: found.cost_s < rival_s and free.at_no_cost is not None,
        )
        if looked_at is None:
            assert free.at_no_cost is not None, "it is why nothing else was looked for"
            return _several(turns, *free.at_no_cost, found, certificate, renting)
        first, memory = looked_at
        best, memory = overlooked(turns, first, memory, found.cost_s, rival_s, briefly=brief)
        if not brief and _wide(free, best, rival_s, renting):
            cheaper, theirs = uncrowded(turns, best, memory, rival_s)
            first = first if cheaper is best else cheaper
            best, memory = cheaper, theirs
        if best.fits and not brief:
            best, memory = stretched(turns, best, memory, found.cost_s)
    little = _SAME if pool is not None else min(next_to_nothing(graph), WORTH if mixed else math.inf)
    dearer = not best.fits or best.cost_s > found.cost_s * (1 + little)
    given_up = (briefly and dearer) or (not best.fits and rival_s < math.inf and not opened)
    several: tuple[Segmented, float] | None = None
    others: list[Billed] = []
    if within is not None and pool is not None:
        others = pool.below(best.cost_s * (1 - WORTH), found.ratios)
    elif free.pool is not None and best.fits and not dearer:
        others = free.pool.below(best.cost_s * SEVERAL, found.ratios)
    larger = mixed and not too_small(graph, Limits.of(model).nbytes)

    def cut_apart(one: Candidate) -> None:
        nonlocal several
        found_apart = apart(turns, one, found, renting, others, larger=larger, rival_s=rival_s)
        if found_apart is not None and (several is None or found_apart[0].cost_s < several[0].cost_s):
            several = found_apart

    # Beside a plan near the best memory aside, several ratios save less than what it is dearer by.
    beaten = pool is None and best.cost_s > rival_s * FAR_DEARER and not opened
    # The bound is of plans with several ratios, too.
    if not (given_up or beaten or (best.fits and certificate.bound_s >= best.cost_s * (1 - WORTH))):
        cut_apart(best)
        if others and within is not None and pool is not None:
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
    if len(turns.space.choices) > MOST_CHOICES:
        return False  # what a wide gap is for, is not for so large a step
    if best.fits and best.cost_s <= free.found.cost_s * (1 + _SAME):
        return False
    # Memory makes nothing cheaper than what was found without a limit.
    wanted_s, bound_s = least_s * (1 - WIDE), free.certificate.bound_s
    if turns.judge.roomy or max(free.found.cost_s, bound_s) >= wanted_s:
        return False
    if least_s < math.inf:
        with turns.timer.search():
            bound_s = renting().bound_within(turns.listed, bound_s, least_s, turns.stop)
    return bound_s < wanted_s


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
