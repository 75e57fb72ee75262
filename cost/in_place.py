"""What is written into a tensor that is there already, rather than into one of its own."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from shardwright.ir.graph import Atom, Equation, Graph, Literal, Value
from shardwright.ir.table import Flags, Numbers, table

#: What writes rows into its first operand: which operand they are, and whether it reads what was there.
PUTS = {
    "dynamic_update_slice": (1, False),
    "scatter": (2, False),
    **{f"scatter-{how}": (2, True) for how in ("add", "sub", "mul", "max", "min")},
}
_SUMS = frozenset({"add", "add_any"})


def overwrites(graph: Graph, row: int, to: int, stored: Flags, handed_out: Collection[int]) -> bool:
    """Whether an equation may write into its operand number `to`: nobody reads that afterwards.

    Args:
        graph: that the equation is of.
        row: its index.
        to: one of its operands.
        stored: of every value, whether it lies in memory.
        handed_out: indices of values that are to lie in memory at the end.
    """
    operand = graph.equations[row].inputs[to]
    if not isinstance(operand, Value) or not stored[operand.index] or operand.index in handed_out:
        return False
    found = table(graph)
    # What a body is given it is taken to carry; what a step is given is the caller's, but for donated state.
    state = {graph.inputs[place] for place in graph.state.values()} if graph.donated else ()
    callers = operand in graph.inputs and bool(graph.input_names) and operand not in state
    last = found.reader[found.operands == operand.index].max()
    return bool(last == row) and not callers and operand not in graph.constants


def scattered_into(graph: Graph, rows: Numbers, scatters: Numbers) -> list[tuple[int, int, int]]:
    """What is scattered into zeros and then only added to something: XLA scatters it into that.

    Args:
        graph: that the equations are of.
        rows: indices of those that are compiled together.
        scatters: places in `rows` of those that add what they scatter.

    Returns:
        Places in `rows` of such a scatter and of the addition, and which of its operands it is added to.
    """
    found, place = table(graph), {row: k for k, row in enumerate(rows.tolist())}
    maker = dict(zip(found.results.tolist(), found.maker.tolist(), strict=True))
    read = np.bincount(found.operands[found.operands >= 0], minlength=len(found.handed_out))
    once = (read == 1) & ~found.handed_out

    def made_by(atom: Atom) -> Equation | None:
        row = maker.get(atom.index, -1) if isinstance(atom, Value) else -1
        return graph.equations[row] if row in place else None

    joined: dict[int, tuple[int, int, int]] = {}
    for scatter in scatters.tolist():
        equation = graph.equations[rows[scatter]]
        zeros, (result,) = made_by(equation.inputs[0]), equation.outputs
        filled = zeros is not None and once[zeros.outputs[0].index] and _is_zero(zeros)
        if not (filled and once[result.index]):
            continue
        row = int(found.reader[found.operands == result.index][0])
        addition = graph.equations[row]
        to = 1 if addition.inputs[0] is result else 0
        if row in place and addition.primitive in _SUMS and isinstance(addition.inputs[to], Value):
            # Of two that are scattered and added up, one is scattered into the other.
            joined.setdefault(row, (scatter, place[row], to))
    return list(joined.values())


def _is_zero(equation: Equation) -> bool:
    """Whether an equation fills a tensor with zeros."""
    value = equation.inputs[0] if equation.primitive == "broadcast_in_dim" else None
    return isinstance(value, Literal) and not np.any(value.value)
