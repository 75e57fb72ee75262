"""Rearrangements before a reduction instead of behind it.

Where a product's transpose is wanted, XLA hands the product out the other way round. Behind an exchange it
cannot: what was received lies as it lies, and is transposed in memory. Both orders cost the plan the same, so
that it may have either.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from operator import eq

from shardwright.ir.flow import Flow, outputs
from shardwright.ir.graph import Graph, Value
from shardwright.ir.placement import Partial, R
from shardwright.ir.program import Compute, Instruction, Move, Program, Property
from shardwright.ir.registry import registry, rule_of
from shardwright.ir.rules import Signature, signatures


def hoisted(program: Program, graph: Graph, flow: Flow | None = None) -> tuple[Program, tuple[int, ...]]:
    """An equal program: what alone reads the result of an all-reduce and rearranges it does so before.

    An exchange that changes places with an instruction carries another name of the same elements.

    Args:
        program: to be changed.
        graph: what it computes.
        flow: of the program, where that is known already.

    Returns:
        The program (itself where nothing is rearranged), and where the instruction that stands at each
        position stood.
    """
    found = list(program.instructions)
    stood = list(range(len(found)))
    kept = frozenset(outputs(program, graph))
    flow = flow or Flow(program, graph)
    readers: dict[Property, list[int]] = {}
    made = Counter(prop for gives in flow.gives for prop in gives)
    for position, needs in enumerate(flow.needs):
        for prop in needs:
            readers.setdefault(prop, []).append(position)
    for position in range(len(found)):
        at = position
        while (after := _follower(found, at, readers, kept, flow)) is not None:
            move, compute = found[at], found[after]
            assert isinstance(move, Move)
            assert isinstance(compute, Compute)
            result = graph.equations[compute.equation].outputs[0].index
            if made[Property(move.value, R)] > 1 or made[Property(result, R)] > 1:
                break
            if made[Property(result, move.pre)]:
                break  # what is established twice is not the same twice
            found[at] = replace(compute, signature=Signature((move.pre,), (move.pre,)))
            found[after] = replace(move, value=result)
            stood[at], stood[after] = stood[after], stood[at]
            at = after
    if all(map(eq, stood, range(len(stood)))):
        return program, tuple(stood)
    return replace(program, instructions=tuple(found)), tuple(stood)


def _follower(
    found: Sequence[Instruction],
    position: int,
    readers: dict[Property, list[int]],
    kept: frozenset[Property],
    flow: Flow,
) -> int | None:
    """The one reader of an all-reduce, if it rearranges as well what is not reduced yet."""
    move = found[position]
    if not isinstance(move, Move) or move.kind != "all_reduce" or move.group is not None or move.post != R:
        return None
    prop = Property(move.value, R)
    after = readers.get(prop, [])
    if not isinstance(move.pre, Partial) or len(after) != 1 or prop in kept:
        return None
    compute = found[after[0]]
    if not isinstance(compute, Compute) or compute.signature != Signature((R,), (R,)):
        return None
    equation = flow.graph.equations[compute.equation]
    op = registry().get(equation.primitive)
    if op is None or op.kind not in ("movement", "reduction") or not isinstance(equation.inputs[0], Value):
        return None
    if equation.output_types[0].nbytes != flow.types[move.value].nbytes:
        return None
    partial = Signature((move.pre,), (move.pre,))
    return after[0] if partial in signatures(rule_of(equation), equation) else None
