"""Links as one strategy finds them: latency and bandwidth fitted per strategy and range of sizes.

A datasheet gives a link one latency and one bandwidth. What an exchange really meets depends on how it is
carried out (staging, reductions on the host, the protocol the library switches to for larger messages), so
`shardwright calibrate` fits both numbers for every strategy, in ranges of tensor sizes. In a fleet file::

    link:
      bandwidth: 5 GB/s
      latency: 200 us
      strategies:
        all_gather.exact:
          - {up_to: 64 KiB, latency: 180 us, bandwidth: 900 MB/s}
          - {latency: 350 us, bandwidth: 4 GB/s}
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches

from shardwright.cost.document import Entry
from shardwright.cost.quantity import BANDWIDTH, DURATION, MEMORY, format_quantity
from shardwright.ir.collectives import registry


@dataclass(frozen=True, slots=True)
class SizeRange:
    """Latency and bandwidth for tensors of at most `up_to_bytes` (None: of any size)."""

    up_to_bytes: float | None
    latency_s: float
    bandwidth_byte_per_s: float


@dataclass(frozen=True, slots=True)
class StrategyLink:
    """A link as a strategy ("all_gather.exact") finds it; ranges ascend, the last has no limit."""

    strategy: str
    ranges: tuple[SizeRange, ...]

    def at(self, nbytes: float) -> SizeRange:
        """The range that a tensor of this size falls into."""
        return next(r for r in self.ranges if r.up_to_bytes is None or nbytes <= r.up_to_bytes)


def read_strategy_links(entry: Entry) -> tuple[StrategyLink, ...]:
    """The strategies of a link's entry.

    Raises:
        InputError: a strategy that does not exist, or ranges that do not ascend to one without a limit.
    """
    known = [f"{kind}.{s}" for kind, c in registry().items() if not c.local for s in c.strategies]
    links: list[StrategyLink] = []
    for name, ranges in entry.mapping(required=(), optional=_names(entry, known)).items():
        links.append(StrategyLink(name, _read_ranges(ranges)))
    return tuple(links)


def _names(entry: Entry, known: Sequence[str]) -> Sequence[str]:
    """`known`, if every name given is among them: the error for one that is not is shorter than the list."""
    given = entry.value if isinstance(entry.value, dict) else {}
    for name in map(str, given):
        if name not in known:
            near = get_close_matches(name, known, n=3)
            remedy = f"Did you mean {', '.join(near)}?" if near else f"Use one of {', '.join(known)}"
            raise entry.child(name, None).error("is no strategy of a collective", remedy)
    return known


def _read_ranges(entry: Entry) -> tuple[SizeRange, ...]:
    items = entry.sequence()
    ranges: list[SizeRange] = []
    for item in items:
        given = item.mapping(required=("latency", "bandwidth"), optional=("up_to",))
        up_to = given["up_to"].quantity(MEMORY) if "up_to" in given else None
        last = item is items[-1]
        ascends = up_to is None or not ranges or up_to > (ranges[-1].up_to_bytes or 0)
        if (up_to is None) != last or not ascends:
            raise item.error(
                "does not continue the ranges", "Give ascending `up_to`; leave it out in the last range only"
            )
        latency, bandwidth = given["latency"].quantity(DURATION), given["bandwidth"].quantity(BANDWIDTH)
        ranges.append(SizeRange(up_to, latency, bandwidth))
    return tuple(ranges)


def plain_strategy_links(links: Sequence[StrategyLink]) -> dict[str, object]:
    """What `read_strategy_links` reads back to equal links."""
    return {link.strategy: [_plain_range(r) for r in link.ranges] for link in links}


def _plain_range(part: SizeRange) -> dict[str, str]:
    data = {} if part.up_to_bytes is None else {"up_to": format_quantity(part.up_to_bytes, MEMORY)}
    data["latency"] = format_quantity(part.latency_s, DURATION)
    data["bandwidth"] = format_quantity(part.bandwidth_byte_per_s, BANDWIDTH)
    return data
