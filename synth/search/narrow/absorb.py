"""Factors that others contain, added up with these before messages are passed (see `narrowing.py`).

A factor over some of the choices of another one needs no messages of its own: added to the other, it says
the same of every assignment. The best bound that messages can reach is never worse for it, and there is less
to sweep. Equal layers stay equal: factors are absorbed kind by kind (one recipe, choices of the same
classes), where each of a kind lies within one of the other, and each of that has one of it.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import TypeAlias

from shardwright.synth.search.fold import Folded, Recipe, Scope, incident

#: Recipe and classes of the choices: terms of one kind.
_Kind: TypeAlias = tuple[int, Scope]


def absorbed(folded: Folded) -> Folded:
    """The same problem in fewer terms, whose factors are the recipes of the one given."""
    kinds = [
        (recipe, tuple([folded.class_of[v] for v in scope]))
        for recipe, scope in zip(folded.recipe_of, folded.scopes, strict=True)
    ]
    members: defaultdict[_Kind, list[int]] = defaultdict(list)
    for term, kind in enumerate(kinds):
        members[kind].append(term)
    options = _options(folded, kinds)
    gone: set[_Kind] = set()
    #: Of kinds that stay: what they absorb, and where its axes lie among theirs.
    within: defaultdict[_Kind, list[tuple[int, Scope]]] = defaultdict(list)
    # Those of the most choices first: what they absorbed moves on with them.
    for small in sorted(options, key=lambda kind: (-len(kind[1]), kind)):
        for (large, at), homes in options[small].items():
            once = len(set(homes)) == len(homes) == len(members[small]) == len(members[large])
            if once and large not in gone:
                within[large].append((small[0], at))
                within[large] += [(r, tuple([at[k] for k in mine])) for r, mine in within.pop(small, [])]
                gone.add(small)
                break
    numbers: dict[Recipe, int] = {}
    scopes: list[Scope] = []
    recipe_of: list[int] = []
    for scope, kind in zip(folded.scopes, kinds, strict=True):
        if kind not in gone:
            whole = tuple(range(len(scope)))
            parts = [(recipe, _order(at, len(scope))) for recipe, at in within.get(kind, ())]
            scopes.append(scope)
            recipe_of.append(numbers.setdefault(((kind[0], whole), *sorted(parts)), len(numbers)))
    return replace(
        folded,
        scopes=tuple(scopes),
        recipe_of=tuple(recipe_of),
        recipes=tuple(numbers),
        incident=incident(scopes, recipe_of, folded.class_of, folded.classes),
    )


def _options(folded: Folded, kinds: list[_Kind]) -> dict[_Kind, dict[tuple[_Kind, Scope], list[int]]]:
    """Per kind, the kinds of larger terms that contain its terms, and how: the term that contains each."""
    terms_of: defaultdict[int, set[int]] = defaultdict(set)
    for term, scope in enumerate(folded.scopes):
        for v in scope:
            terms_of[v].add(term)
    found: defaultdict[_Kind, defaultdict[tuple[_Kind, Scope], list[int]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for term, scope in enumerate(folded.scopes):
        if not scope:
            continue
        for other in sorted(set.intersection(*[terms_of[v] for v in scope])):
            larger = folded.scopes[other]
            if len(larger) > len(scope):
                at = tuple([larger.index(v) for v in scope])
                found[kinds[term]][kinds[other], at].append(other)
    return {kind: dict(options) for kind, options in found.items()}


def _order(at: Scope, rank: int) -> Scope:
    """Which axis comes where in a term of so many; -1 where there is none."""
    return tuple([at.index(k) if k in at else -1 for k in range(rank)])
