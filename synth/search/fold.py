"""Repeated layers, found by structure: choices in one position of equal layers form one class.

Names do not matter, only what ties what. Factors over the same choices are added up into one *term*;
sums of the same factors share a *recipe*. Choices start out equal if they have the same domain, and are
told apart by the recipes they are in, then by the classes of their neighbours there, and so on (colour
refinement, Weisfeiler and Leman 1968) for as many rounds as `prune` runs. What depends on the
surroundings of a choice up to that distance is then worked out once per class.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from shardwright.cost.share_cost import Floats

#: Numbers of choices.
Scope: TypeAlias = tuple[int, ...]

#: What a term adds up: factors by number, each with the order that brings its axes into the term's scope
#: (-1 for a choice that is not on them).
Recipe: TypeAlias = tuple[tuple[int, tuple[int, ...]], ...]

#: Axes in the order in which they are, for so many.
_ORDERS = tuple([tuple(range(axes)) for axes in range(9)])

#: Rounds of refinement and of pruning in every stage: more would keep fewer values, but not save time.
ROUNDS = 1


@dataclass(frozen=True, slots=True)
class Folded:
    """Choices, terms, and which of them are alike.

    Attributes:
        scopes: of every term, ascending.
        recipe_of: recipe of every term.
        recipes: all recipes.
        class_of: class of every choice.
        classes: choices of every class.
        incident: per class, (recipe, classes in scope, axis) of the terms that one of its choices is in,
            and how often.
    """

    scopes: tuple[Scope, ...]
    recipe_of: tuple[int, ...]
    recipes: tuple[Recipe, ...]
    class_of: tuple[int, ...]
    classes: tuple[tuple[int, ...], ...]
    incident: tuple[Counter[tuple[int, Scope, int]], ...]


def fold(kinds: Sequence[Hashable], uses: Sequence[tuple[int, Scope]]) -> Folded:
    """Find out what is alike.

    Args:
        kinds: of every choice; choices of different kinds are never alike.
        uses: factor (by number) and the choices on its axes, no choice twice.
    """
    parts: dict[Scope, list[tuple[int, tuple[int, ...]]]] = {}
    for factor, scope in uses:
        order = _ORDERS[len(scope)] if len(scope) < len(_ORDERS) else tuple(range(len(scope)))
        ascending = scope
        if len(scope) == 2:  # most are
            if scope[0] > scope[1]:
                ascending, order = scope[::-1], (1, 0)
        elif len(scope) > 2:
            ascending = tuple(sorted(scope))
            order = order if ascending == scope else _order(scope)
        mine = parts.get(ascending)
        if mine is None:
            parts[ascending] = [(factor, order)]
        else:
            mine.append((factor, order))
    numbers: dict[Recipe, int] = {}
    scopes, recipe_of = list(parts), list[int]()
    for mine in parts.values():
        if len(mine) > 1:
            mine.sort()
        recipe_of.append(numbers.setdefault(tuple(mine), len(numbers)))
    class_of = refined(kinds, scopes, recipe_of)
    classes: list[list[int]] = [[] for _ in range(max(class_of, default=-1) + 1)]
    for choice, kind in enumerate(class_of):
        classes[kind].append(choice)
    return Folded(
        tuple(scopes),
        tuple(recipe_of),
        tuple(numbers),
        tuple(class_of),
        tuple(map(tuple, classes)),
        incident(scopes, recipe_of, class_of, classes),
    )


def incident(
    scopes: Sequence[Scope],
    recipe_of: Sequence[int],
    class_of: Sequence[int],
    classes: Sequence[Sequence[int]],
) -> tuple[Counter[tuple[int, Scope, int]], ...]:
    """See `Folded`."""
    first = {members[0]: kind for kind, members in enumerate(classes)}
    found: list[Counter[tuple[int, Scope, int]]] = [Counter() for _ in classes]
    members = frozenset(first)
    for scope, recipe in zip(scopes, recipe_of, strict=True):
        if members.isdisjoint(scope):
            continue
        for axis, choice in enumerate(scope):
            kind = first.get(choice)
            if kind is not None:
                found[kind][recipe, tuple([class_of[v] for v in scope]), axis] += 1
    return tuple(found)


def _order(scope: Scope) -> tuple[int, ...]:
    return tuple(sorted(range(len(scope)), key=scope.__getitem__))


def refined(
    kinds: Sequence[Hashable], scopes: Sequence[Scope], recipe_of: Sequence[int], rounds: int = ROUNDS
) -> list[int]:
    """Classes of choices, numbered in the order in which choices have them.

    Args:
        kinds: of every choice; choices of different kinds are never alike.
        scopes, recipe_of: of every term.
        rounds: of refinement.
    """
    known: dict[Hashable, int] = {}
    colour = [known.setdefault(kind, len(known)) for kind in kinds]
    widest = max(map(len, scopes), default=0) + 1
    for _ in range(rounds):
        around: list[list[int]] = [[] for _ in colour]
        terms: dict[tuple[int, ...], int] = {}
        for scope, recipe in zip(scopes, recipe_of, strict=True):
            seen = terms.setdefault((recipe, *[colour[v] for v in scope]), len(terms)) * widest
            for axis, choice in enumerate(scope):
                around[choice].append(seen + axis)
        finer: dict[tuple[int, ...], int] = {}
        colour = [
            finer.setdefault((old, *sorted(mine)), len(finer))
            for old, mine in zip(colour, around, strict=True)
        ]
    return colour


def cook(folded: Folded, tables: Sequence[Floats]) -> list[Floats]:
    """The table of every recipe, from those of the factors; either may have one more axis in front."""
    cooked: list[Floats] = []
    for recipe in folded.recipes:
        turned = [_turned(tables[factor], order) for factor, order in recipe]
        total = turned[0]
        for table in turned[1:]:
            total = total + table
        cooked.append(total)
    return cooked


def _turned(table: Floats, order: tuple[int, ...]) -> Floats:
    """The table with its last axes in another order, and axes of one entry where they come from none."""
    present = [k for k in order if k >= 0]
    front = table.ndim - len(present)
    turned = table.transpose(*range(front), *[front + k for k in present])
    if len(present) == len(order):
        return turned
    return turned[(..., *[slice(None) if k >= 0 else None for k in order])]


def least(table: Floats, axes: int) -> Floats:
    """The least entry over the last axes: a number, or one for each entry of the axis in front."""
    return table.min(axis=tuple(range(-axes, 0)))


def rounded(folded: Folded, cooked: Sequence[Floats]) -> list[Floats]:
    """The tables of recipes, ready for exact arithmetic.

    Values are rounded to multiples of a power of two so small that nobody can care, yet sums are exact.
    Equal prices then stay equal in whatever order they are added: ties are real ties, A* does not chase
    rounding errors, and messages of equal layers are equal. The step is 2^-44 of the sum of all terms'
    least entries (of the largest such sum where prices are several).
    """
    lowest = [least(table, len(recipe[0][1])) for table, recipe in zip(cooked, folded.recipes, strict=True)]
    times = Counter(folded.recipe_of)
    scale = float(np.max(sum((lowest[recipe] * count for recipe, count in times.items()), np.zeros(()))))
    if not (0 < scale < np.inf):
        return list(cooked)
    step = 2.0 ** (np.ceil(np.log2(scale)) - 44)
    return [_rounded(table, step) for table in cooked]


def _rounded(table: Floats, step: float) -> Floats:
    """A table in multiples of a power of two."""
    found = np.divide(table, step, out=np.empty(table.shape))
    np.rint(found, out=found)
    found *= step
    return found
