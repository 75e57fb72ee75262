"""What samples are made of: sizes and numbers that differ between two variants."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import primitives

Program = tuple[Callable[..., Any], tuple[Any, ...]]


@dataclass
class Draw:
    """Sizes and numbers of one variant of a sample."""

    variant: int
    rng: np.random.Generator = field(init=False)

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(self.variant + 1)

    def n(self, first: int, second: int) -> int:
        """A size that differs between the variants."""
        return (first, second)[self.variant]

    @property
    def ab(self) -> tuple[int, int]:
        return self.n(5, 7), self.n(4, 6)

    def floats(self, *shape: int, low: float = -4, high: float = 4, dtype: Any = jnp.float32) -> jax.Array:
        """Multiples of 1/8, of both signs, none of them zero: sums of them are exact."""
        drawn = self.rng.integers(int(low * 8), int(high * 8), shape, endpoint=True) / 8
        drawn = np.asarray(np.where(drawn == 0, 0.5, drawn))
        if low < 0 < high:
            # Whatever is drawn, signs differ: within a tensor, and between the variants of a scalar.
            sign = np.where(np.arange(drawn.size) % 2 == self.variant, -1, 1)
            drawn = np.abs(drawn) * self.rng.permutation(sign).reshape(shape)
        # Converted by numpy: JAX would compile that for every shape.
        return jnp.asarray(np.asarray(drawn, dtype), dtype)

    def ints(self, *shape: int, low: int = -9, high: int = 9, dtype: Any = jnp.int32) -> jax.Array:
        return jnp.asarray(np.asarray(self.rng.integers(low, high, shape, endpoint=True), dtype), dtype)

    def bits(self, *shape: int, dtype: Any = jnp.int32) -> jax.Array:
        """Integers over the whole range, at which arithmetic wraps around."""
        info = np.iinfo(dtype)
        return jnp.asarray(self.rng.integers(info.min, info.max, shape, dtype=dtype, endpoint=True), dtype)

    def bools(self, *shape: int) -> jax.Array:
        return jnp.asarray(self.rng.random(shape) < 0.5 if shape else self.variant == 1, bool)

    def complexes(self, *shape: int) -> jax.Array:
        return self.floats(*shape) + 1j * self.floats(*shape)

    def keys(self, *shape: int) -> jax.Array:
        return jax.random.wrap_key_data(self.bits(*shape, 2, dtype=jnp.uint32))


@dataclass(frozen=True)
class Sample:
    """A program in which `primitive` occurs."""

    primitive: str
    make: Callable[[Draw], Program]
    exact: bool = False

    def __str__(self) -> str:
        return f"{self.primitive}:{self.make.__name__}"


SAMPLES: list[Sample] = []

#: Primitives with rules that only later versions of JAX have (mulhi from 0.10.2 on, polynomial from 0.12).
_LATER = "log2", "mulhi", "one_minus_square", "polynomial"

#: The same, and stages, which devices run together: `tests/rewriting/test_stages.py` has these.
ABSENT = frozenset(("stages", *(name for name in _LATER if not hasattr(lax, name))))


def sample(*names: str) -> Callable[[Callable[[Draw], Program]], Callable[[Draw], Program]]:
    """Register a sample for the named primitives."""

    def add(make: Callable[[Draw], Program]) -> Callable[[Draw], Program]:
        SAMPLES.extend(Sample(name, make) for name in names)
        return make

    return add


def add(name: str, title: str, make: Callable[[Draw], Program], exact: bool = False) -> None:
    make.__name__ = title
    SAMPLES.append(Sample(name, make, exact))


def bind(name: str, **params: Any) -> Callable[..., Any]:
    return lambda *args: getattr(primitives, f"{name}_p").bind(*args, **params)


reals, whole, bits = Draw.floats, Draw.ints, Draw.bits
booleans, complexes = Draw.bools, Draw.complexes


def fine(draw: Draw, *shape: int) -> jax.Array:
    """Multiples of 1/64, which 16 bits cannot hold."""
    return draw.floats(*shape) + draw.floats(*shape) / 8
