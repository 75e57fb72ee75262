"""The traced step as data: values, equations and regions. No JAX object is needed to read it.

    graph    ::= inputs (value*) constants (value*) equations (equation*) outputs (atom*)
    equation ::= outputs (value*) = form(atom*; regions (graph*))
    form     ::= primitive, params, types of operands and results
    atom     ::= value | literal scalar

Equations of equal form share one `Form` object: twelve equal layers have the forms of one, and what
follows from a form alone (`per_form`) is worked out once.

Values are numbered in order of definition; a value is named by its number in the printed program.
A region (the body of a scan, the branches of a cond, ...) is a graph of its own with its own numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, wraps
from itertools import chain
from typing import Any, TypeAlias, TypeVar, cast

import numpy as np

from shardwright.ir.record import record

#: Bytes of an element of dtypes numpy does not know.
_EXTENDED_BYTES = {"bfloat16": 2, "key<fry>": 8, "int4": 1, "uint4": 1, "int2": 1, "uint2": 1}


@cache
def dtype_bytes(dtype: str) -> int:
    """Bytes of one element, also of JAX's extended dtypes (a typed PRNG key, bfloat16, float8, 4 bit)."""
    if dtype in _EXTENDED_BYTES:
        return _EXTENDED_BYTES[dtype]
    if dtype.startswith(("float8", "float4")):
        return 1
    if dtype.startswith("key<"):
        return 16
    return np.dtype(dtype).itemsize


@dataclass(frozen=True, slots=True)
class TensorType:
    """Shape and dtype (`float32`, `bfloat16`, `key<fry>`, ...) of a value."""

    shape: tuple[int, ...]
    dtype: str
    _nbytes: int = field(default=-1, init=False, repr=False, compare=False)

    def __hash__(self) -> int:
        return hash(self.shape)

    @property
    def rank(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        found = self._nbytes
        if found < 0:  # asked for again and again
            found = self.size * dtype_bytes(self.dtype)
            object.__setattr__(self, "_nbytes", found)
        return found

    @property
    def is_float(self) -> bool:
        return "float" in self.dtype

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


@record(frozen=True, slots=True, eq=False)
class Value:
    """One tensor of the single-device program. Compared by identity."""

    index: int
    type: TensorType

    def __str__(self) -> str:
        return f"%{self.index}"

    __repr__ = __str__


@record(frozen=True, slots=True, eq=False)
class Literal:
    """A scalar written into the program."""

    value: Any
    type: TensorType

    def __str__(self) -> str:
        return str(self.value)


Atom: TypeAlias = Value | Literal


@record(frozen=True, slots=True, eq=False)
class Form:
    """What an equation does, whatever the tensors: all that rules and prices look at. Made by `Forms`.

    Attributes:
        primitive: name of the primitive.
        params: its own parameters.
        input_types, output_types: of the operands and results.
        memo: what `per_form` functions found.
    """

    primitive: str
    params: Mapping[str, Any]
    input_types: tuple[TensorType, ...]
    output_types: tuple[TensorType, ...]
    memo: dict[object, Any] = field(default_factory=dict[object, Any], repr=False)


class Forms:
    """Makes forms, one object for equal content."""

    def __init__(self) -> None:
        self._made: dict[Hashable, Form] = {}

    def of(
        self, primitive: str, params: Mapping[str, Any], ins: Sequence[Atom], outs: Sequence[Value]
    ) -> Form:
        """The form of an equation; one of its own where a parameter or literal cannot be compared."""
        input_types = tuple([atom.type for atom in ins])
        output_types = tuple([value.type for value in outs])
        key = (primitive, *params, *params.values(), _literals(ins), input_types, output_types)
        try:
            found = self._made.get(key)
        except TypeError:  # a parameter without a hash, such as an array
            return Form(primitive, params, input_types, output_types)
        if found is None:
            found = self._made[key] = Form(primitive, params, input_types, output_types)
        return found

    def adopt(self, equations: Iterable[Equation]) -> None:
        """Have equal equations share the forms of these, which were made elsewhere."""
        for form, ins in {equation.form: equation.inputs for equation in equations}.items():
            types = form.input_types, form.output_types
            key = (form.primitive, *form.params, *form.params.values(), _literals(ins), *types)
            with suppress(TypeError):  # see `of`
                self._made.setdefault(key, form)


def _literals(ins: Sequence[Atom]) -> tuple[Any, ...]:
    """What an equation says of its operands' values: nothing where all are tensors."""
    if Literal not in map(type, ins):
        return ()
    return tuple([atom.value if type(atom) is Literal else None for atom in ins])


@record(frozen=True, slots=True, eq=False)
class Equation:
    """One primitive applied to atoms.

    `regions` are the graphs of a control-flow primitive; `source` is JAX's source information, read by
    `trace.source_line`. `part` says what differentiation made of it: "forward", "backward" or "" (neither).
    `copy` numbers, from 1 on, the stretch of the forward part that this is computed again for (0: none; see
    `shardwright.ir.rewrites.recompute`); such an equation is not run before the value `after` is there, and
    is not compiled together with what it repeats.
    """

    index: int
    form: Form
    inputs: tuple[Atom, ...]
    outputs: tuple[Value, ...]
    regions: tuple[Graph, ...] = ()
    source: Any = None
    part: str = ""
    copy: int = 0
    after: Value | None = None
    input_values: tuple[Value, ...] = field(init=False)

    def __post_init__(self) -> None:
        # One object where there is no literal.
        values = inputs = self.inputs
        if Literal in map(type, inputs):
            values = tuple([a for a in inputs if type(a) is Value])
        object.__setattr__(self, "input_values", values)

    @property
    def primitive(self) -> str:
        return self.form.primitive

    @property
    def params(self) -> Mapping[str, Any]:
        return self.form.params

    @property
    def input_types(self) -> tuple[TensorType, ...]:
        return self.form.input_types

    @property
    def output_types(self) -> tuple[TensorType, ...]:
        return self.form.output_types

    def __str__(self) -> str:
        ins = ", ".join(map(str, self.inputs))
        outs = ", ".join(f"{v}:{v.type}" for v in self.outputs)
        return f"{outs} = {self.primitive}({ins})"


_T = TypeVar("_T")


def per_form(function: Callable[[Equation], _T]) -> Callable[[Equation], _T]:
    """Decorates a function of an equation that depends on its form alone: worked out once per form."""

    @wraps(function)
    def remembered(equation: Equation) -> _T:
        memo = equation.form.memo
        try:
            return memo[function]
        except KeyError:
            found = memo[function] = function(equation)
            return found

    return remembered


@dataclass(frozen=True, slots=True, eq=False)
class Graph:
    """A straight-line program over values.

    Attributes:
        inputs: values that the caller provides, with `input_names` such as `params['wte']`.
        constants: arrays the function closed over, by value; they are held by every device at start.
        equations: in execution order.
        outputs: what the program returns.
        state: output position -> input position of tensors that must come back placed as they went in.
        donated: whether the caller gives state away: what continues it may take its memory.
        residuals: what the forward part keeps for the backward part, beside inputs and constants: types, and
            values where a backward equation needs it indeed.
        compiler: whose: XLA's for "cpu", "gpu" or "gpu-float32". What is in memory depends on it alone.
        memo: what `per_graph` functions found.
    """

    inputs: tuple[Value, ...]
    constants: Mapping[Value, Any]
    equations: tuple[Equation, ...]
    outputs: tuple[Atom, ...]
    input_names: tuple[str, ...] = ()
    output_names: tuple[str, ...] = ()
    state: Mapping[int, int] = field(default_factory=dict)
    residuals: tuple[tuple[TensorType, Value | None], ...] = ()
    donated: bool = False
    compiler: str = "cpu"
    memo: dict[object, Any] = field(default_factory=dict[object, Any], repr=False)

    def values(self) -> tuple[Value, ...]:
        """All values in order of definition."""
        return _values(self)

    def all_equations(self) -> tuple[Equation, ...]:
        """Equations of this graph and, depth first, of every region in it."""
        return _all_equations(self)

    def __str__(self) -> str:
        lines = ["inputs " + ", ".join(f"{v}:{v.type}" for v in self.inputs)]
        lines += [f"  {e.index}: {e}" for e in self.equations]
        return "\n".join([*lines, "outputs " + ", ".join(map(str, self.outputs))])


def per_graph(function: Callable[[Graph], _T]) -> Callable[[Graph], _T]:
    """Decorates a function of a graph alone: worked out once per graph."""

    @wraps(function)
    def remembered(graph: Graph) -> _T:
        if function not in graph.memo:
            graph.memo[function] = function(graph)
        return cast(_T, graph.memo[function])

    return remembered


@per_graph
def _values(graph: Graph) -> tuple[Value, ...]:
    made = chain.from_iterable([equation.outputs for equation in graph.equations])
    return (*graph.inputs, *graph.constants, *made)


@per_graph
def _all_equations(graph: Graph) -> tuple[Equation, ...]:
    found: list[Equation] = []
    for equation in graph.equations:
        found.append(equation)
        for region in equation.regions:
            found.extend(region.all_equations())
    return tuple(found)


@per_graph
def value_types(graph: Graph) -> Mapping[int, TensorType]:
    """Type of every value of a graph, by its index."""
    return {value.index: value.type for value in graph.values()}


def value_type(graph: Graph, index: int) -> TensorType:
    """Type of value `index`."""
    return value_types(graph)[index]
