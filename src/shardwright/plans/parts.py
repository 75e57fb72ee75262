"""What a plan says of itself, as small records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from shardwright.cost.timeline import Timeline

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Stats:
    """Where planning time went and how large the search was.

    Attributes:
        trace_s: seconds in jax.make_jaxpr.
        space_s: seconds to build the choice graph, which are part of `search_s`.
        search_s: seconds of everything after tracing but for `ratio_s`.
        ratio_s: seconds of LP, rounding and re-costing.
        expanded: nodes expanded by A*.
        searches: searches run.
        equations: equations of the flattened step, regions included.
        choices: choices of the fused choice graph.
        replicated: primitives that run replicated on every device, and why.
    """

    trace_s: float
    space_s: float
    search_s: float
    ratio_s: float
    expanded: int
    searches: int
    equations: int
    choices: int
    replicated: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Exchanged:
    """One kind of exchange of a plan, added up.

    Attributes:
        name: collective and strategy, such as "all_gather.exact".
        count: how often it runs in a step.
        seconds: what all of them are priced at.
        pattern: what the program does with it, if that has a name: see `shardwright.ir.patterns`.
    """

    name: str
    count: float
    seconds: float
    pattern: str = ""


@dataclass(frozen=True, slots=True)
class PinPrice:
    """A pin and its price.

    Attributes:
        name: what the user called it.
        placement: where it fixes arguments.
        price_s: by so much the plan is dearer than the best program without it.
        arguments: those that it fixes, by name; files of older versions do not say.
    """

    name: str
    placement: str
    price_s: float
    arguments: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Spent:
    """Where the predicted seconds of a device's step go.

    Attributes:
        compute_s: it computes.
        exchange_s: it does not, while an exchange is under way.
        idle_s: it waits for other devices.
    """

    compute_s: float
    exchange_s: float
    idle_s: float

    @staticmethod
    def of(found: Timeline) -> tuple[Spent, ...]:
        """Of every device."""
        return tuple(map(Spent, found.compute_s, found.exposed_s, found.idle_s))


@dataclass(frozen=True, slots=True)
class Unused:
    """Devices that a plan leaves out, by name, and why."""

    devices: tuple[str, ...]
    why: str


def spread(values: Sequence[T], used: Sequence[int], count: int, rest: T) -> tuple[T, ...]:
    """Values of used devices among those of all `count` devices; the others have `rest`."""
    found = [rest] * count
    for device, value in zip(used, values, strict=True):
        found[device] = value
    return tuple(found)
