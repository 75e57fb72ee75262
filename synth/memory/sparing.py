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
from shardwright.ir.program import Compute, Instruction, Loop, Move, Program
from shardwright.ir.wires import Key, keys_made, keys_read


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
        self._moves: dict[Key, Move] = {}
        self._at: dict[int, Compute | Loop] = {}
        #: What is brought from elsewhere as soon as it is made, by value.
        self._soon: dict[int, list[Key]] = {}
        given = {value.index for value in graph.inputs} | {value.index for value in graph.constants}
        for instruction in program.instructions:
            if not isinstance(instruction, Move):
                self._at[instruction.equation] = instruction
                continue
            key = instruction.value, instruction.post
            self._moves.setdefault(key, instruction)
            if instruction.value not in given and instruction.kind != "all_gather":
                self._soon.setdefault(instruction.value, []).append(key)
        self.gathers = self._read_twice()

    @property
    def possible(self) -> bool:
        """Whether there is one move to every property: of several, this would lose all but one."""
        count = sum(isinstance(instruction, Move) for instruction in self.program.instructions)
        return count == len(self._moves) and all(move.group is None for move in self._moves.values())

    def _read_twice(self) -> tuple[Key, ...]:
        ahead: dict[Key, None] = {}
        behind: set[Key] = set()
        for number, instruction in sorted(self._at.items()):
            for key in keys_read(instruction, self.graph):
                if key in self._moves and self._moves[key].kind == "all_gather":
                    if self.graph.equations[number].part == "backward":
                        behind.add(key)
                    else:
                        ahead[key] = None
        return tuple(key for key in ahead if key in behind)

    def again(self, count: int) -> Program:
        """The program in which so many of the `gathers` are done again, the first ones."""
        again = set(self.gathers[:count])
        placed: list[Instruction] = []
        there: set[Key] = set()

        def bring(key: Key) -> None:
            if key not in there and key in self._moves:
                move = self._moves[key]
                bring((move.value, move.pre))
                placed.append(move)
                there.add(key)

        for value, placement in zip(self.graph.inputs, self.program.inputs, strict=True):
            there.add((value.index, placement))
        for number, instruction in sorted(self._at.items()):
            for key in keys_read(instruction, self.graph):
                if key in again and self.graph.equations[number].part == "backward":
                    again.discard(key)
                    there.discard(key)
                bring(key)
            placed.append(instruction)
            made = keys_made(instruction, self.graph)
            there.update(made)
            for value, _ in made:
                for key in self._soon.get(value, ()):
                    bring(key)
        for atom, placement in zip(self.graph.outputs, self.program.outputs, strict=True):
            if isinstance(atom, Value):
                bring((atom.index, placement))
        return replace(self.program, instructions=tuple(placed))
