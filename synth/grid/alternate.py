"""Program and ratios on two mesh axes: search and linear programs in turns.

As on one axis (`shardwright.synth.alternate`): the first start is the program that is best when every
instruction has the shares it likes most, whose price is the bound; a start ends when it no longer gets
better; the pair that costs least after rounding is kept. Here a device's ratio is the share of its node times
its own in it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import inf

from shardwright.cost.fleet import Fleet
from shardwright.ir.graph import Graph
from shardwright.ir.program import verify
from shardwright.synth.alternate import Synthesis
from shardwright.synth.combinations import SMALL
from shardwright.synth.fallback import fullest
from shardwright.synth.grid.candidate import GridCandidate
from shardwright.synth.grid.memory import NEARLY_FREE, GridRenting
from shardwright.synth.grid.pricing import GridPriceList
from shardwright.synth.grid.ranges import MOST_PIECES, NEAR, Tightening
from shardwright.synth.grid.solve import GridSolver, Solvers
from shardwright.synth.grid.turns import CLOSE, GridFound, GridTurns
from shardwright.synth.grid.weighing import Weighing
from shardwright.synth.memory.alive import crowded
from shardwright.synth.prices.tables import Prices
from shardwright.synth.programs.judge import SHORT, Judge, Look
from shardwright.synth.search.narrow.search import MOST_ROUNDS
from shardwright.synth.search.solution import Solution
from shardwright.synth.shares.bounds import ENOUGH
from shardwright.synth.shares.turns import starts
from shardwright.synth.space.factors import Use
from shardwright.synth.space.space import Space
from shardwright.synth.timer import Timer
from shardwright.synth.unsearched import arithmetic_s

_MOST_STARTS = 2

#: Beyond this multiple of the cost without a limit of memory, no bound is tried against a rival; and what
#: costs this multiple of a rival is not looked around.
_FAR_ABOVE = 1.5

#: Where the best program at the floors takes so many times the memory, what fits is looked for from there;
#: only if what is alive in the order as traced, each tensor held once, fills this part of it, of devices that
#: are alike or not: where that program was seen to be so large, it did.
_FAR_TOO_LARGE, _SCARCE_ALIKE, _SCARCE = 1.5, 0.8, 0.45


def is_mesh(fleet: Fleet) -> bool:
    """Whether two mesh axes are more than one: several nodes, some of which have several devices."""
    return 1 < len(fleet.nodes) < len(fleet.devices)


class GridSearch:
    """Program and ratios on two mesh axes, for one fleet; see the module's docstring.

    Attributes:
        crowded: the largest part of its memory that a device takes for the best program without a limit, with
            exchanges where they are wanted, as in programs of the step changed.

    Args:
        graph: the step.
        space: its programs, on the nodes of the fleet.
        listed: prices.
        timer: is told where time goes, and says when it is over.
        extra: factors that pin choices.
        look: what says how much memory a program takes; by default the model of `cost/memory/liveness.py`.
        solvers: known ones, see `GridSolver`.
        like: the search on another part of the fleet, for the same programs and pins.
        before: what solved for the programs of a step of which this one is a rewriting.
    """

    def __init__(
        self,
        graph: Graph,
        space: Space,
        listed: GridPriceList,
        timer: Timer,
        extra: tuple[Use, ...] = (),
        look: Look | None = None,
        solvers: Solvers | None = None,
        like: GridSearch | None = None,
        before: GridSolver | None = None,
    ) -> None:
        self.graph = graph
        self._judge = Judge(graph, listed.model, look)
        self._extra = extra
        with timer.search():
            known = None if like is None else like._turns
            self._turns = GridTurns(space, listed, timer, extra, solvers, known, before)
            self._listed, self._floors = listed, listed.floors
        self._weighing = Weighing(graph, space, listed.grid, self._judge, timer, extra)
        self._renting = GridRenting(self._weighing, extra, solvers)
        self._ideal: Solution | None = None
        self._rough, self._changed = False, before is not None
        #: A bound that was good enough when it was looked for.
        self._aimed_s = inf
        self._best: GridFound | None = None
        self._tightening: Tightening | None = None
        self._free: tuple[GridFound, GridCandidate, GridCandidate] | None = None
        #: Small steps are planned alike whatever the memory.
        self._large = len(graph.equations) > SMALL
        #: The best program at the floors, at the ratios that it likes; what fits in its place.
        self._at_floors: GridCandidate | None = None
        self._in_its_place: GridCandidate | None = None
        self.crowded = 0.0

    @property
    def bound_s(self) -> float:
        """What no program costs less than, as far as is known."""
        return self._turns.bound_s

    @property
    def solver(self) -> GridSolver:
        """What solves for its programs."""
        return self._turns.solver

    @property
    def alike(self) -> bool:
        """Whether no ratios but even ones make sense."""
        return self._turns.even is not None

    def arithmetic_s(self) -> float:
        """What the kernels of every program cost at least: a bound that no search is needed for."""
        with self._turns.timer.search():
            self._listed.learn(self._turns.solver.factors)
            self._raise(arithmetic_s(self._turns.space, self._floors))
        return self.bound_s

    def bound(self, target_s: float = inf, *, roughly: bool = False) -> float:
        """What the best program costs when every instruction has the shares it likes most.

        Args:
            target_s: a bound that is good enough.
            roughly: a program will do that is nearly the best, to see what memory it takes.

        Raises:
            PlanError: no program keeps to the pins.
        """
        if (self._rough and not roughly) or self.short_of(target_s):
            self._ideal = self._best = self._at_floors = self._in_its_place = None
            self._turns.forget()
        if self._ideal is None:
            # Devices that are alike are likely to have equal shares: the best program at the floors is then
            # likely to be the plan, and its bound what says so.
            turns = self._turns
            enough, rounds = (NEAR, 1) if turns.even is None or target_s < inf else (CLOSE, MOST_ROUNDS)
            self._rough = roughly and enough == CLOSE
            enough = NEAR if self._rough else enough
            # Prices at even ratios are about those at the floors.
            turns.close = 2 * NEAR if self._rough else CLOSE
            self._ideal = turns.solve(self._floors, None, enough, target_s, rounds=rounds)
            self._aimed_s = target_s
            self._raise(self._ideal.bound_s)
        return self.bound_s

    def short_of(self, target_s: float) -> bool:
        """Whether its bound was good enough when it was looked for, and is not for a higher target."""
        return self._ideal is not None and self._best is None and self._aimed_s <= self.bound_s < target_s

    def _raise(self, bound_s: float) -> None:
        self._turns.bound_s = max(self.bound_s, bound_s)

    @property
    def free_s(self) -> float:
        """What the best pair found costs if memory is no limit; infinite if none was looked for."""
        found = self._best or self._at_floors
        return inf if found is None else found.cost_s

    def plan(self, most_s: float = inf, content_s: float = inf, *, briefly: bool = False) -> Synthesis:
        """The best pair of program and ratios found.

        Args:
            most_s: beyond this cost a plan is of no use.
            content_s: a bound with which to be content, whatever the plan costs.
            briefly: do not search for what fits in place of what does not.

        Raises:
            PlanError: no program keeps to the pins.
        """
        found = self._planned(most_s, content_s, briefly=briefly)
        if self._rough and not found.dearer:  # it may be the plan
            self.bound()
            found = self._planned(most_s, content_s, briefly=briefly)
        return found

    def _planned(self, most_s: float, content_s: float, *, briefly: bool) -> Synthesis:
        """See `plan`; what was searched roughly is left so if that will do."""
        self.bound(most_s, roughly=briefly)
        assert self._ideal is not None
        turns = self._turns
        if self._best is None:
            given_up = self._within_at_once(most_s, briefly=briefly)
            if given_up is not None:
                return given_up
            for ratios in _starts(turns, self._ideal, self._floors, large=self._large):
                reached = self._reached(ratios, most_s)
                if self._best is None or reached.cost_s < self._best.cost_s * (1 - 1e-9):
                    self._best = reached
                if turns.timer.late() or self.bound_s >= self._best.cost_s * (1 - ENOUGH):
                    break
        assert self._best is not None
        if len(turns.grid.mesh.kind_counts) > 1:
            # Better bounds, and shares, of what does not fit, or is dearer than a rival, are of no use;
            # but where the best program is too dear anyhow, one that is not may fit.
            settled = self._settled(self._best, most_s, briefly=briefly)
            of_use = fullest(settled, turns.grid.model) <= 1 or (not briefly and self.free_s >= most_s)
            beaten = self._best.cost_s >= most_s / (1 - ENOUGH)
            if not of_use or beaten or settled.cost_s > most_s * _FAR_ABOVE:
                return settled
            if self._tightening is None:
                self._tightening = Tightening(turns, self._ideal, self._best)
            before, self._best = self._best, self._tightening.run(self._best, content_s)
            if self._best is before:
                bound_s = min(max(settled.bound_s, self.bound_s), settled.cost_s)
                expanded = turns.expanded + self._renting.expanded
                searches = turns.searches + self._renting.searches
                settled = replace(settled, expanded=expanded, searches=searches)
                return replace(settled, bound_s=bound_s)
        return self._settled(self._best, most_s, briefly=briefly)

    def _reached(self, ratios: tuple[float, ...], most_s: float) -> GridFound:
        """Turns from some ratios on: beside a rival thorough ones only if less thorough ones beat it."""
        if most_s < inf:
            reached = self._turns.take(ratios, rounds=1)
            if reached.cost_s >= most_s / (1 - ENOUGH) or self._turns.timer.late():
                return reached
            self._turns.forget()
        return self._turns.take(ratios)

    def sharpened(self, wanted_s: float, *, briefly: bool = False) -> float:
        """What no program costs less than, found with more effort.

        Args:
            wanted_s: a bound with which to be content.
            briefly: with no more effort than a plan is worth that is no dearer than its rivals.
        """
        self.bound(wanted_s)
        assert self._ideal is not None
        turns = self._turns
        if len(turns.grid.mesh.kind_counts) > 1 and self.bound_s < wanted_s:
            if self._best is None:
                self._best = turns.take(next(_starts(turns, self._ideal, self._floors, large=self._large)))
            if self._tightening is None:
                self._tightening = Tightening(turns, self._ideal, self._best)
            self._tightening.reach(self._best, wanted_s, *([MOST_PIECES] if briefly else []))
        return self.bound_s

    def _settled(self, best: GridFound, most_s: float, *, briefly: bool) -> Synthesis:
        """The program of what was found, priced as it will run, within the devices' memory."""
        turns, judge, renting, ideal = self._turns, self._judge, self._renting, self._ideal
        assert ideal is not None
        free, as_found = self._unlimited(best)
        bound_s = self.bound_s
        fitted = free
        if not judge.ample(free.memory, free.ratios):
            # The model takes some programs too large: what it puts in another order may fit as it is.
            seen = None if briefly or as_found is free else self._weighing.seen_to_fit(as_found)
            fitted = seen or self._weighing.looked_at(free, briefly=briefly)
        near_free = fitted.over <= 1 and fitted.cost_s <= free.cost_s * (1 + NEARLY_FREE)
        if not near_free and not briefly and free.cost_s < most_s:
            fitted = self._within(free, fitted, most_s)
        if fitted.over <= 1 and not near_free and fitted.cost_s < most_s:
            bound_s = renting.bound(self._floors, ideal, bound_s, fitted.cost_s)
        solution = free.solution if fitted.ratios == free.ratios else None
        # What is of no use is not searched for once more.
        if fitted.over <= 1 and fitted.cost_s < most_s / (1 - ENOUGH):
            solution = turns.search(fitted.ratios)[0]
        return self._told(fitted, free.cost_s, bound_s, solution)

    def _told(
        self, fitted: GridCandidate, free_s: float, bound_s: float, solution: Solution | None = None
    ) -> Synthesis:
        """What was found, with what no program costs less than: at any ratios, and at those by a solution."""
        turns, renting = self._turns, self._renting
        with turns.timer.search():
            verify(fitted.program, self.graph)
        cost_s = fitted.cost_s
        least = bound_s if solution is None else solution.bound_s
        # What differs by the order of a sum is the same.
        gap = 1 - least / cost_s if least < cost_s * (1 - 1e-9) else 0.0
        notes: list[str] = []
        if fitted.over > 1:
            notes.append(SHORT)
        if solution is not None and solution.bound_s < solution.seconds * (1 - CLOSE) * (1 - 1e-9):
            notes.append(f"the search stopped early: at these ratios a program could be {gap:.1%} cheaper")
        if turns.timer.late():
            notes.append("the time limit ended the search before all starts were tried")
        return Synthesis(
            fitted.program,
            fitted.ratios,
            cost_s,
            min(bound_s, cost_s),
            gap,
            turns.expanded + renting.expanded,
            turns.searches + renting.searches,
            tuple(notes),
            tuple(fitted.items),
            fitted.memory,
            dearer=fitted.over > 1 or cost_s > free_s * (1 + ENOUGH),
        )

    def _within_at_once(self, most_s: float, *, briefly: bool) -> Synthesis | None:
        """What fits, or lacks least, without a search for the best program memory aside; None for want of it.

        Of a large step whose best program at the floors takes far too much. That one is made to fit: where
        what comes of it is of no use, the best program memory aside, which takes as long again, is none.
        """
        ideal, turns = self._ideal, self._turns
        assert ideal is not None
        part = _SCARCE if turns.even is None else _SCARCE_ALIKE
        if not (self._large and crowded(self.graph, part * sum(self._weighing.limits.nbytes))):
            return None
        if self._at_floors is None:
            # The search memory aside asks for the prices of alike devices at even ratios, too.
            ratios = turns.even or next(_starts(turns, ideal, self._floors, large=self._large))
            prices = self._floors if turns.even is None else turns.prices(turns.even)
            with turns.timer.search():
                self._at_floors = self._weighed(ideal, prices, ratios)
        here = self._at_floors
        if here.over > _FAR_TOO_LARGE:
            here = self._weighing.in_turn(here)
        if here.over <= _FAR_TOO_LARGE:
            return None
        self.crowded = self._judge.feared(here.memory, here.ratios)
        if briefly:
            return self._told(here, here.cost_s, self.bound_s)
        found = self._in_its_place = self._renting.fitting(here, turns, most_s)
        return None if found.fits and found.cost_s < most_s else self._told(found, here.cost_s, self.bound_s)

    def _within(self, free: GridCandidate, fitted: GridCandidate, most_s: float) -> GridCandidate:
        """What fits in place of the best memory aside; `fitted` is the best so far, which may not fit."""
        turns, renting, ideal, place = self._turns, self._renting, self._ideal, self._in_its_place
        assert ideal is not None
        if place is not None and place.beats(fitted):
            fitted = place
        if place is not None and turns.even is not None:
            return fitted  # at other ratios there is nothing to be found
        below_s = min(most_s, fitted.cost_s) if fitted.over <= 1 else most_s
        near = below_s <= free.cost_s * _FAR_ABOVE

        def hopeless() -> bool:
            """Whether a bound, which takes long, proves that nothing that fits is cheap enough."""
            if not near:
                return False
            return renting.bound(self._floors, ideal, self.bound_s, below_s) >= below_s * (1 - 1e-3)

        again = renting.fitting(free, turns, below_s, hopeless)
        return again if again.beats(fitted) else fitted

    def _weighed(self, solution: Solution, prices: Prices, ratios: tuple[float, ...]) -> GridCandidate:
        """A solution as a program at some ratios, in the order that takes least where memory is scarce."""
        scarce = self._rough or self._changed
        # A step is changed as much as should do.
        likely = self._changed and not self._rough
        return self._weighing.candidate(solution, prices, ratios, in_turn=scarce, likely=likely)

    def _unlimited(self, best: GridFound) -> tuple[GridCandidate, GridCandidate]:
        """The program of what was found if memory were no limit: in the order that takes least, and as it is.

        Both are one if it fits by the model of memory. Where memory is known to be scarce, only the order
        that takes least is looked at.
        """
        if self._free is None or self._free[0] is not best:
            solution, prices = self._turns.search(best.ratios)
            scarce, known = self._rough or self._changed, self._at_floors
            if (
                known is not None
                and known.prices is prices
                and known.solution.assignment == solution.assignment
            ):
                free = replace(known, solution=solution)
            else:
                with self._turns.timer.search():
                    free = self._weighed(solution, prices, best.ratios)
            less = free if free.fits or scarce else self._weighing.in_turn(free)
            self._free = best, less, free
            turned = less if free.fits or scarce else self._weighing.turned(free)
            self.crowded = self._judge.feared(turned.memory, turned.ratios)
        return self._free[1:]


def _starts(turns: GridTurns, ideal: Solution, floors: Prices, *, large: bool) -> Iterator[tuple[float, ...]]:
    """Ratios to start from, those that the best program at the floors likes first."""
    if turns.even is not None:
        yield turns.even
        return
    mesh = turns.grid.mesh
    yield turns.best_ratios(ideal, floors, mesh.ratios(*mesh.even()))[0]
    if large and len(mesh.kind_counts) > 1:  # further starts come from the ranges of the nodes' shares
        return
    for shares in starts(turns.grid.model)[:_MOST_STARTS]:
        yield tuple(float(shares[c]) for c in turns.grid.model.class_of)
