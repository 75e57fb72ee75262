"""What of a program is computed again (`rewrites/recompute.py`), and where, for backends and prices."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from shardwright.ir.graph import Equation, Graph, per_graph
from shardwright.ir.host import is_reload, leaving, uses_host
from shardwright.ir.program import Instruction, Loop, Move, Program


@per_graph
def repeats(graph: Graph) -> bool:
    """Whether something in it is computed again, in another executable than at first."""
    return any(equation.after is not None for equation in graph.all_equations())


def begins_again(instruction: Instruction, graph: Graph, pending: Iterable[Instruction]) -> bool:
    """Whether an instruction begins to compute a stretch again in which the `pending` ones have no part.

    What is compiled together ends there, as it does before and after what comes back from host memory, and
    between stretches of which something goes there: until they end, nothing leaves.
    """
    number, back = _repeated(instruction, graph)
    if not number and not uses_host(graph):
        return False
    before = iter(pending)
    first = next(before, None)
    if first is None:
        return number > 0
    if _repeated(first, graph)[1] != back:
        return True
    mine = _leaves(instruction, graph)
    if mine:
        return any(_leaves(other, graph) not in (0, mine) for other in (first, *before))
    return number > 0 and all(_repeated(other, graph)[0] != number for other in (first, *before))


def computed_again(program: Program, graph: Graph) -> Iterator[bool]:
    """Of every instruction but loops, bodies where their loop is: whether it computes something again."""
    return _each(program, graph, _is_again)


def brought_back(program: Program, graph: Graph) -> Iterator[bool]:
    """Of the same instructions, whether something comes back from host memory in it."""
    return _each(program, graph, is_reload)


def _each(program: Program, graph: Graph, which: Callable[[Equation], bool]) -> Iterator[bool]:
    for instruction in program.instructions:
        if isinstance(instruction, Loop):
            regions = graph.equations[instruction.equation].regions
            for body, region in zip(instruction.bodies, regions, strict=True):
                yield from _each(body, region, which)
        else:
            yield not isinstance(instruction, Move) and which(graph.equations[instruction.equation])


def _leaves(instruction: Instruction, graph: Graph) -> int:
    """Number of the stretch of which an instruction makes something that goes to host memory; 0 for none."""
    return 0 if isinstance(instruction, Move) else leaving(graph).get(instruction.equation, 0)


def _is_again(equation: Equation) -> bool:
    return equation.copy > 0 and not is_reload(equation)


def _repeated(instruction: Instruction, graph: Graph) -> tuple[int, bool]:
    """Number of the stretch that an instruction computes again, 0 for none; whether it is a reload of it."""
    if isinstance(instruction, Move):
        return 0, False
    equation = graph.equations[instruction.equation]
    return (equation.copy if equation.after is not None else 0), is_reload(equation)
