"""Every way to keep less of the forward part, for small steps of few layers; others have a ladder.

The ladder of `shardwright.synth.stretches` adds one stretch after another, in an order by what each frees for
its time, and so leaves most combinations out. Where there are few, and each is planned in a moment, none need
be: which stretches are computed again, what of them is kept and what waits in host memory is then as exact as
the search for each of them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from shardwright.cost.fleet import Fleet
from shardwright.cost.model import CostModel
from shardwright.ir.graph import Graph
from shardwright.ir.rewrites.recompute import Stretch
from shardwright.synth.stretches import Policy, options

#: Combinations that are few, and equations of a small step.
FEW, SMALL = 64, 300

#: A step of no more equations is planned in a second or so, on no more devices in less.
_EQUATIONS, _DEVICES = 1_500, 4


def in_a_moment(graph: Graph, fleet: Fleet) -> bool:
    """Whether a step is planned in about a second: then nothing is left out to save time."""
    return len(fleet.devices) <= _DEVICES and few_equations(graph)


def few_equations(graph: Graph) -> bool:
    """Whether a step is planned in a second or so on most fleets: then more than one of its ways is."""
    return len(graph.all_equations()) <= _EQUATIONS


def combinations(
    graph: Graph, model: CostModel, policies: Sequence[Policy]
) -> tuple[tuple[Stretch, ...], ...] | None:
    """Every combination of what may be done with each layer, but for doing nothing; the quickest first.

    Args:
        graph: the step.
        model: of the fleet, for the order alone.
        policies: what may be done with a layer; what frees nothing of it is no choice.

    Returns:
        The combinations, or None if there are too many, or the step is too large to plan all of them.
    """
    if len(graph.equations) > SMALL:
        return None
    layers = [(None, *each) for each in options(graph, model, policies) if each]
    if math.prod(map(len, layers)) > FEW:
        return None
    found = [
        tuple(option for option in choice if option is not None) for choice in itertools.product(*layers)
    ]
    # All layers that are dealt with take their time: the quickest is likely to be the cheapest that fits.
    found.sort(key=lambda some: sum(option.seconds for option in some))
    return tuple(tuple(option.stretch for option in some) for some in found if some)
