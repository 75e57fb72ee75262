"""A good assignment of a problem with equal layers: all of them decide alike.

Choices of one class are tied to each other, as if the layers were one that runs so many times: a problem as
small as one layer. Its best assignment is one of the whole problem, mostly a very good one; what can be saved
by treating layers differently is found afterwards, since values are left out by what this one costs
(`search.py`). Bounds of the tied problem say nothing of assignments that are not tied.
"""

from __future__ import annotations

from collections.abc import Sequence
from string import ascii_lowercase

import numpy as np
from numpy.typing import NDArray

from shardwright.cost.share_cost import Floats
from shardwright.synth.search.fold import Folded, Scope, cook, fold
from shardwright.synth.search.narrow.dual import Dual
from shardwright.synth.search.prune import Kept
from shardwright.synth.search.stages import Core, Stage


def repeats(folded: Folded) -> bool:
    """Whether some choices that matter are of one class."""
    present = {v for scope in folded.scopes for v in scope}
    return len({folded.class_of[v] for v in present}) < len(present)


def tied(folded: Folded, kept: Kept, dual: Dual, most: int = 0) -> tuple[Core, list[NDArray[np.intp]]]:
    """The problem with one choice per class, over the values left, with costs where messages moved them.

    Args:
        folded: the whole problem.
        kept: its values left.
        dual: its messages.
        most: so many values at most, those that look best by the messages; 0 for all.

    Returns:
        Also the values of every class that its tables are over.
    """
    counts: dict[tuple[int, Scope], int] = {}
    # Colours are numbered in the order in which choices have them, and so are classes.
    likely = dual.likely(most) if most else None
    uses, tables = dual.reparametrised(likely)
    for factor, scope in uses:
        key = factor, tuple([folded.class_of[v] for v in scope])
        counts[key] = counts.get(key, 0) + 1
    summed = [_diagonal(tables[factor], kinds) * times for (factor, kinds), times in counts.items()]
    scopes = [tuple(dict.fromkeys(kinds)) for _, kinds in counts]
    once = fold(range(len(folded.classes)), list(enumerate(scopes)))
    present = {kind for scope in scopes for kind in scope}
    left = kept.values if likely is None else [mine[likely[kind]] for kind, mine in enumerate(kept.values)]
    sizes = [len(mine) if kind in present else 1 for kind, mine in enumerate(left)]
    return Core([], Stage(once, sizes), cook(once, summed)), left


def untied(folded: Folded, left: Sequence[NDArray[np.intp]], values: Sequence[int]) -> list[int]:
    """The value of every choice of the whole problem, from that of its class among those left."""
    return [int(left[kind][values[kind]]) for kind in folded.class_of]


def _diagonal(table: Floats, kinds: Scope) -> Floats:
    """Entries at which axes of one class have equal positions, over one axis per class."""
    axes = list(dict.fromkeys(kinds))
    if len(axes) == len(kinds):
        return table
    letters = dict(zip(axes, ascii_lowercase, strict=False))
    entries = "".join([letters[kind] for kind in kinds])
    return np.einsum(f"{entries}->{''.join(letters.values())}", table)
