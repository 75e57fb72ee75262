"""Programs without exchanges: what every device computes of a function's results, from arguments all have.

Demands go backwards from the results. A value that is wanted in stretches is computed in stretches where a
rule says how, which asks for its operands in stretches in turn; elsewhere it is computed whole and cut. The
random numbers of a stretch of a parameter are drawn for that stretch alone, from each element's own counter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardwright.ir.collectives import between
from shardwright.ir.graph import Equation, Graph, Literal, Value
from shardwright.ir.pairs import paired
from shardwright.ir.placement import Grid, Placement, R, Shard, axis_by_axis, cuts, reduction
from shardwright.ir.program import Compute, Instruction, Move, Program, verify
from shardwright.ir.registry import rule_of
from shardwright.ir.rules import Signature, letter_signature
from shardwright.ir.rules import cuts as cuts_of_letter


@dataclass(frozen=True, slots=True)
class Direct:
    """A program without exchanges.

    Attributes:
        program: verified.
        whole: equations whose results are wanted in stretches and are computed whole.
    """

    program: Program
    whole: tuple[Equation, ...]


def direct(graph: Graph, outputs: Sequence[Placement]) -> Direct:
    """The program that gives the graph's outputs as placed, from inputs that every device has whole.

    Args:
        graph: a traced function.
        outputs: a placement per output.
    """
    wanted: dict[int, dict[Placement, None]] = {}
    backwards: list[Instruction] = []
    whole: list[Equation] = []

    def want(atoms: Sequence[Value | Literal], placements: Sequence[Placement]) -> None:
        for atom, placement in zip(atoms, placements, strict=True):
            if isinstance(atom, Value):
                wanted.setdefault(atom.index, {})[placement] = None

    def cut_whole(value: Value) -> bool:
        """Free moves from R to everything else that is wanted of a value; whether there are any."""
        moves = dict.fromkeys(move for p in wanted.get(value.index, {}) for move in axis_by_axis(p))
        for pre, placement in reversed(moves):
            free = between(pre, placement)
            assert free is not None and free.local, f"{pre} -> {placement} is no free move"
            backwards.append(Move(free.kind, value.index, pre, placement))
        return bool(moves)

    want(
        graph.outputs,
        [R if isinstance(a, Literal) else p for a, p in zip(graph.outputs, outputs, strict=True)],
    )
    for equation in reversed(graph.equations):
        chosen: dict[Signature, None] = {}
        rest = False
        for position, value in enumerate(equation.outputs):
            for placement in list(wanted.get(value.index, ())):
                found = None if placement == R else _signature(equation, position, placement)
                if found is None:
                    rest = True
                else:
                    chosen[found] = None
                    del wanted[value.index][placement]
        if rest:
            moved = [cut_whole(value) for value in equation.outputs]
            if any(moved):
                whole.append(equation)
            chosen[Signature((R,) * len(equation.inputs), (R,) * len(equation.outputs))] = None
        for signature in chosen:
            backwards.append(Compute(equation.index, signature))
            want(equation.inputs, signature.ins)
    for value in (*graph.inputs, *graph.constants):
        cut_whole(value)
    program = Program(
        (R,) * len(graph.inputs),
        tuple(reversed(backwards)),
        tuple(R if isinstance(a, Literal) else p for a, p in zip(graph.outputs, outputs, strict=True)),
    )
    verify(program, graph)
    return Direct(program, tuple(whole))


def _signature(equation: Equation, position: int, placement: Placement) -> Signature | None:
    """The signature under which result `position` comes out in `placement`, without any Partial."""
    if equation.regions:
        return None
    if isinstance(placement, Grid):
        across, within = (_on_one(equation, position, p) for p in (placement.across, placement.within))
        found = paired(across, within, placement.nodes) if across and within else None
    else:
        found = _on_one(equation, position, placement)
    return found if found and found.outs[position] == placement and _possible(equation, found) else None


def _on_one(equation: Equation, position: int, placement: Placement) -> Signature | None:
    """The same on one mesh axis."""
    if not isinstance(placement, Shard):
        return Signature((R,) * len(equation.inputs), (R,) * len(equation.outputs))
    rule = rule_of(equation)
    for letter in rule.letters:
        at = cuts_of_letter(rule, equation, letter)[1][position]
        if at is None or at.dim != placement.dim or not at.minor or placement.unit % at.minor:
            continue
        found = letter_signature(rule, equation, letter, placement.unit // at.minor)
        if found.outs[position] == placement and _possible(equation, found):
            return found
    return None


def _possible(equation: Equation, signature: Signature) -> bool:
    """Whether no operand is Partial, no literal cut, and every cut dimension a multiple of its unit."""
    if any(reduction(p) for p in (*signature.ins, *signature.outs)):
        return False
    if any(isinstance(a, Literal) and cuts(p) for a, p in zip(equation.inputs, signature.ins, strict=True)):
        return False
    tensors = (*equation.input_types, *equation.output_types)
    for tensor, placement in zip(tensors, (*signature.ins, *signature.outs), strict=True):
        if any(tensor.shape[cut.dim] % cut.unit for cut in cuts(placement)):
            return False
    return True
