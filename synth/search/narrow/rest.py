"""What messages (`dual.py`) leave of a problem: fewer values, and costs where they arise."""

from __future__ import annotations

import numpy as np

from shardwright.synth.search.eliminate import live
from shardwright.synth.search.fold import cook, fold
from shardwright.synth.search.narrow.dual import Dual
from shardwright.synth.search.order import full_order
from shardwright.synth.search.prune import Kept
from shardwright.synth.search.stages import Core, Stage


class Rest:
    """What is left of a problem, as its messages say it.

    Attributes:
        stage: choices and terms that are left.
        values: per class, values of the core that its tables are over.
        some: of these, the values that still matter, and tables over them.
        scale: seconds that no useful program costs more than.

    Args:
        core: the problem.
        kept: its values that were left so far.
        dual: its messages.
        placed: an order in which choices were eliminated before; written to where it lacks some.
    """

    def __init__(self, core: Core, kept: Kept, dual: Dual, placed: list[int]) -> None:
        self.core = core
        uses, tables = dual.reparametrised()
        present = {v for _, scope in uses for v in scope}
        folded = fold([(shade, v in present) for v, shade in enumerate(dual.shade_of)], uses)
        cooked = cook(folded, tables)
        self._kind_of = [core.folded.class_of[members[0]] for members in folded.classes]
        self.values = [kept.values[kind] for kind in self._kind_of]
        self.stage = Stage(folded, [len(values) for values in self.values])
        self.some = Kept(folded, [len(values) for values in self.values], cooked)
        self._cooked = cooked
        finite = [float(np.where(np.isfinite(table), np.abs(table), 0.0).max()) for table in core.cooked]
        self.scale = max(finite, default=0.0) + abs(core.constant) + abs(dual.bound()) or 1.0
        self._placed = placed
        self._ordered_for: list[int] = []

    @property
    def order(self) -> list[int]:
        """In which choices are eliminated, those at least that have several values left."""
        sizes = [self.some.size(kind) for kind in range(len(self.values))]
        if self._ordered_for != sizes:
            scopes = live(self.stage.folded, sizes)
            placed = set(self._placed)
            if any(v not in placed for scope in scopes for v in scope):
                self._placed[:] = full_order([sizes[kind] for kind in self.stage.folded.class_of], scopes)
            self._ordered_for = sizes
        return self._placed

    def without(self, dual: Dual, most_s: float) -> None:
        """Leave out values with which all assignments cost more than so much, as messages say."""
        above, excess = most_s - dual.bound(), dual.excess()
        for kind, members in enumerate(self.stage.folded.classes):
            mine = np.flatnonzero(excess[dual.shade_of[members[0]]] <= above)
            if 0 < len(mine) < len(self.values[kind]):
                self.some.keep(kind, mine)

    def copy(self) -> Kept:
        """The values that still matter, to be narrowed down further."""
        copied = Kept(self.stage.folded, [len(values) for values in self.values], self._cooked)
        for kind, values in enumerate(self.some.values):
            copied.keep(kind, values)
        return copied

    def leave_out(self, kept: Kept) -> None:
        """Leave out of the core's values those that none of a class's choices has left."""
        of_kind: dict[int, set[int]] = {}
        for kind, values, some in zip(self._kind_of, self.values, self.some.values, strict=True):
            of_kind.setdefault(kind, set()).update(values[some].tolist())
        for kind, values in of_kind.items():
            if len(values) < kept.size(kind):
                kept.keep(kind, np.array(sorted(values), dtype=np.intp))

    def original(self, at: dict[int, int], some: Kept) -> list[int]:
        """The core's value of every choice, from positions among the values of `some`."""
        kinds = enumerate(self.stage.folded.class_of)
        return [int(self.values[kind][some.values[kind][at.get(v, 0)]]) for v, kind in kinds]
