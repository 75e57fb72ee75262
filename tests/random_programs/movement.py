"""Operations that put elements elsewhere; layers, branches and loops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from arithmetic import OPS  # those join the ones that are there
from jax import lax
from pool import Entry, Pool, integer, matrix, op, small, tensor


def moving(make: Callable[[Pool, Entry], Any]) -> None:
    """An operation that puts elements elsewhere, of any dtype but keys."""

    def apply(pool: Pool) -> Entry:
        e = pool.any(tensor, lambda e: not e.key)
        return Entry(make(pool, e), e.whole, e.most)

    OPS[make.__name__] = apply


@moving
def transpose(pool: Pool, e: Entry) -> Any:
    return jnp.moveaxis(e.x, 0, pool.dim(e))


@moving
def merge(pool: Pool, e: Entry) -> Any:
    return e.x.reshape(-1, e.shape[-1]) if e.x.ndim > 2 else e.x.reshape(-1)


@moving
def separate(pool: Pool, e: Entry) -> Any:
    axis = pool.dim(e)
    size = e.shape[axis]
    inner = next((d for d in (2, 3) if size % d == 0 and size > d), None)
    if inner is None or e.x.ndim > 3:
        raise LookupError
    return e.x.reshape(*e.shape[:axis], size // inner, inner, *e.shape[axis + 1 :])


@moving
def widen(pool: Pool, e: Entry) -> Any:
    if e.x.size > 100 or e.x.ndim > 2:
        raise LookupError
    return lax.broadcast_in_dim(e.x, (2, *e.shape), tuple(range(1, e.x.ndim + 1)))


@moving
def squeeze(pool: Pool, e: Entry) -> Any:
    if 1 in e.shape:
        return jnp.squeeze(e.x)
    axis = pool.dim(e)
    return jnp.squeeze(jnp.expand_dims(e.x, (axis, axis + 2)), axis)


@moving
def cut(pool: Pool, e: Entry) -> Any:
    axis = pool.dim(e)
    start = pool.number(e.shape[axis])
    return lax.slice_in_dim(e.x, start, e.shape[axis], stride=1 + pool.number(2), axis=axis)


@moving
def pad(pool: Pool, e: Entry) -> Any:
    axis = pool.dim(e)
    config = [(0, 0, 0)] * e.x.ndim
    config[axis] = (pool.number(3) - 1, pool.number(3), pool.number(2))
    if e.x.size > 100 or e.shape[axis] < 2:
        raise LookupError
    return lax.pad(e.x, jnp.zeros((), e.x.dtype), config)


@moving
def join(pool: Pool, e: Entry) -> Any:
    if e.x.size > 100:
        raise LookupError
    return jnp.concatenate([e.x, jnp.flip(e.x, pool.dim(e))], pool.dim(e))


@moving
def halve(pool: Pool, e: Entry) -> Any:
    axis = pool.dim(e)
    if e.shape[axis] < 2:
        raise LookupError
    return lax.split(e.x, (1, e.shape[axis] - 1), axis)[1]


@moving
def copy_from(pool: Pool, e: Entry) -> Any:
    start = pool.any(lambda s: s.int and s.shape == ())
    axis = pool.dim(e)
    return lax.dynamic_slice_in_dim(e.x, start.x, max(1, e.shape[axis] // 2), axis)


@moving
def copy_into(pool: Pool, e: Entry) -> Any:
    start = pool.any(lambda s: s.int and s.shape == ())
    axis = pool.dim(e)
    return lax.dynamic_update_slice_in_dim(e.x, lax.slice_in_dim(e.x, 0, 1, axis=axis), start.x, axis)


@moving
def take(pool: Pool, e: Entry) -> Any:
    index = pool.any(lambda i: i.int and i.x.ndim <= 2 and i.x.size * e.x.size <= 300)
    mode = ["clip", "fill", "wrap"][pool.number(3)]
    fill = None if mode != "fill" or e.bool else 0
    return jnp.take(e.x, index.x, axis=pool.dim(e), mode=mode, fill_value=fill)


@moving
def take_along(pool: Pool, e: Entry) -> Any:
    index = pool.any(lambda i: i.int and i.x.ndim == e.x.ndim and i.shape == e.shape)
    return jnp.take_along_axis(e.x, index.x % e.shape[-1], axis=-1)


@op
def scatter_add(pool: Pool) -> Entry:
    rows = pool.float(matrix, most=100.0)
    index = pool.any(lambda i: i.int and i.shape == rows.shape[:1])
    target = jnp.zeros((6, *rows.shape[1:]), rows.x.dtype) if pool.number(2) else jnp.ones_like(rows.x)
    return Entry(target.at[index.x % target.shape[0]].add(rows.x), rows.whole, 1 + rows.most * rows.shape[0])


@op
def one_hot(pool: Pool) -> Entry:
    index = pool.any(lambda i: i.int and i.x.size <= 40)
    return Entry(jax.nn.one_hot(index.x % 6, 6), True, 1.0)


@op
def convolve(pool: Pool) -> Entry:
    a = pool.float(lambda e: e.x.ndim == 3 and e.x.size > 0, most=50.0)
    kernel = jnp.asarray(np.arange(3 * a.shape[2] * 2).reshape(3, a.shape[2], 2) % 3 - 1, jnp.float32)
    if a.shape[1] < 3:
        raise LookupError
    dims = ("NWC", "WIO", "NWC")
    x = lax.conv_general_dilated(a.x, kernel, (1,), [(1, 1)], dimension_numbers=dims)
    return Entry(x, a.whole, a.most * 3 * a.shape[2])


@op
def pool_windows(pool: Pool) -> Entry:
    a = pool.float(lambda e: e.x.ndim == 2 and min(e.shape) >= 2)
    if pool.number(2):
        return Entry(lax.reduce_window(a.x, -jnp.inf, lax.max, (1, 2), (1, 2), "VALID"), a.whole, a.most)
    return Entry(lax.reduce_window(a.x, 0.0, lax.add, (2, 1), (1, 1), "SAME"), a.whole, 2 * a.most)


@op
def gradient(pool: Pool) -> Entry:
    a, b = pool.float(lambda e: e.x.ndim == 2, tensor, most=9.0), None
    b = pool.float(lambda e: e.x.ndim == 2 and e.shape[0] == a.shape[1], tensor, most=9.0)

    def loss(w: Any) -> Any:
        return jnp.mean(jax.nn.log_softmax(0.1 * jnp.tanh(a.x) @ w) ** 2)

    return Entry(jax.grad(loss)(b.x), False, 10.0)


@op
def scan(pool: Pool) -> Entry:
    a = pool.float(lambda e: e.x.ndim >= 2 and e.x.size > 0, small, most=9.0)
    reverse = bool(pool.number(2))

    def body(carry: Any, x: Any) -> tuple[Any, Any]:
        carry = lax.max(carry, x) + x
        return carry, carry - 1

    start = jnp.zeros(a.shape[1:])
    carry, stacked = lax.scan(body, start, a.x, reverse=reverse)
    return Entry([carry, stacked][pool.number(2)], a.whole, (2 * a.most + 1) * 2 ** a.shape[0])


@op
def branch(pool: Pool) -> Entry:
    a = pool.float(tensor)
    decide = pool.any(lambda e: (e.bool or e.int) and e.shape == ())
    axis = pool.dim(a)
    x = lax.cond(decide.x > 0, lambda v: v.sum(axis), lambda v: v.max(axis), a.x)
    return Entry(x, a.whole, a.most * a.shape[axis])


@op
def repeat(pool: Pool) -> Entry:
    a = pool.whole(tensor, most=100.0)
    _, x = lax.while_loop(
        lambda s: (s[0] < 3) & (s[1].max() < 1000), lambda s: (s[0] + 1, s[1] + s[1].sum(0)), (0, a.x)
    )
    return Entry(x, True, a.most * (1 + a.shape[0]) ** 3)


@op
def repeat_each(pool: Pool) -> Entry:
    """Under vmap: every row ends its loop in an iteration of its own."""
    a = pool.whole(tensor, most=100.0)

    def grow(row: Any) -> Any:
        return lax.while_loop(
            lambda s: (s[0] < 3) & (s[1].sum() < 10), lambda s: (s[0] + 1, 2 * s[1] + 1), (0, row)
        )

    count, x = jax.vmap(grow)(a.x)
    return [integer(count), Entry(x, True, 8 * a.most + 7)][pool.number(2)]
