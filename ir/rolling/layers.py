"""Which loops a step becomes: runs of layers, forward and backward, that belong together.

Loops belong together whose iterations read what the others' made, or the same parameters, one by one, be it
in the same order or in the opposite one. All loops of a family have the same layers: what one of them does
not have, such as a first layer whose operand needs no gradient, is in none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from shardwright.ir.graph import Atom, Equation, Graph, Literal, Value
from shardwright.ir.rolling.parts import Given, Loop
from shardwright.ir.rolling.runs import Run, Stretch, apart, in_order, makers_of, stretches
from shardwright.ir.rolling.slots import Body, Carried, Own, body_of
from shardwright.ir.rolling.stacks import Stacks

#: What a layer has at least one of: what only changes tensors element by element is part of one.
_PRODUCTS = frozenset({"dot_general", "conv_general_dilated"})


class _Aligned(NamedTuple):
    """Iteration n of a run has layer `first + n * step` of a family."""

    family: int
    step: int
    first: int


@dataclass(frozen=True, slots=True)
class _Found:
    """A run as a loop; or runs that it and others have to be restricted to."""

    loop: Loop | None = None
    restricted: tuple[tuple[Stretch, Run], ...] = ()


def in_layers(graph: Graph, sorts: Sequence[Hashable], single: Collection[Equation] = ()) -> Stacks | None:
    """The loops over layers that a step has, and its stacks; None if it has none.

    Args:
        graph: the step.
        sorts: see `Stacks`.
        single: equations that are to be in no group.
    """
    order = in_order(graph)
    makers = makers_of(order)

    products = np.cumsum([0, *map(_multiplies, order)])

    def is_layer(stretch: Stretch) -> bool:
        if products[stretch.first] == products[stretch.first + stretch.period]:
            return False
        first_two = (Run(run.first, run.period, 2) for run in stretch.runs())
        return any(map(_hands_on, _bodies(first_two, order, makers)))

    found = list(filter(is_layer, stretches(order)))
    alike = _equal_constants(graph)
    while found:
        tried = apart(found)
        stacks = _with_loops(tried, lambda: Stacks(graph, order, alike, sorts, single))
        if stacks is not None:
            return stacks
        # What repeats most may be no layers: pieces of a batch, say, each of which goes through all of them.
        found = [stretch for stretch in found if stretch not in tried]
    return None


def _with_loops(tried: Sequence[Stretch], stacks_of: Callable[[], Stacks]) -> Stacks | None:
    """Stretches as loops, and their stacks; None if none of them has parameters."""
    runs: dict[Stretch, Run | None] = dict.fromkeys(tried)
    while runs:
        stacks = stacks_of()
        used: dict[Stretch, Loop] = {}
        again = False
        for stretch, run in runs.items():
            found = _loop(stretch, run, stacks, used)
            if found.restricted:
                runs.update(found.restricted)
                again = True
                break
            if found.loop is not None:
                stacks.add(found.loop)
                used[stretch] = found.loop
        if again:
            continue
        parameters = {stack.family for stack in stacks.all if isinstance(stack.source, Given)}
        kept = {s: runs[s] for s, loop in used.items() if loop.family in parameters}
        if len(kept) == len(used):
            return stacks if used else None
        runs = kept
    return None


def _bodies(
    runs: Iterator[Run], order: Sequence[Equation], makers: Mapping[Value, tuple[int, int]]
) -> Iterator[Body]:
    return (body for run in runs if (body := body_of(run, order, makers)) is not None)


def _multiplies(equation: Equation) -> bool:
    inner = (e for region in equation.regions for e in region.all_equations())
    return equation.primitive in _PRODUCTS or any(e.primitive in _PRODUCTS for e in inner)


def _hands_on(body: Body) -> bool:
    """Whether a tensor that an iteration hands on is made of what it was handed; and each has its own rows.

    Where one is only begun before the one before it is done, as updates of parameters may be, it is not.
    """
    if all(isinstance(atoms[0], Literal) for atoms in body.rows):
        return False
    handed = {place for place, start in body.carried.items() if start.type.rank}
    reached: set[int] = set()
    for position, slots in enumerate(body.slots):
        for slot in slots:
            carried = isinstance(slot, Carried) and slot.place in handed
            if carried or (isinstance(slot, Own) and slot.place[0] in reached):
                reached.add(position)
    return any(position in reached for position, _ in handed)


def _equal_constants(graph: Graph) -> dict[Atom, Atom]:
    """Of arrays that the step closes over, which are equal, the first that stands for all of them."""
    first: dict[Hashable, Value] = {}
    found: dict[Atom, Atom] = {}
    for value, array in graph.constants.items():
        try:
            key: Hashable = (value.type, np.asarray(array).tobytes())
        except TypeError:  # keys of random numbers
            continue
        found[value] = first.setdefault(key, value)
    return found


def _loop(stretch: Stretch, fixed: Run | None, stacks: Stacks, used: Mapping[Stretch, Loop]) -> _Found:
    """A stretch as a loop, beside those that there are already."""
    runs = stretch.runs() if fixed is None else iter([fixed])
    best: tuple[tuple[float, ...], Body, _Aligned | None] | None = None
    for run in runs:
        body = body_of(run, stacks.order, stacks.makers, stacks.same)
        if body is None or not _hands_on(body):
            continue
        votes = {atoms: _vote(atoms, stacks) for atoms in body.rows}
        counted = Counter(vote for vote in votes.values() if vote is not None)
        winner = max(counted, key=lambda vote: (counted[vote], vote), default=None)
        odd = sum(atoms[0].type.nbytes for atoms, vote in votes.items() if vote not in (None, winner))
        handed_on = [start.type for start in body.carried.values()]
        cost = (float(odd), float(sum(t.nbytes for t in handed_on)), float(len(handed_on)), float(run.first))
        if best is None or cost < best[0]:
            best = cost, body, winner
    if best is None:
        return _Found()
    _, body, aligned = best
    if aligned is None:
        family = max((loop.family for loop in stacks.loops), default=-1) + 1
        return _Found(Loop(body, range(body.run.times), family))
    return _beside(stretch, body, aligned, used)


def _beside(stretch: Stretch, body: Body, aligned: _Aligned, used: Mapping[Stretch, Loop]) -> _Found:
    """A loop with the layers of others; where these have more or fewer, what all of them have."""
    run, others = body.run, {s: loop for s, loop in used.items() if loop.family == aligned.family}
    count = next(iter(others.values())).body.run.times
    layers = [aligned.first + n * aligned.step for n in range(run.times)]
    common = [n for n, layer in enumerate(layers) if 0 <= layer < count]
    if len(common) < 2:
        return _Found()
    if len(common) == run.times == count:
        return _Found(Loop(body, range(layers[0], layers[-1] + aligned.step, aligned.step), aligned.family))
    some = [layers[n] for n in common]
    restricted = [(stretch, _part(run, common))]
    for other, loop in others.items():
        mine = [n for n, layer in enumerate(loop.layers) if min(some) <= layer <= max(some)]
        restricted.append((other, _part(loop.body.run, mine)))
    return _Found(restricted=tuple(restricted))


def _part(run: Run, iterations: Sequence[int]) -> Run:
    return Run(run.first + run.period * iterations[0], run.period, len(iterations))


def _vote(atoms: tuple[Atom, ...], stacks: Stacks) -> _Aligned | None:
    """Which layers the iterations of a run have, by what is there for each; None if that says nothing."""
    for step, ordered in ((1, atoms), (-1, tuple(reversed(atoms)))):
        entering = stacks.entering.get(ordered)
        if entering is not None:
            return _Aligned(entering[0].family, step, 0 if step > 0 else len(atoms) - 1)
    places = [(n, place) for n, atom in enumerate(atoms) if (place := stacks.place_of(atom)) is not None]
    if len(places) < 2 or len({(what, family) for _, (what, family, _) in places}) > 1:
        return None
    (n, (_, family, layer)), (m, (_, _, other)) = places[:2]
    step = (other - layer) // (m - n)
    first = layer - step * n
    if abs(step) != 1 or any(at != first + step * k for k, (_, _, at) in places):
        return None
    return _Aligned(family, step, first)
