"""Every way to keep less of the forward part, for small steps of few layers; others have a ladder.

The ladder of `shardwright.synth.stretches` adds one stretch after another, in an order by what each frees for
its time, and so leaves most combinations out. Where there are few, and each is planned in a moment, none need
be: which stretches are computed again, what of them is kept and what waits in host memory is then as exact as
the search for each of them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

from shardwright.cost.fleet import Fleet
from shardwright.cost.model import CostModel
from shardwright.ir.graph import Graph
from shardwright.ir.rewrites.recompute import Stretch
from shardwright.synth.stretches import Option, Policy, options

#: Combinations that are few, and equations of a small step.
FEW, SMALL = 64, 300

#: Parts of a fleet (of two classes of devices) up to which that is so; of more, fewer combinations are few.
_PARTS = 3

#: A step of no more equations is planned in a second or so, on no more devices in less.
_EQUATIONS, _DEVICES = 1_500, 4


def in_a_moment(graph: Graph, fleet: Fleet) -> bool:
    """Whether a step is planned in about a second: then nothing is left out to save time."""
    return len(fleet.devices) <= _DEVICES and few_equations(graph)


def few_equations(graph: Graph) -> bool:
    """Whether a step is planned in a second or so on most fleets: then more than one of its ways is."""
    return len(graph.all_equations()) <= _EQUATIONS


def combinations(
    graph: Graph, model: CostModel, policies: Sequence[Policy], parts: int = 1
) -> tuple[tuple[tuple[Stretch, ...], ...], bool]:
    """Every combination of what may be done with each layer, but for doing nothing; the quickest first.

    Where these are too many with host memory, every one without it, and of those with it those that do the
    same with every layer, or with all up to some layer: the first ones wait longest.

    Args:
        graph: the step.
        model: of the fleet, for the order alone.
        policies: what may be done with a layer; what frees nothing of it is no choice.
        parts: of the fleet, for each of which every combination is planned.

    Returns:
        The combinations, none if there are too many or the step is too large to plan all of them; and whether
        they are all there are.
    """
    if len(graph.equations) > SMALL:
        return (), True
    layers = [each for each in options(graph, model, policies) if each]
    few = FEW / max(1.0, parts / _PARTS)
    found, complete = _product(layers, few), True
    if found is None:
        found = _product([[o for o in each if not o.stretch.host] for each in layers], few)
        if found is None or len(found) == 1:  # too many even so, or none but to do nothing
            return (), True
        found, complete = [*found, *_alike(layers, policies)], False
    # All layers that are dealt with take their time: the quickest is likely to be the cheapest that fits.
    found.sort(key=lambda some: sum(option.seconds for option in some))
    return tuple(tuple(option.stretch for option in some) for some in found if some), complete


def _product(layers: Sequence[Sequence[Option]], few: float) -> list[tuple[Option, ...]] | None:
    """One option or none of each layer, in every way; None where there are more than a few."""
    if math.prod(len(each) + 1 for each in layers) > few:
        return None
    every = itertools.product(*[(None, *each) for each in layers])
    return [tuple(option for option in some if option is not None) for some in every]


def _alike(layers: Sequence[Sequence[Option]], policies: Sequence[Policy]) -> Iterator[tuple[Option, ...]]:
    """What waits in host memory of all layers up to each, the same of all."""
    for keep, host in policies:
        if host:
            mine = [o for each in layers for o in each if (o.stretch.keep, o.stretch.host) == (keep, host)]
            yield from (tuple(mine[:count]) for count in range(1, len(mine) + 1))
