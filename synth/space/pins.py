"""Pins: where a tensor must lie, as factors of the choice graph."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from shardwright.cost.share_cost import Floats
from shardwright.ir.placement import Placement, Shard
from shardwright.synth.space.conversions import Domain
from shardwright.synth.space.factors import Choice, Conversion, Matrices, Use

#: Which placements a pin allows.
Allowed: TypeAlias = Callable[[Placement], bool]


@dataclass(frozen=True, slots=True)
class PinFactor:
    """Costs nothing where the base of a choice's holding is one of `allowed`, and `otherwise_s` elsewhere.

    The base is where a tensor that is handed in lies between steps; a second placement, made from that, stays
    free. Prices do not enter.
    """

    domain: Domain
    allowed: frozenset[Placement]
    otherwise_s: float = np.inf
    weight: float = 1.0

    @property
    def domains(self) -> tuple[Domain, ...]:
        """Of the choice that is pinned."""
        return (self.domain,)

    def table(self, matrices: Matrices) -> Floats:
        """Seconds by holding."""
        holdings = self.domain.holdings
        return np.array([0.0 if h.base in self.allowed else self.otherwise_s for h in holdings])

    def conversions(self, at: Sequence[int]) -> tuple[Conversion, ...]:
        """None: a pin makes nothing necessary."""
        return ()


def pin(choice: Choice, allowed: Allowed, otherwise_s: float = np.inf) -> Use:
    """The use of a factor that pins `choice` to those placements of its domain that `allowed` accepts.

    Args:
        choice: to pin.
        allowed: says of a placement whether the choice may be held in it.
        otherwise_s: price of any other; infinite where the pin must be kept.
    """
    bases = frozenset(holding.base for holding in choice.domain.holdings)
    factor = PinFactor(choice.domain, frozenset(filter(allowed, bases)), otherwise_s)
    return Use(factor, (choice.index,))


def pinned(uses: Iterable[Use]) -> frozenset[int]:
    """The indices of the choices that pins among some factors must be kept for."""
    return frozenset(
        use.scope[0] for use in uses if isinstance(use.factor, PinFactor) and np.isinf(use.factor.otherwise_s)
    )


def is_shard(placement: Placement) -> bool:
    """Whether a placement is a sharded one."""
    return isinstance(placement, Shard)


def shardable(choice: Choice) -> bool:
    """Whether a choice could be sharded at all."""
    return any(is_shard(holding.base) for holding in choice.domain.holdings)
