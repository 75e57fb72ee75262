"""Equations of a graph as JAX code: run again on other tensors, where the user's lines stand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from shardwright.ir.graph import Equation


def as_traced(equation: Equation) -> Any:
    """Context in which what is traced counts as the user's line, and as part of what it was part of."""
    from jax._src import source_info_util  # (no public name for it)

    stack = source_info_util.current_name_stack() + equation.source.name_stack
    return source_info_util.user_context(equation.source.traceback, name_stack=stack)


def results_of(equation: Equation, primitives: Mapping[str, Any], args: Sequence[Any]) -> list[Any]:
    """Results of an equation on whole tensors."""
    with as_traced(equation):
        results = primitives[equation.primitive].bind(*args, **equation.params)
    return list(results) if isinstance(results, (tuple, list)) else [results]
