"""Messages (`shardwright.synth.search.dual`) by name, for problems that are solved at prices after prices.

A name says what a kind of factor adds up and which classes it ties: whatever values are left, and whatever
they cost, messages of one name are over the same choices.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

import numpy as np

from shardwright.cost.share_cost import Floats
from shardwright.synth.search.dual import Dual
from shardwright.synth.search.fold import Folded, Scope
from shardwright.synth.search.prune import Kept

#: A recipe and the classes of its choices.
Name: TypeAlias = tuple[object, ...]

#: Messages to each choice, over all values of its class.
Messages: TypeAlias = dict[Name, list[Floats]]


def dual_of(folded: Folded, kept: Kept) -> tuple[Dual, list[tuple[Name, list[int]]]]:
    """Messages of a problem, all nothing; and of every kind of factor its name and the classes it ties."""
    numbers: dict[tuple[int, ...], int] = {}
    tables: list[Floats] = []
    uses: list[tuple[int, Scope]] = []
    called: list[tuple[Name, list[int]]] = []
    for scope, recipe in zip(folded.scopes, folded.recipe_of, strict=True):
        kinds = tuple([folded.class_of[v] for v in scope])
        key = kept.key(recipe, kinds)
        if key not in numbers:
            numbers[key] = len(numbers)
            tables.append(kept.table(recipe, kinds))
        uses.append((numbers[key], scope))
        called.append(((recipe, *kinds), list(kinds)))
    dual = Dual(folded.class_of, [kept.size(kind) for kind in folded.class_of], uses, tables)
    by_kind = dict(zip(dual.kind_of_use(), called, strict=True))
    return dual, [by_kind[number] for number in range(len(dual.kinds))]


def say(
    dual: Dual, names: Sequence[tuple[Name, list[int]]], kept: Kept, messages: Mapping[Name, Sequence[Floats]]
) -> None:
    """Begin with known messages; `names` as of `dual_of`."""
    for number, (name, kinds) in enumerate(names):
        if name in messages:
            pairs = zip(messages[name], kinds, strict=True)
            dual.start_from(number, [message[kept.values[kind]] for message, kind in pairs])


def note(
    dual: Dual,
    names: Sequence[tuple[Name, list[int]]],
    kept: Kept,
    sizes: Sequence[int],
    messages: Messages,
) -> None:
    """Write down what is said, for values left; `sizes` are those of classes before any went."""
    for number, (name, kinds) in enumerate(names):
        full = messages.setdefault(name, [np.zeros(sizes[kind]) for kind in kinds])
        for whole, kind, message in zip(full, kinds, dual.kinds[number].messages, strict=True):
            whole[kept.values[kind]] = message
