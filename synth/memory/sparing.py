"""The same program with less in memory at a time: exchanges when they are wanted, and gathers done again.

`emit` puts exchanges that wait for the same segment side by side, so that segments are long; all parameters
are then gathered before the first layer, and whole until the last reader. Where memory binds, instructions
may stand in the order of the step's equations instead: what is gathered is gathered right before it is read,
what is reduced is reduced as soon as it is there. That costs no exchange more. Beyond that, what the forward
part gathered may be dropped and gathered again for the backward part, as sharded training does it.
"""

from __future__ import annotations

from dataclasses import replace

from shardwright.ir.graph import Graph, Value
from shardwright.ir.program import Move, Program
from shardwright.ir.wires import Key, Number, apart, wires, with_wires


class Sparing:
    """Orders a program anew, see the module's docstring; bodies of loops stay as they are.

    Args:
        program: a verified program on one mesh axis.
        graph: what it computes.

    Attributes:
        gathers: what is gathered for the forward part and read by the backward part as well, the first first.
    """

    def __init__(self, program: Program, graph: Graph) -> None:
        self.program, self.graph = program, graph
        self._wires = found = wires(program, graph)
        #: Where a move makes a tensor in a placement, and where an equation is computed.
        self._moves: dict[Number, int] = {}
        at: dict[int, int] = {}
        #: What is brought from elsewhere as soon as it is made, by value.
        self._soon: dict[int, list[Number]] = {}
        given = {value.index for value in graph.inputs} | {value.index for value in graph.constants}
        for position, instruction in enumerate(program.instructions):
            if not isinstance(instruction, Move):
                at[instruction.equation] = position
                continue
            (made,) = found.makes[position]
            self._moves.setdefault(made, position)
            if instruction.value not in given and instruction.kind != "all_gather":
                self._soon.setdefault(instruction.value, []).append(made)
        #: Where the equations of the step are computed, in its order; and whether in the backward part.
        self._computed = [(at[e.index], e.part == "backward") for e in graph.equations if e.index in at]
        self._gathered = self._read_twice()
        self.gathers: tuple[Key, ...] = tuple(found.keys(self._gathered))

    @property
    def possible(self) -> bool:
        """Whether there is one move to every property: of several, this would lose all but one."""
        moves = [instruction for instruction in self.program.instructions if isinstance(instruction, Move)]
        return len(moves) == len(self._moves) and all(move.group is None for move in moves)

    def _read_twice(self) -> list[Number]:
        kinds = [(made, self.program.instructions[at]) for made, at in self._moves.items()]
        gathered = {made for made, move in kinds if isinstance(move, Move) and move.kind == "all_gather"}
        ahead: dict[Number, None] = {}
        behind: set[Number] = set()
        for position, backward in self._computed if gathered else ():
            for number in self._wires.reads[position]:
                if number in gathered:
                    if backward:
                        behind.add(number)
                    else:
                        ahead[number] = None
        return [number for number in ahead if number in behind]

    def again(self, count: int) -> Program:
        """The program in which so many of the `gathers` are done again, the first ones."""
        found, moves, soon = self._wires, self._moves, self._soon
        again = set(self._gathered[:count])
        placed: list[int] = []
        there: set[Number] = set()

        def bring(number: Number) -> None:
            if number not in there and number in moves:
                position = moves[number]
                bring(found.reads[position][0])
                placed.append(position)
                there.add(number)

        for value, placement in zip(self.graph.inputs, self.program.inputs, strict=True):
            there.add(found.number(value.index, placement))
        for position, backward in self._computed:
            for number in found.reads[position]:
                if backward and number in again:
                    again.discard(number)
                    there.discard(number)
                if number not in there:
                    bring(number)
            placed.append(position)
            made = found.makes[position]
            there.update(made)
            for number in made:
                for later in soon.get(apart(number)[0], ()):
                    bring(later)
        for atom, placement in zip(self.graph.outputs, self.program.outputs, strict=True):
            if isinstance(atom, Value):
                bring(found.number(atom.index, placement))
        instructions = tuple([self.program.instructions[position] for position in placed])
        return with_wires(replace(self.program, instructions=instructions), self.graph, found.taken(placed))
