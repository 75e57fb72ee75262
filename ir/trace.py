"""From a JAX training step to a graph.

The whole differentiated step is traced once with abstract values. Call primitives (jit, custom
derivatives, remat) are inlined; scan, while and cond keep their bodies as regions; what nobody uses
is dropped.

State: a training step is run in a loop, its first outputs becoming its first arguments. The leading
outputs that match the leading arguments in structure, shape and dtype are therefore taken to be state
and must come back placed as they went in, so that a plan is priced as the steady state of the loop.
"""

from __future__ import annotations

import inspect
import os
import sysconfig
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.tree_util import keystr, tree_flatten_with_path, tree_structure

from shardwright.ir.errors import InputError, TraceError
from shardwright.ir.fingerprint import fingerprint
from shardwright.ir.graph import Graph
from shardwright.ir.jaxpr import Builder
from shardwright.ir.rewrites.scans import broadcasting_inside
from shardwright.ir.state import StateMap, match_state

#: Where code lies that calls the user's, JAX's and our own; and where all lies that is installed.
_CALLERS = tuple(f"{folder}{os.sep}" for folder in (Path(jax.__file__).parent, Path(__file__).parents[1]))
_LIBRARIES = tuple(f"{sysconfig.get_path(name)}{os.sep}" for name in ("stdlib", "purelib", "platlib"))


@dataclass(frozen=True, slots=True)
class Traced:
    """A training step as a graph, with what is needed to call it like the original.

    Attributes:
        graph: the flattened program.
        in_tree: structure of the positional arguments (a tuple).
        out_tree: structure of the result.
        state_names: argument -> output that continues it, for the printout.
        trace_s: seconds that JAX took to trace (make_jaxpr alone).
        graph_s: seconds of the rest: to check the arguments, and to make a graph of what JAX traced.
        primitives: JAX primitive objects by name, for the backends.
        origin, rewriting: of a step that was changed since, the step as it was traced and how it was changed
            (see `shardwright.ir.rewrites.rewriting`); None of any other.
        weak: flat arguments that JAX types weakly, Python's numbers for instance: they take the dtype of what
            they meet.
        weak_outputs: the same of flat outputs.
    """

    graph: Graph
    in_tree: Any
    out_tree: Any
    state_names: Mapping[str, str]
    trace_s: float
    primitives: Mapping[str, Any]
    graph_s: float = 0.0
    origin: Traced | None = None
    rewriting: object = None
    weak: frozenset[int] = frozenset()
    weak_outputs: frozenset[int] = frozenset()

    @property
    def fingerprint(self) -> str:
        """Content hash of the graph as it was traced, equal in every process and for every PYTHONHASHSEED."""
        return fingerprint((self.origin or self).graph)


def trace(step: Callable[..., Any], *args: Any, state: StateMap | None = None) -> Traced:
    """Trace `step(*args)` into a graph.

    Args:
        step: a single-device function of pytrees of arrays.
        args: pytrees of arrays, numbers or `jax.ShapeDtypeStruct`; only shapes and dtypes are used.
        state: argument (position or parameter name) -> output path (a position, a key path such as
            `"[0]['params']"`), overriding the inferred match; `{}` says that there is no state.

    Raises:
        InputError: an argument leaf is no array or number; a state entry names nothing or does not match.
        TraceError: the step has side effects, raises, or cannot be traced at all.
    """
    begun = time.perf_counter()
    names = argument_names(step, args)
    leaves = [(name, *leaf) for name, arg in zip(names, args, strict=True) for leaf in _leaves(arg)]
    for name, path, leaf in leaves:
        _check_leaf(name, path, leaf)
    start = time.perf_counter()
    try:
        closed, out_shape = jax.make_jaxpr(step, return_shape=True)(*args)
    except Exception as error:  # whatever the user's code raises is the user's to see
        first_line = (str(error).splitlines() or [""])[0]
        raise TraceError(
            place="tracing the training step",
            reason=f"it raised {type(error).__name__}: {first_line}{_raised_at(error)}",
            remedy="It must run under jax.jit with arguments of these shapes",
        ) from error
    trace_s = time.perf_counter() - start
    builder = Builder()
    graph = builder.graph(closed.jaxpr, closed.consts)
    in_paths = [name + keystr(path) for name, path, _ in leaves]
    out_paths = [keystr(path) for path, _ in _leaves(out_shape)]
    for path, leaf in _leaves(out_shape):
        _check_result(path, leaf)
    state_map, state_names = match_state(names, args, out_shape, state)
    graph = Graph(
        graph.inputs,
        graph.constants,
        graph.equations,
        graph.outputs,
        tuple(in_paths),
        tuple(out_paths),
        state_map,
        graph.residuals,
    )
    return Traced(
        graph=broadcasting_inside(graph),
        in_tree=tree_structure(tuple(args)),
        out_tree=tree_structure(out_shape),
        state_names=state_names,
        trace_s=trace_s,
        primitives=builder.primitives,
        graph_s=time.perf_counter() - begun - trace_s,
        weak=_weak(closed.in_avals),
        weak_outputs=_weak(closed.out_avals),
    )


def marked(traced: Traced, **marks: Any) -> Traced:
    """A step whose graph has these attributes (`donated`, `compiler`), and so that of its origin."""
    graph = traced.graph
    if all(getattr(graph, name) == mark for name, mark in marks.items()):
        return traced
    origin = None if traced.origin is None else marked(traced.origin, **marks)
    # Once for each: what is worked out for a graph is remembered with it.
    known: dict[object, Graph] = graph.memo.setdefault(marked, {})
    found = known.setdefault(tuple(sorted(marks.items())), replace(graph, **marks, memo={}))
    return replace(traced, graph=found, origin=origin)


def _weak(avals: Sequence[Any]) -> frozenset[int]:
    return frozenset(i for i, aval in enumerate(avals) if getattr(aval, "weak_type", False))


def _raised_at(error: BaseException) -> str:
    """` (file:line)` of the innermost frame of the user's own code, else of any but JAX's and ours."""
    ours, others = "", ""
    frame = error.__traceback__
    while frame is not None:
        name = frame.tb_frame.f_code.co_filename
        if not name.startswith(_CALLERS):
            others = f" ({name}:{frame.tb_lineno})"
            if not name.startswith(_LIBRARIES):
                ours = others
        frame = frame.tb_next
    return ours or others


def argument_names(step: Callable[..., Any], args: Sequence[Any]) -> list[str]:
    """Names of positional arguments, as far as the step's signature has them."""
    try:
        parameters = list(inspect.signature(step).parameters.values())
    except (TypeError, ValueError):
        parameters = []
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    named = [p.name for p in parameters if p.kind in kinds]
    return [named[i] if i < len(named) else f"arg{i}" for i in range(len(args))]


def _leaves(tree: Any) -> list[tuple[Any, Any]]:
    return tree_flatten_with_path(tree)[0]


def _check_leaf(name: str, path: Any, leaf: Any) -> None:
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return
    place = name + keystr(path)
    if isinstance(leaf, (bool, int, float, complex, np.ndarray, np.generic, jax.Array)):
        if isinstance(leaf, (np.ndarray, np.generic)) and leaf.dtype.kind in "OSUM":
            raise InputError(
                place=place, reason=f"dtype {leaf.dtype} is no number type", remedy="Pass numeric arrays only"
            )
        return
    raise InputError(
        place=place,
        reason=f"a {type(leaf).__name__} is no array or number",
        remedy="Close over static values (functools.partial) instead of passing them",
    )


def _check_result(path: Any, leaf: Any) -> None:
    """Whole numbers have a derivative of no values, which is a dtype of its own in JAX."""
    if leaf.dtype == jax.dtypes.float0:
        raise TraceError(
            place=f"output {keystr(path)}",
            reason="is a derivative by integers or keys (float0), which has no values",
            remedy="Leave it out of what the step returns",
        )
