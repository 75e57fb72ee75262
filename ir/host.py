"""Host memory: tensors that wait there between the forward part and the backward part.

An equation `reload` hands on its operand, and says where it was in between: once everything else that reads
the operand has done so, a device may move it to its host's memory; for the equation it comes back. To
rules, search and verification it is an identity. It is priced as two trips over the device's host link
(`cost/model.py`), memory models leave its operand out while nobody else reads it, and backends really move it
(`ir/segments.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import mlir

from shardwright.ir.graph import Equation, Graph, per_graph
from shardwright.ir.program import Instruction, Move


def _same(x: Any) -> Any:
    return x


#: Name of the primitive.
RELOAD = "reload"

#: What a backend that keeps it where it is compiles it to: nothing.
reload_p = Primitive(RELOAD)
reload_p.def_impl(_same)
reload_p.def_abstract_eval(_same)
mlir.register_lowering(reload_p, mlir.lower_fun(_same, multiple_results=False))


def reload(x: jax.Array) -> jax.Array:
    """The array itself, as an equation of its own."""
    return reload_p.bind(x)


def reloads(instruction: Instruction, graph: Graph) -> bool:
    """Whether an instruction brings back what may be in host memory meanwhile."""
    return not isinstance(instruction, Move) and is_reload(graph.equations[instruction.equation])


def is_reload(equation: Equation) -> bool:
    """The same of an equation."""
    return equation.primitive == RELOAD


@per_graph
def leaving(graph: Graph) -> Mapping[int, int]:
    """By equation that makes what reloads read, the number of its stretch."""
    number = {value: e.copy for e in graph.equations if is_reload(e) for value in e.input_values}
    return {e.index: number[v] for e in graph.equations for v in e.outputs if v in number}


@per_graph
def uses_host(graph: Graph) -> bool:
    """Whether anything, in loops as well, waits in host memory."""
    return RELOAD in {equation.form.primitive for equation in graph.all_equations()}


def spilled_bytes(equations: Iterable[Equation]) -> int:
    """Bytes that wait there, each tensor whole."""
    return sum(value.type.nbytes for e in equations if is_reload(e) for value in e.input_values)
