"""What a loop of the host carries from iteration to iteration: in one place, not in three.

The host runs a loop whose body exchanges, iteration by iteration. What it carries, such as the sums of
gradients over micro-batches, comes in, is made anew by the body, and comes in again. Two rules keep it where
it is, as XLA does in loops of its own:

- *Written over.* The segment of the body that reads as the last what was carried in, and makes what is
  carried on, writes it over that, if whatever reads the old there must run before (`ir/donation.py`).
- *Handed over.* A loop begins with what a segment made for it alone; of anything else, such as an argument,
  which is the caller's, it begins with a copy.

Prices of memory (`cost/memory/tenants.py`, `shardwright/memory/walk.py`) and ranks
(`backends/mpi/script.py`) go by the same rules.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Protocol, TypeVar

from shardwright.ir.donation import over_given
from shardwright.ir.dtypes import is_key
from shardwright.ir.flow import inputs, outputs
from shardwright.ir.graph import Equation, Graph, Value
from shardwright.ir.program import Program, Property
from shardwright.ir.regions import boundary, stacked_results
from shardwright.ir.segments import Lasting, Looping, Segment

_S = TypeVar("_S", bound=Lasting)
_Step = TypeVar("_Step", bound=Lasting, covariant=True)


class Stepped(Protocol[_Step]):
    """A schedule or an order."""

    @property
    def program(self) -> Program: ...
    @property
    def graph(self) -> Graph: ...
    @property
    def steps(self) -> Sequence[_Step]: ...


@dataclass(frozen=True, slots=True)
class Carry:
    """An operand of a loop that a region carries to its own next iteration.

    Attributes:
        operand: its position among those of the equation.
        into, out: positions among inputs and outputs of the region.
    """

    operand: int
    into: int
    out: int


def carries(equation: Equation, region: int) -> tuple[Carry, ...]:
    """What a region carries on."""
    wiring = boundary(equation)
    operand = {port.inner: port.outer for port in wiring.ins if port.region == region and not port.stacked}
    own = ((into, out) for start, out, end, into in wiring.carries if start == end == region)
    return tuple([Carry(operand[into], into, out) for into, out in own])


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
    """By segment of a loop's body, what it makes in the place of what was carried in: new -> old."""
    pairs = carried_on(body.program, body.graph, carries(equation, region))
    return over_given(body.steps, body.graph, pairs)


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
    read = read_by(step, order.graph)
    times = Counter(read)
    made: dict[Property, Lasting] = {}
    for each in takewhile(lambda each: each is not step, order.steps):
        made.update(dict.fromkeys(each.gives, each))
    mine = {prop for prop in step.drops if isinstance(made.get(prop), Segment)}
    begun = (read[operand] for operand in operands)
    return frozenset(prop for prop in begun if prop is not None and times[prop] == 1 and prop in mine)


def stacked(step: Looping, graph: Graph) -> tuple[Property, ...]:
    """Results of a loop that have a place from its beginning; all others are what its body made last."""
    equation, outs = graph.equations[step.loop.equation], step.loop.signature.outs
    return tuple([Property(equation.outputs[k].index, outs[k]) for k in sorted(stacked_results(equation))])
