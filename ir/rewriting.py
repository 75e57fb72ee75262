"""How a plan changes the step before it distributes it; what the step computes stays the same.

A rewriting is a few numbers, and applying it needs nothing else: a plan file has the rewriting, and whoever
loads it traces the step and applies it again.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, cast

from shardwright.ir.recompute import Stretch, recomputing
from shardwright.ir.trace import Traced


@dataclass(frozen=True, slots=True)
class Rewriting:
    """What is changed.

    Attributes:
        recompute: stretches of the forward part that the backward part computes again, by equations of the
            traced step, ascending.
    """

    recompute: tuple[Stretch, ...] = ()

    def __bool__(self) -> bool:
        return self != AS_TRACED

    def to_dict(self) -> dict[str, Any]:
        """Plain data, see `plan.schema.json`."""
        return {
            "recompute": [
                {"name": s.name, "first": s.first, "last": s.last, "keep": s.keep} for s in self.recompute
            ],
        }

    @staticmethod
    def from_dict(data: Any) -> Rewriting:
        """Inverse of `to_dict`."""
        return Rewriting(recompute=tuple(Stretch(**entry) for entry in data.get("recompute", ())))


#: No change.
AS_TRACED = Rewriting()


def original(traced: Traced) -> Traced:
    """The step as it was traced."""
    return traced if traced.origin is None else traced.origin


def rewriting_of(traced: Traced) -> Rewriting:
    """How a step was changed since it was traced."""
    return traced.rewriting if isinstance(traced.rewriting, Rewriting) else AS_TRACED


def rewritten(traced: Traced, rewriting: Rewriting) -> Traced:
    """A step, changed; of one that was changed already, its origin is.

    Its fingerprint is still that of the step as it was traced.

    Raises:
        PlanError: the rewriting is of another step.
    """
    if rewriting_of(traced) == rewriting:
        return traced
    source = original(traced)
    if not rewriting:
        return source
    known = cast("dict[Rewriting, Traced]", source.graph.memo.setdefault(Rewriting, {}))
    if rewriting not in known:
        graph = recomputing(source.graph, rewriting.recompute)
        known[rewriting] = replace(source, graph=graph, origin=source, rewriting=rewriting)
    return known[rewriting]
