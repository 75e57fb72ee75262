"""What the search for the programs of a step leaves to that of the step changed (`shardwright.ir.rewrites`).

Most choices of a changed step have a twin in the step as it was (`shardwright.synth.space.twins`). What was
found there is a start here: the best assignment is a good one, or nearly one, messages between the same
choices are about right, and what dominates a value mostly still does. None of it is taken for granted. Any
messages make a bound, an assignment counts for what it costs here, and of a value it is checked whether it is
still dominated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from shardwright.cost.share_cost import Floats
from shardwright.synth.search.eliminate import live
from shardwright.synth.search.fold import Scope, cook, fold
from shardwright.synth.search.narrow.buckets import Buckets
from shardwright.synth.search.narrow.dominated import Went
from shardwright.synth.search.narrow.search import NEVER, Memory
from shardwright.synth.search.order import full_order
from shardwright.synth.search.prune import Kept
from shardwright.synth.search.stages import Core, Stage
from shardwright.synth.space.space import Space
from shardwright.synth.space.twins import twins

#: Part of the choices that have twins at least, for anything to be inherited; and of the kinds of factors
#: that have messages: where more begin with none, those that do not are no better a start than none at all.
_LEAST, _MOSTLY = 0.5, 0.75

#: Largest table by which choices without twins are decided.
_CELLS = 1 << 14


@dataclass(frozen=True, slots=True)
class Inherited:
    """What is known of the twins of a problem's choices.

    Attributes:
        stage: what was left of the other problem, in few terms.
        messages: of its terms, see `shardwright.synth.search.narrow.search.Memory`.
        went: of its classes, see `shardwright.synth.search.narrow.dominated.Dominated`.
        same: of every choice, its twin if that has the same values; -1 without one.
        values: of every choice, the value that its twin has in the best assignment; -1 without one.
    """

    stage: Stage
    messages: Mapping[tuple[object, ...], Sequence[Floats]]
    went: Mapping[int, Went]
    same: Sequence[int]
    values: Sequence[int]

    @staticmethod
    def of(space: Space, other: Space, stage: Stage, memory: Memory, best: Sequence[int]) -> Inherited | None:
        """What is known of a space's choices by those of another, None where too few have twins.

        Args:
            space: the programs of a changed step.
            other: those of the step as it was.
            stage: what was left of their problem.
            memory: what its solution left.
            best: their best assignment.
        """
        same, values = [-1] * len(space.choices), [-1] * len(space.choices)
        for choice, twin in enumerate(twins(space, other)):
            if twin >= 0:
                mine, theirs = space.choices[choice].domain, other.choices[twin].domain
                if mine is theirs:
                    same[choice], values[choice] = twin, best[twin]
                elif theirs.holdings[best[twin]] in mine.holdings:
                    values[choice] = mine.holdings.index(theirs.holdings[best[twin]])
        if sum(value >= 0 for value in values) < _LEAST * len(values):
            return None
        return Inherited(stage, dict(memory.messages), dict(memory.dominated.went), same, values)

    def hand_on(self, core: Core, memory: Memory) -> tuple[int, ...]:
        """Begin a memory with what is known, and return an assignment that is thought to be good."""
        memory.messages = self._messages(core)
        memory.inherited = bool(memory.messages)
        memory.dominated.begin(core.folded, core.sizes, core.cooked, self._went(core))
        return completed(core, self.values)

    def _messages(self, core: Core) -> dict[tuple[object, ...], list[Floats]]:
        folded, other = core.folded, self.stage.folded
        recipe_of = dict(zip(other.scopes, other.recipe_of, strict=True))
        found: dict[tuple[object, ...], list[Floats]] = {}
        names: set[tuple[int, ...]] = set()
        for scope, recipe in zip(folded.scopes, folded.recipe_of, strict=True):
            name = recipe, *[folded.class_of[v] for v in scope]
            names.add(name)
            theirs = [self.same[v] for v in scope]
            ascending = tuple(sorted(theirs))
            if name not in found and ascending in recipe_of:
                known = self.messages.get((recipe_of[ascending], *[other.class_of[v] for v in ascending]))
                if known is not None:
                    found[name] = [known[ascending.index(v)].copy() for v in theirs]
        return found if len(found) >= _MOSTLY * len(names) else {}

    def _went(self, core: Core) -> dict[int, Went]:
        found: dict[int, Went] = {}
        for kind, members in enumerate(core.folded.classes):
            twin = next((self.same[v] for v in members if self.same[v] >= 0), -1)
            went = self.went.get(self.stage.folded.class_of[twin]) if twin >= 0 else None
            if went is not None:
                found[kind] = went
        return found


def completed(core: Core, values: Sequence[int]) -> tuple[int, ...]:
    """An assignment of a core in which choices without a value (-1) have what is best beside the others."""
    folded, found = core.folded, list(values)
    free: dict[int, int] = {}
    uses: list[tuple[int, Scope]] = []
    tables: list[Floats] = []
    for scope, recipe in zip(folded.scopes, folded.recipe_of, strict=True):
        mine = [v for v in scope if found[v] < 0]
        if mine:
            at = [slice(None) if found[v] < 0 else found[v] for v in scope]
            tables.append(core.cooked[recipe][tuple(at)])
            uses.append((len(uses), tuple([free.setdefault(v, len(free)) for v in mine])))
    best = _best([core.sizes[folded.class_of[v]] for v in free], uses, tables)
    for choice, number in free.items():
        found[choice] = best.get(number, 0)
    return tuple([max(0, value) for value in found])


def _best(
    sizes: Sequence[int], uses: Sequence[tuple[int, Scope]], tables: Sequence[Floats]
) -> dict[int, int]:
    """The best values of a few choices, or good ones where their tables would be large."""
    folded = fold(range(len(sizes)), uses)
    kept = Kept(folded, sizes, cook(folded, tables))
    scale = sum(float(np.where(np.isfinite(t), np.abs(t), 0.0).max(initial=0.0)) for t in tables)
    buckets = Buckets(kept, full_order(sizes, live(folded, sizes)), _CELLS, (scale or 1.0) * NEVER)
    buckets.there()
    return buckets.greedy()
