"""Seconds and rates as people read them."""

from __future__ import annotations


def duration(seconds: float) -> str:
    """Seconds with three digits and a fitting unit; below a picosecond, rounding left it of nothing."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6), ("ns", 1e-9)):
        if seconds >= 0.9995 * scale or (unit == "ns" and seconds >= 1e-12):
            return f"{seconds / scale:.3g} {unit}"
    return "0 s"


def flop_rate(flop_per_s: float) -> str:
    """FLOP/s with three digits and a fitting unit."""
    return f"{_decimal(flop_per_s)}FLOP/s"


def bandwidth(byte_per_s: float) -> str:
    """Bytes per second with three digits and a fitting decimal unit."""
    return f"{_decimal(byte_per_s)}B/s"


def _decimal(value: float) -> str:
    for prefix, scale in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= scale:
            return f"{value / scale:.3g} {prefix}"
    return f"{value:.3g} "
