"""Pins: where a tensor must lie, as factors of the choice graph."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias, cast

import numpy as np

from shardwright.cost.share_cost import Floats
from shardwright.ir.placement import Placement, Shard
from shardwright.synth.factors import Choice, Factor, Key, Prices

#: Which placements a pin allows.
Allowed: TypeAlias = Callable[[Placement], bool]


@dataclass(frozen=True, eq=False)
class PinFactor:
    """Costs nothing where the base of a choice's holding is one of `allowed`, and `otherwise_s` elsewhere.

    The base is where a tensor that is handed in lies between steps; a second placement, made from that, stays
    free. Prices do not enter.
    """

    choice: Choice
    allowed: frozenset[Placement]
    otherwise_s: float = np.inf

    @property
    def scope(self) -> tuple[Choice, ...]:
        """The choice that is pinned."""
        return (self.choice,)

    @cached_property
    def key(self) -> Key:
        """Equal keys have equal tables."""
        return Key(("pin", self.choice.domain, self.allowed, self.otherwise_s))

    def table(self, prices: Prices) -> Floats:
        """Seconds by holding."""
        holdings = self.choice.domain.holdings
        return np.array([0.0 if h.base in self.allowed else self.otherwise_s for h in holdings])


def pin(choice: Choice, allowed: Allowed, otherwise_s: float = np.inf) -> Factor:
    """The factor that pins `choice` to those placements of its domain that `allowed` accepts.

    Args:
        choice: to pin.
        allowed: says of a placement whether the choice may be held in it.
        otherwise_s: price of any other; infinite where the pin must be kept.
    """
    bases = frozenset(holding.base for holding in choice.domain.holdings)
    return cast(Factor, PinFactor(choice, frozenset(filter(allowed, bases)), otherwise_s))


def is_shard(placement: Placement) -> bool:
    """Whether a placement is a sharded one."""
    return isinstance(placement, Shard)


def shardable(choice: Choice) -> bool:
    """Whether a choice could be sharded at all."""
    return any(is_shard(holding.base) for holding in choice.domain.holdings)
