"""Single kernels to time, as segments of a plan run them: compiled, on this process's device."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shardwright.backends.measuring.step_cases import drawn, is_piece, piece

#: Copies of a kernel in one compiled function: what starts the function is shared among them.
COPIES = 4
#: Operands and results of the function that "start" starts.
OPERANDS = 32


@dataclass(frozen=True, slots=True)
class KernelCase:
    """A kernel.

    Attributes:
        op: "dispatch" (nothing but the start of a compiled function), "start" (the same with many operands,
            where other things fill the caches), "matmul", "matmul:tn" (the first operand lies as (k, m): a
            weight's gradient is a sum over samples), "matmul:nt" (the second as (n, k)), "elementwise:NAME",
            "reduction", or a piece of a training step (`shardwright.backends.measuring.step_cases`).
        shape: () for those two; (b, m, k, n) of a product (b, m, k) @ (b, k, n); (rows, width) of elementwise
            kernels and reductions; the sizes of a piece.
        dtype: of the operands.
        precision: of a product, as JAX spells it.
    """

    op: str
    shape: tuple[int, ...]
    dtype: str = "float32"
    precision: str | None = None


#: Loops of two operations: one alone is not compiled as the loops of a step are, and may be slower.
ELEMENTWISE: Mapping[str, Callable[[Any], Any]] = {
    "add": lambda x: x + 1,
    "mul": lambda x: x * x + 1,
    "div": lambda x: 1 / (x + 2),
    "exp": lambda x: jnp.exp(x) + 1,
    "tanh": lambda x: jnp.tanh(x) + 1,
    "erf": lambda x: jax.lax.erf(x) + 1,
    "sqrt": lambda x: jnp.sqrt(x) + 1,
    # One loop of many operations: what arithmetic takes once memory is paid for.
    "chain": lambda x: jnp.tanh(jnp.exp(-x * x) * 0.5 + x) / (jnp.sqrt(x + 2) + 1),
}


def operation(case: KernelCase) -> Callable[..., Any]:
    """The kernel as a function of its operands."""

    def kernel(*args: Any) -> Any:
        if case.op == "dispatch":
            return args[0] + 1
        if case.op.startswith("matmul"):
            # Operands lie as they do: a transposition would be an operation of its own.
            spec = {"matmul": "...mk,...kn", "matmul:tn": "...km,...kn", "matmul:nt": "...mk,...nk"}[case.op]
            return jnp.einsum(f"{spec}->...mn", *args, precision=case.precision)
        if case.op == "reduction":
            return jnp.sum(args[0], axis=1)
        return ELEMENTWISE[case.op.partition(":")[2]](args[0])

    return kernel


def copies(case: KernelCase) -> int:
    """How often the kernel runs in one call of `compiled(case)`."""
    return 1 if case.op in ("dispatch", "start") or is_piece(case.op) else COPIES


def is_cold(case: KernelCase) -> bool:
    """Whether it finds the caches full of other things, as a segment of a plan does."""
    return case.op == "start" or is_piece(case.op)


def compiled(case: KernelCase) -> Callable[[], None]:
    """A function that runs the kernel `copies(case)` times on the default device and waits for it."""
    if is_piece(case.op):
        function, arguments = piece(case.op, case.shape)
        return _waiting(jax.jit(function), *arguments)
    if case.op == "start":
        return _waiting(jax.jit(negatives), [jnp.zeros(())] * OPERANDS)
    # Operands of their own, or the compiler would find the copies to be one.
    operands = [
        [
            jnp.asarray(drawn(np.random.default_rng(seed).random, shape), dtype=case.dtype)
            for shape in operand_shapes(case)
        ]
        for seed in range(copies(case))
    ]

    kernel = operation(case)

    def repeated(sets: Sequence[Sequence[Any]]) -> Any:
        results: list[Any] = []
        for args in sets:
            # The barrier keeps them from becoming one loop.
            result, sets = jax.lax.optimization_barrier((kernel(*args), sets))
            results.append(result)
        return results

    return _waiting(jax.jit(repeated), operands)


def negatives(operands: Sequence[Any]) -> list[Any]:
    """Next to no work on any number of operands."""
    return [-x for x in operands]


def _waiting(function: Callable[..., Any], *arguments: Any) -> Callable[[], None]:
    """A call of the compiled function that waits for its results; made once here, which compiles it."""

    def run() -> None:
        jax.block_until_ready(function(*arguments))

    run()
    return run


def operand_shapes(case: KernelCase) -> list[tuple[int, ...]]:
    """Shapes of its operands."""
    if case.op.startswith("matmul"):
        b, m, k, n = case.shape
        left = (k, m) if case.op == "matmul:tn" else (m, k)
        right = (n, k) if case.op == "matmul:nt" else (k, n)
        return [(b, *left), (b, *right)] if b > 1 else [left, right]
    return [case.shape]
