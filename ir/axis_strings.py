"""Axis strings, read: see `shardwright.ir.rules` for the grammar and for what follows from them.

Rules are many, axis strings few: what follows from one alone is worked out once.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class Axis:
    """One dimension in an axis string: its letters, major first, and which of them are blocked."""

    letters: tuple[str, ...]
    blocked: tuple[str, ...] = ()


Axes: TypeAlias = tuple[Axis, ...]


@cache
def parsed(axes: str) -> tuple[tuple[Axes, ...], tuple[Axes, ...]]:
    """Axes of the operands and of the results."""
    left, right = axes.split("->")
    return _parse_side(left), _parse_side(right)


@cache
def blocked_letters(axes: str) -> frozenset[str]:
    """Letters that are never sharded, by `!` or as minor letters of a merged dimension."""
    sides = parsed(axes)
    return frozenset(letter for side in sides for axes in side for axis in axes for letter in axis.blocked)


@cache
def cut_letters(axes: str, contracts: bool) -> tuple[str, ...]:
    """Letters that may be sharded; those of operands alone only where the rule `contracts` them."""
    blocked, (ins, outs) = blocked_letters(axes), parsed(axes)
    found = dict.fromkeys(axis.letters[0] for axes in (*ins, *outs) for axis in axes if axis.letters)
    produced = {axis.letters[0] for axes in outs for axis in axes if axis.letters}
    return tuple(letter for letter in found if letter not in blocked and (contracts or letter in produced))


@cache
def merges(axes: str) -> bool:
    """Whether there is a merged dimension, of which a cut takes whole minor axes."""
    return any(len(axis.letters) > 1 for side in parsed(axes) for axes in side for axis in axes)


def _parse_side(text: str) -> tuple[Axes, ...]:
    return tuple(_parse_operand(part) for part in text.split(",")) if text.strip() else ()


def _parse_operand(text: str) -> Axes:
    axes: list[Axis] = []
    group: list[str] | None = None
    for token in text.replace("(", " ( ").replace(")", " ) ").split():
        if token == "(":
            group = []
        elif token == ")":
            assert group is not None, f"unbalanced parenthesis in axis string operand {text!r}"
            names = tuple(name.rstrip("!") for name in group)
            minor = tuple(name.rstrip("!") for i, name in enumerate(group) if i > 0 or name.endswith("!"))
            axes.append(Axis(names, minor))
            group = None
        elif group is not None:
            group.append(token)
        elif token == ".":
            continue
        elif token == "1":
            axes.append(Axis(()))
        else:
            name = token.rstrip("!")
            axes.append(Axis((name,), (name,) if token.endswith("!") else ()))
    return tuple(axes)
