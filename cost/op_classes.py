"""Classes of operations that a processor carries out at rates of their own.

A roofline with one rate for products and one for everything else misses what a compiled step does on a CPU:
a weight's gradient has its first operand rearranged before it is multiplied, and an exponential takes several
times as long as an addition. `shardwright calibrate` measures a rate for each class; a type that was not
measured has one rate for products and one for the rest.
"""

from __future__ import annotations

from typing import Any, cast

from shardwright.ir.graph import Equation
from shardwright.ir.registry import registry

#: Classes with what is in them, as documentation and error messages list them.
OP_CLASSES = {
    "product": "matrix products",
    "batched_product": "many small matrix products at once",
    "convolution": "convolutions",
    "transcendental": "exponentials, logarithms, roots, powers and their like",
    "reduction": "sums, maxima and minima over some dimensions",
    "total": "reductions to a single number",
    "transposition": "elements of the first operand of a product that lies contracted dimension first",
    "other": "all other operations",
}
#: Trips to host memory and back: no operations, and none of the rates above.
HOST = "host"
PRODUCTS = frozenset({"product", "batched_product", "convolution"})

_TRANSCENDENTAL = frozenset(
    {
        *("exp", "exp2", "expm1", "log", "log1p", "logistic", "pow", "cbrt", "sqrt", "rsqrt"),
        *("sin", "cos", "tan", "asin", "acos", "atan", "atan2"),
        *("sinh", "cosh", "tanh", "asinh", "acosh", "atanh"),
        *("erf", "erfc", "erf_inv", "lgamma", "digamma"),
    }
)


def op_class(equation: Equation) -> str:
    """The class of an equation, one of `OP_CLASSES`, or `HOST`."""
    op = registry().get(equation.primitive)
    kind = "unknown" if op is None else op.kind
    if kind == "contraction":
        return _product(equation)
    if kind == "host":
        return HOST
    if equation.primitive in _TRANSCENDENTAL:
        return "transcendental"
    if kind == "reduction":
        return "total" if all(tensor.size == 1 for tensor in equation.output_types) else "reduction"
    return "other"


def _product(equation: Equation) -> str:
    if equation.primitive == "conv_general_dilated":
        return "convolution"
    if equation.primitive != "dot_general":
        return "product"
    (_, _), (batch, _) = cast(Any, equation.params)["dimension_numbers"]
    return "batched_product" if batch else "product"


def turned_elements(equation: Equation) -> int:
    """Elements of the first operand of a product if it lies contracted dimension first, and no batch does."""
    if equation.primitive != "dot_general":
        return 0
    (contracted, _), (batch, _) = cast(Any, equation.params)["dimension_numbers"]
    left = equation.input_types[0]
    rows = [d for d in range(left.rank) if d not in contracted]
    return left.size if rows and contracted and not batch and min(contracted) < max(rows) else 0
