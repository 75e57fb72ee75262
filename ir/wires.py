"""Who reads and who makes what in a program, as numbers: once per program, for all that walks over it.

A tensor in a placement has a *number*: that of the placement among those of the program, then the value's.
Groups do not count.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from shardwright.ir.graph import Graph, Value
from shardwright.ir.placement import Placement
from shardwright.ir.program import Instruction, Move, Program

#: A tensor in a placement.
Number: TypeAlias = int
_SHIFT = 32
_MASK = (1 << _SHIFT) - 1


@dataclass(frozen=True, slots=True)
class Wires:
    """What the instructions of a program read and make.

    Attributes:
        reads: of every instruction, in order of operands; literals have no number.
        makes: the same of results.
        numbers: of placements, as they are part of the numbers of tensors.
    """

    reads: Sequence[Sequence[Number]]
    makes: Sequence[Sequence[Number]]
    numbers: dict[Placement, int]

    def number(self, value: int, placement: Placement) -> Number:
        """Of a tensor in a placement."""
        return self.numbers.setdefault(placement, len(self.numbers) << _SHIFT) + value

    def keys(self, some: Iterable[Number]) -> list[tuple[int, Placement]]:
        """The tensors and placements of some numbers."""
        placements = list(self.numbers)
        return [(number & _MASK, placements[number >> _SHIFT]) for number in some]

    def taken(self, order: Sequence[int]) -> Wires:
        """Of some instructions, by number, in their order."""
        return Wires([self.reads[i] for i in order], [self.makes[i] for i in order], self.numbers)


def wires(program: Program, graph: Graph) -> Wires:
    """What a program over a graph reads and makes; remembered."""
    known = program.memo.get(Wires)
    if known is None or known[0] is not graph:
        known = program.memo[Wires] = graph, wired(program.instructions, graph)
    return known[1]


def with_wires(program: Program, graph: Graph, found: Wires) -> Program:
    """A program of which that is known already."""
    program.memo[Wires] = graph, found
    return program


def wired(instructions: Iterable[Instruction], graph: Graph) -> Wires:
    """What instructions read and make."""
    equations = graph.equations
    reads: list[list[int]] = []
    makes: list[list[int]] = []
    numbers: dict[Placement, int] = {}

    def coded(placements: Iterable[Placement]) -> list[int]:
        return [numbers.setdefault(placement, len(numbers) << _SHIFT) for placement in placements]

    # Many equations share one signature.
    known: dict[int, tuple[list[int], list[int]]] = {}
    for instruction in instructions:
        if isinstance(instruction, Move):
            pre, post = coded((instruction.pre, instruction.post))
            reads.append([instruction.value + pre])
            makes.append([instruction.value + post])
            continue
        equation, signature = equations[instruction.equation], instruction.signature
        codes = known.get(id(signature))
        if codes is None:
            codes = known[id(signature)] = coded(signature.ins), coded(signature.outs)
        ins, outs = codes
        reads.append([a.index + c for a, c in zip(equation.inputs, ins, strict=True) if type(a) is Value])
        makes.append([v.index + c for v, c in zip(equation.outputs, outs, strict=True)])
    return Wires(reads, makes, numbers)
