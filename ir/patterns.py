"""Programs that have a name of their own, recognised after the search has found them.

*Sufficient factors* (Xie et al., "Distributed Machine Learning via Sufficient Factor Broadcasting", 2015):
the gradient of a weight is a product over the batch, which the devices share out. Instead of adding up their
products (an all-reduce of the gradient) they gather its factors, and each computes the whole product.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set

from shardwright.ir.graph import Equation, Graph, Value
from shardwright.ir.placement import Partial, R, Shard
from shardwright.ir.program import Compute, Loop, Move, Program
from shardwright.ir.registry import is_contraction, rule_of
from shardwright.ir.rules import signatures

SUFFICIENT_FACTORS = "sufficient factors"


def patterns(program: Program, graph: Graph) -> dict[int, str]:
    """Names of patterns by `id` of the moves that are part of one, loop bodies included."""
    found = {id(move): SUFFICIENT_FACTORS for move in _factors(program, graph)}
    for instruction in program.instructions:
        if isinstance(instruction, Loop):
            regions = graph.equations[instruction.equation].regions
            for body, region in zip(instruction.bodies, regions, strict=True):
                found |= patterns(body, region)
    return found


def _factors(program: Program, graph: Graph) -> Iterator[Move]:
    """All-gathers that only serve products over the gathered dimension, from which state is made."""
    gathers = [
        i for i in program.instructions if isinstance(i, Move) and i.kind == "all_gather" and i.group is None
    ]
    if not gathers:
        return
    gradients = _gradients(graph)
    readers = _readers(program, graph, {gather.value for gather in gathers})
    for gather in gathers:
        uses = readers[gather.value]
        if uses and all(
            isinstance(gather.pre, Shard)
            and equation in gradients
            and _contracts(equation, operand, gather.pre.dim)
            for equation, operand in uses
        ):
            yield gather


def _readers(
    program: Program, graph: Graph, gathered: Set[int]
) -> Mapping[int, list[tuple[Equation | None, int]]]:
    """Who reads gathered values whole: equation and operand; None for a move or for the caller."""
    found: dict[int, list[tuple[Equation | None, int]]] = {value: [] for value in gathered}
    for instruction in program.instructions:
        if isinstance(instruction, Move):
            if instruction.value in gathered and instruction.pre == R:
                found[instruction.value].append((None, 0))
            continue
        equation = graph.equations[instruction.equation]
        for operand, atom in enumerate(equation.inputs):
            if isinstance(atom, Value) and atom.index in gathered and instruction.signature.ins[operand] == R:
                found[atom.index].append((equation if isinstance(instruction, Compute) else None, operand))
    for atom, placement in zip(graph.outputs, program.outputs, strict=True):
        if isinstance(atom, Value) and atom.index in gathered and placement == R:
            found[atom.index].append((None, 0))
    return found


def _contracts(equation: Equation | None, operand: int, dim: int) -> bool:
    """Whether the equation, with this operand sharded along `dim`, would leave a sum to be made."""
    return equation is not None and any(
        isinstance(signature.ins[operand], Shard)
        and signature.ins[operand].dim == dim  # pyright: ignore[reportAttributeAccessIssue]
        and all(isinstance(out, Partial) for out in signature.outs)
        for signature in signatures(rule_of(equation), equation)
    )


def _gradients(graph: Graph) -> set[Equation]:
    """Contractions whose result goes into new state without passing through another contraction."""
    makes = {value: equation for equation in graph.equations for value in equation.outputs}
    pending = [graph.outputs[out] for out in graph.state]
    found: set[Equation] = set()
    seen: set[Equation] = set()
    while pending:
        equation = makes.get(pending.pop())  # pyright: ignore[reportArgumentType]
        if equation is None or equation in seen:
            continue
        seen.add(equation)
        if is_contraction(equation.primitive):
            found.add(equation)
        elif not equation.regions:
            pending.extend(equation.input_values)
    return found
