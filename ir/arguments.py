"""Checks of what callers pass, whatever its type: what is wrong is one error that says what to pass."""

from __future__ import annotations

from collections.abc import Collection
from numbers import Integral, Real
from typing import TypeGuard

from shardwright.ir.errors import InputError


def check_choice(place: str, given: object, choices: Collection[str]) -> None:
    """Raises InputError if that is none of several texts."""
    if not isinstance(given, str) or given not in choices:
        *first, last = (repr(choice) for choice in choices)
        remedy = f"Pass {', '.join(first)} or {last}"
        raise InputError(place=place, reason=f"is {given!r}", remedy=remedy)


def check_several(place: str, given: object, example: str) -> None:
    """Raises InputError for what is no collection, or a text, which is one of letters."""
    if isinstance(given, str) or not isinstance(given, Collection):
        raise InputError(place=place, reason=f"is {given!r}", remedy=f"Pass a list, such as {example}")


def is_number(given: object) -> TypeGuard[float]:
    """Whether that is a number, of whatever type; True is none."""
    if isinstance(given, bool):
        return False
    return isinstance(given, Real)


def is_whole(given: object) -> TypeGuard[int]:
    """Whether that is of a type of whole numbers: 0.0 is not."""
    return is_number(given) and isinstance(given, Integral)
