"""From a jaxpr to a graph: calls inlined, control flow as regions, what nobody uses dropped."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, Protocol, TypeAlias, cast

import jax
import numpy as np
from jax.extend import core as jex

from shardwright.ir.batched import answers, with_one_answer
from shardwright.ir.errors import TraceError
from shardwright.ir.graph import Atom, Equation, Forms, Graph, Literal, TensorType, Value

#: Call primitives and the parameter that holds what they call, in jax 0.12 another one of a composite.
CALLS = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "call": "call_jaxpr",
    "eval_jaxpr": "call_jaxpr",
    "remat2": "jaxpr",
    "checkpoint": "jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "custom_vjp_call_jaxpr": "fun_jaxpr",
    # How it is differentiated or batched is not asked any more; a composite is what it is made of, which a
    # kernel of its own does not take the place of.
    "linear_call": "callee",
    "custom_vmap_call": "call",
    "composite": "call_jaxpr" if jax.__version_info__ >= (0, 12) else "jaxpr",
}

#: What a step does to an array that it may change in place.
MUTABLE = ("new_ref", "get", "swap", "addupdate")

#: A primitive that says what it is made of once somebody asks, such as `jnp.nonzero` in jax 0.12.
HIGH = "call_hi_primitive"

#: A linear solve that says how it is differentiated. Once that is done, it is a call of what solves.
SOLVE = "custom_linear_solve"

#: Control flow and the parameters that hold its regions, in the order of `shardwright.ir.regions`.
REGIONS = {"scan": ("jaxpr",), "while": ("cond_jaxpr", "body_jaxpr"), "cond": ("branches",)}

#: Calls that distribute what they call.
DISTRIBUTED = frozenset({"shard_map", "pmap", "xla_pmap"})

UNKNOWN_LINE = "an unknown source line"

#: How the lines of rewritings begin, which JAX takes for the user's.
_REWRITES = str(Path(__file__).parent / "rewrites")


class Closed(Protocol):
    """A jaxpr and the arrays that it closes over: in jax 0.12 a Jaxpr, before that a ClosedJaxpr."""

    @property
    def jaxpr(self) -> jex.Jaxpr: ...

    @property
    def consts(self) -> Sequence[Any]: ...


class Builder:
    """Collects primitive objects, types and forms over all regions of one trace."""

    def __init__(self) -> None:
        self.primitives: dict[str, Any] = {}
        self.forms = Forms()
        self._types: dict[tuple[tuple[int, ...], Any], TensorType] = {}
        self._of_aval: dict[int, tuple[Any, TensorType]] = {}
        self._parts: dict[Any, str] = {}
        self._last: tuple[Any, str] = (None, "")
        self._of_user: dict[Any, bool] = {}
        self._made: dict[tuple[Any, ...], Closed] = {}

    def graph(self, jaxpr: jex.Jaxpr, consts: Sequence[Any], caller: Any = None, part: str = "") -> Graph:
        return _Region(self).build(jaxpr, consts, caller, part)

    def part_of(self, eqn: jex.JaxprEqn, around: str) -> str:
        """What differentiation made of an equation, by JAX's stack of transformations."""
        if around == "backward":
            return around
        stack = eqn.source_info.name_stack
        # One object often serves many equations in a row.
        last, found = self._last
        if last is not stack:
            known = self._parts.get(stack)
            if known is None:
                names = str(stack)
                known = "backward" if "transpose(" in names else "forward" if "jvp(" in names else ""
                self._parts[stack] = known
            found = known
            self._last = stack, found
        return found or around

    def users(self, source: Any, caller: Any) -> Any:
        """Source of the user's code: JAX's own functions (jnp.linalg.cholesky) are traced apart."""
        if caller is None:
            return source
        # Equations of one line have equal tracebacks: what these say is looked up once.
        known = self._of_user.get(source.traceback)
        if known is None:
            known = self._of_user[source.traceback] = bool(summary(source))
        return source if known else caller

    def one_answer(self, eqn: jex.JaxprEqn) -> Closed:
        """`with_one_answer` of a `while`."""
        return self._once(eqn, lambda: with_one_answer(eqn.params))

    def lowered(self, eqn: jex.JaxprEqn) -> Closed:
        """What a primitive that can say so is made of, see `HIGH`."""
        primitive: Any = eqn.primitive

        def made_of(*args: Any) -> Any:
            return primitive.to_lojax(*args, **eqn.params)

        return self._once(eqn, lambda: jax.make_jaxpr(made_of)(*[atom.aval for atom in eqn.invars]))

    def _once(self, eqn: jex.JaxprEqn, make: Callable[[], Any]) -> Closed:
        """What takes an equation's place; one object for equal ones, whose forms are then equal, too."""
        key = (eqn.primitive.name, *eqn.params.values(), *[atom.aval for atom in eqn.invars])
        found = self._made.get(key)
        if found is None:
            from jax._src import source_info_util  # (no public name for it)

            # It stands in the user's line that has the equation.
            with source_info_util.user_context(eqn.source_info.traceback):
                found = self._made[key] = make()
        return found

    def type_of(self, aval: Any) -> TensorType:
        """One object for equal types: comparing them is then comparing addresses."""
        known = self._of_aval.get(id(aval))
        if known is not None:
            return known[1]
        key = (aval.shape, aval.dtype)
        found = self._types.get(key)
        if found is None:
            found = self._types[key] = TensorType(tuple(aval.shape), str(aval.dtype))
        # What is remembered by identity is kept, lest something else comes to have it.
        self._of_aval[id(aval)] = aval, found
        return found


#: An equation as it was met, values being numbers until it is known which of them are needed: name,
#: parameters, operands, results, regions, source and part. (A plain tuple: of a record the making is felt.)
_Met: TypeAlias = tuple[
    str, Mapping[str, Any], tuple[int | Literal, ...], tuple[int, ...], tuple[Graph, ...], Any, str
]


class _Region:
    """Builds the graph of one jaxpr, inlining calls and dropping what nobody needs."""

    def __init__(self, builder: Builder) -> None:
        self.builder = builder
        self.types: list[TensorType] = []
        self.constants: dict[int, Any] = {}
        self.by_identity: dict[int, int] = {}
        self.met: list[_Met] = []
        #: Of every value, whether the backward part makes it.
        self.backward: list[bool] = []
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
        self.backward.append(False)
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
        builder, types, met, backward = self.builder, self.types, self.met, self.backward
        literal, type_of, part_of = jex.Literal, builder.type_of, builder.part_of
        for eqn in jaxpr.eqns:
            name, results = eqn.primitive.name, eqn.outvars
            operands = tuple([self.read(a, env) if isinstance(a, literal) else env[a] for a in eqn.invars])
            part, before = part_of(eqn, around), len(types)
            if part == "backward" and around != part:
                # What JAX hands over is read off its own equations, calls as a whole: the backward part of a
                # call may not need all that the forward part kept for it.
                kept = [atom for atom in operands if isinstance(atom, int) and not backward[atom]]
                self.residuals.update(dict.fromkeys(kept))
            called = eqn.params[CALLS[name]] if name in CALLS else None
            if name == SOLVE:
                called, operands = _solver(eqn, operands)
            if name == "while" and answers(eqn.params):
                called = builder.one_answer(eqn)
            if name == HIGH and not eqn.effects:
                called = builder.lowered(eqn)
            if called is not None:
                inner, consts = _opened(called)
                inner_env: dict[jex.Var, int | Literal] = dict(zip(inner.invars, operands, strict=True))
                self.bind_constants(inner, consts, inner_env)
                self.walk(inner, inner_env, builder.users(eqn.source_info, caller), part)
                env.update(
                    zip(eqn.outvars, (self.read(atom, inner_env) for atom in inner.outvars), strict=True)
                )
                if part == "backward":
                    backward[before:] = [True] * (len(types) - before)
                continue
            source = eqn.source_info if caller is None else builder.users(eqn.source_info, caller)
            regions: tuple[Graph, ...] = ()
            if name in REGIONS:
                regions = tuple([builder.graph(r.jaxpr, r.consts, source, part) for r in _regions(eqn)])
            if not regions and eqn.effects:
                raise TraceError(
                    place=f"{name} at {summary(source) or UNKNOWN_LINE}",
                    reason="it has side effects, which cannot be distributed",
                    remedy="Return what the Ref holds in the end, in place of writing to it"
                    if name in MUTABLE
                    else "Remove the print, callback or effect from the training step",
                )
            if name == "rng_uniform":
                raise TraceError(
                    place=f"{name} at {summary(source) or UNKNOWN_LINE}",
                    reason="it draws anew on every device, so that replicas would disagree",
                    remedy="Use jax.random with a key",
                )
            if name in DISTRIBUTED:
                raise TraceError(
                    place=f"{name} at {summary(source) or UNKNOWN_LINE}",
                    reason="it says what each device does, and a plan is made for a single-device step",
                    remedy=f"Call what is in the {name} without it: the plan distributes it",
                )
            builder.primitives.setdefault(name, eqn.primitive)
            for number, var in enumerate(results, before):
                types.append(type_of(var.aval))
                backward.append(part == "backward")
                env[var] = number
            outputs = tuple(range(before, len(types)))
            if name == "optimization_barrier":
                # A barrier of several operands is one of each: they may be placed differently.
                for a, v in zip(operands, outputs, strict=True):
                    met.append((name, eqn.params, (a,), (v,), regions, source, part))
            else:
                met.append((name, eqn.params, operands, outputs, regions, source, part))

    def needed(self, inputs: Sequence[int], outputs: Sequence[int | Literal]) -> Graph:
        """The graph without equations and constants nobody needs, its values numbered densely."""
        types, used = self.types, [False] * len(self.types)
        for atom in outputs:
            if isinstance(atom, int):
                used[atom] = True
        kept: list[_Met] = []
        for met in reversed(self.met):
            if True in [used[number] for number in met[3]]:
                kept.append(met)
                for atom in met[2]:
                    if type(atom) is int:
                        used[atom] = True
        kept.reverse()
        constants = [number for number in self.constants if used[number]]
        order = [*inputs, *constants, *chain.from_iterable([met[3] for met in kept])]
        new = list(map(Value, range(len(order)), [types[number] for number in order]))
        values = dict(zip(order, new, strict=True))

        def name(atom: int | Literal) -> Atom:
            return atom if isinstance(atom, Literal) else values[atom]

        equations: list[Equation] = []
        form_of, made = self.builder.forms.of, len(inputs) + len(constants)
        for index, (primitive, params, operands, results, regions, source, part) in enumerate(kept):
            ins = tuple([values[atom] if type(atom) is int else name(atom) for atom in operands])
            first, made = made, made + len(results)
            outs = tuple(new[first:made])
            form = form_of(primitive, params, ins, outs)
            equations.append(Equation(index, form, ins, outs, regions, source, part))
        return Graph(
            tuple(new[: len(inputs)]),
            {values[number]: self.constants[number] for number in constants},
            tuple(equations),
            tuple([name(atom) for atom in outputs]),
            residuals=tuple([(types[number], values.get(number)) for number in self.residuals]),
        )


def _solver(
    eqn: jex.JaxprEqn, operands: tuple[int | Literal, ...]
) -> tuple[Closed, tuple[int | Literal, ...]]:
    """What a linear solve calls, and with which of its operands: constants of its own, right-hand sides."""
    matvec, vecmat, solve, transposed = eqn.params["const_lengths"]
    first, last = matvec + vecmat, matvec + vecmat + solve
    return eqn.params["jaxprs"].solve, (*operands[first:last], *operands[last + transposed :])


def _opened(called: Any) -> tuple[jex.Jaxpr, Sequence[Any]]:
    """A jaxpr and what it closes over; what a checkpoint calls closes over nothing."""
    return getattr(called, "jaxpr", called), getattr(called, "consts", ())


def _regions(eqn: jex.JaxprEqn) -> list[Closed]:
    found: list[Closed] = []
    for key in REGIONS.get(eqn.primitive.name, ()):
        region = eqn.params[key]
        found.extend(region if isinstance(region, tuple) else (region,))
    return found


def source_line(equation: Equation) -> str:
    """`file:line (function)` of the user's code that made an equation, relative to the working directory."""
    return source_text(equation.source)


def source_text(source: Any) -> str:
    """`source_line` of JAX's source information."""
    return summary(source).removeprefix(f"{Path.cwd()}/") or UNKNOWN_LINE


def summary(source: Any) -> str:
    """`file:line (function)` of JAX's source information, "" without one, or without a frame of the user's.

    What a rewriting adds to a step (`ir/rewrites`) stands in no line of it.
    """
    if source is None:
        return ""
    from jax._src import source_info_util  # (no public name for it)

    found = source_info_util.summarize(source)
    return "" if found.startswith(_REWRITES) else found
