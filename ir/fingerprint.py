"""A graph's content as a hash that is the same in every process."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np

from shardwright.ir.graph import Equation, Graph, per_form, per_graph


@per_graph
def fingerprint(graph: Graph) -> str:
    """SHA-256 over the graph's structure, types and parameters (not the contents of constants)."""
    digest = hashlib.sha256()
    _digest(graph, digest)
    return digest.hexdigest()


def _digest(graph: Graph, digest: Any) -> None:
    digest.update(",".join(f"{v}:{v.type}" for v in (*graph.inputs, *graph.constants)).encode())
    for equation in graph.equations:
        types, rest = _of_form(equation)
        outs = ", ".join([f"%{v.index}:{kind}" for v, kind in zip(equation.outputs, types, strict=True)])
        ins = ", ".join([str(atom) for atom in equation.inputs])
        digest.update(f"{outs} = {equation.primitive}({ins})|{rest}\n".encode())
        for region in equation.regions:
            _digest(region, digest)
    digest.update(f"{','.join(map(str, graph.outputs))}|{sorted(graph.state.items())}".encode())


@per_form
def _of_form(equation: Equation) -> tuple[tuple[str, ...], str]:
    """The types of its results and its parameters, as text."""
    return tuple(map(str, equation.output_types)), params_text(equation.params)


def params_text(params: Mapping[str, Any]) -> str:
    """Parameters as stable text: what prints an address or repeats a region is named by its type alone."""
    return ";".join(f"{key}={_stable(params[key])}" for key in sorted(params))


def _stable(value: Any) -> str:
    if value is None or isinstance(value, (bool, int, float, str, bytes, np.dtype, np.generic)):
        return str(value)
    if isinstance(value, (tuple, list)) and not hasattr(value, "_fields"):
        return "(" + ",".join(map(_stable, cast(Sequence[Any], value))) + ")"
    if hasattr(value, "eqns") or callable(value):  # a jaxpr, closed or not, or a function
        return type(value).__name__
    if isinstance(value, (set, frozenset)):
        return "{" + ",".join(sorted(map(_stable, cast(frozenset[Any], value)))) + "}"
    if isinstance(value, np.ndarray):
        return f"{value.dtype}{value.shape}{value.tolist()}"
    text = str(value)
    return type(value).__name__ if " at 0x" in text else text
