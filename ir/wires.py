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
from shardwright.ir.rules import Signature

#: A tensor in a placement.
Number: TypeAlias = int
#: The same, spelled out: the value by index.
Key: TypeAlias = tuple[int, Placement]
_SHIFT = 32
_MASK = (1 << _SHIFT) - 1


def apart(number: Number) -> tuple[int, int]:
    """The value, and the number of the placement, of a tensor in a placement."""
    return number & _MASK, number >> _SHIFT


def keys_read(instruction: Instruction, graph: Graph) -> list[Key]:
    """What an instruction reads, as (value, placement)."""
    if isinstance(instruction, Move):
        return [(instruction.value, instruction.pre)]
    equation = graph.equations[instruction.equation]
    pairs = zip(equation.inputs, instruction.signature.ins, strict=True)
    return [(a.index, p) for a, p in pairs if isinstance(a, Value)]


def keys_made(instruction: Instruction, graph: Graph) -> list[Key]:
    """What an instruction makes, as (value, placement)."""
    if isinstance(instruction, Move):
        return [(instruction.value, instruction.post)]
    outputs = graph.equations[instruction.equation].outputs
    return [(v.index, p) for v, p in zip(outputs, instruction.signature.outs, strict=True)]


@dataclass(frozen=True, slots=True)
class Wires:
    """What the instructions of a program read and make.

    Attributes:
        reads: of every instruction, in order of operands; literals have no number.
        makes: the same of results.
        numbers: of placements, as they are part of the numbers of tensors.
    """

    reads: list[list[Number]]
    makes: list[list[Number]]
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


class Recorder:
    """Writes down who reads and who makes what, instruction by instruction, in the order they are told.

    Attributes:
        wires: what was written down so far.
    """

    def __init__(self) -> None:
        self.wires = Wires([], [], {})
        # Many equations share one signature, which is kept lest another comes to have its id.
        self._known: dict[int, tuple[Signature, list[Number], list[Number]]] = {}

    def codes(self, signature: Signature) -> tuple[Signature, list[Number], list[Number]]:
        """A signature and its placements' part in the numbers of operands and of results."""
        found = self._known.get(id(signature))
        if found is None:
            number = self.wires.number
            ins, outs = [number(0, p) for p in signature.ins], [number(0, p) for p in signature.outs]
            found = self._known[id(signature)] = signature, ins, outs
        return found

    def move(self, move: Move) -> Number:
        """Note a move; what it makes."""
        made = self.wires.number(move.value, move.post)
        self.note([self.wires.number(move.value, move.pre)], [made])
        return made

    def note(self, reads: list[Number], makes: list[Number]) -> None:
        """Note an instruction."""
        self.wires.reads.append(reads)
        self.wires.makes.append(makes)


def wired(instructions: Iterable[Instruction], graph: Graph) -> Wires:
    """What instructions read and make."""
    equations, recorder = graph.equations, Recorder()
    for instruction in instructions:
        if isinstance(instruction, Move):
            recorder.move(instruction)
            continue
        equation = equations[instruction.equation]
        _, ins, outs = recorder.codes(instruction.signature)
        recorder.note(
            [a.index + c for a, c in zip(equation.inputs, ins, strict=True) if type(a) is Value],
            [v.index + c for v, c in zip(equation.outputs, outs, strict=True)],
        )
    return recorder.wires
