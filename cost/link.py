"""Connections between devices, and the entries of a fleet file that describe them."""

from __future__ import annotations

from dataclasses import dataclass

from shardwright.cost.document import Entry
from shardwright.cost.quantity import BANDWIDTH, DURATION, format_quantity
from shardwright.cost.strategy_links import StrategyLink, plain_strategy_links, read_strategy_links


@dataclass(frozen=True, slots=True)
class Link:
    """A connection: what one end can send, and receive at the same time, and the delay of the first byte.

    `strategies` are the same two numbers as measured for single strategies.
    """

    bandwidth_byte_per_s: float
    latency_s: float
    strategies: tuple[StrategyLink, ...] = ()

    def under(self, strategy: str, nbytes: float) -> Link:
        """The link that `strategy` ("all_gather.exact") finds for a tensor of this size."""
        for measured in self.strategies:
            if measured.strategy == strategy:
                found = measured.at(nbytes)
                return Link(found.bandwidth_byte_per_s, found.latency_s)
        return self


def read_link(entry: Entry) -> Link:
    """The link that an entry describes."""
    given = entry.mapping(required=("bandwidth", "latency"), optional=("strategies",))
    return Link(
        given["bandwidth"].quantity(BANDWIDTH),
        given["latency"].quantity(DURATION),
        read_strategy_links(given["strategies"]) if "strategies" in given else (),
    )


def plain_link(link: Link) -> dict[str, object]:
    """Plain data that `read_link` reads back to an equal link."""
    data: dict[str, object] = {
        "bandwidth": format_quantity(link.bandwidth_byte_per_s, BANDWIDTH),
        "latency": format_quantity(link.latency_s, DURATION),
    }
    if link.strategies:
        data["strategies"] = plain_strategy_links(link.strategies)
    return data
