"""The step on one device, equation by equation: what distributed programs are compared with."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

from shardwright.backends.compile import QUICK, controlled
from shardwright.ir.graph import Atom, Equation, Graph, Literal, Value
from shardwright.ir.trace import Traced

#: A step from flat arguments to flat outputs.
Flat: TypeAlias = Callable[..., Sequence[Any]]


def single_device(
    traced: Traced, wanted: Sequence[int], step: Flat | None
) -> Callable[[Sequence[Any]], list[Any]]:
    """Arguments -> the wanted outputs of the undistributed step (what they do not need is not compiled)."""

    def chosen(*flat: Any) -> list[Any]:
        outputs = step(*flat) if step is not None else evaluate_graph(traced.graph, traced.primitives, flat)
        return [outputs[i] for i in wanted]

    compiled = jax.jit(chosen, compiler_options=dict(QUICK))

    def alone(args: Sequence[Any]) -> list[Any]:
        return list(compiled(*args)) if wanted else []

    return alone


def evaluate_graph(graph: Graph, primitives: Mapping[str, Any], flat: Sequence[Any]) -> list[Any]:
    """All outputs of a graph on one device, equation by equation."""
    env: dict[Value, Any] = dict(zip(graph.inputs, flat, strict=True))
    env.update({value: jnp.asarray(array) for value, array in graph.constants.items()})
    for equation in graph.equations:
        args = [_whole(atom, env) for atom in equation.inputs]
        if equation.regions:
            runs = [partial(_evaluated, region, primitives) for region in equation.regions]
            results = controlled(equation, runs, args)
        else:
            results = bind(equation, primitives, args)
        env.update(zip(equation.outputs, results, strict=True))
    return [_whole(atom, env) for atom in graph.outputs]


def _evaluated(region: Graph, primitives: Mapping[str, Any], *args: Any) -> tuple[Any, ...]:
    return tuple(evaluate_graph(region, primitives, args))


def bind(equation: Equation, primitives: Mapping[str, Any], args: Sequence[Any]) -> list[Any]:
    """Results of an equation on whole arrays."""
    primitive = primitives[equation.primitive]
    result = primitive.bind(*args, **equation.params)
    return list(result) if primitive.multiple_results else [result]


def _whole(atom: Atom, env: Mapping[Value, Any]) -> Any:
    return jnp.asarray(atom.value, dtype=atom.type.dtype) if isinstance(atom, Literal) else env[atom]
