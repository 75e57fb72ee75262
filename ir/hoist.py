"""Rearrangements before a reduction instead of behind it.

Where a product's transpose is wanted, XLA hands the product out the other way round. Behind an exchange it
cannot: what was received lies as it lies, and is transposed in memory. Both orders cost the plan the same, so
that it may have either.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

from shardwright.ir.flow import outputs
from shardwright.ir.graph import Graph, Value, value_types
from shardwright.ir.placement import Partial, Placement, R
from shardwright.ir.program import Compute, Instruction, Move, Program
from shardwright.ir.registry import registry, rule_of
from shardwright.ir.rules import Signature, signatures
from shardwright.ir.wires import Number, Wires, keys_made, keys_read, wires, with_wires


def hoisted(program: Program, graph: Graph) -> tuple[Program, tuple[int, ...]]:
    """An equal program: what alone reads the result of an all-reduce and rearranges it does so before.

    An exchange that changes places with an instruction carries another name of the same elements.

    Args:
        program: to be changed.
        graph: what it computes.

    Returns:
        The program (itself where nothing is rearranged), and where the instruction that stands at each
        position stood.
    """
    found = list(program.instructions)
    stood = list(range(len(found)))
    sums = [position for position, instruction in enumerate(found) if _is_sum(instruction)]
    if not sums:
        return program, tuple(stood)
    known = wires(program, graph)
    number, types = known.number, value_types(graph)
    kept = {number(prop.value, prop.placement) for prop in outputs(program, graph)}
    readers: dict[Number, list[int]] = {}
    for position, reads in enumerate(known.reads):
        for each in dict.fromkeys(reads):
            readers.setdefault(each, []).append(position)
    made = Counter(each for makes in known.makes for each in makes)
    for position in sums:
        at = position
        while (after := _follower(found, at, readers, kept, graph, number)) is not None:
            move, compute = found[at], found[after]
            assert isinstance(move, Move)
            assert isinstance(compute, Compute)
            result = graph.equations[compute.equation].outputs[0].index
            if types[result].nbytes != types[move.value].nbytes:
                break
            if made[number(move.value, R)] > 1 or made[number(result, R)] > 1:
                break
            if made[number(result, move.pre)]:
                break  # what is established twice is not the same twice
            found[at] = replace(compute, signature=Signature((move.pre,), (move.pre,)))
            found[after] = replace(move, value=result)
            stood[at], stood[after] = stood[after], stood[at]
            at = after
    changed = [position for position, stands in enumerate(stood) if stands != position]
    if not changed:
        return program, tuple(stood)
    reads, makes = list(known.reads), list(known.makes)
    for position in changed:
        reads[position] = [number(*key) for key in keys_read(found[position], graph)]
        makes[position] = [number(*key) for key in keys_made(found[position], graph)]
    moved = replace(program, instructions=tuple(found))
    return with_wires(moved, graph, Wires(reads, makes, known.numbers)), tuple(stood)


def _is_sum(instruction: Instruction) -> bool:
    """Whether it is an all-reduce of all devices, of what is not reduced at all yet."""
    return (
        isinstance(instruction, Move)
        and instruction.kind == "all_reduce"
        and instruction.group is None
        and instruction.post == R
        and isinstance(instruction.pre, Partial)
    )


def _follower(
    found: Sequence[Instruction],
    position: int,
    readers: Mapping[Number, Sequence[int]],
    kept: Collection[Number],
    graph: Graph,
    number: Callable[[int, Placement], Number],
) -> int | None:
    """The one reader of an all-reduce, if it rearranges as well what is not reduced yet."""
    move = found[position]
    assert isinstance(move, Move)
    result = number(move.value, R)
    after = readers.get(result, ())
    if len(after) != 1 or result in kept:
        return None
    compute = found[after[0]]
    if not isinstance(compute, Compute) or compute.signature != Signature((R,), (R,)):
        return None
    equation = graph.equations[compute.equation]
    op = registry().get(equation.primitive)
    if op is None or op.kind not in ("movement", "reduction") or not isinstance(equation.inputs[0], Value):
        return None
    partial = Signature((move.pre,), (move.pre,))
    return after[0] if partial in signatures(rule_of(equation), equation) else None
