"""Operations that compute: of elements, sums, products, orders; of integers, bits and random numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from pool import OPS, Entry, Pool, fits, integer, matrix, op, tensor


def smooth(name: str, function: Callable[[Any], Any], most: float) -> None:
    """A float function that makes no whole numbers, bounded by `most`."""

    def make(pool: Pool) -> Entry:
        return Entry(function(jnp.clip(pool.float().x, -3, 3)), False, most)

    OPS[name] = make


smooth("exp", jnp.exp, 21.0)
smooth("tanh", jnp.tanh, 1.0)
smooth("logistic", jax.nn.sigmoid, 1.0)
smooth("rsqrt", lambda x: lax.rsqrt(1 + x * x), 1.0)
smooth("log1p", lambda x: jnp.log1p(jnp.abs(x)), 2.0)
smooth("erf", lax.erf, 1.0)
smooth("sin", jnp.sin, 1.0)
smooth("gelu", jax.nn.gelu, 3.0)


def exact(name: str, function: Callable[[Any], Any], grow: Callable[[float], float] = lambda m: m) -> None:
    """A float function of whole numbers alone, which it keeps whole."""

    def make(pool: Pool) -> Entry:
        e = pool.whole(most=2.0**10)
        return Entry(function(e.x), True, grow(e.most))

    OPS[name] = make


exact("negate", jnp.negative)
exact("absolute", jnp.abs)
exact("square", jnp.square, lambda m: m * m)
exact("floor", lambda x: jnp.floor(x / 2))
exact("round", lambda x: jnp.round(x / 4))
exact("clip", lambda x: lax.clamp(-2.0, x, 3.0))
exact("where", lambda x: jnp.where(x > 0, x, 2 * x + 1), lambda m: 2 * m + 1)
exact("stop", lambda x: lax.stop_gradient(lax.optimization_barrier(x)))
exact("half", lambda x: lax.rem(x, jnp.float32(9)).astype(jnp.bfloat16).astype(jnp.float32), lambda m: 9.0)


@op
def combine(pool: Pool) -> Entry:
    a = pool.float(most=2.0**9)
    b = pool.float(lambda e: fits(e, a), most=2.0**9)
    function, most = [
        (lax.add, a.most + b.most),
        (lax.sub, a.most + b.most),
        (lax.mul, a.most * b.most),
        (lax.max, a.most + b.most),
        (lax.min, a.most + b.most),
        (lambda x, y: x / (1 + jnp.abs(y)), a.most),
    ][which := pool.number(6)]
    x, y = jnp.broadcast_arrays(a.x, b.x) if which % 2 else (a.x, b.x)
    x, y = (x, y) if x.ndim == y.ndim and x.shape == y.shape else jnp.broadcast_arrays(x, y)
    return Entry(function(x, y), a.whole and b.whole and which < 5, most)


@op
def bias(pool: Pool) -> Entry:
    """A matrix and a vector along one of its dimensions, as layers add them."""
    a = pool.float(matrix)
    axis = pool.dim(a)
    b = pool.float(lambda e: e.shape == (a.shape[axis],))
    row = b.x.reshape([-1 if d == axis else 1 for d in range(a.x.ndim)])
    return Entry(a.x + row, a.whole and b.whole, a.most + b.most)


@op
def choose(pool: Pool) -> Entry:
    a = pool.float(tensor)
    b, p = pool.float(lambda e: e.shape == a.shape), pool.any(lambda e: e.bool and e.shape in (a.shape, ()))
    return Entry(lax.select_n(p.x, a.x, b.x), a.whole and b.whole, max(a.most, b.most))


@op
def dot(pool: Pool) -> Entry:
    a = pool.float(matrix, most=50.0)
    b = pool.float(matrix, lambda e: bool(set(e.shape) & set(a.shape)), most=50.0)
    pairs = [(i, j) for i in range(a.x.ndim) for j in range(b.x.ndim) if a.shape[i] == b.shape[j]]
    contract = pairs[pool.number(len(pairs))]
    rest = [(i, j) for i, j in pairs if i != contract[0] and j != contract[1]]
    batch = [rest[pool.number(len(rest))]] if rest and pool.number(2) else []
    numbers = (
        ([contract[0]], [contract[1]]),
        ([i for i, _ in batch], [j for _, j in batch]),
    )
    size = a.x.size * b.x.size // a.shape[contract[0]] ** 2 // (a.shape[batch[0][0]] if batch else 1)
    if size > 300:
        raise LookupError
    return Entry(
        lax.dot_general(a.x, b.x, numbers), a.whole and b.whole, a.most * b.most * a.shape[contract[0]]
    )


@op
def total(pool: Pool) -> Entry:
    a = pool.float(tensor)
    axis, keep = pool.dim(a), bool(pool.number(2))
    if pool.number(3) == 0:
        return Entry(a.x.mean(axis, keepdims=keep), False, a.most)
    return Entry(a.x.sum(axis, keepdims=keep), a.whole, a.most * a.shape[axis])


@op
def largest(pool: Pool) -> Entry:
    a = pool.float(tensor)
    return Entry(
        [jnp.max, jnp.min][pool.number(2)](a.x, pool.dim(a), keepdims=bool(pool.number(2))), a.whole, a.most
    )


@op
def softmax(pool: Pool) -> Entry:
    a = pool.float(tensor, most=10.0)
    return Entry(jax.nn.softmax(a.x, axis=pool.dim(a)), False, 1.0)


@op
def place_of_largest(pool: Pool) -> Entry:
    a = pool.whole(tensor)
    return integer([jnp.argmax, jnp.argmin][pool.number(2)](a.x, pool.dim(a)))


@op
def truth(pool: Pool) -> Entry:
    a = pool.any(lambda e: e.bool, tensor)
    return Entry([jnp.any, jnp.all][pool.number(2)](a.x, pool.dim(a)), True, 1.0)


@op
def compare(pool: Pool) -> Entry:
    a = pool.whole()
    b = pool.whole(lambda e: fits(e, a))
    return Entry([jnp.greater, jnp.equal, jnp.less_equal][pool.number(3)](a.x, b.x), True, 1.0)


@op
def running(pool: Pool) -> Entry:
    a = pool.float(tensor)
    axis, back = pool.dim(a), bool(pool.number(2))
    function = [lax.cumsum, lax.cummax, lax.cummin][which := pool.number(3)]
    return Entry(function(a.x, axis, reverse=back), a.whole, a.most * (1 if which else a.shape[axis]))


@op
def ordered(pool: Pool) -> Entry:
    a = pool.whole(tensor)
    return Entry(lax.sort(a.x, dimension=pool.dim(a)), True, a.most)


@op
def best(pool: Pool) -> Entry:
    a = pool.whole(tensor)
    values, places = lax.top_k(a.x, min(2, a.shape[-1]))
    return integer(places) if pool.number(2) else Entry(values, True, a.most)


@op
def arithmetic(pool: Pool) -> Entry:
    a = pool.any(lambda e: e.int)
    b = pool.any(lambda e: e.int and e.x.dtype == a.x.dtype and fits(e, a))
    functions = [jnp.add, jnp.multiply, jnp.bitwise_xor, jnp.minimum, lambda x, y: x << (y & 7)]
    return integer(functions[pool.number(5)](a.x, b.x))


@op
def int_sum(pool: Pool) -> Entry:
    a = pool.any(lambda e: e.int, tensor)
    return integer(jnp.sum(a.x, pool.dim(a), dtype=a.x.dtype))


@op
def to_int(pool: Pool) -> Entry:
    return integer(pool.whole().x.astype(jnp.int32))


@op
def to_float(pool: Pool) -> Entry:
    e = pool.any(lambda e: e.int or e.bool)
    return Entry((e.x if e.bool else lax.rem(e.x, jnp.asarray(5, e.x.dtype))).astype(jnp.float32), True, 5.0)


@op
def counting(pool: Pool) -> Entry:
    e = pool.any(tensor)
    return integer(lax.broadcasted_iota(jnp.int32, e.shape, pool.dim(e)))


@op
def random_bits(pool: Pool) -> Entry:
    key = pool.any(lambda e: e.key and e.shape == ())
    return integer(jax.random.bits(key.x, (6, 4)).astype(jnp.int32))


@op
def uniform(pool: Pool) -> Entry:
    key = pool.any(lambda e: e.key and e.shape == ())
    return Entry(jax.random.uniform(jax.random.fold_in(key.x, 3), (4, 6)), False, 1.0)


@op
def dropout(pool: Pool) -> Entry:
    key = pool.any(lambda e: e.key and e.shape == ())
    a = pool.float(tensor)
    keep = jax.random.bernoulli(key.x, 0.5, a.shape)
    return Entry(jnp.where(keep, a.x, 0), a.whole, a.most)
