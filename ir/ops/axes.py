"""Small helpers to write axis strings for any rank."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from shardwright.ir.collectives import identity
from shardwright.ir.graph import TensorType
from shardwright.ir.placement import ReduceOp


def names(prefix: str, count: int) -> tuple[str, ...]:
    """`prefix0 prefix1 …`: one letter per dimension."""
    return tuple(f"{prefix}{i}" for i in range(count))


def blocked(letters: Iterable[str], dims: Iterable[int]) -> list[str]:
    """`letters` with those of `dims` marked as never sharded."""
    block = set(dims)
    return [f"{letter}!" if i in block else letter for i, letter in enumerate(letters)]


def string(inputs: Iterable[Iterable[str]], outputs: Iterable[Iterable[str]]) -> str:
    """The axis string with the given letters per operand and per result."""

    def side(operands: Iterable[Iterable[str]]) -> str:
        return ", ".join(" ".join(letters) or "." for letters in operands)

    return f"{side(inputs)} -> {side(outputs)}"


def aligned(tensor: TensorType, output: TensorType, letters: tuple[str, ...]) -> tuple[str, ...]:
    """Letters of an elementwise operand: the output's, `1` where a size-one dimension is stretched."""
    if tensor.rank == 0:
        return ()
    return tuple(
        letter if size == out else "1"
        for letter, size, out in zip(letters, tensor.shape, output.shape, strict=True)
    )


_WIDER = {
    "float16": ("float32", "float64"),
    "bfloat16": ("float32", "float64"),
    "float32": ("float64", "complex64", "complex128"),
    "float64": ("complex128",),
    "complex64": ("float32", "float64", "complex128"),
    "complex128": ("float64",),
}


def carries_sum(before: str, after: str) -> bool:
    """Whether a sum of `before` numbers is still exact when each of them has first become an `after`.

    Never into integers (they wrap at another width), booleans, or narrower floats (each would round).
    """
    return before == after or after in _WIDER.get(before, ())


def carries_order(before: str, after: str) -> bool:
    """Whether converting keeps the order, so that a maximum may be taken before or after it."""
    if before == after:
        return True
    if "key" in before + after or "complex" in before + after or after == "bool":
        return False
    if "float" in after:
        # Of what is too large for a float without infinities it makes no number, which wins over every other.
        return bool(np.isinf(identity("max", after)))
    # A float out of range, or no number, becomes whatever integer the device makes of it.
    return "float" not in before and np.can_cast(before, after, "safe")


def placing(dtype: str) -> ReduceOp | None:
    """How devices that hold some elements, and zero elsewhere, are put together; None if they cannot be."""
    if dtype.startswith("key<"):
        return None
    return "max" if dtype == "bool" else "sum"


def clamped(jax: Any, index: Any, limit: int) -> Any:
    """An index of any integer dtype, clamped to [0, limit], as integers from which offsets are subtracted."""
    top = min(limit, int(jax.numpy.iinfo(index.dtype).max))
    return jax.numpy.clip(index, 0, max(top, 0)).astype("int32" if limit < 2**31 else "int64")


def as_ints(values: Sequence[Any]) -> tuple[int, ...]:
    """Parameters as Python integers (JAX mixes in numpy ones)."""
    return tuple(int(value) for value in values)
