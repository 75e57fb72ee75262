"""Donated state: what continues it takes its memory, as with `donate_argnums` of `jax.jit`.

A device reuses memory inside of one compiled program. State is taken over where the last segment that reads
it is also the one that makes what continues it, if whatever reads it there must run before that: of what may
be read later XLA makes a copy first. State that an exchange makes anew, or that a loop of the host goes
through, keeps its memory until the step ends. Prices of memory (`cost/memory/tenants.py`,
`shardwright/memory/walk.py`) and the reference's counter of bytes go by the same rule.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from typing import TypeVar

from shardwright.ir.dtypes import is_key
from shardwright.ir.errors import InputError
from shardwright.ir.flow import reads, writes
from shardwright.ir.graph import Graph, Value
from shardwright.ir.program import Program, Property
from shardwright.ir.segments import Lasting, Looping, Schedule, Segment, Step
from shardwright.ir.trace import Traced, marked

_T = TypeVar("_T", bound=Hashable)
_S = TypeVar("_S", bound=Lasting)


def check_donate(donate: object) -> None:
    """Raises InputError for what is neither True nor False, nor None for what a plan says."""
    if donate is not None and not isinstance(donate, bool):
        raise InputError(place="donate", reason=f"is {donate!r}", remedy="Pass True or False")


def donating(traced: Traced, donated: bool) -> Traced:
    """A step, the state of which is given away at every call, or is not."""
    return marked(traced, donated=donated)


def continued(program: Program, graph: Graph) -> Mapping[Property, Property]:
    """Donated state: what continues it -> what comes in, where both lie alike."""
    if not graph.donated:
        return {}
    found: dict[Property, Property] = {}
    for out, position in graph.state.items():
        value, atom = graph.inputs[position], graph.outputs[out]
        if isinstance(atom, Value) and atom != value and not is_key(value.type.dtype):
            old = Property(value.index, program.inputs[position])
            found.setdefault(Property(atom.index, program.outputs[out]), old)
    return {new: old for new, old in found.items() if new.placement == old.placement}


def taken_over(planned: Schedule) -> Mapping[Step, Mapping[Property, Property]]:
    """By segment of a schedule, what it makes in the memory of what it reads as the last: new -> old."""
    return over_given(planned.steps, planned.graph, continued(planned.program, planned.graph))


def over_given(
    steps: Sequence[_S], graph: Graph, pairs: Mapping[Property, Property]
) -> Mapping[_S, Mapping[Property, Property]]:
    """By segment, what it makes in the memory of something that was given, and that it reads as the last.

    Args:
        steps: of a schedule or an order, with lifetimes.
        graph: what they compute.
        pairs: new -> old, which may give its memory.
    """
    if not pairs:
        return {}
    # A loop may hand out what came in.
    through_loops = {prop for step in steps if isinstance(step, Looping) for prop in step.needs}
    found: dict[_S, Mapping[Property, Property]] = {}
    for step in steps:
        if isinstance(step, Segment):
            dropped = set(step.drops).intersection(step.needs).difference(through_loops)
            mine = {new: old for new, old in pairs.items() if old in dropped and new in step.gives}
            lines = [(reads(i, graph), writes(i, graph)) for i in step.instructions] if mine else ()
            if ready := in_time(lines, mine):
                found[step] = ready
    return found


def in_time(
    lines: Sequence[tuple[Collection[_T], Collection[_T]]], pairs: Mapping[_T, _T]
) -> Mapping[_T, _T]:
    """Those pairs of new and old of which everything that reads the old must run before the new is made.

    Args:
        lines: what every instruction reads, and what it makes, in order.
        pairs: new -> old; the new is made by one of them.
    """
    if not pairs:
        return {}
    late = 0
    #: By what an instruction makes, the pairs (as bits) whose new is made of it; by old, its pairs.
    needed: dict[_T, int] = {}
    mine: dict[_T, int] = {}
    for bit, (new, old) in enumerate(pairs.items()):
        needed[new] = needed.get(new, 0) | 1 << bit
        mine[old] = mine.get(old, 0) | 1 << bit
    for read, made in reversed(lines):
        waiting = 0
        for each in made:
            waiting |= needed.get(each, 0)
        for each in read:
            late |= mine.get(each, 0) & ~waiting
            if waiting:
                needed[each] = needed.get(each, 0) | waiting
    return {new: old for bit, (new, old) in enumerate(pairs.items()) if not late >> bit & 1}
