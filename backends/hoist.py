"""Rearrangements before a reduction instead of behind it.

Where a product's transpose is wanted, XLA hands the product out the other way round. Behind an exchange it
cannot: what was received lies as it lies, and is transposed in memory. Both orders cost the plan the same, so
that it may have either.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from shardwright.backends.flow import nbytes_of, outputs, reads
from shardwright.ir.graph import Graph, TensorType, Value
from shardwright.ir.placement import Partial, R
from shardwright.ir.program import Compute, Instruction, Move, Program, Property
from shardwright.ir.rules import Signature, registry, rule_of, signatures


def hoisted(program: Program, graph: Graph) -> Program:
    """An equal program: what alone reads the result of an all-reduce and rearranges it does so before.

    Exchanges keep their number and order; those that change places with an instruction carry another name of
    the same elements.
    """
    types = {value.index: value.type for value in graph.values()}
    found = list(program.instructions)
    kept = frozenset(outputs(program, graph))
    readers: dict[Property, list[int]] = {}
    for position, instruction in enumerate(found):
        for prop in reads(instruction, graph):
            readers.setdefault(prop, []).append(position)
    for position in range(len(found)):
        at = position
        while (after := _follower(found, at, readers, kept, graph, types)) is not None:
            move, compute = found[at], found[after]
            assert isinstance(move, Move)
            assert isinstance(compute, Compute)
            result = graph.equations[compute.equation].outputs[0].index
            found[at] = replace(compute, signature=Signature((move.pre,), (move.pre,)))
            found[after] = replace(move, value=result)
            at = after
    return replace(program, instructions=tuple(found))


def _follower(
    found: Sequence[Instruction],
    position: int,
    readers: dict[Property, list[int]],
    kept: frozenset[Property],
    graph: Graph,
    types: dict[int, TensorType],
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
    equation = graph.equations[compute.equation]
    op = registry().get(equation.primitive)
    if op is None or op.kind not in ("movement", "reduction") or not isinstance(equation.inputs[0], Value):
        return None
    if nbytes_of(equation.output_types[0]) != nbytes_of(types[move.value]):
        return None
    partial = Signature((move.pre,), (move.pre,))
    return after[0] if partial in signatures(rule_of(equation), equation) else None
