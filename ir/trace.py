"""From a JAX training step to a graph. The one file of `ir` that imports jax.

The whole differentiated step is traced once with abstract values. Call primitives (jit, custom
derivatives, remat) are inlined; scan, while and cond keep their bodies as regions; what nobody uses
is dropped.

State: a training step is run in a loop, its first outputs becoming its first arguments. The leading
outputs that match the leading arguments in structure, shape and dtype are therefore taken to be state
and must come back placed as they went in, so that a plan is priced as the steady state of the loop.
"""

from __future__ import annotations

import hashlib
import inspect
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, cast

import jax
import numpy as np
from jax.extend import core as jex
from jax.tree_util import keystr, tree_flatten_with_path, tree_structure

from shardwright.ir.errors import InputError, TraceError
from shardwright.ir.graph import Atom, Equation, Forms, Graph, Literal, TensorType, Value

#: Call primitives and the parameter that holds what they call.
CALLS = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "call": "call_jaxpr",
    "remat2": "jaxpr",
    "checkpoint": "jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "custom_vjp_call_jaxpr": "fun_jaxpr",
}

#: Control flow and the parameters that hold its regions, in the order of `shardwright.ir.regions`.
REGIONS = {"scan": ("jaxpr",), "while": ("cond_jaxpr", "body_jaxpr"), "cond": ("branches",)}

UNKNOWN_LINE = "an unknown source line"

StateMap: TypeAlias = Mapping[int | str, Any]


@dataclass(frozen=True, slots=True)
class Traced:
    """A training step as a graph, with what is needed to call it like the original.

    Attributes:
        graph: the flattened program.
        in_tree: structure of the positional arguments (a tuple).
        out_tree: structure of the result.
        input_types: abstract values of the flat arguments.
        state_names: argument -> output that continues it, for the printout.
        trace_s: seconds that JAX took to trace (make_jaxpr alone).
        primitives: JAX primitive objects by name, for the backends.
        fingerprint: content hash of the graph, equal in every process and for every PYTHONHASHSEED.
    """

    graph: Graph
    in_tree: Any
    out_tree: Any
    state_names: Mapping[str, str]
    trace_s: float
    primitives: Mapping[str, Any]
    fingerprint: str


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
    names = _argument_names(step, args)
    for name, arg in zip(names, args, strict=True):
        for path, leaf in tree_flatten_with_path(arg)[0]:
            _check_leaf(name + keystr(path), leaf)
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
    builder = _Builder()
    graph = builder.graph(closed.jaxpr, closed.consts)
    in_paths = [
        name + keystr(p)
        for name, arg in zip(names, args, strict=True)
        for p, _ in tree_flatten_with_path(arg)[0]
    ]
    out_paths = [keystr(path) for path, _ in tree_flatten_with_path(out_shape)[0]]
    state_map, state_names = _state(names, args, out_shape, state)
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
        graph=graph,
        in_tree=tree_structure(tuple(args)),
        out_tree=tree_structure(out_shape),
        state_names=state_names,
        trace_s=trace_s,
        primitives=builder.primitives,
        fingerprint=fingerprint(graph),
    )


def _raised_at(error: BaseException) -> str:
    """` (file:line)` of the innermost frame of user code, as far as the traceback tells."""
    place, frame = "", error.__traceback__
    jax_folder = str(Path(jax.__file__).parent)
    while frame is not None:
        name = frame.tb_frame.f_code.co_filename
        if name != __file__ and not name.startswith(jax_folder):
            place = f" ({name}:{frame.tb_lineno})"
        frame = frame.tb_next
    return place


def _argument_names(step: Callable[..., Any], args: Sequence[Any]) -> list[str]:
    try:
        parameters = list(inspect.signature(step).parameters.values())
    except (TypeError, ValueError):
        parameters = []
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    named = [p.name for p in parameters if p.kind in kinds]
    return [named[i] if i < len(named) else f"arg{i}" for i in range(len(args))]


def _check_leaf(place: str, leaf: Any) -> None:
    if isinstance(leaf, (bool, int, float, complex, np.ndarray, np.generic, jax.Array, jax.ShapeDtypeStruct)):
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


# ---------------------------------------------------------------------------------------------------
# jaxpr -> graph


class _Builder:
    """Collects primitive objects, types and forms over all regions of one trace."""

    def __init__(self) -> None:
        self.primitives: dict[str, Any] = {}
        self.forms = Forms()
        self._types: dict[tuple[tuple[int, ...], Any], TensorType] = {}
        self._parts: dict[Any, str] = {}

    def graph(self, jaxpr: jex.Jaxpr, consts: Sequence[Any], caller: Any = None, part: str = "") -> Graph:
        return _Region(self).build(jaxpr, consts, caller, part)

    def part_of(self, eqn: jex.JaxprEqn, around: str) -> str:
        """What differentiation made of an equation, by JAX's stack of transformations."""
        if around == "backward":
            return around
        stack = eqn.source_info.name_stack
        found = self._parts.get(stack)
        if found is None:
            names = str(stack)
            found = "backward" if "transpose(" in names else "forward" if "jvp(" in names else ""
            self._parts[stack] = found
        return found or around

    def type_of(self, aval: Any) -> TensorType:
        """One object for equal types: comparing them is then comparing addresses."""
        key = (aval.shape, aval.dtype)
        found = self._types.get(key)
        if found is None:
            found = self._types[key] = TensorType(tuple(aval.shape), str(aval.dtype))
        return found


@dataclass(frozen=True, slots=True)
class _Met:
    """An equation as it was met: values are numbers until it is known which of them are needed."""

    name: str
    params: Mapping[str, Any]
    ins: tuple[int | Literal, ...]
    outs: tuple[int, ...]
    regions: tuple[Graph, ...]
    source: Any
    part: str


class _Region:
    """Builds the graph of one jaxpr, inlining calls and dropping what nobody needs."""

    def __init__(self, builder: _Builder) -> None:
        self.builder = builder
        self.types: list[TensorType] = []
        self.constants: dict[int, Any] = {}
        self.by_identity: dict[int, int] = {}
        self.met: list[_Met] = []
        self.backward: set[int] = set()
        self.residuals: dict[int, None] = {}

    def build(self, jaxpr: jex.Jaxpr, consts: Sequence[Any], caller: Any, part: str) -> Graph:
        inputs = [self.value(var.aval) for var in jaxpr.invars]
        env: dict[jex.Var, int | Literal] = dict(zip(jaxpr.invars, inputs, strict=True))
        self.bind_constants(jaxpr, consts, env)
        self.walk(jaxpr, env, caller, part)
        for number in (*inputs, *self.constants):
            self.residuals.pop(number, None)
        return self.needed(inputs, [self.read(atom, env) for atom in jaxpr.outvars])

    def value(self, aval: Any) -> int:
        self.types.append(self.builder.type_of(aval))
        return len(self.types) - 1

    def bind_constants(
        self, jaxpr: jex.Jaxpr, consts: Sequence[Any], env: dict[jex.Var, int | Literal]
    ) -> None:
        for var, const in zip(jaxpr.constvars, consts, strict=True):
            env[var] = self.constant(const, var.aval)

    def constant(self, array: Any, aval: Any) -> int:
        """A closed-over array; the same array is one constant however often it is met."""
        if id(array) not in self.by_identity:
            number = self.value(aval)
            self.by_identity[id(array)] = number
            self.constants[number] = array
        return self.by_identity[id(array)]

    def read(self, atom: Any, env: Mapping[jex.Var, int | Literal]) -> int | Literal:
        if not isinstance(atom, jex.Literal):
            return env[cast(jex.Var, atom)]
        aval: Any = atom.aval
        if aval.shape != ():
            return self.constant(atom.val, aval)
        return Literal(np.asarray(atom.val)[()], self.builder.type_of(aval))

    def walk(
        self, jaxpr: jex.Jaxpr, env: dict[jex.Var, int | Literal], caller: Any, around: str = ""
    ) -> None:
        """Append the equations of a jaxpr; `caller` and `around` are source and part of the call or loop."""
        for eqn in jaxpr.eqns:
            name = eqn.primitive.name
            operands = tuple([self.read(atom, env) for atom in eqn.invars])
            part, before = self.builder.part_of(eqn, around), len(self.types)
            if part == "backward" and around != part:
                # What JAX hands over is read off its own equations, calls as a whole: the backward part of a
                # call may not need all that the forward part kept for it.
                kept = (atom for atom in operands if isinstance(atom, int) and atom not in self.backward)
                self.residuals.update(dict.fromkeys(kept))
            if name in CALLS:
                called = eqn.params[CALLS[name]]
                inner, consts = (
                    (called.jaxpr, called.consts) if isinstance(called, jex.ClosedJaxpr) else (called, ())
                )
                inner_env: dict[jex.Var, int | Literal] = dict(zip(inner.invars, operands, strict=True))
                self.bind_constants(inner, consts, inner_env)
                self.walk(inner, inner_env, _users(eqn.source_info, caller), part)
                env.update(
                    zip(eqn.outvars, (self.read(atom, inner_env) for atom in inner.outvars), strict=True)
                )
                if part == "backward":
                    self.backward.update(range(before, len(self.types)))
                continue
            source = _users(eqn.source_info, caller)
            regions = tuple([self.builder.graph(r.jaxpr, r.consts, source, part) for r in _regions(eqn)])
            if not regions and eqn.effects:
                raise TraceError(
                    place=f"{name} at {_summary(source) or UNKNOWN_LINE}",
                    reason="it has side effects, which cannot be distributed",
                    remedy="Remove the print, callback or effect from the training step",
                )
            if name == "rng_uniform":
                raise TraceError(
                    place=f"{name} at {_summary(source) or UNKNOWN_LINE}",
                    reason="it draws anew on every device, so that replicas would disagree",
                    remedy="Use jax.random with a key",
                )
            self.builder.primitives.setdefault(name, eqn.primitive)
            outputs = tuple([self.value(var.aval) for var in eqn.outvars])
            # A barrier of several operands is one of each: they may be placed differently.
            each = name == "optimization_barrier"
            parts = zip(operands, outputs, strict=True) if each else ()
            for ins, outs in [((a,), (v,)) for a, v in parts] or [(operands, outputs)]:
                self.met.append(_Met(name, eqn.params, ins, outs, regions, source, part))
            env.update(zip(eqn.outvars, outputs, strict=True))
            if part == "backward":
                self.backward.update(outputs)

    def needed(self, inputs: Sequence[int], outputs: Sequence[int | Literal]) -> Graph:
        """The graph without equations and constants nobody needs, its values numbered densely."""
        used = [False] * len(self.types)
        for atom in outputs:
            if isinstance(atom, int):
                used[atom] = True
        kept: list[_Met] = []
        for met in reversed(self.met):
            if any(used[number] for number in met.outs):
                kept.append(met)
                for atom in met.ins:
                    if isinstance(atom, int):
                        used[atom] = True
        values: dict[int, Value] = {}

        def name(atom: int | Literal) -> Atom:
            return atom if isinstance(atom, Literal) else values[atom]

        def made(number: int) -> Value:
            value = values[number] = Value(len(values), self.types[number])
            return value

        new_inputs = tuple([made(number) for number in inputs])
        new_constants = {made(number): array for number, array in self.constants.items() if used[number]}
        equations: list[Equation] = []
        for met in reversed(kept):
            ins = tuple([name(atom) for atom in met.ins])
            outs = tuple([made(number) for number in met.outs])
            form = self.builder.forms.of(met.name, met.params, ins, outs)
            equations.append(Equation(len(equations), form, ins, outs, met.regions, met.source, met.part))
        results = tuple([name(atom) for atom in outputs])
        residuals = tuple([(self.types[number], values.get(number)) for number in self.residuals])
        return Graph(new_inputs, new_constants, tuple(equations), results, residuals=residuals)


def _users(source: Any, caller: Any) -> Any:
    """Source information of the user's code: JAX's own functions (jnp.linalg.cholesky) are traced apart."""
    return source if caller is None or _summary(source) else caller


def _regions(eqn: jex.JaxprEqn) -> list[jex.ClosedJaxpr]:
    found: list[jex.ClosedJaxpr] = []
    for key in REGIONS.get(eqn.primitive.name, ()):
        region = eqn.params[key]
        found.extend(region if isinstance(region, tuple) else (region,))
    return found


def source_line(equation: Equation) -> str:
    """`file:line (function)` of the user's code that made an equation, relative to the working directory."""
    return source_text(equation.source)


def source_text(source: Any) -> str:
    """`source_line` of JAX's source information."""
    return _summary(source).removeprefix(f"{Path.cwd()}/") or UNKNOWN_LINE


def _summary(source: Any) -> str:
    """`file:line (function)` of JAX's source information, "" where no frame of it is the user's."""
    from jax._src import source_info_util  # (no public name for it)

    return source_info_util.summarize(source)


# ---------------------------------------------------------------------------------------------------
# State


def _state(
    names: Sequence[str], args: Sequence[Any], out_shape: Any, override: StateMap | None
) -> tuple[dict[int, int], dict[str, str]]:
    """Flat output position -> flat input position, and the same by name."""
    arg_start = np.cumsum([0, *(len(jax.tree.leaves(arg)) for arg in args)])
    if override is None:
        pairs = [(i, path) for i, path in enumerate(_leading(args, out_shape))]
    else:
        pairs = [(_argument(key, names), _output_path(where)) for key, where in override.items()]
    out_leaves = [(path, leaf) for path, leaf in tree_flatten_with_path(out_shape)[0]]
    mapping: dict[int, int] = {}
    by_name: dict[str, str] = {}
    for position, path in pairs:
        under = [k for k, (p, _) in enumerate(out_leaves) if _is_under(keystr(p), path)]
        leaves = jax.tree.leaves(args[position])
        same = len(leaves) == len(under) and all(
            _same_type(leaf, out_leaves[k][1]) for leaf, k in zip(leaves, under, strict=True)
        )
        if not same:
            raise InputError(
                place=f"state[{names[position]}]",
                reason=f"output {path or 'of the step'} does not match it in structure, shape and dtype",
                remedy=f"Name one of the outputs {', '.join(sorted({keystr(p[:1]) for p, _ in out_leaves}))}",
            )
        if mapping.keys() & set(under) or names[position] in by_name:
            raise InputError(
                place=f"state[{names[position]}]",
                reason=f"it, or output {path or 'of the step'}, is matched twice",
                remedy="Match every argument and every output once",
            )
        mapping.update({k: int(arg_start[position]) + j for j, k in enumerate(under)})
        if leaves:
            by_name[names[position]] = f"output{path}"
    return mapping, by_name


def _leading(args: Sequence[Any], out_shape: Any) -> list[str]:
    """Paths of the leading outputs that match the leading arguments.

    A result that is as a whole what the first argument is (a step of one container) is state.
    """
    if args and _same_trees(args[0], out_shape):
        return [""]
    outs = list(out_shape) if type(out_shape) in (tuple, list) else [out_shape]
    found: list[str] = []
    for i, (arg, out) in enumerate(zip(args, outs, strict=False)):
        if not _same_trees(arg, out):
            break
        found.append(f"[{i}]" if type(out_shape) in (tuple, list) else "")
    return found


def _same_trees(arg: Any, out: Any) -> bool:
    same = tree_structure(arg) == tree_structure(out)
    return same and all(map(_same_type, jax.tree.leaves(arg), jax.tree.leaves(out)))


def _is_under(leaf: str, path: str) -> bool:
    """Whether an output leaf lies under a key path: `.a` holds `.a` and `.a['x']`, but not `.ab`."""
    return leaf.startswith(path) and (not path or leaf[len(path) :][:1] in ("", "[", "."))


def _argument(key: int | str, names: Sequence[str]) -> int:
    if isinstance(key, int) and 0 <= key < len(names):
        return key
    if isinstance(key, str) and key in names:
        return names.index(key)
    raise InputError(
        place=f"state[{key!r}]", reason="is no argument", remedy=f"Name one of {', '.join(names)}"
    )


def _output_path(where: Any) -> str:
    if isinstance(where, int):
        return f"[{where}]"
    if isinstance(where, str):
        return where
    if isinstance(where, (tuple, list)):
        return "".join(f"[{part!r}]" for part in cast(Sequence[Any], where))
    raise InputError(
        place=f"state: {where!r}",
        reason=f"a {type(where).__name__} is no output path",
        remedy="Name the output by position, by key path such as \"[0]['params']\", or by a tuple of keys",
    )


def _same_type(a: Any, b: Any) -> bool:
    def of(leaf: Any) -> tuple[tuple[int, ...], str]:
        if isinstance(leaf, (bool, int, float, complex)):
            return (), str(jax.dtypes.result_type(leaf))
        return tuple(leaf.shape), str(
            jax.dtypes.canonicalize_dtype(leaf.dtype) if _plain(leaf) else leaf.dtype
        )

    return of(a) == of(b)


def _plain(leaf: Any) -> bool:
    return not jax.numpy.issubdtype(leaf.dtype, jax.dtypes.extended)


# ---------------------------------------------------------------------------------------------------
# Fingerprint


def fingerprint(graph: Graph) -> str:
    """SHA-256 over the graph's structure, types and parameters (not the contents of constants)."""
    digest = hashlib.sha256()
    _digest(graph, digest)
    return digest.hexdigest()


def _digest(graph: Graph, digest: Any) -> None:
    digest.update(",".join(f"{v}:{v.type}" for v in (*graph.inputs, *graph.constants)).encode())
    for equation in graph.equations:
        digest.update(f"{equation}|{params_text(equation.params)}\n".encode())
        for region in equation.regions:
            _digest(region, digest)
    digest.update(f"{','.join(map(str, graph.outputs))}|{sorted(graph.state.items())}".encode())


def params_text(params: Mapping[str, Any]) -> str:
    """Parameters as stable text: what prints an address or repeats a region is named by its type alone."""
    return ";".join(f"{key}={_stable(params[key])}" for key in sorted(params))


def _stable(value: Any) -> str:
    if value is None or isinstance(value, (bool, int, float, str, bytes, np.dtype, np.generic)):
        return str(value)
    if isinstance(value, (tuple, list)) and not hasattr(value, "_fields"):
        return "(" + ",".join(map(_stable, cast(Sequence[Any], value))) + ")"
    if isinstance(value, (jex.Jaxpr, jex.ClosedJaxpr)) or callable(value):
        return type(value).__name__
    if isinstance(value, (set, frozenset)):
        return "{" + ",".join(sorted(map(_stable, cast(frozenset[Any], value)))) + "}"
    if isinstance(value, np.ndarray):
        return f"{value.dtype}{value.shape}{value.tolist()}"
    text = str(value)
    return type(value).__name__ if " at 0x" in text else text
