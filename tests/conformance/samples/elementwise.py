"""Elementwise primitives."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.layout import Layout, with_layout_constraint
from jax.extend.core import primitives
from tests.conformance.samples.draw import (
    ABSENT,
    Draw,
    Program,
    add,
    bind,
    bits,
    booleans,
    complexes,
    fine,
    reals,
    sample,
    whole,
)


def _elementwise(
    name: str,
    title: str,
    function: Callable[..., Any],
    *kinds: Callable[..., Any],
    rank: int = 1,
    exact: bool = False,
) -> None:
    def make(draw: Draw) -> Program:
        return function, tuple(kind(draw, *draw.ab[:rank]) for kind in kinds)

    add(name, title, make, exact)


unit = partial(Draw.floats, low=-0.9, high=0.9)
positive = partial(Draw.floats, low=0.25, high=6)
above_one = partial(Draw.floats, low=1, high=6)
unsigned = partial(Draw.bits, dtype=jnp.uint32)
shifts = partial(Draw.ints, low=0, high=31)
half = partial(Draw.floats, dtype=jnp.bfloat16)


def scalar(kind: Callable[..., Any]) -> Callable[..., Any]:
    return lambda draw, *_: kind(draw)


def row(kind: Callable[..., Any]) -> Callable[..., Any]:
    return lambda draw, _, b: kind(draw, 1, b)


def few(draw: Draw, *_: int) -> jax.Array:
    """Many of -1, 0 and 1, so that many are equal."""
    return draw.ints(draw.n(24, 30), low=-1, high=1)


def few_floats(draw: Draw, *shape: int) -> jax.Array:
    """The same as floats."""
    return few(draw).astype(jnp.float32)


def special(draw: Draw, n: int) -> jax.Array:
    """Floats with infinities and not-a-numbers among them."""
    return jnp.concatenate([draw.floats(n - 3), jnp.asarray([jnp.inf, jnp.nan, -jnp.inf])])


for _name in (
    *(
        "abs",
        "asinh",
        "atan",
        "ceil",
        "cosh",
        "digamma",
        "erf",
        "erfc",
        "floor",
        "lgamma",
        "neg",
        "sign",
        "sinh",
    ),
    *("square", "bessel_i0e", "bessel_i1e", "stop_gradient", "copy"),
):
    _elementwise(_name, "reals", bind(_name), reals)
for _name in (
    *(
        "cbrt",
        "cos",
        "exp",
        "exp2",
        "expm1",
        "log",
        "log1p",
        "logistic",
        "rsqrt",
        "sin",
        "sqrt",
        "tan",
        "tanh",
    ),
):
    _elementwise(_name, "reals", getattr(lax, _name), reals)
_elementwise("exp", "matrix", lax.exp, reals, rank=2)
_elementwise("round", "reals", lax.round, reals)
for _name in ("acos", "asin", "atanh", "erf_inv"):
    _elementwise(_name, "unit", getattr(lax, _name), unit)
for _name in ("acosh", "sqrt", "log"):
    _elementwise(_name, "positive", getattr(lax, _name), above_one)
for _name in ("abs", "neg", "sign", "not", "clz", "population_count", "square"):
    _elementwise(_name, "integers", bind(_name), whole)
    if _name not in ("clz", "population_count"):
        _elementwise(_name, "bits", bind(_name), bits)
_elementwise("not", "logic", lax.bitwise_not, booleans)
_elementwise("is_finite", "special", lax.is_finite, special)
_elementwise("name", "reals", lambda x: checkpoint_name(x, "kept"), reals)
_elementwise("reduce_precision", "fine", lambda x: lax.reduce_precision(x, 8, 3), fine)
if "log2" not in ABSENT:
    _elementwise("log2", "reals", lax.log2, reals)
    _elementwise("log2", "positive", lax.log2, above_one)
if "one_minus_square" not in ABSENT:
    _elementwise("one_minus_square", "reals", lax.one_minus_square, reals)
if "polynomial" not in ABSENT:
    _elementwise("polynomial", "reals", partial(lax.polynomial, coeffs=(1.0, 2.0, 3.0)), reals)
for _power in (2, 3, -1):
    _elementwise("integer_pow", f"power{_power}", partial(lax.integer_pow, y=_power), reals)
_elementwise("integer_pow", "bits", partial(lax.integer_pow, y=3), bits)
for _name in ("real", "imag", "conj", "neg", "abs", "sign", "exp"):
    _elementwise(_name, "complexes", getattr(lax, _name), complexes)
_elementwise("complex", "reals", lax.complex, reals, reals)

for _name in ("add", "sub", "mul", "div", "max", "min", "rem", "pow", "atan2"):
    _elementwise(_name, "reals", getattr(lax, _name), positive if _name == "pow" else reals, reals)
for _name in ("add", "sub", "mul", "div", "max", "min", "rem"):
    _elementwise(_name, "bits", getattr(lax, _name), bits, bits)
_elementwise("nextafter", "reals", lax.nextafter, reals, reals, exact=True)
for _name in ("eq", "ne", "ge", "gt", "le", "lt"):
    _elementwise(_name, "few", getattr(lax, _name), few_floats, few_floats)
    _elementwise(_name, "few_integers", getattr(lax, _name), few, few)
for _name in ("eq_to", "le_to", "lt_to"):
    _elementwise(_name, "few", bind(_name), few_floats, few_floats)
for _name in ("and", "or", "xor"):
    _elementwise(_name, "logic", bind(_name), booleans, booleans)
    _elementwise(_name, "bits", bind(_name), bits, bits)
for _name in ("add", "mul", "max"):
    _elementwise(_name, "matrix", getattr(lax, _name), reals, reals, rank=2)
    _elementwise(_name, "row", getattr(lax, _name), reals, row(reals), rank=2)
    _elementwise(
        _name, "scalar", bind(_name, **({"out_dtype": None} if _name == "mul" else {})), reals, scalar(reals)
    )
    _elementwise(_name, "half", getattr(lax, _name), half, half)
_elementwise("add", "literal", lambda x: x + 2.0, reals)
_elementwise("sub", "literal", lambda x: 1.0 - x, reals)
_elementwise("mul", "complexes", lax.mul, complexes, complexes)
_elementwise("add_any", "reals", primitives.add_jaxvals_p.bind, reals, reals)
for _name in ("shift_left", "shift_right_logical", "shift_right_arithmetic"):
    _elementwise(_name, "bits", getattr(lax, _name), bits, shifts)
_elementwise(
    "shift_right_logical", "unsigned", lax.shift_right_logical, unsigned, partial(shifts, dtype=jnp.uint32)
)
if "mulhi" not in ABSENT:
    _elementwise("mulhi", "unsigned", lax.mulhi, unsigned, unsigned)
    _elementwise("mulhi", "bits", lax.mulhi, bits, bits)
for _name in ("igamma", "igammac", "igamma_grad_a"):
    _elementwise(_name, "positive", bind(_name), above_one, above_one)
_elementwise("polygamma", "positive", lambda m, x: lax.polygamma(jnp.round(m), x), above_one, above_one)
_elementwise("zeta", "positive", lambda x, q: lax.zeta(x + 1, q), above_one, above_one)
_elementwise(
    "regularized_incomplete_beta",
    "positive",
    lambda a, b, x: lax.betainc(a, b, jnp.abs(x)),
    *(above_one, above_one, unit),
)
_elementwise("clamp", "reals", lax.clamp, reals, reals, reals)
_elementwise("clamp", "scalars", lambda x: lax.clamp(-1.0, x, 2.0), reals, rank=2)
_elementwise("select_n", "matrix", lax.select_n, booleans, reals, reals, rank=2)
_elementwise("select_n", "scalar", lax.select_n, scalar(booleans), reals, reals)
_elementwise("select_n", "zero", lambda p, x: jnp.where(p, x, 0.0), booleans, reals)


@sample("select_n")
def three_branches(draw: Draw) -> Program:
    n = draw.n(5, 7)
    return lax.select_n, (draw.ints(n, low=0, high=2), draw.floats(n), draw.floats(n), draw.floats(n))


for _title, _kind, _after in (
    ("widened", half, "float32"),
    ("narrowed", fine, "bfloat16"),
    ("truncated", special, "int32"),
    ("floated", bits, "float32"),
    ("logic_floated", booleans, "float32"),
    ("logic_counted", booleans, "int32"),
    ("tested", few_floats, "bool"),
    ("int_narrowed", bits, "int8"),
    ("int_widened", partial(Draw.bits, dtype=jnp.int8), "int32"),
    ("unsigned_widened", partial(Draw.bits, dtype=jnp.uint8), "int32"),
    ("unsigned", bits, "uint32"),
    ("made_complex", reals, "complex64"),
    ("too_large", lambda draw, *shape: 200 * draw.floats(*shape), "float8_e4m3fn"),
):
    _convert = partial(lambda x, t: lax.convert_element_type(x, t), t=_after)
    _elementwise("convert_element_type", _title, _convert, _kind, exact=_title in ("narrowed", "too_large"))
for _title, _kind, _after in (
    ("float_bits", reals, "uint32"),
    ("bits_float", bits, "float32"),
    ("unsigned", bits, "uint32"),
    ("halves", reals, "uint16"),
):
    _elementwise(
        "bitcast_convert_type", _title, partial(lambda x, t: lax.bitcast_convert_type(x, t), t=_after), _kind
    )


@sample("bitcast_convert_type")
def joined_halves(draw: Draw) -> Program:
    return lambda x: lax.bitcast_convert_type(x, "float32"), (draw.bits(draw.n(5, 7), 2, dtype=jnp.uint16),)


@sample("optimization_barrier")
def one_operand(draw: Draw) -> Program:
    return lax.optimization_barrier, (draw.floats(*draw.ab),)


@sample("optimization_barrier", "device_put")
def two_operands(draw: Draw) -> Program:
    def both(x: Any, y: Any) -> Any:
        return jax.device_put(lax.optimization_barrier((x, y)))

    return both, (draw.floats(*draw.ab), draw.floats(draw.n(6, 5)))


@sample("device_put")
def single(draw: Draw) -> Program:
    return jax.device_put, (draw.floats(*draw.ab),)


def _constrained(draw: Draw) -> Program:
    mesh = jax.sharding.Mesh(np.asarray(jax.devices()[:1]), ("x",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    return lambda x: lax.with_sharding_constraint(x, sharding), (draw.floats(*draw.ab),)


add("sharding_constraint", "one_device", _constrained)


@sample("reshard", "sharding_constraint")
def gradient_of_constrained(draw: Draw) -> Program:
    mesh = jax.sharding.Mesh(np.asarray(jax.devices()[:1]), ("x",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))

    def step(x: Any) -> Any:
        return jax.grad(lambda x: jnp.sum(lax.with_sharding_constraint(x, sharding) ** 2))(x)

    return step, (draw.floats(*draw.ab),)


@sample("layout_constraint")
def row_major(draw: Draw) -> Program:
    return lambda x: with_layout_constraint(x, Layout((0, 1))), (draw.floats(*draw.ab),)
