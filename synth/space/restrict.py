"""Smaller spaces of programs: those whose equations keep to some of their signatures."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from shardwright.ir.graph import Equation, Graph
from shardwright.ir.rules import Signature
from shardwright.synth.space.space import Space

#: Whether an equation may be computed under a signature.
Keep: TypeAlias = Callable[[Equation, Signature], bool]


class RestrictedSpace(Space):
    """The programs of a step that compute every equation under a signature that `keep` accepts.

    An equation of which none is accepted (a batch of one cannot be cut) keeps all of its signatures.
    """

    def __init__(self, graph: Graph, keep: Keep) -> None:
        self._keep = keep
        self._kept: dict[tuple[int, tuple[bool, ...]], tuple[Signature, ...]] = {}
        super().__init__(graph)

    def signatures(self, equation: Equation) -> tuple[Signature, ...]:
        """The signatures kept; one object for equal equations of which the same ones are."""
        found = super().signatures(equation)
        kept = tuple(self._keep(equation, signature) for signature in found)
        if all(kept) or not any(kept):
            return found
        key = (id(found), kept)
        if key not in self._kept:
            self._kept[key] = tuple(s for s, stays in zip(found, kept, strict=True) if stays)
        return self._kept[key]
