"""Narrowing down a problem: messages, there and back through mini-buckets, A*.

What is left once simple choices are out (`solve.py`), until the bound meets the best assignment found.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from shardwright.synth.search.astar import MOST_NODES, Layer, a_star
from shardwright.synth.search.eliminate import eliminate, live, record
from shardwright.synth.search.fold import refined
from shardwright.synth.search.narrow.buckets import Bounds, Buckets
from shardwright.synth.search.narrow.dominated import Dominated
from shardwright.synth.search.narrow.dual import PER_ROUND, Dual
from shardwright.synth.search.narrow.messages import Messages, Talk
from shardwright.synth.search.narrow.rest import Rest
from shardwright.synth.search.narrow.tied import repeats, tied, untied
from shardwright.synth.search.order import full_order
from shardwright.synth.search.prune import Kept
from shardwright.synth.search.stages import Core, Stage

#: Most sweeps of messages, from nothing and from messages that were right at other prices; and the part of
#: the bound that a round of them must add to go on.
MOST_SWEEPS, FEW_SWEEPS, ENOUGH = 64, 24, 1e-3

#: Largest tables of the ways there and back, the next where one no longer leaves out much; and rounds of
#: messages at most.
_CELLS, MOST_ROUNDS = (1 << 14, 1 << 16, 1 << 18), 4

#: Rounds of refinement that tell choices of one class apart whose messages differ.
_REFINED = 2

#: What assignments are assumed to cost at most: a part above the bound, and the factor by which that grows
#: where it was easily settled.
_SLACK, _MORE_SLACK = 0.01, 2.0

#: Further from the bound, messages have to say more before values are left out.
_FAR = 0.01

#: What was best at other prices, and is within this part of the bound, is as good as the best of tied layers.
_DOUBT = 0.02

#: How well the best assignment of tied layers is known at least, and mostly `_STRICTER` times better: what it
#: costs is only what values are left out by, and layers that may differ are searched after it.
_TIED = 0.2

#: What messages are likely to add to the bound, as a part of it, when assignments are guessed by what they
#: say (or half of what the bound may miss, if that is more); how often; of how many values per class; and of
#: how many where messages will not do.
_SOON, _GUESSES, _FEW_LIKELY, _LIKELY = 1e-3, 2, 5, 8

#: By what part of the way to the last guess the bound must have risen for another.
_NEWS = 0.1

#: While values are left out quickly, the bound is to meet the best assignment as many times better.
_STRICTER = 0.1

#: Where something costs less than a bound that would be good enough, no bound is that: it may miss the best
#: assignment by this part.
_OUT_OF_REACH = 0.05

#: A way there and back is worth repeating while it leaves out such a part of the values.
_PROGRESS = 0.08

#: Of more values than these, larger tables and A* say little for their time.
_FEW_VALUES = 2_000

#: What stands for "impossible", in units of the largest cost at hand; a power of two.
NEVER = 2.0**14

#: A* has tables of so many cells, expands so many nodes at most, and takes so many steps per choice.
MOST_CELLS, _MOST_NODES, _STEPS = 1 << 20, 1_000, 8

#: Bounds that are so close to a cost are equal to it.
_CLOSE = 1e-9


class Memory:
    """What one solution leaves for the next, at other prices: messages, an order, what dominates what."""

    def __init__(self) -> None:
        self.stage: Stage | None = None
        self.messages: Messages = {}
        self.talk: Talk | None = None
        self.order: list[int] = []
        self.guess_order: list[int] = []
        self.dominated = Dominated()
        #: Whether the messages are those of another problem, and nothing was solved with them yet.
        self.inherited = False

    def of(self, stage: Stage) -> Memory:
        """The memory, empty if it was of something else."""
        if self.stage is not stage:
            self.stage, self.messages, self.dominated = stage, {}, Dominated()
            self.order, self.guess_order, self.inherited, self.talk = [], [], False, None
        return self


class Search:
    """Search in the core of a problem.

    Attributes:
        seconds: what the best assignment costs, infinite while there is none.
        best: its value of every choice of the core.
        proven: no assignment costs less.
        expanded, width: see `Solution`.
    """

    def __init__(self, core: Core, kept: Kept, memory: Memory, stop: Callable[[], bool]) -> None:
        self.core, self.kept, self.stop = core, kept, stop
        self.memory = memory
        self.seconds, self.proven, self._target_s = math.inf, -math.inf, math.inf
        self.best: list[int] = []
        self._messages, self._looks = self.memory.messages, 0
        #: Finer than classes, once it is found that choices of one class have different things to say.
        self._colours: list[int] | None = None
        self._finer: Talk | None = None
        #: Whether any program is better than none.
        self._eager = False
        self.expanded = self.width = 0

    def offer(self, values: Sequence[int]) -> None:
        """Keep an assignment of the core if it is better than the best."""
        folded = self.core.folded
        seconds = self.core.constant + sum(
            float(self.core.cooked[recipe][tuple([values[v] for v in scope])])
            for scope, recipe in zip(folded.scopes, folded.recipe_of, strict=True)
        )
        if seconds < self.seconds:
            self.seconds, self.best = seconds, list(values)

    def run(self, enough: float, target_s: float, rounds: int, sweeps: int = 0) -> None:
        """Narrow down what is left until the bound meets the best assignment, or nothing helps any more.

        What assignments may cost is assumed to be little more than the bound. Either one is found that does
        not cost more, and is the best; or there is none, which makes a better bound.

        Args:
            enough: part of the best cost by which the bound may miss it.
            target_s: a bound that is good enough whatever the best assignment costs.
            rounds: of messages at most, but for a second one where the first leaves the bound far away.
            sweeps: of the first round at most; 0 for as many as seem useful.
        """
        self._target_s = target_s
        known, inherited = bool(self.best), self.memory.inherited
        few = self.memory.messages and not inherited
        sweeps, slack = sweeps or (FEW_SWEEPS if few else MOST_SWEEPS), _SLACK
        for number in range(rounds + 1):
            dual = self._swept(sweeps, enough, on=number > 0)
            self._prove(self.core.constant + dual.bound())
            if self.proven >= target_s or self._done(enough):
                break  # whatever the best assignment is, or hardly dearer than that
            if not number and not known:
                if not self.best:
                    self._guess(dual, _LIKELY)
                if self.seconds > self.proven * (1 + _DOUBT):
                    self._tied(dual)
                if self._done(enough):
                    break
            elif inherited and not number:  # a bound that a guess meets needs nothing that takes longer
                self._guess(dual, _LIKELY)
                if self._done(enough):
                    break
            rest = Rest(self.core, self.kept, dual, self.memory.order)
            if self.best:
                rest.without(dual, self.seconds * (1 + _CLOSE) - self.core.constant)
            self._look_at(rest, rest.some, _CELLS[0], self.seconds)
            if not number and known and self.seconds > self.proven * (1 + _DOUBT):
                self._tied(dual)
            more = not number or number < min(rounds - 1, 2)
            if self.best and more and self.seconds > self.proven * (1 + _FAR):
                sweeps = MOST_SWEEPS
                rest.leave_out(self.kept)
                continue  # values are left out by what the best assignment costs: more messages say more
            settled = True
            while settled and not (self._done(enough * _STRICTER) or self.proven >= target_s or self._late()):
                assumed = self.proven + slack * max(abs(self.proven), rest.scale * 1e-6)
                assumed = min(self.seconds, assumed if assumed < rest.scale else math.inf)
                looks = self._looks
                settled = self._assume(rest, assumed, enough)
                if settled:  # up to the rounding of tables, some 1e-8 of the cost at most
                    self._prove(assumed)
                slack *= _MORE_SLACK if self._looks == looks + 1 else 1.0
            if settled or number >= rounds - 1 or self._late() or self._done(enough * _STRICTER):
                break
            rest.leave_out(self.kept)
            sweeps = MOST_SWEEPS
        if not self.best and math.isfinite(self.proven):
            rest = Rest(self.core, self.kept, self._swept(0), self.memory.order)
            self._eager = True
            self._look_at(rest, rest.some, _CELLS[0], self.seconds)
            if not self.best:
                self._searched(rest, rest.some, MOST_NODES)

    def _tied(self, dual: Dual) -> None:
        """Offer the best assignment in which equal layers decide alike."""
        folded = self.core.folded
        if not repeats(folded):
            return
        core, left = tied(folded, self.kept, dual)
        search = Search(core, Kept(core.folded, core.sizes, core.cooked), Memory(), self.stop)
        search.run(_TIED, math.inf, 1, sweeps=FEW_SWEEPS)
        if search.best:
            self.offer(untied(folded, left, search.best))

    def _guess(self, dual: Dual, most: int) -> None:
        """Offer a good assignment of so many values per class that look best by the messages, layers tied."""
        folded = self.core.folded
        core, left = tied(folded, self.kept, dual, most)
        if not self.memory.guess_order:
            self.memory.guess_order = full_order(core.sizes, live(core.folded, [2] * len(core.sizes)))
        scale = sum(float(np.where(np.isfinite(t), np.abs(t), 0.0).max()) for t in core.cooked)
        some = Kept(core.folded, core.sizes, core.cooked)
        buckets = Buckets(some, self.memory.guess_order, _CELLS[0], (scale or 1.0) * NEVER)
        buckets.there()
        at = buckets.greedy()
        self.offer(untied(folded, left, [at.get(kind, 0) for kind in range(len(left))]))

    def _done(self, enough: float) -> bool:
        if self.seconds <= self.proven * (1 + _CLOSE):
            self.proven = self.seconds
        if self.proven < self._target_s <= self.seconds:
            return self.proven == self.seconds
        if self.seconds < self._target_s < math.inf:
            enough = max(enough, _OUT_OF_REACH)
        return self.proven >= self.seconds * (1 - enough)

    def _swept(self, sweeps: int, enough: float = 0.0, *, on: bool = False) -> Dual:
        """Messages of what is left, as those of the last time after some sweeps; so many if they go `on`.

        Args:
            sweeps: at most.
            enough: part of the best cost by which a bound that ends them may miss it.
            on: so many.
        """
        talk = self._talk(finer=on)
        talk.say(self._messages)
        dual = talk.dual
        if self.memory.inherited:
            dual.balance()
            self.memory.inherited = False
        # Messages of other prices are nearly right everywhere: no round of sweeps adds much at once.
        if on and self._colours is not None:
            dual.rise(sweeps, ENOUGH, self.stop, lambda bound, more: self._enough(bound, enough))
        elif on:
            # What buckets make of messages goes on rising when the bound by messages alone does not.
            dual.move(sweeps // PER_ROUND, self.stop)
        else:
            guesses, guessed_at = 0, -math.inf
            soon = max(_SOON, min(enough, _FAR) / 2)

            def settled(bound: float, more: float) -> bool:
                nonlocal guesses, guessed_at
                done = self._enough(bound, enough)
                close = more < soon * (abs(self.core.constant) + abs(bound))
                # Messages that have hardly changed lead to the same guess.
                news = not self.proven < guessed_at + _NEWS * (self.seconds - guessed_at)
                good = self.seconds <= self.proven * (1 + _DOUBT)
                if close and news and not good and guesses < _GUESSES and not done:
                    guesses, guessed_at = guesses + 1, self.proven
                    self._guess(dual, _FEW_LIKELY)
                    done = self._enough(bound, enough)
                return done

            bound = dual.rise(sweeps, -1.0 if sweeps == FEW_SWEEPS else ENOUGH, self.stop, settled)
            far = self.seconds > self.proven * (1 + _FAR) and self.proven < self._target_s
            if self._messages and far and not self._late():
                # Those of prices that are quite different lead to where no further ones lead out of.
                said = dual.forget()
                if dual.rise(MOST_SWEEPS, ENOUGH, self.stop, settled) < bound:
                    dual.remember(said)
        talk.note(self._messages, self.core.sizes)
        if self._messages is self.memory.messages:  # what fewer values say later is of no use at other prices
            self._messages = {name: [m.copy() for m in full] for name, full in self._messages.items()}
        return dual

    def _enough(self, bound: float, enough: float) -> bool:
        """Whether what messages prove is the end of it."""
        self._prove(self.core.constant + bound)
        return self.proven >= self._target_s or self._done(enough)

    def _talk(self, *, finer: bool) -> Talk:
        """What is left, with nothing said yet; between finer colours where choices of one class differ."""
        folded, talk = self.core.folded, self._finer or self.memory.talk
        if finer and talk is not None and self._colours is None and not talk.dual.alike:
            self._colours = refined(folded.class_of, folded.scopes, folded.recipe_of, _REFINED)
            talk = self._finer = Talk(folded, self.kept, self._colours)
            self._messages = talk.of_classes(self._messages)
        elif talk is None or not talk.renewed(self.kept):
            talk = Talk(folded, self.kept, self._colours)
            if self._colours is None:
                self.memory.talk = talk
            else:
                self._finer = talk
        return talk

    def _assume(self, rest: Rest, assumed: float, enough: float) -> bool:
        """Look for the best assignment that costs no more than assumed, or one that is good enough.

        Returns:
            Whether it was found, or there is none.
        """
        some = rest.copy()
        for cells in _CELLS[1:]:
            before = math.inf
            if cells == _CELLS[-1] and sum(map(len, some.values)) > _FEW_VALUES:
                return False  # messages have to say more first
            while (left := sum(map(len, some.values))) < before * (1 - _PROGRESS):
                before = left
                if self._look_at(rest, some, cells, assumed):
                    return True
                if self._late() or self._done(enough * _STRICTER):
                    return False
        bound, settled = self._searched(rest, some)
        self._prove(min(bound, assumed))
        return settled

    def _look_at(self, rest: Rest, some: Kept, cells: int, assumed: float) -> bool:
        """There and back through some values; leave out those that cost more than assumed.

        Returns:
            Whether nothing is left to be found among them.
        """
        self._looks += 1
        scale = self.seconds if math.isfinite(self.seconds) else rest.scale
        buckets = Buckets(some, rest.order, cells, scale * NEVER)
        found = buckets.bounds()
        bound = self.core.constant + found.bound
        if found.exact or math.isfinite(assumed) or self._eager:
            self.offer(rest.original(buckets.greedy(), some))
        possible = _keep(some, found, assumed * (1 + _CLOSE) - bound)
        self._prove(min(bound, assumed) if possible else assumed)
        return found.exact or not possible or bound >= assumed

    def _prove(self, bound: float) -> None:
        self.proven = max(self.proven, min(bound, self.seconds))

    def _late(self) -> bool:
        """Whether time is over, and there is something to show."""
        return bool(self.best) and self.stop()

    def _searched(self, rest: Rest, some: Kept, nodes: int = _MOST_NODES) -> tuple[float, bool]:
        """A* among some values, which offers what it finds: a bound on them, and whether that is settled."""
        folded = rest.stage.folded
        sizes = [len(values) for values in some.values]
        order = [v for v in rest.order if sizes[folded.class_of[v]] > 1]
        tape = record(folded, sizes, sizes, order, MOST_CELLS)
        done = eliminate(tape, some)
        layer, steps = Layer(folded.class_of, some.values, done), _STEPS if nodes < MOST_NODES else math.inf
        found = a_star([layer], nodes, self._late, steps=steps)
        least = self.core.constant + float(done.constant)
        if found is None:  # all impossible, or none found
            return least, not math.isfinite(least)
        self.expanded, self.width = self.expanded + found.expanded, tape.width
        if found.assignment:
            values = [rest.values[kind] for kind in folded.class_of]
            self.offer([int(mine[at]) for mine, at in zip(values, found.assignment, strict=True)])
        return self.core.constant + found.bound, found.cost <= found.bound


def _keep(some: Kept, found: Bounds, above: float) -> bool:
    """Leave out values that exceed the bound by more; whether any are left of every class."""
    for kind, excess in enumerate(found.of_value):
        if excess is not None:
            mine = np.flatnonzero(excess <= above)
            if not len(mine):
                return False
            if len(mine) < len(excess):
                some.keep(kind, some.values[kind][mine])
    return True
