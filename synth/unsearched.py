"""The plan where nothing is searched: the best baseline on all devices, and what no plan costs less than."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from shardwright.cost.fleet import Fleet
from shardwright.ir.graph import Graph
from shardwright.synth.chosen import Choice
from shardwright.synth.fallback import best_baseline
from shardwright.synth.part import parts_of
from shardwright.synth.parts import Members
from shardwright.synth.prices.tables import Prices
from shardwright.synth.space.factors import EquationFactor
from shardwright.synth.space.space import Space
from shardwright.synth.timer import Timer


def arithmetic_s(space: Space, floors: Prices) -> float:
    """What the kernels of every program cost at least, each under shares of its own; no exchange counts."""
    uses = Counter([use.factor for use in space.uses])
    kernels = {factor: floors.list.kernels(factor) for factor in uses if isinstance(factor, EquationFactor)}
    seconds = floors.seconds
    return sum(uses[f] * f.weight * float(seconds[lines].min()) for f, lines in kernels.items())


def unsearched(
    graph: Graph, space: Space, fleet: Fleet, timer: Timer, parts: Sequence[Members] | None = None
) -> Choice:
    """The best baseline on all devices; the bound is that of all parts (see `subfleets.py`) all the same.

    Raises:
        PlanError: no baseline applies to the step.
    """
    whole, *rest = parts_of(fleet, parts)
    found = best_baseline(graph, space, whole.model, timer)
    with timer.search():
        bounds = [arithmetic_s(space, part.floors) for part in rest]
    return Choice(replace(found, bound_s=min((found.bound_s, *bounds))), whole.members, whole.model)
