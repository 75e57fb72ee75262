"""Parts of a fleet: which are worth considering, and why a plan leaves devices out.

`shardwright.synth.subfleets` and `shardwright.synth.grid.choice` choose among them, on one mesh axis and two.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, combinations, product
from typing import Protocol, TypeVar

import numpy as np

from shardwright.cost.fleet import Fleet
from shardwright.cost.model import CostModel
from shardwright.cost.subfleet import subfleet
from shardwright.ir.registry import is_contraction
from shardwright.ir.rules import flop_count
from shardwright.synth.alternate import Synthesis
from shardwright.synth.space.factors import EquationFactor
from shardwright.synth.space.space import Space

#: Parts of a fleet that are considered at most, the whole included.
MOST_PARTS = 24

#: Device classes up to which all unions come before what is made of nodes; of more, only the likely ones.
_FEW_CLASSES = 4

Members = tuple[int, ...]


def candidates(fleet: Fleet, layers: Iterable[int] = ()) -> tuple[Members, ...]:
    """The parts of a fleet worth considering: indices of their devices, ascending.

    The whole fleet first, then one node of each kind, each class of devices, and what else can be made of
    none, one or all nodes of each kind, or of whole classes. Parts that have equal nodes count once; of nodes
    that are alike the cheapest come first, if the fleet says what they cost. Parts of some of these that are
    as good for stages come after the whole.

    Args:
        fleet: all devices.
        layers: of every pipeline of stages: how many there are.
    """
    found: dict[object, Members] = {}
    for members in _parts(fleet):
        if len(found) == MOST_PARTS:
            break
        nodes = subfleet(fleet, members, fleet.name).nodes
        found.setdefault(frozenset(Counter(node.kind for node in nodes).items()), members)
    whole, *others = found.values()
    fewer = (_in_whole_layers(fleet, part, count) for part in (whole, *others) for count in sorted(layers))
    return tuple(dict.fromkeys((whole, *chain.from_iterable(fewer), *others)))


def _in_whole_layers(fleet: Fleet, members: Members, layers: int) -> Iterator[Members]:
    """Of alike devices, or nodes, as few as have no more layers each than all of them would.

    Of twelve layers on eight devices four have two, as each of six has: with fewer stages to pass.
    """
    nodes: dict[int, list[int]] = {}
    for device in members:
        nodes.setdefault(fleet.devices[device].node, []).append(device)
    for stages in ([[device] for device in members], list(nodes.values())):
        if len({tuple(fleet.devices[d].type for d in stage) for stage in stages}) == 1:
            count = math.ceil(layers / math.ceil(layers / len(stages)))
            if count < min(layers, len(stages)):
                yield _union([tuple(stage) for stage in stages[:count]])


def _parts(fleet: Fleet) -> Iterator[Members]:
    """Parts of a fleet, those that baselines use first; some more than once."""
    nodes: list[tuple[float, object, Members]] = []
    first = 0
    for node in fleet.nodes:
        hourly = sum(kind.price_per_hour or 0.0 for kind in node.devices)
        nodes.append((hourly, node.kind, tuple(range(first, first + len(node.devices)))))
        first += len(node.devices)
    kinds: dict[object, list[Members]] = {kind: [] for _, kind, _ in nodes}
    for _, kind, devices in sorted(nodes, key=lambda node: node[0]):
        kinds[kind].append(devices)
    classes = [each.members for each in fleet.classes]
    yield tuple(range(first))
    yield from (alike[0] for alike in kinds.values())
    yield from classes
    few = len(classes) <= _FEW_CLASSES
    if not few:
        # What is left out are the slowest, most likely.
        rates = [fleet.devices[members[0]].type.float32_flop_per_s for members in classes]
        fastest = sorted(range(len(classes)), key=lambda number: -rates[number])
        yield from (_union([classes[c] for c in fastest[:size]]) for size in range(2, len(classes)))
    for size in range(2 if few else len(classes) - 1, len(classes)):
        yield from (_union(some) for some in combinations(classes, size))
    if not few:
        # Nodes without one of their classes: a device that is added must not hide what was best before.
        for alike in kinds.values():
            inside = [own for own in classes if own[0] in _union(alike)]
            yield from (_union(some) for some in combinations(inside, len(inside) - 1) if some)
    # A fleet of ten kinds has 59,048 combinations: more than the limit need not be made.
    prefixes = ([alike[:count] for count in sorted({0, 1, len(alike)})] for alike in kinds.values())
    for taken in product(*prefixes):
        if any(taken):
            yield _union([node for alike in taken for node in alike])
    for size in () if few else range(len(classes) - 2, 1, -1):
        yield from (_union(some) for some in combinations(classes, size))


def _union(parts: Sequence[Members]) -> Members:
    return tuple(sorted(device for part in parts for device in part))


class Tried(Protocol):
    """A part of the fleet, with what is known of its plans."""

    members: Members
    bound_s: float
    found: Synthesis | None
    fits: bool
    impossible: bool
    unfinished: bool

    @property
    def lacking(self) -> float:
        """The largest part of its memory that its plan takes on a device; infinite where there is none."""
        ...

    @property
    def cost_s(self) -> float:
        """What its plan costs; infinite where there is none."""
        ...

    @property
    def free_s(self) -> float:
        """What the best program found costs if memory were no limit; infinite if none was looked for."""
        ...


_Part = TypeVar("_Part", bound=Tried)


def beats(one: Tried, other: Tried) -> bool:
    """Whether a part has the better plan: one that fits into memory is better than any that does not.

    Of those that do not, whatever was searched for, what lacks least is.
    """
    if one.fits != other.fits:
        return one.fits
    if not (one.fits or one.unfinished or other.unfinished):
        return one.lacking < other.lacking
    return one.cost_s < other.cost_s * (1 - 1e-9)


def outgrown(parts: Iterable[Tried]) -> bool:
    """Whether a part into whose memory the step fits in no way may be cheaper than what the others cost."""
    some = list(parts)
    free_s = min((part.free_s for part in some), default=math.inf)
    return any(part.impossible and part.bound_s < free_s for part in some)


def raised_in_turn(
    parts: Sequence[_Part], wanted_s: float, cost_s: float, raised: Callable[[_Part], float]
) -> float:
    """What no plan that fits costs less than: the bounds of the parts, the least one raised time and again.

    Until all are as high as wanted or the least one cannot be raised.

    Args:
        parts: those found to be impossible do not count.
        wanted_s: bounds that are this high are not raised.
        cost_s: of a plan that fits.
        raised: a part's bound with more effort, no lower than it is; the part may turn out to be impossible.
    """
    queue = [(part.bound_s, number) for number, part in enumerate(parts) if not part.impossible]
    heapq.heapify(queue)
    while queue and queue[0][0] < wanted_s:
        bound_s, number = heapq.heappop(queue)
        part = parts[number]
        part.bound_s = raised(part)
        if part.impossible:
            continue
        heapq.heappush(queue, (part.bound_s, number))
        if part.bound_s <= bound_s:
            break
    return min([cost_s, *(bound_s for bound_s, _ in queue)])


def unused(fleet: Fleet, best: Tried, parts: Sequence[Tried]) -> tuple[tuple[Members, str], ...]:
    """The devices that a part leaves out, by class, and why they are not used."""
    found: list[tuple[Members, str]] = []
    for each in fleet.classes:
        left = tuple(d for d in each.members if d not in best.members)
        if left:
            found.append((left, _why(each.members, best, parts)))
    return tuple(found)


def _why(members: Members, best: Tried, parts: Sequence[Tried]) -> str:
    """Why the other devices of a class are not used."""

    def of_class(part: Tried) -> int:
        return len(frozenset(members).intersection(part.members))

    used = of_class(best)
    # What is too small for any program is no part on which a plan that fits could be.
    possible = [part for part in parts if not (best.fits and part.impossible)]
    others = [part for part in possible if of_class(part) > used]
    them = "more of them" if used else "them"
    least_s = min((part.bound_s for part in others), default=0.0)
    if least_s >= best.cost_s * (1 - 1e-9):
        return f"no plan that uses {them} costs less than {_milliseconds(least_s)}"
    if not any(part.found or part.impossible or part.free_s < math.inf for part in others):
        return f"no plan that uses {them} costs less than {_milliseconds(least_s)}: none was searched for"
    costs = [part.cost_s for part in others if part.found is not None and part.fits]
    aside_s = min((part.free_s for part in others), default=math.inf)
    if not costs and best.cost_s <= aside_s < math.inf:
        return f"the best plan found that uses {them} costs {_milliseconds(aside_s)}, memory aside"
    if not costs:
        return f"no plan found that uses {them} fits into memory"
    return f"the best plan found that uses {them} costs {_milliseconds(min(costs))}"


def _milliseconds(seconds: float) -> str:
    """With four digits."""
    return f"{1e3 * seconds:.4g} ms"


def products_s(space: Space, model: CostModel, parts: Sequence[Sequence[int]]) -> list[float]:
    """What the products of every program take at least on some parts of a fleet, all at the peak.

    A bound for which nothing need be priced.

    Args:
        space: the programs.
        model: of the whole fleet.
        parts: their devices.
    """
    #: Operations by rates per class.
    flop: dict[tuple[float, ...], float] = {}
    for factor, count in Counter([use.factor for use in space.uses]).items():
        if isinstance(factor, EquationFactor) and is_contraction(factor.equation.primitive):
            mine = flop_count(factor.rule, factor.equation)
            rates = tuple(model.peak_rates(factor.equation, mine).tolist())
            flop[rates] = flop.get(rates, 0.0) + count * factor.weight * mine
    classes = [model.class_of[list(members)] for members in parts]
    return [sum(n / float(np.array(rates)[mine].sum()) for rates, n in flop.items()) for mine in classes]
