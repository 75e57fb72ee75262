"""A contraction as the kernel model sees it: b products of m×k by k×n, and which of the four is sharded.

A `dot_general` says so itself. A convolution is the product that an implicit GEMM computes: a row for every
position of the result, a column for every output feature, and the window times the input features between.
"""

from __future__ import annotations

import math
from typing import Any, TypeAlias, cast

from shardwright.ir.graph import Equation, TensorType
from shardwright.ir.placement import Placement, Shard
from shardwright.ir.rules import Signature

#: b, m, n, k.
Sizes: TypeAlias = tuple[int, int, int, int]
B, M, N, K = range(4)


def product_sizes(equation: Equation, flop: float) -> Sizes | None:
    """Sizes of the whole, unsharded product of `flop` operations; None if this is none, or an empty one."""
    if flop <= 0 or equation.primitive not in ("dot_general", "conv_general_dilated"):
        return None
    left, right = equation.input_types
    params = cast(Any, equation.params)
    if equation.primitive == "dot_general":
        (contracted, _), (batch, _) = params["dimension_numbers"]
        b = math.prod(left.shape[d] for d in batch)
        k = math.prod(left.shape[d] for d in contracted)
        return b, left.size // (b * k), right.size // (b * k), k
    # (out features, in features, window)
    features, fan_in, *window = params["dimension_numbers"].rhs_spec
    groups = max(params["feature_group_count"], params["batch_group_count"])
    n = right.shape[features] // groups
    k = right.shape[fan_in] * math.prod(right.shape[d] for d in window)
    # What dilation fills with zeros is neither counted in `flop` nor multiplied.
    return groups, max(round(flop / (2 * groups * n * k)), 1), n, k


def like_linear(equation: Equation) -> bool:
    """Whether the contracted dimension lies last in both operands, as in PyTorch's Linear."""
    if equation.primitive != "dot_general":
        return False
    (contracted, _) = cast(Any, equation.params)["dimension_numbers"]
    return all(tensor.rank - 1 in dims for tensor, dims in zip(equation.input_types, contracted, strict=True))


def sharded_size(signature: Signature) -> int | None:
    """Which of b, m, n, k a signature cuts; None where it cuts none.

    What is sharded in both operands is contracted or, if the result is sharded too, a batch; what is sharded
    in one operand is its own side of the result.
    """
    left, right = (isinstance(p, Shard) for p in signature.ins)
    if not (left or right):
        return None
    if not isinstance(signature.outs[0], Shard):
        return K
    return B if left and right else M if left else N


def even_share(tensors: tuple[TensorType, ...], placements: tuple[Placement, ...], devices: int) -> float:
    """The share of a device that holds as many units of the cut axis as any, if all have the same ratio."""
    for tensor, placement in zip(tensors, placements, strict=True):
        if isinstance(placement, Shard):
            units = tensor.shape[placement.dim] // placement.unit
            return math.ceil(units / devices) / units if units else 1.0
    return 1.0
