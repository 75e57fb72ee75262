"""Quantities with units: `10.4 Gbit/s`, `5 us`, `20 GFLOP/s`, `16 GiB`.

A quantity is text: a number and a unit. A bare number is rejected, because `10` may be gigabits or
gigabytes and nobody notices which. Prefixes are decimal (`GB` is 10⁹ bytes) unless they say otherwise
(`GiB` is 2³⁰ bytes), and capitals matter. Arithmetic is exact until the last step: `5 us` is the float
5e-06.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from fractions import Fraction
from math import isfinite

from shardwright.ir.errors import InputError

_LONGEST = 64
_NUMBER = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]{1,3})?")
_NO_NUMBER = re.compile(r"[+-]?\.?(?:nan|inf|infinity)\b", re.IGNORECASE)

_DECIMAL = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15}
_BINARY = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of quantity.

    Attributes:
        name: what it is called in messages.
        base: the unit that values are in.
        units: every accepted spelling and its size in the base unit.
        written: the spellings that `format_quantity` prefers, largest first.
        example: a quantity of this kind, shown in remedies.
    """

    name: str
    base: str
    units: Mapping[str, Fraction]
    written: tuple[str, ...]
    example: str


def _prefixed(unit: str, prefixes: Mapping[str, int], size: Fraction = Fraction(1)) -> dict[str, Fraction]:
    return {prefix + unit: size * scale for prefix, scale in prefixes.items()}


BANDWIDTH = Kind(
    name="bandwidth",
    base="B/s",
    units=_prefixed("B/s", _DECIMAL)
    | _prefixed("B/s", _BINARY)
    | _prefixed("bit/s", _DECIMAL, Fraction(1, 8)),
    written=("TB/s", "GB/s", "MB/s", "kB/s"),
    example="16 GB/s",
)
"""Base unit: byte per second."""

DURATION = Kind(
    name="duration",
    base="s",
    units={
        "s": Fraction(1),
        "ms": Fraction(1, 10**3),
        "us": Fraction(1, 10**6),
        "µs": Fraction(1, 10**6),
        "ns": Fraction(1, 10**9),
    },
    written=("s", "ms", "us", "ns"),
    example="5 us",
)
"""Base unit: second."""

COMPUTE = Kind(
    name="compute rate",
    base="FLOP/s",
    units=_prefixed("FLOP/s", _DECIMAL),
    written=("TFLOP/s", "GFLOP/s", "MFLOP/s", "kFLOP/s"),
    example="20 GFLOP/s",
)
"""Base unit: floating-point operation per second; a multiply-add is two."""

MEMORY = Kind(
    name="memory size",
    base="B",
    units=_prefixed("B", _DECIMAL) | _prefixed("B", _BINARY),
    written=("TB", "GB", "MB", "kB"),
    example="16 GB",
)
"""Base unit: byte."""

KINDS = (BANDWIDTH, DURATION, COMPUTE, MEMORY)


def parse_quantity(value: object, kind: Kind, *, place: str) -> float:
    """The value of a quantity in the base unit of its kind: finite and above zero.

    Args:
        value: the text to read, such as "10.4 Gbit/s"; anything but text is an error.
        kind: which units it may have.
        place: where the text stands, for the error.

    Raises:
        InputError: not text, no number, no unit, an unknown unit, or a number not finite and positive.
    """

    def error(reason: str, remedy: str) -> InputError:
        return InputError(place=place, reason=reason, remedy=remedy)

    units = ", ".join(kind.units)
    write_so = f"Write a number and a unit, as in '{kind.example}'; known units: {units}"
    if isinstance(value, float) and not isfinite(value):
        raise error(f"{value} is not a finite number", f"Give a {kind.name} that is finite and above zero")
    if isinstance(value, int | float) and not isinstance(value, bool):
        raise error(f"{value:.6g} has no unit" if abs(value) < 1e300 else "has no unit", write_so)
    if not isinstance(value, str):
        raise error(f"is no {kind.name}", write_so)
    text = value.strip()
    if len(text) > _LONGEST:
        raise error(f"is {len(text)} characters long", write_so)
    if _NO_NUMBER.match(text):
        raise error(f"{text!r} is not a finite number", f"Give a {kind.name} that is finite and above zero")
    number = _NUMBER.match(text)
    if number is None:
        raise error(f"{text!r} is no {kind.name}", write_so)
    unit = text[number.end() :].strip().replace("μ", "µ")  # Greek mu, for the micro sign
    if not unit:
        raise error(f"{text!r} has no unit", write_so)
    if unit not in kind.units:
        near = get_close_matches(unit, kind.units, n=1)
        hint = f"Did you mean '{near[0]}'? " if near else ""
        raise error(f"{unit!r} is not a unit of {kind.name}", f"{hint}Known units: {units}")
    try:
        amount = float(Fraction(number[0]) * kind.units[unit])
    except OverflowError:
        raise error(f"{text!r} is too large", f"Give a {kind.name} that a float can hold") from None
    if amount <= 0:
        wrong = "negative" if number[0].startswith("-") else "zero"
        raise error(f"{text!r} is {wrong}", f"Give a {kind.name} above zero")
    return amount


def format_quantity(amount: float, kind: Kind) -> str:
    """The text of a finite positive amount in the base unit: the largest handy unit that loses nothing.

    `parse_quantity(format_quantity(x, kind), kind, place=…) == x` exactly.
    """
    for unit in kind.written:
        number = Fraction(amount) / kind.units[unit]
        if 1 <= number < 10**15:
            # Dividing by the unit rounds: 0.0001247 s are 124.7 us, not 124.69999999999999.
            for digits in (f"{float(number):.15g}", repr(float(number)).removesuffix(".0")):
                if float(Fraction(digits) * kind.units[unit]) == amount:
                    return f"{digits} {unit}"
    return f"{amount!r} {kind.base}"


def at_least(factor: float) -> str:
    """A positive number in three digits, rounded up: how it is printed what is enough."""
    digit = 10.0 ** (math.floor(math.log10(factor)) - 2)
    return f"{math.ceil(factor / digit * (1 - 1e-12)) * digit:.3g}"


def size(nbytes: float) -> str:
    """Bytes with a binary unit and three digits: how all sizes are printed."""
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if nbytes >= scale:
            number = nbytes / scale
            return f"{number:.3g} {unit}" if number < 999.5 else f"{number:.0f} {unit}"
    return f"{nbytes:.0f} B"
