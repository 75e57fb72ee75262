"""Stages of an elimination: a folded problem each, with the tapes that eliminate its simple choices, or all.

See `shardwright.synth.search.solve`, which goes through them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from shardwright.cost.share_cost import Floats
from shardwright.synth.search.astar import Layer
from shardwright.synth.search.eliminate import Elimination, Tape, eliminate, live, record
from shardwright.synth.search.fold import Folded, fold
from shardwright.synth.search.order import full_order, simple_order
from shardwright.synth.search.prune import Kept, prune

#: Exact tables that are together no larger than this are filled without trying smaller ones first.
AT_ONCE = 1 << 24

#: Where exact tables are together larger than this, another order is looked for. That takes about as long as
#: filling 2^24 cells; of four full-size models tables changed by +3, -15, -20 and -75 %, most in the largest.
_REORDERED = 1 << 27


@dataclass(slots=True)
class Stage:
    """A folded problem, and the tape that eliminates the choices of one stage.

    A tape serves all prices under which no table outgrows what a bucket may have: classes that are settled at
    some of them are carried along.

    Attributes:
        folded: the problem.
        sizes: values of every class; those of one are settled.
        order: in which choices are eliminated.
        made_for: values left that it was made for, until there were others.
    """

    folded: Folded
    sizes: Sequence[int]
    order: list[int] = field(default_factory=list[int])
    made_for: tuple[int, ...] = ()
    tapes: dict[int, Tape] = field(default_factory=dict[int, Tape])
    following: Stage | None = None

    def prepare(self, left: Sequence[int], simple: tuple[int, int] | None, most_cells: int) -> Tape:
        """The tape for so many values left; `simple` says which choices to eliminate, None for all."""
        for made_for, tape in self.tapes.items():
            # A tape that splits no bucket is the same whatever a bucket may have.
            if (made_for == most_cells or not tape.split) and self._serves(tape, left, most_cells):
                return tape
        if not self.order:
            self.order, self.made_for = self._ordered(left, simple), tuple(left)
        tape = record(self.folded, self.sizes, left, self.order, most_cells)
        if simple is None and self.made_for not in ((), tuple(left)):
            if self.cells(tape, left) > _REORDERED:
                self.order = self._ordered(left, simple)
                tape = record(self.folded, self.sizes, left, self.order, most_cells)
            self.made_for = ()
        self.tapes[most_cells] = tape
        return tape

    def _ordered(self, left: Sequence[int], simple: tuple[int, int] | None) -> list[int]:
        scopes = live(self.folded, self.sizes)
        sized = [left[kind] for kind in self.folded.class_of]
        return full_order(sized, scopes) if simple is None else simple_order(sized, scopes, *simple)

    @staticmethod
    def cells(tape: Tape, left: Sequence[int]) -> int:
        """Cells of all tables of a tape."""
        return sum(math.prod([left[kind] for kind in step.kinds]) for step in tape.operations)

    @staticmethod
    def _serves(tape: Tape, left: Sequence[int], most_cells: int) -> bool:
        return all(math.prod([left[k] for k in step.kinds]) <= most_cells for step in tape.operations)

    def next(self, tape: Tape) -> Stage:
        """What is left, folded again; its factors are the sources of `tape.left`, in order of appearance."""
        if self.following is None:
            numbers: dict[object, int] = {}
            uses = [(numbers.setdefault(source, len(numbers)), scope) for source, scope in tape.left]
            present = {v for _, scope in uses for v in scope}
            # Choices that are done with stay, for the numbers' sake, in classes apart.
            kinds = [(kind, v in present) for v, kind in enumerate(self.folded.class_of)]
            folded = fold(kinds, uses)
            before = [self.folded.class_of[members[0]] for members in folded.classes]
            self.following = Stage(folded, [self.sizes[kind] for kind in before])
        return self.following


@dataclass(frozen=True, slots=True)
class Core:
    """A problem whose simple choices have been eliminated.

    Attributes:
        done: the stages so far.
        stage: what is left.
        cooked: table of every recipe.
    """

    done: Sequence[Layer]
    stage: Stage
    cooked: Sequence[Floats]

    @property
    def folded(self) -> Folded:
        """Choices and terms that are left."""
        return self.stage.folded

    @property
    def sizes(self) -> Sequence[int]:
        """Values of every class that is left."""
        return self.stage.sizes

    @property
    def constant(self) -> float:
        """What the choices eliminated so far cost at least, apart from what the tables say."""
        return sum(float(layer.elimination.constant) for layer in self.done)

    def one(self, number: int) -> Core:
        """Where prices are several, what is left at one of them."""
        recipes = zip(self.cooked, self.folded.recipes, strict=True)
        cooked = [table[number] if table.ndim > len(recipe[0][1]) else table for table, recipe in recipes]
        return Core(
            [replace(layer, elimination=layer.elimination.one(number)) for layer in self.done],
            self.stage,
            cooked,
        )

    def pruned(self) -> Kept:
        """The values that matter."""
        return prune(self.folded, self.sizes, self.cooked)

    def bounds(self, numbers: Sequence[int], most_cells: int) -> Floats:
        """Where prices are several: what no assignment costs less than at some of them, by small tables.

        Values that matter at none of them are left out.
        """
        some, cooked = list(numbers), list[Floats]()
        for table, recipe in zip(self.cooked, self.folded.recipes, strict=True):
            cooked.append(table[some] if table.ndim > len(recipe[0][1]) else table)
        kept = prune(self.folded, self.sizes, cooked)
        tape = self.stage.prepare([len(values) for values in kept.values], None, most_cells)
        done = sum((layer.elimination.constant for layer in self.done), np.zeros(()))
        return eliminate(tape, kept).constant + (done[some] if done.ndim else done)

    def tape(self, kept: Kept, most_cells: int) -> Tape:
        """What eliminates all that is left, over the values of `kept`; see `finish`."""
        return self.stage.prepare([len(values) for values in kept.values], None, most_cells)

    def cells(self, kept: Kept, most_cells: int) -> int:
        """Cells of all tables of `finish`."""
        return self.stage.cells(self.tape(kept, most_cells), [len(values) for values in kept.values])

    def finish(self, kept: Kept, most_cells: int) -> list[Layer]:
        """All stages, the last one over the values of `kept`, with buckets of at most `most_cells`."""
        tape = self.tape(kept, most_cells)
        values = original(self.folded, kept.values, self.done)
        return [*self.done, Layer(self.folded.class_of, values, eliminate(tape, kept))]


def original(
    folded: Folded, kept: Sequence[NDArray[np.intp]], layers: Sequence[Layer]
) -> list[NDArray[np.intp]]:
    """Per class, the values left, as values of the first stage's domains."""
    if not layers:
        return list(kept)
    before = layers[-1]
    result: list[NDArray[np.intp]] = []
    for members, values in zip(folded.classes, kept, strict=True):
        result.append(before.values[before.class_of[members[0]]][values])
    return result


def distinct(elimination: Elimination) -> list[Floats]:
    """Tables of what is left, one per source."""
    found: dict[object, Floats] = {}
    for (source, _), table in zip(elimination.tape.left, elimination.left, strict=True):
        found.setdefault(source, table)
    return list(found.values())
