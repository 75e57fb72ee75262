"""A program in blocks: what is compiled together, and the exchanges in between; what is there in each.

    program ::= (segment cut)* segment
    cut     ::= exchange+      they stand side by side
              | barrier        a loop that the host runs, or where something is computed again

`joined.py` and `anew.py` rearrange these, where what is handed on between segments does not fit into memory.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from shardwright.cost.share_cost import Floats
from shardwright.ir.flow import Flow, inputs, is_local, outputs
from shardwright.ir.graph import Graph
from shardwright.ir.placement import cuts
from shardwright.ir.program import Move, Program, Property
from shardwright.ir.repeated import Together


class Blocks:
    """Of one program; segments have even numbers, cuts odd ones.

    Args:
        program: a verified program.
        graph: what it computes.
        part: of a tensor that is cut, how much of it a device has.

    Attributes:
        flow: of the program.
        of: the block of every instruction, by position.
        barriers: cuts that are no exchanges.
        last: number of the last segment.
        nbytes: of every property on a device.
        given: properties that are inputs or constants.
        kept: properties that are outputs.
        makers: positions that establish each property.
        readers: positions that read each property.
    """

    def __init__(self, program: Program, graph: Graph, part: float) -> None:
        self.program, self.graph = program, graph
        flow = self.flow = Flow(program, graph)
        self._numbers: dict[Property, int] = {}
        self.makers: list[list[int]] = []
        self.readers: list[list[int]] = []
        sizes: list[float] = []

        def number(prop: Property) -> int:
            found = self._numbers.setdefault(prop, len(sizes))
            if found == len(sizes):
                nbytes = flow.types[prop.value].nbytes
                sizes.append(nbytes * part if cuts(prop.placement) else float(nbytes))
                self.makers.append([])
                self.readers.append([])
            return found

        self.given = [number(prop) for prop in inputs(program, graph)]
        self.needs = [[number(prop) for prop in needs] for needs in flow.needs]
        self.gives = [[number(prop) for prop in gives] for gives in flow.gives]
        self.kept = [number(prop) for prop in outputs(program, graph)]
        for position, (needs, gives) in enumerate(zip(self.needs, self.gives, strict=True)):
            for prop in needs:
                self.readers[prop].append(position)
            for prop in gives:
                self.makers[prop].append(position)
        self.nbytes: Floats = np.array(sizes)
        self.barriers: set[int] = set()
        self.of = self._cut()
        self.last = int(self.of[-1] + 1) // 2 * 2 if len(self.of) else 0
        self._made = _pairs(self.makers)
        self._read = _pairs(self.readers)

    def _cut(self) -> NDArray[np.intp]:
        program, graph, flow = self.program, self.graph, self.flow
        found: list[int] = []
        block = 0
        together = Together(graph)
        for position, instruction in enumerate(program.instructions):
            alone = not isinstance(instruction, Move) and not is_local(instruction, graph)
            if alone or flow.exchange[position]:
                if block % 2 == 0 or alone or block in self.barriers:
                    block += 1 if block % 2 == 0 else 2
                if alone:
                    self.barriers.add(block)
                together.clear()
            else:
                if block % 2:
                    block += 1
                elif together.any and together.end_before(instruction):
                    self.barriers.add(block + 1)
                    block += 2
                    together.clear()
                together.add(instruction)
            found.append(block)
        return np.array(found, dtype=np.intp)

    def there(self, of: NDArray[np.intp]) -> Floats:
        """Bytes of what is there in each block and was made by an instruction, if they are in blocks `of`.

        What a segment makes for itself alone does not count: much of it is never written to memory.
        """
        count, nobody = len(self.nbytes), self.last + 2
        first = np.full(count, nobody, dtype=np.intp)
        last = np.full(count, -1, dtype=np.intp)
        np.minimum.at(first, self._made[0], of[self._made[1]])
        np.maximum.at(last, self._read[0], of[self._read[1]])
        last[self.kept] = self.last
        first[self.given] = nobody
        handed_on = (first < nobody) & (last >= first) & ((last > first) | (first % 2 == 1))
        change = np.zeros(nobody + 1)
        np.add.at(change, first[handed_on], self.nbytes[handed_on])
        np.add.at(change, last[handed_on] + 1, -self.nbytes[handed_on])
        return change.cumsum()


def _pairs(found: Sequence[Sequence[int]]) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Numbers and positions as columns."""
    rows = [(number, position) for number, some in enumerate(found) for position in some]
    columns = np.array(rows, dtype=np.intp).reshape(-1, 2)
    return columns[:, 0], columns[:, 1]
