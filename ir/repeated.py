"""What of a program is computed again (`rewrites/recompute.py`), and where, for backends and prices."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from shardwright.ir.graph import Equation, Graph, per_graph
from shardwright.ir.host import is_reload, leaving, uses_host
from shardwright.ir.program import Instruction, Loop, Move, Program


@per_graph
def repeats(graph: Graph) -> bool:
    """Whether something in it is computed again, in another executable than at first."""
    return any(equation.after is not None for equation in graph.all_equations())


class Together:
    """Instructions of a program that are compiled together, as far as they are known yet.

    Args:
        graph: what the program computes.
    """

    def __init__(self, graph: Graph) -> None:
        self._marks, self._host = _marks(graph), uses_host(graph)
        self.clear()

    def clear(self) -> None:
        """The next instruction is the first."""
        #: Whether they bring back something from host memory; None as long as there are none.
        self._back: bool | None = None
        #: Numbers of the stretches that they compute again, and of those of which they make what leaves.
        self._again, self._leaving = set[int](), set[int]()

    @property
    def any(self) -> bool:
        """Whether there are some."""
        return self._back is not None

    def add(self, instruction: Instruction) -> None:
        """Another one."""
        again, back, leaves = self._of(instruction)
        if self._back is None:
            self._back = back
        if again:
            self._again.add(again)
        if leaves:
            self._leaving.add(leaves)

    def end_before(self, instruction: Instruction) -> bool:
        """Whether an instruction begins to compute a stretch again in which these have no part.

        What is compiled together ends there, as it does before and after what comes back from host memory,
        and between stretches of which something goes there: until they end, nothing leaves.
        """
        again, back, leaves = self._of(instruction)
        if not again and not self._host:
            return False
        if self._back is None:
            return again > 0
        if self._back != back:
            return True
        if leaves:
            return not self._leaving <= {leaves}
        return again > 0 and again not in self._again

    def _of(self, instruction: Instruction) -> tuple[int, bool, int]:
        return (
            _UNMARKED if isinstance(instruction, Move) else self._marks.get(instruction.equation, _UNMARKED)
        )


def begins_again(instruction: Instruction, graph: Graph, pending: Iterable[Instruction]) -> bool:
    """See `Together.end_before`, of the `pending` ones."""
    together = Together(graph)
    if not together.end_before(instruction) and not uses_host(graph):
        return False
    for each in pending:
        together.add(each)
    return together.end_before(instruction)


def equations_of(program: Program, graph: Graph) -> Iterator[Equation | None]:
    """Of every instruction but loops, bodies where their loop is: the equation that it computes, if any."""
    for instruction in program.instructions:
        if isinstance(instruction, Loop):
            regions = graph.equations[instruction.equation].regions
            for body, region in zip(instruction.bodies, regions, strict=True):
                yield from equations_of(body, region)
        else:
            yield None if isinstance(instruction, Move) else graph.equations[instruction.equation]


def is_again(equation: Equation) -> bool:
    """Whether it computes something again."""
    return equation.copy > 0 and not is_reload(equation)


_UNMARKED = 0, False, 0


@per_graph
def _marks(graph: Graph) -> Mapping[int, tuple[int, bool, int]]:
    """Of equations that have to do with it: what they compute again, bring back and make that leaves.

    Returns:
        By equation: number of the stretch that it computes again, 0 for none; whether it is a reload; and
        number of the stretch of which it makes something that goes to host memory, 0 for none.
    """
    leaves = leaving(graph)
    each = {
        e.index: (e.copy if e.after is not None else 0, is_reload(e), leaves.get(e.index, 0))
        for e in graph.equations
    }
    return {index: found for index, found in each.items() if found != _UNMARKED}
