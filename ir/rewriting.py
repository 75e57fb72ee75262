"""How a plan changes the step before it distributes it; what the step computes stays the same.

A rewriting is a few numbers, and applying it needs nothing else: a plan file has the rewriting, and whoever
loads it traces the step and applies it again.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, cast

from shardwright.ir.errors import InputError
from shardwright.ir.microbatch import microbatched
from shardwright.ir.recompute import Stretch, recomputing
from shardwright.ir.trace import Traced


@dataclass(frozen=True, slots=True)
class Rewriting:
    """What is changed.

    Attributes:
        recompute: stretches of the forward part that the backward part computes again, by equations of the
            traced step, ascending.
        microbatches: in so many equal pieces of the batch forward and backward part run, one after another.
    """

    recompute: tuple[Stretch, ...] = ()
    microbatches: int = 1

    def __bool__(self) -> bool:
        return self != AS_TRACED

    def to_dict(self) -> dict[str, Any]:
        """Plain data, see `plan.schema.json`."""
        return {
            "recompute": [
                {"name": s.name, "first": s.first, "last": s.last, "keep": s.keep} for s in self.recompute
            ],
            "microbatches": self.microbatches,
        }

    @staticmethod
    def from_dict(data: Any) -> Rewriting:
        """Inverse of `to_dict`."""
        again = tuple(Stretch(**entry) for entry in data.get("recompute", ()))
        return Rewriting(recompute=again, microbatches=data.get("microbatches", 1))


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
        InputError: the step cannot be run in so many micro-batches, or is to be changed in both ways.
    """
    if rewriting_of(traced) == rewriting:
        return traced
    source = original(traced)
    if not rewriting:
        return source
    known = cast("dict[Rewriting, Traced]", source.graph.memo.setdefault(Rewriting, {}))
    if rewriting not in known:
        if rewriting.microbatches == 1:
            changed = replace(source, graph=recomputing(source.graph, rewriting.recompute))
        elif rewriting.recompute:
            raise InputError(
                place="microbatches",
                reason="nothing can be computed again within micro-batches yet",
                remedy="Plan with recompute='off', or with microbatches=1",
            )
        else:
            changed = microbatched(source, rewriting.microbatches)
        known[rewriting] = replace(changed, origin=source, rewriting=rewriting)
    return known[rewriting]
