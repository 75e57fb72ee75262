"""Single kernels to time, as segments of a plan run them: compiled, on this process's device."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shardwright.backends.step_cases import is_piece, piece

#: Copies of a kernel in one compiled function: what starts the function is shared among them.
COPIES = 4


@dataclass(frozen=True, slots=True)
class KernelCase:
    """A kernel.

    Attributes:
        op: "dispatch", "matmul", "matmul:tn" (the first operand lies as (k, m): a weight's gradient is
            a sum over samples), "matmul:nt" (the second as (n, k)), "elementwise:NAME", "reduction", or a
            piece of a training step (`shardwright.backends.step_cases`).
        shape: () for dispatch; (b, m, k, n) of a product (b, m, k) @ (b, k, n); (rows, width) of elementwise
            kernels and reductions; the sizes of a piece.
        dtype: of the operands.
        precision: of a product, as JAX spells it.
    """

    op: str
    shape: tuple[int, ...]
    dtype: str = "float32"
    precision: str | None = None


ELEMENTWISE: Mapping[str, Callable[[Any], Any]] = {
    "add": lambda x: x + 1,
    "mul": lambda x: x * x,
    "div": lambda x: 1 / (x + 2),
    "exp": jnp.exp,
    "tanh": jnp.tanh,
    "erf": jax.lax.erf,
    "sqrt": jnp.sqrt,
    "select": lambda x: jnp.where(x > 0, x, 0),
    # One loop of many operations: what arithmetic takes once memory is paid for.
    "chain": lambda x: jnp.tanh(jnp.exp(-x * x) * 0.5 + x) / (jnp.sqrt(x + 2) + 1),
}
#: Operations per element.
CHAIN = 10


def copies(case: KernelCase) -> int:
    """How often the kernel runs in one call of `compiled(case)`."""
    return 1 if case.op == "dispatch" or is_piece(case.op) else COPIES


def compiled(case: KernelCase) -> Callable[[], None]:
    """A function that runs the kernel `copies(case)` times on the default device and waits for it."""
    if is_piece(case.op):
        function, arguments = piece(case.op, case.shape)
        return _waiting(jax.jit(function), *arguments)
    # Operands of their own, or the compiler would find the copies to be one.
    operands = [
        [
            jnp.asarray(np.random.default_rng(seed).uniform(size=shape), dtype=case.dtype)
            for shape in _operand_shapes(case)
        ]
        for seed in range(copies(case))
    ]

    def kernel(*args: Any) -> Any:
        if case.op == "dispatch":
            return args[0] + 1
        if case.op.startswith("matmul"):
            left, right = args
            left = left.mT if case.op == "matmul:tn" else left
            right = right.mT if case.op == "matmul:nt" else right
            return jnp.matmul(left, right, precision=case.precision)
        if case.op == "reduction":
            return jnp.sum(args[0], axis=1)
        return ELEMENTWISE[case.op.partition(":")[2]](args[0])

    def repeated(sets: Sequence[Sequence[Any]]) -> Any:
        results: list[Any] = []
        for args in sets:
            # The barrier keeps them from becoming one loop.
            result, sets = jax.lax.optimization_barrier((kernel(*args), sets))
            results.append(result)
        return results

    return _waiting(jax.jit(repeated), operands)


def _waiting(function: Callable[..., Any], *arguments: Any) -> Callable[[], None]:
    """A call of the compiled function that waits for its results; made once here, which compiles it."""

    def run() -> None:
        jax.block_until_ready(function(*arguments))

    run()
    return run


def _operand_shapes(case: KernelCase) -> list[tuple[int, ...]]:
    if case.op.startswith("matmul"):
        b, m, k, n = case.shape
        left = (k, m) if case.op == "matmul:tn" else (m, k)
        right = (n, k) if case.op == "matmul:nt" else (k, n)
        return [(b, *left), (b, *right)] if b > 1 else [left, right]
    return [case.shape]
