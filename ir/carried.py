"""What a loop of the host carries from iteration to iteration: in one place, not in three.

The host runs a loop whose body exchanges, iteration by iteration. What it carries, such as the sums of
gradients over micro-batches, comes in, is made anew by the body, and comes in again. Two rules keep it where
it is, as XLA does in loops of its own:

- *Written over.* The segment of the body that reads as the last what was carried in, and makes what is
  carried on, writes it over that, if whatever reads the old there must run before (`ir/donation.py`).
- *Handed over.* A loop begins with what a segment made for it alone; of anything else, such as an argument,
  which is the caller's, it begins with a copy.

A loop within such a body goes by the first rule as well: it begins with what was carried in, carries it on in
its place, and what it ends with is carried on.

Prices of memory (`cost/memory/tenants.py`, `shardwright/memory/walk.py`) and ranks
(`backends/mpi/script.py`) go by the same rules.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import TypeVar

from shardwright.ir.donation import over_given
from shardwright.ir.dtypes import is_key
from shardwright.ir.flow import inputs, outputs
from shardwright.ir.graph import Equation, Graph, Value
from shardwright.ir.program import Program, Property
from shardwright.ir.regions import boundary, stacked_results
from shardwright.ir.segments import Lasting, Looping, Segment, Stepped

_S = TypeVar("_S", bound=Lasting)


@dataclass(frozen=True, slots=True)
class Carry:
    """An operand of a loop that a region carries to its own next iteration.

    Attributes:
        operand, result: its positions among those of the equation.
        into, out: positions among inputs and outputs of the region.
    """

    operand: int
    result: int
    into: int
    out: int


def carries(equation: Equation, region: int) -> tuple[Carry, ...]:
    """What a region carries on."""
    wiring = boundary(equation)
    operand = {port.inner: port.outer for port in wiring.ins if port.region == region and not port.stacked}
    result = {port.inner: port.outer for port in wiring.outs if port.region == region and not port.stacked}
    own = ((into, out) for start, out, end, into in wiring.carries if start == end == region)
    return tuple([Carry(operand[into], result[out], into, out) for into, out in own])


def carried_on(program: Program, region: Graph, some: Iterable[Carry]) -> dict[Property, Property]:
    """Of a loop's body, new -> old: what it makes and hands on once, in the place of what was carried in."""
    given, results = inputs(program, region), Counter(outputs(program, region))
    found: dict[Property, Property] = {}
    for carry in some:
        atom = region.outputs[carry.out]
        if isinstance(atom, Value) and not is_key(atom.type.dtype):
            new = Property(atom.index, program.outputs[carry.out])
            if results[new] == 1 and new not in given:
                found[new] = given[carry.into]
    return found


def written_over(
    body: Stepped[_S], equation: Equation, region: int
) -> Mapping[_S, Mapping[Property, Property]]:
    """By segment or loop of a loop's body, what it makes in the place of what was carried in: new -> old."""
    pairs = carried_on(body.program, body.graph, carries(equation, region))
    found = dict(over_given(body.steps, body.graph, pairs))
    for step in body.steps:
        if isinstance(step, Looping) and (mine := _through(body, step, pairs)):
            found[step] = mine
    return found


def _through(
    body: Stepped[_S], step: Looping, pairs: Mapping[Property, Property]
) -> dict[Property, Property]:
    """Of what is carried on in the place of what was carried in, what a loop in the body carries on."""
    if not pairs:
        return {}
    loop, outs = body.graph.equations[step.loop.equation], step.loop.signature.outs
    taken = [olds(written_over(each, loop, number)) for number, each in enumerate(step.bodies)]
    begun = begun_with(body, step, carried_in_place(step.bodies, loop, taken), pairs.values())
    read, found = read_by(step, body.graph), dict[Property, Property]()
    for number in range(len(loop.regions)):
        for carry in carries(loop, number):
            new = Property(loop.outputs[carry.result].index, outs[carry.result])
            old = pairs.get(new)
            if old is not None and old == read[carry.operand] and old in begun:
                found[new] = old
    return found


def carried_in_place(
    bodies: Sequence[Stepped[Lasting]], equation: Equation, taken: Sequence[Collection[Property]]
) -> frozenset[int]:
    """Positions of the operands that a loop of the host carries on in their place.

    Args:
        bodies: those of the loop.
        equation: the loop.
        taken: by body, what it takes the memory of.
    """
    pairs = enumerate(zip(bodies, taken, strict=True))
    return frozenset().union(*(in_place(body, equation, number, mine) for number, (body, mine) in pairs))


def olds(over: Mapping[_S, Mapping[Property, Property]]) -> set[Property]:
    """What is written over."""
    return {old for pairs in over.values() for old in pairs.values()}


def begun_with(
    order: Stepped[Lasting], step: Looping, operands: Collection[int], given: Collection[Property]
) -> frozenset[Property]:
    """What was given, and a loop of the order begins with in its place: nothing reads it afterwards.

    Args:
        order: the steps.
        step: the loop, one of them.
        operands: positions of those that are carried on in their place.
        given: what may give its memory.
    """
    # Another loop may have handed out what came in.
    others = {p for each in order.steps if isinstance(each, Looping) and each is not step for p in each.needs}
    mine = set(given).intersection(step.drops).difference(others)
    return _read_once(order, step, operands).intersection(mine)


def in_place(
    body: Stepped[Lasting], equation: Equation, region: int, taken: Collection[Property]
) -> frozenset[int]:
    """Positions of the operands that a loop's body carries on in their place, having `taken` its inputs'."""
    given = inputs(body.program, body.graph)
    return frozenset(carry.operand for carry in carries(equation, region) if given[carry.into] in taken)


def read_by(step: Looping, graph: Graph) -> list[Property | None]:
    """What a loop reads as each of its operands; None for literals."""
    pairs = zip(graph.equations[step.loop.equation].inputs, step.loop.signature.ins, strict=True)
    return [Property(atom.index, p) if isinstance(atom, Value) else None for atom, p in pairs]


def handed_over(order: Stepped[Lasting], step: Looping, operands: Collection[int]) -> frozenset[Property]:
    """What a loop begins with in the place where it was made.

    Args:
        order: the steps.
        step: the loop, one of them.
        operands: positions of those that are carried on in their place.
    """
    made: dict[Property, Lasting] = {}
    for each in takewhile(lambda each: each is not step, order.steps):
        made.update(dict.fromkeys(each.gives, each))
    mine = {prop for prop in step.drops if isinstance(made.get(prop), Segment)}
    return _read_once(order, step, operands).intersection(mine)


def _read_once(order: Stepped[Lasting], step: Looping, operands: Collection[int]) -> frozenset[Property]:
    """What a loop reads as one of these operands, and as no other."""
    read = read_by(step, order.graph)
    times = Counter(read)
    some = (read[operand] for operand in operands)
    return frozenset(prop for prop in some if prop is not None and times[prop] == 1)


def stacked(step: Looping, graph: Graph) -> tuple[Property, ...]:
    """Results of a loop that have a place from its beginning; all others are what its body made last."""
    equation, outs = graph.equations[step.loop.equation], step.loop.signature.outs
    return tuple([Property(equation.outputs[k].index, outs[k]) for k in sorted(stacked_results(equation))])
