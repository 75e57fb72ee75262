"""A good assignment of a problem with equal layers: all of them decide alike.

Choices of one class are tied to each other, as if the layers were one that runs so many times: a problem as
small as one layer. Its best assignment is one of the whole problem, mostly a very good one; what can be saved
by treating layers differently is found afterwards, since values are left out by what this one costs
(`shardwright.synth.grid.narrow`). Bounds of the tied problem say nothing of assignments that are not tied.
"""

from __future__ import annotations

from collections.abc import Sequence
from string import ascii_lowercase

import numpy as np

from shardwright.cost.share_cost import Floats
from shardwright.synth.search.dual import Dual
from shardwright.synth.search.fold import Folded, Scope, cook, fold
from shardwright.synth.search.prune import Kept
from shardwright.synth.search.stages import Core, Stage


def repeats(folded: Folded) -> bool:
    """Whether some choices that matter are of one class."""
    present = {v for scope in folded.scopes for v in scope}
    return len({folded.class_of[v] for v in present}) < len(present)


def tied(folded: Folded, kept: Kept, dual: Dual) -> Core:
    """The problem with one choice per class, over the values left, with costs where messages moved them.

    Args:
        folded: the whole problem.
        kept: its values left.
        dual: its messages.
    """
    counts: dict[tuple[int, Scope], int] = {}
    uses, tables = dual.reparametrised()
    for factor, scope in uses:
        key = factor, tuple([folded.class_of[v] for v in scope])
        counts[key] = counts.get(key, 0) + 1
    summed = [_diagonal(tables[factor], kinds) * times for (factor, kinds), times in counts.items()]
    scopes = [tuple(dict.fromkeys(kinds)) for _, kinds in counts]
    once = fold(range(len(folded.classes)), list(enumerate(scopes)))
    present = {kind for scope in scopes for kind in scope}
    sizes = [kept.size(members) if members in present else 1 for members in range(len(folded.classes))]
    return Core([], Stage(once, sizes), cook(once, summed))


def untied(folded: Folded, kept: Kept, values: Sequence[int]) -> list[int]:
    """The value of every choice of the whole problem, from that of its class among the values left."""
    return [int(kept.values[kind][values[kind]]) for kind in folded.class_of]


def _diagonal(table: Floats, kinds: Scope) -> Floats:
    """Entries at which axes of one class have equal positions, over one axis per class."""
    axes = list(dict.fromkeys(kinds))
    if len(axes) == len(kinds):
        return table
    letters = dict(zip(axes, ascii_lowercase, strict=False))
    entries = "".join([letters[kind] for kind in kinds])
    return np.einsum(f"{entries}->{''.join(letters.values())}", table)
