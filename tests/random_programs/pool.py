"""Values of a random program, what picks them, and the table of its operations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


@dataclass
class Entry:
    """A value of the program; `whole`: its floats are whole numbers; `most`: none is larger in magnitude."""

    x: Any
    whole: bool
    most: float

    @property
    def shape(self) -> tuple[int, ...]:
        return self.x.shape

    @property
    def float(self) -> bool:
        return jnp.issubdtype(self.x.dtype, jnp.floating)

    @property
    def int(self) -> bool:
        return jnp.issubdtype(self.x.dtype, jnp.integer)

    @property
    def bool(self) -> bool:
        return self.x.dtype == jnp.bool_

    @property
    def key(self) -> bool:
        return jnp.issubdtype(self.x.dtype, jax.dtypes.prng_key)


class Pool:
    """Values so far, and the numbers that decide which of them a step takes and how."""

    def __init__(self, entries: Sequence[Entry]) -> None:
        self.entries = list(entries)
        self.picks: list[int] = []

    def number(self, below: int) -> int:
        """The next number, below `below`."""
        first = self.picks.pop(0) if self.picks else 0
        return first % max(below, 1)

    def any(self, *wanted: Callable[[Entry], bool]) -> Entry:
        """A value for which all of `wanted` hold, a recent one rather than an old one."""
        found = [e for e in self.entries if all(w(e) for w in wanted)]
        if not found:
            raise LookupError
        return found[-1 - self.number(len(found))]

    def float(self, *wanted: Callable[[Entry], bool], most: float = 2.0**20) -> Entry:
        found = self.any(lambda e: e.float, *wanted)
        return found if found.most <= most else Entry(lax.rem(found.x, jnp.float32(7)), found.whole, 7.0)

    def whole(self, *wanted: Callable[[Entry], bool], most: float = 2.0**20) -> Entry:
        return self.float(lambda e: e.whole, *wanted, most=most)

    def dim(self, e: Entry) -> int:
        return self.number(e.x.ndim)


def tensor(e: Entry) -> bool:
    return e.x.ndim > 0 and e.x.size > 0


def matrix(e: Entry) -> bool:
    return e.x.ndim >= 2 and e.x.size > 0


def small(e: Entry) -> bool:
    return e.x.size <= 300


def integer(x: Any) -> Entry:
    return Entry(x, True, 2.0**31)


#: Each takes values from the pool and gives one more, or raises LookupError where none fits.
Op = Callable[[Pool], Entry]
OPS: dict[str, Op] = {}


def op(make: Op) -> Op:
    OPS[make.__name__] = make
    return make


def fits(e: Entry, other: Entry) -> bool:
    try:
        return np.prod(np.broadcast_shapes(e.shape, other.shape)) <= 300
    except ValueError:
        return False
