"""Small programs for every primitive that has a rule: what the conformance test runs.

A sample is a function of a `Draw` and gives a program and its arguments. It is called with two draws, whose
sizes differ, so that no combination passes by a coincidence of sizes. To add a primitive, add a rule and
a sample; the test fails for a rule without one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.layout import Layout, with_layout_constraint
from jax.extend.core import primitives
from jax.extend.random import threefry2x32_p

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
        return jnp.asarray(drawn, dtype)

    def ints(self, *shape: int, low: int = -9, high: int = 9, dtype: Any = jnp.int32) -> jax.Array:
        return jnp.asarray(self.rng.integers(low, high, shape, endpoint=True), dtype)

    def bits(self, *shape: int, dtype: Any = jnp.int32) -> jax.Array:
        """Integers over the whole range, at which arithmetic wraps around."""
        info = np.iinfo(dtype)
        return jnp.asarray(self.rng.integers(info.min, info.max, shape, dtype=dtype, endpoint=True))

    def bools(self, *shape: int) -> jax.Array:
        return jnp.asarray(self.rng.random(shape) < 0.5 if shape else self.variant == 1)

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


def sample(*names: str) -> Callable[[Callable[[Draw], Program]], Callable[[Draw], Program]]:
    """Register a sample for the named primitives."""

    def add(make: Callable[[Draw], Program]) -> Callable[[Draw], Program]:
        SAMPLES.extend(Sample(name, make) for name in names)
        return make

    return add


def _add(name: str, title: str, make: Callable[[Draw], Program], exact: bool = False) -> None:
    make.__name__ = title
    SAMPLES.append(Sample(name, make, exact))


# ---------------------------------------------------------------------------------------------------
# Elementwise


def _elementwise(
    name: str, title: str, function: Callable[..., Any], *kinds: Callable[..., Any], rank: int = 1, exact: bool = False
) -> None:
    def make(draw: Draw) -> Program:
        return function, tuple(kind(draw, *draw.ab[:rank]) for kind in kinds)

    _add(name, title, make, exact)


def _bind(name: str, **params: Any) -> Callable[..., Any]:
    return lambda *args: getattr(primitives, f"{name}_p").bind(*args, **params)


reals, whole, bits, booleans, complexes = Draw.floats, Draw.ints, Draw.bits, Draw.bools, Draw.complexes
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


def fine(draw: Draw, *shape: int) -> jax.Array:
    """Multiples of 1/64, which 16 bits cannot hold."""
    return draw.floats(*shape) + draw.floats(*shape) / 8


def few(draw: Draw, *_: int) -> jax.Array:
    """Many of -1, 0 and 1, so that many are equal."""
    return draw.ints(draw.n(24, 30), low=-1, high=1)


def few_floats(draw: Draw, *shape: int) -> jax.Array:
    """The same as floats."""
    return few(draw).astype(jnp.float32)


def special(draw: Draw, n: int) -> jax.Array:
    """Floats with infinities and not-a-numbers among them."""
    return jnp.concatenate([draw.floats(n - 3), jnp.asarray([jnp.inf, jnp.nan, -jnp.inf])])


_TUNED = ("cos", "exp", "exp2", "log", "log1p", "logistic", "rsqrt", "sin", "sqrt", "tan", "tanh", "cbrt", "expm1")
for _name in (
    *("abs", "asinh", "atan", "cbrt", "ceil", "cos", "cosh", "digamma", "erf", "erfc", "exp", "exp2", "expm1"),
    *("floor", "lgamma", "log", "log1p", "logistic", "neg", "rsqrt", "sign", "sin", "sinh", "sqrt", "square"),
    *("tan", "tanh", "bessel_i0e", "bessel_i1e", "stop_gradient", "copy"),
):
    _elementwise(_name, "reals", _bind(_name, **({"accuracy": None} if _name in _TUNED else {})), reals)
_elementwise("exp", "matrix", lax.exp, reals, rank=2)
_elementwise("round", "reals", lax.round, reals)
for _name in ("acos", "asin", "atanh", "erf_inv"):
    _elementwise(_name, "unit", getattr(lax, _name), unit)
for _name in ("acosh", "sqrt", "log"):
    _elementwise(_name, "positive", getattr(lax, _name), above_one)
for _name in ("abs", "neg", "sign", "not", "clz", "population_count", "square"):
    _elementwise(_name, "integers", _bind(_name), whole)
    if _name not in ("clz", "population_count"):
        _elementwise(_name, "bits", _bind(_name), bits)
_elementwise("not", "logic", lax.bitwise_not, booleans)
_elementwise("is_finite", "special", lax.is_finite, special)
_elementwise("name", "reals", lambda x: checkpoint_name(x, "kept"), reals)
_elementwise("reduce_precision", "fine", lambda x: lax.reduce_precision(x, 8, 3), fine)
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
    _elementwise(_name, "few", _bind(_name), few_floats, few_floats)
for _name in ("and", "or", "xor"):
    _elementwise(_name, "logic", _bind(_name), booleans, booleans)
    _elementwise(_name, "bits", _bind(_name), bits, bits)
for _name in ("add", "mul", "max"):
    _elementwise(_name, "matrix", getattr(lax, _name), reals, reals, rank=2)
    _elementwise(_name, "row", getattr(lax, _name), reals, row(reals), rank=2)
    _elementwise(_name, "scalar", _bind(_name, **({"out_dtype": None} if _name == "mul" else {})), reals, scalar(reals))
    _elementwise(_name, "half", getattr(lax, _name), half, half)
_elementwise("add", "literal", lambda x: x + 2.0, reals)
_elementwise("sub", "literal", lambda x: 1.0 - x, reals)
_elementwise("mul", "complexes", lax.mul, complexes, complexes)
_elementwise("add_any", "reals", primitives.add_jaxvals_p.bind, reals, reals)
for _name in ("shift_left", "shift_right_logical", "shift_right_arithmetic"):
    _elementwise(_name, "bits", getattr(lax, _name), bits, shifts)
_elementwise("shift_right_logical", "unsigned", lax.shift_right_logical, unsigned, partial(shifts, dtype=jnp.uint32))
_elementwise("mulhi", "unsigned", lax.mulhi, unsigned, unsigned)
_elementwise("mulhi", "bits", lax.mulhi, bits, bits)
for _name in ("igamma", "igammac", "igamma_grad_a"):
    _elementwise(_name, "positive", _bind(_name), above_one, above_one)
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
):
    _convert = partial(lambda x, t: lax.convert_element_type(x, t), t=_after)
    _elementwise("convert_element_type", _title, _convert, _kind, exact=_title == "narrowed")
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


_add("sharding_constraint", "one_device", _constrained)


@sample("layout_constraint")
def row_major(draw: Draw) -> Program:
    return lambda x: with_layout_constraint(x, Layout((0, 1))), (draw.floats(*draw.ab),)


# ---------------------------------------------------------------------------------------------------
# Contractions


def _dot(title: str, numbers: Any, left: Callable[[Draw], Any], right: Callable[[Draw], Any], **params: Any) -> None:
    def make(draw: Draw) -> Program:
        return partial(lax.dot_general, dimension_numbers=numbers, **params), (left(draw), right(draw))

    _add("dot_general", title, make, exact=title == "rounded")


_MATRIX = (((1,), (0,)), ((), ()))
_dot("matrix", _MATRIX, lambda d: d.floats(d.n(5, 7), d.n(4, 6)), lambda d: d.floats(d.n(4, 6), d.n(7, 5)))
_dot("vector", (((0,), (0,)), ((), ())), lambda d: d.floats(d.n(5, 7)), lambda d: d.floats(d.n(5, 7)))
_dot("outer", (((), ()), ((), ())), lambda d: d.floats(d.n(5, 7)), lambda d: d.floats(d.n(4, 6)))
_dot(
    "batched",
    (((2,), (1,)), ((0,), (0,))),
    lambda d: d.floats(d.n(4, 5), d.n(5, 6), d.n(6, 4)),
    lambda d: d.floats(d.n(4, 5), d.n(6, 4), d.n(7, 3)),
)
_dot(
    "two_contracted",
    (((0, 1), (0, 1)), ((), ())),
    lambda d: d.floats(d.n(4, 5), d.n(5, 3), d.n(3, 4)),
    lambda d: d.floats(d.n(4, 5), d.n(5, 3), d.n(6, 7)),
)
_dot(
    "half_preferred",
    _MATRIX,
    lambda d: d.floats(d.n(5, 7), d.n(4, 6), dtype=jnp.bfloat16),
    lambda d: d.floats(d.n(4, 6), d.n(7, 5), dtype=jnp.bfloat16),
    preferred_element_type=jnp.float32,
)
_dot(
    "rounded",
    _MATRIX,
    lambda d: fine(d, d.n(5, 7), d.n(4, 6)),
    lambda d: fine(d, d.n(4, 6), d.n(7, 5)),
    preferred_element_type=jnp.bfloat16,
)
_dot(
    "bytes_preferred",
    _MATRIX,
    lambda d: d.bits(d.n(5, 7), d.n(4, 6), dtype=jnp.int8),
    lambda d: d.bits(d.n(4, 6), d.n(7, 5), dtype=jnp.int8),
    preferred_element_type=jnp.int32,
)
_dot("integers", _MATRIX, lambda d: d.bits(d.n(5, 7), d.n(4, 6)), lambda d: d.bits(d.n(4, 6), d.n(7, 5)))


def _conv(
    title: str,
    lhs: Callable[[Draw], tuple[int, ...]],
    rhs: Callable[[Draw], tuple[int, ...]],
    dims: tuple[str, str, str],
    **params: Any,
) -> None:
    def make(draw: Draw) -> Program:
        a, b = draw.floats(*lhs(draw), low=-2, high=2), draw.floats(*rhs(draw), low=-2, high=2)
        options = {"window_strides": (1,) * (a.ndim - 2), "padding": [(0, 0)] * (a.ndim - 2), **params}
        return lambda x, y: lax.conv_general_dilated(x, y, dimension_numbers=dims, **options), (a, b)

    _add("conv_general_dilated", title, make)


_LINE = ("NWC", "WIO", "NWC")
_conv("overlapping", lambda d: (d.n(4, 5), 8, d.n(3, 4)), lambda d: (3, d.n(3, 4), d.n(5, 3)), _LINE, padding=[(1, 1)])
_conv("channels_first", lambda d: (d.n(4, 5), d.n(3, 4), 6), lambda d: (d.n(5, 3), d.n(3, 4), 3), ("NCH", "OIH", "NCH"))
_conv(
    "image",
    lambda d: (d.n(3, 4), 5, 6, d.n(2, 3)),
    lambda d: (3, 2, d.n(2, 3), d.n(4, 3)),
    ("NHWC", "HWIO", "NHWC"),
    window_strides=(2, 1),
    padding="SAME",
)
_conv("pointwise", lambda d: (d.n(4, 5), d.n(6, 7), d.n(3, 4)), lambda d: (1, d.n(3, 4), d.n(5, 3)), _LINE)
_conv(
    "patches",
    lambda d: (d.n(4, 3), 4 * d.n(5, 6), d.n(2, 3)),
    lambda d: (4, d.n(2, 3), d.n(5, 3)),
    _LINE,
    window_strides=(4,),
)
_conv(
    "patch_weights",
    lambda d: (d.n(2, 3), 4 * d.n(5, 6), d.n(4, 3)),
    lambda d: (d.n(2, 3), d.n(5, 6), d.n(5, 7)),
    ("CWN", "IWO", "WNC"),
    rhs_dilation=(4,),
)
_conv(
    "spread_patches",
    lambda d: (d.n(4, 3), d.n(5, 6), d.n(2, 3)),
    lambda d: (3, d.n(2, 3), d.n(5, 3)),
    _LINE,
    lhs_dilation=(3,),
    padding=[(2, 2)],
)
_conv("dense", lambda d: (d.n(4, 3), d.n(5, 6), d.n(2, 3)), lambda d: (d.n(5, 6), d.n(2, 3), d.n(5, 3)), _LINE)


def _grouped(draw: Draw) -> Program:
    groups = draw.n(4, 5)
    x, y = draw.floats(draw.n(4, 3), 5, 2 * groups), draw.floats(2, 2, 3 * groups)
    convolve = partial(lax.conv_general_dilated, window_strides=(1,), padding="VALID", dimension_numbers=_LINE)
    return lambda a, b: convolve(a, b, feature_group_count=groups), (x, y)


def _depthwise(draw: Draw) -> Program:
    groups = draw.n(4, 5)
    x, y = draw.floats(draw.n(4, 3), 5, groups), draw.floats(3, 1, groups)
    convolve = partial(lax.conv_general_dilated, window_strides=(1,), padding="SAME", dimension_numbers=_LINE)
    return lambda a, b: convolve(a, b, feature_group_count=groups), (x, y)


def _batch_grouped(draw: Draw) -> Program:
    groups = draw.n(4, 5)
    x, y = draw.floats(2 * groups, 5, draw.n(3, 2)), draw.floats(3, draw.n(3, 2), 3 * groups)
    convolve = partial(lax.conv_general_dilated, window_strides=(1,), padding="VALID", dimension_numbers=_LINE)
    return lambda a, b: convolve(a, b, batch_group_count=groups), (x, y)


_add("conv_general_dilated", "grouped", _grouped)
_add("conv_general_dilated", "depthwise", _depthwise)
_add("conv_general_dilated", "batch_grouped", _batch_grouped)


# ---------------------------------------------------------------------------------------------------
# Movement


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


@sample("iota")
def counting(draw: Draw) -> Program:
    return lambda: lax.broadcasted_iota(jnp.int32, draw.ab, 1), ()


@sample("iota")
def counting_floats(draw: Draw) -> Program:
    return lambda: lax.broadcasted_iota(jnp.float32, draw.ab, 0), ()


def _reshape(title: str, before: Callable[[Draw], tuple[int, ...]], after: Callable[[Draw], tuple[int, ...]]) -> None:
    _add("reshape", title, lambda draw: (lambda x: lax.reshape(x, after(draw)), (draw.floats(*before(draw)),)))


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


# ---------------------------------------------------------------------------------------------------
# Joining and slicing


@sample("concatenate")
def concatenated(draw: Draw) -> Program:
    a, b = draw.ab
    return lambda x, y: lax.concatenate([x, y], 1), (draw.floats(a, b), draw.floats(a, draw.n(3, 2)))


@sample("concatenate")
def class_token(draw: Draw) -> Program:
    a, b = draw.ab
    return lambda x, y, z: lax.concatenate([x, y, z], 0), (draw.floats(1, b), draw.floats(a, b), draw.floats(2, b))


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
    _add("pad", title, lambda draw: (lambda x, v: lax.pad(x, v, config), (kind(draw, *draw.ab), kind(draw))))


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

    _add("slice", title, make)


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
    return lambda x, i, j: lax.dynamic_slice(x, (i, j), (3, m)), (draw.floats(n, m), jnp.int32(2), jnp.int32(0))


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


# ---------------------------------------------------------------------------------------------------
# Indexing


def _lookup(table: Any, cotangent: Any, tokens: Any, mode: str) -> Any:
    out, pull = jax.vjp(lambda t: t.at[tokens].get(mode=mode), table)
    return out, pull(cotangent)


def _embedding(mode: str) -> None:
    def make(draw: Draw) -> Program:
        out = 0 if mode == "promise_in_bounds" else 12
        tokens = draw.ints(draw.n(3, 4), draw.n(5, 3), low=-out, high=6 + out)
        table = draw.floats(draw.n(7, 8), draw.n(4, 3))
        return partial(_lookup, mode=mode), (table, draw.floats(*tokens.shape, draw.n(4, 3)), tokens)

    _add("gather", f"embedding_{mode}", make)
    _add("scatter-add", f"embedding_{mode}", make)


_embedding("promise_in_bounds")
_embedding("fill")
_embedding("clip")


@sample("gather", "scatter-add")
def along_axis(draw: Draw) -> Program:
    """Forward and backward of take_along_axis: batching dimensions."""
    b, v = draw.n(5, 4), draw.n(7, 8)

    def pick(x: Any, i: Any, cotangent: Any) -> Any:
        out, pull = jax.vjp(lambda y: jnp.take_along_axis(y, i, axis=1), x)
        return out, pull(cotangent)

    return pick, (draw.floats(b, v), draw.ints(b, 2, low=-9, high=9), draw.floats(b, 2))


@sample("gather", "scatter-add")
def one_index(draw: Draw) -> Program:
    """x[:, 0]: the indices are a single vector."""
    a, b = draw.ab

    def pick(x: Any, i: Any, cotangent: Any) -> Any:
        out, pull = jax.vjp(lambda y: jnp.take(y, i, axis=1), x)
        return out, pull(cotangent)

    return pick, (draw.floats(a, b), jnp.int32(1), draw.floats(a))


@sample("gather", "scatter-add")
def two_indices(draw: Draw) -> Program:
    """x[i, :, j]: two indexed dimensions, some indices out of range."""
    n = draw.n(6, 5)
    shape = (draw.n(5, 6), 3, draw.n(4, 5))

    def pick(x: Any, i: Any, j: Any, cotangent: Any) -> Any:
        out, pull = jax.vjp(lambda y: y.at[i, :, j].get(mode="fill", fill_value=0), x)
        return out, pull(cotangent)

    indices = (draw.ints(n, low=-9, high=9), draw.ints(n, low=-9, high=9))
    return pick, (draw.floats(*shape), *indices, draw.floats(n, 3))


@sample("gather")
def windows(draw: Draw) -> Program:
    """Windows of three rows, clamped at the end."""
    numbers = lax.GatherDimensionNumbers((1, 2), (), (0,))
    n, m = draw.n(7, 9), draw.n(4, 5)
    return (
        lambda x, i: lax.gather(x, i, numbers, (3, m), mode="clip"),
        (draw.floats(n, m), draw.ints(draw.n(5, 4), 1, low=-3, high=12)),
    )


def _gather_as(title: str, table: Callable[[Draw], Any], **params: Any) -> None:
    def make(draw: Draw) -> Program:
        index = draw.ints(draw.n(5, 6), low=-12, high=12, dtype=params.get("dtype", jnp.int32))
        options = {"mode": "fill", **{k: v for k, v in params.items() if k != "dtype"}}
        return lambda x, i: x.at[i].get(**options), (table(draw), index)

    _add("gather", title, make)


_gather_as("logic", lambda d: d.bools(d.n(7, 8)))
_gather_as("integers", lambda d: d.bits(d.n(7, 8)))
_gather_as("keys", lambda d: d.keys(d.n(7, 8)), mode="clip")
_gather_as("filled", lambda d: d.floats(d.n(7, 8)), fill_value=3.0)
_gather_as("byte_indices", lambda d: d.floats(d.n(7, 8)), dtype=jnp.int8)


@sample("gather")
def more_rows_than_bytes(draw: Draw) -> Program:
    numbers = lax.GatherDimensionNumbers((), (0,), (0,))
    index = draw.bits(draw.n(6, 7), 1, dtype=jnp.int8)
    return lambda x, i: lax.gather(x, i, numbers, (1,), mode="clip"), (draw.floats(draw.n(200, 210)), index)


@sample("scatter")
def set_unique(draw: Draw) -> Program:
    n, m = draw.n(7, 8), draw.n(4, 3)
    index = jnp.asarray(draw.rng.permutation(n + 2)[:5] - 1)
    return (
        lambda x, i, u: x.at[i].set(u, unique_indices=True, mode="drop"),
        (draw.floats(n, m), index, draw.floats(5, m)),
    )


@sample("scatter")
def set_one(draw: Draw) -> Program:
    n, m = draw.n(7, 8), draw.n(4, 3)
    return lambda x, u: x.at[2].set(u), (draw.floats(n, m), draw.floats(m))


def _scattered(name: str, method: str, mode: str = "drop") -> None:
    def make(draw: Draw) -> Program:
        n, m = draw.n(7, 8), draw.n(4, 3)
        index = draw.ints(draw.n(5, 6), low=-12, high=12)
        return (
            lambda x, i, u: getattr(x.at[i], method)(u, mode=mode),
            (draw.floats(n, m), index, draw.floats(len(index), m)),
        )

    _add(name, f"{method}_{mode}", make)


_scattered("scatter", "set")
_scattered("scatter-mul", "multiply")
_scattered("scatter-max", "max")
_scattered("scatter-min", "min")
_scattered("scatter-sub", "subtract")
_scattered("scatter-max", "max", "clip")
_scattered("scatter-add", "add", "clip")


# ---------------------------------------------------------------------------------------------------
# Reductions


def _reduction(
    name: str, title: str, function: Callable[..., Any], kind: Callable[..., Any] = reals, axis: Any = 1, rank: int = 2
) -> None:
    _add(name, title, lambda draw: (lambda x: function(x, axis=axis), (kind(draw, *(*draw.ab, 3)[:rank]),)))


for _name in ("sum", "max", "min", "prod"):
    _reduction(f"reduce_{_name}", "one_axis", getattr(jnp, _name))
    _reduction(f"reduce_{_name}", "bits", getattr(jnp, _name), bits, 0)
_reduction("reduce_sum", "two_axes", jnp.sum, axis=(0, 2), rank=3)
_reduction("reduce_max", "all", jnp.max, axis=None)
_reduction("reduce_and", "logic", jnp.all, booleans)
_reduction("reduce_or", "logic", jnp.any, booleans)
for _name in ("and", "or", "xor"):
    _fold = _bind(f"reduce_{_name}", axes=(0,))
    _add(f"reduce_{_name}", "bits", partial(lambda draw, f: (f, (draw.bits(*draw.ab),)), f=_fold))
for _name in ("argmax", "argmin"):
    _reduction(_name, "one_axis", getattr(jnp, _name))
for _name in ("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"):
    _reduction(_name, "running", getattr(lax, _name))
_reduction("cumsum", "backwards", partial(lax.cumsum, reverse=True), bits, 0)
_reduction("sort", "alone", lambda x, axis: lax.sort(x, dimension=axis))
_reduction("top_k", "one_axis", lambda x, axis: lax.top_k(x, 2, axis=axis))


@sample("sort")
def sorted_pairs(draw: Draw) -> Program:
    a, b = draw.ab
    return lambda x, y: lax.sort((x, y), dimension=0, num_keys=1), (draw.floats(a, b), draw.floats(a, b))


@sample("reduce")
def custom_reduction(draw: Draw) -> Program:
    return lambda x: lax.reduce(x, np.float32(0), lambda a, b: a + 2 * b, (1,)), (draw.floats(*draw.ab),)


for _name in ("psum", "pmax", "pmin"):
    _add(
        _name,
        "over_vmap",
        partial(
            lambda d, f: (jax.vmap(lambda x: f(x, "i"), axis_name="i", out_axes=None), (d.floats(*d.ab),)),
            f=getattr(lax, _name),
        ),
    )


# ---------------------------------------------------------------------------------------------------
# Windows


def _distinct(draw: Draw) -> jax.Array:
    """Numbers of which no two are equal, so that the largest of a window is one."""
    shape = draw.n(4, 3), draw.n(12, 18)
    return jnp.asarray(draw.rng.permutation(np.prod(shape)).reshape(shape) / 4 - 7, jnp.float32)


def _pool(size: tuple[int, ...], strides: tuple[int, ...], padding: Any) -> dict[str, Callable[..., Any]]:
    """Windowed reductions and, by differentiating them, what belongs to them."""

    def window(x: Any, start: Any, function: Any) -> Any:
        return lax.reduce_window(x, start, function, size, strides, padding)

    def largest(x: Any) -> Any:
        return window(x, -jnp.inf, lax.max)

    return {
        "reduce_window_sum": lambda x: window(x, 0.0, lax.add),
        "reduce_window_max": largest,
        "reduce_window_min": lambda x: window(x, jnp.inf, lax.min),
        "reduce_window": lambda x: window(x, np.float32(0), lambda a, b: a + 2 * b),
        "select_and_scatter_add": lambda x: jax.vjp(largest, x)[1](2 * largest(x)),
        "select_and_gather_add": lambda x: jax.jvp(largest, (x,), (jnp.sin(8 * x),))[1],
    }


for _title, _pooling in {
    "side_by_side": ((1, 2), (1, 2), "VALID"),
    "overlapping": ((1, 3), (1, 2), "VALID"),
    "padded": ((1, 3), (1, 1), "SAME"),
    "sparse": ((1, 2), (1, 3), "VALID"),
}.items():
    for _name, _function in _pool(*_pooling).items():
        _add(_name, _title, partial(lambda draw, f: (f, (_distinct(draw),)), f=_function))


# ---------------------------------------------------------------------------------------------------
# Random numbers


def _bits(width: int, shape: Callable[[Draw], tuple[int, ...]]) -> None:
    _add("random_bits", f"bits{width}", lambda d: (lambda k: jax.random.bits(k, shape(d), f"uint{width}"), (d.keys(),)))


_bits(8, lambda d: (d.n(5, 7),))
_bits(16, lambda d: (d.n(5, 7),))
_bits(32, lambda d: (d.n(5, 7), 3))


@sample("random_bits")
def per_key_bits(draw: Draw) -> Program:
    return jax.vmap(lambda k: jax.random.bits(k, (draw.n(6, 4),))), (draw.keys(draw.n(4, 5)),)


@sample("random_bits", "random_wrap")
def other_generator(draw: Draw) -> Program:
    def bits(data: Any) -> Any:
        return jax.random.bits(jax.random.wrap_key_data(data, impl="rbg"), (draw.n(5, 7),))

    return bits, (draw.bits(4, dtype=jnp.uint32),)


@sample("random_wrap")
def wrapped(draw: Draw) -> Program:
    return jax.random.wrap_key_data, (draw.bits(draw.n(5, 4), 2, dtype=jnp.uint32),)


@sample("random_unwrap")
def unwrapped(draw: Draw) -> Program:
    return jax.random.key_data, (draw.keys(draw.n(5, 4)),)


@sample("random_seed")
def seeded(draw: Draw) -> Program:
    return jax.vmap(jax.random.key), (draw.ints(draw.n(5, 4)),)


@sample("random_fold_in")
def folded(draw: Draw) -> Program:
    n = draw.n(5, 4)
    return jax.vmap(jax.random.fold_in), (draw.keys(n), draw.ints(n, low=0))


@sample("random_fold_in")
def folded_one(draw: Draw) -> Program:
    return jax.random.fold_in, (draw.keys(), jnp.uint32(3))


@sample("random_split")
def split_keys(draw: Draw) -> Program:
    return jax.vmap(lambda k: jax.random.split(k, 3)), (draw.keys(draw.n(5, 4)),)


@sample("random_clone")
def cloned(draw: Draw) -> Program:
    return jax.random.clone, (draw.keys(draw.n(5, 4)),)


@sample("threefry2x32")
def hashed(draw: Draw) -> Program:
    operands = tuple(draw.bits(draw.n(5, 7), dtype=jnp.uint32) for _ in range(4))
    return lambda a, b, c, d: threefry2x32_p.bind(a, b, c, d), operands


@sample("rng_bit_generator")
def generated(draw: Draw) -> Program:
    return lambda k: lax.rng_bit_generator(k, draw.ab), (draw.bits(4, dtype=jnp.uint32),)
