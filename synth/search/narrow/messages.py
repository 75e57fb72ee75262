"""Messages (`dual.py`) by name, for problems that are solved at prices after prices.

A name says what a kind of factor adds up and which classes (or finer colours) it ties: whatever values are
left, and whatever they cost, messages of one name are over the same choices.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

import numpy as np

from shardwright.cost.share_cost import Floats
from shardwright.synth.search.fold import Folded, Scope
from shardwright.synth.search.narrow.dual import Dual
from shardwright.synth.search.prune import Kept

#: A recipe and the classes of its choices.
Name: TypeAlias = tuple[object, ...]

#: Messages to each choice, over all values of its class.
Messages: TypeAlias = dict[Name, list[Floats]]


class Talk:
    """Messages of a problem with some values left, all nothing at first.

    Args:
        folded: the problem.
        kept: its values.
        colour_of: of every choice, whose messages those of one colour share; classes by default, or finer.

    Attributes:
        dual: the messages.
    """

    def __init__(self, folded: Folded, kept: Kept, colour_of: Sequence[int] | None = None) -> None:
        self._values = kept.values.copy()
        colour_of = folded.class_of if colour_of is None else colour_of
        numbers: dict[tuple[int, ...], int] = {}
        #: Recipe and classes of every distinct table.
        self._tables: list[tuple[int, Scope]] = []
        uses: list[tuple[int, Scope]] = []
        called: list[tuple[Name, Scope]] = []
        for scope, recipe in zip(folded.scopes, folded.recipe_of, strict=True):
            kinds = tuple([folded.class_of[v] for v in scope])
            key = kept.key(recipe, kinds)
            if key not in numbers:
                numbers[key] = len(numbers)
                self._tables.append((recipe, kinds))
            uses.append((numbers[key], scope))
            called.append(((recipe, *[colour_of[v] for v in scope]), kinds))
        sizes = [kept.size(kind) for kind in folded.class_of]
        self.dual = Dual(colour_of, sizes, uses, self._priced(kept))
        by_kind = dict(zip(self.dual.kind_of_use(), called, strict=True))
        #: Of every kind of factor its name, by the colours that it ties, and their classes.
        self._names = [by_kind[number] for number in range(len(self.dual.kinds))]

    def _priced(self, kept: Kept) -> list[Floats]:
        return [kept.table(recipe, kinds) for recipe, kinds in self._tables]

    def renewed(self, kept: Kept) -> bool:
        """Begin anew at other prices of the problem if the same values are left; whether they are."""
        if any(not np.array_equal(*pair) for pair in zip(self._values, kept.values, strict=True)):
            return False
        self.dual.renew(self._priced(kept))
        return True

    def of_classes(self, messages: Mapping[Name, list[Floats]]) -> Messages:
        """Messages between classes, by the names that they have between finer colours."""
        found: Messages = {}
        for name, kinds in self._names:
            if (name[0], *kinds) in messages:
                found[name] = [message.copy() for message in messages[name[0], *kinds]]
        return found

    def say(self, messages: Mapping[Name, list[Floats]]) -> None:
        """Begin with known messages."""
        for number, (name, kinds) in enumerate(self._names):
            if name in messages:
                pairs = zip(messages[name], kinds, strict=True)
                self.dual.start_from(number, [message[self._values[kind]] for message, kind in pairs])

    def note(self, messages: Messages, sizes: Sequence[int]) -> None:
        """Write down what is said; `sizes` are those of the classes before any values went."""
        for kind, (name, kinds) in zip(self.dual.kinds, self._names, strict=True):
            full = messages.setdefault(name, [np.zeros(sizes[kind]) for kind in kinds])
            for whole, tied, message in zip(full, kinds, kind.messages, strict=True):
                whole[self._values[tied]] = message
