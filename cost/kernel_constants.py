"""Constants."""

from collections.abc import Mapping

SHARED: Mapping[str, float] = {}
OWN: Mapping[str, Mapping[str, float]] = {}
CORRECTIONS: Mapping[str, Mapping[str, tuple[int, ...]]] = {}
