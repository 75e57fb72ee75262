"""Movement, joining and slicing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from tests.conformance.samples.draw import Draw, Program, add, bits, booleans, reals, sample

from shardwright.ir.host import reload


@sample("broadcast_in_dim")
def broadcast_scalar(draw: Draw) -> Program:
    return lambda x: lax.broadcast_in_dim(x, draw.ab, ()), (draw.floats(),)


@sample("broadcast_in_dim")
def broadcast_row(draw: Draw) -> Program:
    a, b = draw.ab
    return lambda x: lax.broadcast_in_dim(x, (a, 3, b), (0, 2)), (draw.floats(1, b),)


@sample("broadcast_in_dim")
def new_dimension(draw: Draw) -> Program:
    return lambda x: lax.expand_dims(x, (1,)), (draw.floats(*draw.ab),)


@sample("transpose")
def transposed(draw: Draw) -> Program:
    return lambda x: jnp.transpose(x, (2, 0, 1)), (draw.floats(*draw.ab, 3),)


@sample("transpose")
def transposed_logic(draw: Draw) -> Program:
    return jnp.transpose, (draw.bools(*draw.ab),)


@sample("reload")
def waited_in_host_memory(draw: Draw) -> Program:
    return reload, (draw.floats(*draw.ab),)


@sample("reload")
def waited_as_integers(draw: Draw) -> Program:
    return reload, (draw.ints(*draw.ab),)


@sample("squeeze")
def squeezed(draw: Draw) -> Program:
    a, b = draw.ab
    return lambda x: lax.squeeze(x, (1,)), (draw.floats(a, 1, b),)


@sample("rev")
def reversed_(draw: Draw) -> Program:
    return lambda x: lax.rev(x, (1,)), (draw.floats(*draw.ab),)


@sample("tile")
def tiled(draw: Draw) -> Program:
    a, b = draw.ab
    return lambda x: lax.tile(x, (draw.n(5, 4), 1)), (draw.floats(a, b),)


@sample("empty2")
def nothing_kept(draw: Draw) -> Program:
    """What a branch has instead of what only the other one keeps for its gradient."""
    traced = jax.make_jaxpr(jax.grad(lambda x: lax.cond(x > 0, jnp.tanh, lambda x: x + 1, x)))(1.0)
    branches = [each for e in traced.eqns if e.primitive.name == "cond" for each in e.params["branches"]]
    (equation, *_) = [e for each in branches for e in each.jaxpr.eqns if e.primitive.name == "empty2"]
    return lambda: equation.primitive.bind(**equation.params), ()


@sample("iota")
def counting(draw: Draw) -> Program:
    return lambda: lax.broadcasted_iota(jnp.int32, draw.ab, 1), ()


@sample("iota")
def counting_floats(draw: Draw) -> Program:
    return lambda: lax.broadcasted_iota(jnp.float32, draw.ab, 0), ()


def counting_narrow(draw: Draw) -> Program:
    return lambda: lax.iota(jnp.float8_e4m3fn, draw.n(40, 70)), ()


add("iota", "counting_narrow", counting_narrow, exact=True)


def _reshape(
    title: str, before: Callable[[Draw], tuple[int, ...]], after: Callable[[Draw], tuple[int, ...]]
) -> None:
    add("reshape", title, lambda draw: (lambda x: lax.reshape(x, after(draw)), (draw.floats(*before(draw)),)))


def _reordered(
    title: str, order: tuple[int, ...], before: Callable[[Draw], tuple[int, ...]], after: Any
) -> None:
    """The operand's dimensions in another order first, as gradients of grouped convolutions have it."""
    add(
        "reshape",
        title,
        lambda draw: (lambda x: lax.reshape(x, after(draw), order), (draw.floats(*before(draw)),)),
    )


_reordered("turned_ones", (0, 2, 1, 3), lambda d: (3, d.n(4, 5), 1, 2), lambda d: (3, 1, d.n(4, 5), 2))
_reordered(
    "turned_merged", (1, 2, 0), lambda d: (d.n(5, 4), d.n(4, 5), 3), lambda d: (d.n(4, 5) * 3, d.n(5, 4))
)
_reordered("turned_split", (1, 0), lambda d: (3, d.n(4, 5) * 2), lambda d: (d.n(4, 5), 2, 3))

_reshape("heads_split", lambda d: (3, d.n(4, 5) * 4), lambda d: (3, d.n(4, 5), 4))
_reshape("heads_merged", lambda d: (3, d.n(4, 5), 4), lambda d: (3, d.n(4, 5) * 4))
_reshape("flattened", lambda d: (d.n(4, 5), 3, 2), lambda d: (d.n(4, 5) * 6,))
_reshape("split_twice", lambda d: (d.n(4, 5) * 6,), lambda d: (d.n(4, 5), 3, 2))
_reshape("across", lambda d: (d.n(4, 5), 6), lambda d: (2 * d.n(4, 5), 3))
_reshape("common", lambda d: (3 * d.n(4, 5), 2), lambda d: (2 * d.n(4, 5), 3))
_reshape("two_runs", lambda d: (d.n(4, 5), 2, d.n(5, 4) * 3), lambda d: (2 * d.n(4, 5), d.n(5, 4), 3))
_reshape("ones", lambda d: (d.n(4, 5), d.n(5, 4)), lambda d: (1, d.n(4, 5), 1, d.n(5, 4), 1))
_reshape("from_one", lambda d: (1,), lambda d: ())


@sample("reshape")
def of_keys(draw: Draw) -> Program:
    return lambda k: k.reshape(draw.n(4, 5), 2), (draw.keys(draw.n(8, 10)),)


@sample("concatenate")
def concatenated(draw: Draw) -> Program:
    a, b = draw.ab
    return lambda x, y: lax.concatenate([x, y], 1), (draw.floats(a, b), draw.floats(a, draw.n(3, 2)))


@sample("concatenate")
def class_token(draw: Draw) -> Program:
    a, b = draw.ab
    return lambda x, y, z: lax.concatenate([x, y, z], 0), (
        draw.floats(1, b),
        draw.floats(a, b),
        draw.floats(2, b),
    )


@sample("split")
def split(draw: Draw) -> Program:
    a, b = draw.ab
    return lambda x: lax.split(x, (1, b), axis=1), (draw.floats(a, b + 1),)


@sample("stack")
def stacked(draw: Draw) -> Program:
    return lambda x, y: jnp.stack([x, y], 1), (draw.floats(*draw.ab), draw.floats(*draw.ab))


@sample("unstack")
def unstacked(draw: Draw) -> Program:
    a, b = draw.ab
    return lambda x: jnp.unstack(x, axis=1), (draw.floats(a, 2, b),)


def _pad(title: str, config: Any, kind: Callable[..., Any] = reals) -> None:
    add("pad", title, lambda draw: (lambda x, v: lax.pad(x, v, config), (kind(draw, *draw.ab), kind(draw))))


_pad("edges", ((0, 0, 0), (2, 1, 0)))
_pad("interior", ((1, 2, 2), (0, 0, 0)))
_pad("cropped", ((0, 0, 0), (-1, 3, 0)))
_pad("logic", ((0, 0, 0), (0, 2, 0)), booleans)


@sample("pad")
def padded_with_zero(draw: Draw) -> Program:
    return lambda x: lax.pad(x, 0.0, ((0, 3, 0), (0, 0, 0))), (draw.floats(*draw.ab),)


def _slice(title: str, bounds: Callable[[int, int], Any], kind: Callable[..., Any] = reals) -> None:
    def make(draw: Draw) -> Program:
        n, m = draw.n(8, 10), draw.n(4, 5)
        return lambda x: lax.slice(x, *bounds(n, m)), (kind(draw, n, m),)

    add("slice", title, make)


_slice("middle", lambda n, m: ((2, 0), (7, m)))
_slice("both", lambda n, m: ((1, 0), (n, m - 1)))
_slice("strided", lambda n, m: ((1, 0), (8, m), (3, 1)))
_slice("logic", lambda n, m: ((1, 1), (5, m)), booleans)
_slice("integers", lambda n, m: ((0, 0), (6, m)), bits)


@sample("slice")
def every_other(draw: Draw) -> Program:
    n = draw.n(5, 6)
    return lambda x: lax.slice(x, (1, 0), (2 * n, 3), (2, 1)), (draw.floats(2 * n, 3),)


@sample("slice")
def sliced_keys(draw: Draw) -> Program:
    return lambda k: k[1:4], (draw.keys(draw.n(5, 6)),)


@sample("dynamic_slice")
def at_position(draw: Draw) -> Program:
    n, m = draw.n(7, 9), draw.n(5, 4)
    return lambda x, i, j: lax.dynamic_slice(x, (i, j), (3, m)), (
        draw.floats(n, m),
        jnp.int32(2),
        jnp.int32(0),
    )


@sample("dynamic_slice")
def past_the_end(draw: Draw) -> Program:
    n = draw.n(7, 9)
    starts = (jnp.uint8(draw.n(200, 3)), jnp.uint8(draw.n(1, 200)))
    return lambda x, i, j: lax.dynamic_slice(x, (i, j), (2, 3)), (draw.floats(n, 6), *starts)


@sample("dynamic_slice")
def of_logic(draw: Draw) -> Program:
    return lambda x, i: lax.dynamic_slice(x, (i,), (4,)), (draw.bools(draw.n(9, 11)), jnp.int32(3))


@sample("dynamic_update_slice")
def cache_update(draw: Draw) -> Program:
    n, m = draw.n(7, 9), draw.n(5, 4)
    args = (draw.floats(n, m), draw.floats(3, m), jnp.int32(2), jnp.int32(0))
    return lambda x, u, i, j: lax.dynamic_update_slice(x, u, (i, j)), args


@sample("dynamic_update_slice")
def update_at_the_end(draw: Draw) -> Program:
    n = draw.n(7, 9)
    args = (draw.floats(n, 5), draw.floats(2, 3), jnp.int32(draw.n(100, 3)), jnp.int32(draw.n(1, 100)))
    return lambda x, u, i, j: lax.dynamic_update_slice(x, u, (i, j)), args
