"""How far two results are apart, measured by what rounding may do: see `shardwright.backends.verify`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from shardwright.backends.layout import to_numpy
from shardwright.ir.graph import Equation, TensorType
from shardwright.ir.placement import reduction
from shardwright.ir.registry import registry, rule_of
from shardwright.ir.rules import Signature, letter_sizes

#: Units of the last place by which numbers smaller than normal differ for the order of a sum.
_LAST_PLACES = 8


def narrow(tensor: TensorType) -> bool:
    """Whether a tensor is a float of less than 32 bits."""
    return tensor.is_float and tensor.dtype not in ("float32", "float64")


def widened(array: NDArray[Any]) -> NDArray[Any]:
    """The numbers with 64 bits a part: differences of them are not rounded visibly."""
    return array.astype(np.complex128 if array.dtype.kind == "c" else np.float64)


def rounded(tensor: TensorType) -> bool:
    """Whether a tensor is of real or complex floats."""
    return tensor.is_float or tensor.dtype.startswith("complex")


def rel_error(got: Any, wanted: Any, tensor: TensorType, terms: float = 0.0) -> float:
    """max|got - wanted| / max(max|wanted|, terms); infinite where non-finite elements differ.

    Integers, booleans and keys: 0 if equal, else infinite. Differences below the smallest normal number of
    float32 count as none, and a few units of the last place of narrow floats that are smaller than normal.
    """
    a, b = to_numpy(got), to_numpy(wanted)
    if not rounded(tensor):
        return 0.0 if np.array_equal(a, b) else np.inf
    a, b = widened(a), widened(b)
    finite = np.isfinite(a) & np.isfinite(b)
    if not np.array_equal(a[~finite], b[~finite], equal_nan=True):
        return np.inf
    difference = float(np.max(np.abs(a[finite] - b[finite]), initial=0.0))
    info = jnp.finfo(tensor.dtype)
    last = max(float(jnp.finfo("float32").tiny), _LAST_PLACES * float(info.smallest_subnormal))
    if difference < min(float(info.tiny), last):
        return 0.0
    return difference / max(float(np.max(np.abs(b[finite]), initial=0.0)), terms, difference * 1e-30)


def sums(equation: Equation, signature: Signature) -> bool:
    """Whether results are sums that may cancel; of other linear operations |result| is op(|inputs|)."""
    rule = rule_of(equation)
    if not rule.linear or not all(map(rounded, equation.output_types)):
        return False
    op = registry().get(equation.primitive)
    elementwise = op is not None and op.kind in ("elementwise", "movement") and rule.linear != "joint"
    return not elementwise or any(reduction(p) == "sum" for p in signature.ins)


def term_count(equation: Equation) -> int:
    """How many terms each element of the result sums: the sizes of the contracted letters."""
    rule = rule_of(equation)
    sizes = letter_sizes(rule, equation)
    kept = {letter for axes in rule.parsed[1] for axis in axes for letter in axis.letters}
    return math.prod(size for letter, size in sizes.items() if letter not in kept)


def vanishing(equation: Equation) -> float:
    """What a sum may lack: processors may take terms for zero that are smaller than any normal number.

    Narrow floats are added up in float32, whose numbers are what counts.
    """
    smallest = (float(jnp.finfo(value.type.dtype).tiny) for value in equation.outputs)
    return term_count(equation) * min(float(jnp.finfo("float32").tiny), *smallest)


def magnitude(array: Any) -> Any:
    """|x| of what is rounded, in the dtype of x."""
    return jnp.abs(array).astype(array.dtype) if jnp.issubdtype(array.dtype, jnp.inexact) else array


def largest(array: Any) -> Any:
    """Largest finite absolute value."""
    return jnp.max(jnp.where(jnp.isfinite(array), jnp.abs(array), 0), initial=0).astype(jnp.float32)


def sensitivity(
    alone: Callable[[Sequence[Any]], list[Any]], args: Sequence[Any], whole: Sequence[Any], tolerance: float
) -> list[float]:
    """By scalar, how much it changes per relative change of the arguments, the most of a few changes.

    What is nearly zero because terms cancel is as right as one device's if that finds it for arguments
    nearly the same (backward error: Higham, section 1.5). The changes are a tenth of the tolerance: what
    they come to may be a few times smaller than what rounding does.
    """
    rng = np.random.default_rng(0)
    step = tolerance / 10
    changes = [0.0] * len(whole)
    for _ in range(3):
        near = [
            x * jnp.asarray(1 + step * rng.choice([-1, 1], x.shape), x.dtype)
            if jnp.issubdtype(x.dtype, jnp.inexact)
            else x
            for x in args
        ]
        for i, (other, wanted) in enumerate(zip(alone(near), whole, strict=True)):
            if jnp.issubdtype(wanted.dtype, jnp.inexact) and jnp.isfinite(other):
                changes[i] = max(changes[i], float(jnp.abs(other - wanted)) / step)
    return changes
