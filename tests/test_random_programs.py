"""Random programs at random prices, on random fleets with random ratios, equal the single-device evaluation.

A program is a list of steps drawn from `OPS`, which spans the rule registry. Prices are drawn per
instruction instead of modelled: tiny tensors would otherwise stay replicated, and any program of the
space must be right, not only a cheap one.

Floats are small whole numbers as long as operations keep them whole, and sums of whole numbers are equal
in any order; what jumps (sorting, comparing, rounding, counting) is applied to whole numbers alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax import lax

from shardwright.backends.reference import ReferenceExecutable
from shardwright.cost.fleet import Fleet
from shardwright.cost.model import CostModel
from shardwright.ir.placement import R, Shard
from shardwright.ir.program import Compute, Program, verify
from shardwright.ir.rules import Signature, registry
from shardwright.ir.trace import trace
from shardwright.synth.emit import emit
from shardwright.synth.price_list import PriceList
from shardwright.synth.pricing import Prices
from shardwright.synth.solve import solve
from shardwright.synth.space import Space

# ---------------------------------------------------------------------------------------------------
# Values


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


# ---------------------------------------------------------------------------------------------------
# Operations. Each takes values from the pool and gives one more, or raises LookupError where none fits.

Op = Callable[[Pool], Entry]
OPS: dict[str, Op] = {}


def op(make: Op) -> Op:
    OPS[make.__name__] = make
    return make


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


def fits(e: Entry, other: Entry) -> bool:
    try:
        return np.prod(np.broadcast_shapes(e.shape, other.shape)) <= 300
    except ValueError:
        return False


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


# -- movement ---------------------------------------------------------------------------------------


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


# -- integers, bits, random numbers -----------------------------------------------------------------


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


# -- layers and loops -------------------------------------------------------------------------------


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


# ---------------------------------------------------------------------------------------------------
# Programs

Line = tuple[str, tuple[int, ...]]

_SHAPES = ((6, 4), (4, 6), (4,), (4, 3, 6))


def arguments(seed: int) -> tuple[Any, ...]:
    rng = np.random.default_rng(seed)
    floats = [jnp.asarray(rng.integers(-3, 4, shape), jnp.float32) for shape in _SHAPES]
    ints = [jnp.asarray(rng.integers(-9, 10, shape), jnp.int32) for shape in ((6, 4), (6,), ())]
    return (*floats, *ints, jax.random.key(seed))


def entries(args: Sequence[Any]) -> list[Entry]:
    return [Entry(x, True, 9.0) for x in args]


def run(lines: Sequence[Line], args: Sequence[Any]) -> list[Entry]:
    """The values that a program adds to its arguments: all that nothing says must not be handed out."""
    pool = Pool(entries(args))
    for name, picks in lines:
        pool.picks = list(picks)
        try:
            pool.entries.append(OPS[name](pool))
        except LookupError:
            continue
    return pool.entries[len(args) :]


# One number per line stands for all its picks: they are then spread evenly, which hypothesis' own are not.
_PICKS = st.integers(0, 12**6 - 1).map(lambda n: tuple(n // 12**k % 12 for k in range(6)))
_LINES = st.lists(st.tuples(st.sampled_from(sorted(OPS)), _PICKS), min_size=4, max_size=9)


@st.composite
def fleets(draw: st.DrawFn) -> Fleet:
    """Two to four devices, unlike each other."""
    speeds = draw(st.lists(st.sampled_from([1, 2, 5]), min_size=2, max_size=4))
    devices = [
        {
            "type": {
                "name": f"speed-{speed}",
                "flops": f"{speed} GFLOP/s",
                "memory_bandwidth": f"{speed} GB/s",
                "memory": "1 GB",
                "launch": "0.01 us",
            }
        }
        for speed in speeds
    ]
    link = {"bandwidth": "100 GB/s", "latency": "0.01 us"}
    return Fleet.from_dict({"name": "random", "nodes": [{"count": 1, "devices": devices, "link": link}]})


@st.composite
def ratios(draw: st.DrawFn, devices: int) -> tuple[float, ...]:
    weights = draw(
        st.lists(st.sampled_from([0, 1, 1, 2, 3, 7]), min_size=devices, max_size=devices).filter(any)
    )
    return tuple(w / sum(weights) for w in weights)


def random_prices(model: CostModel, seed: int) -> Prices:
    """A price of its own for every kernel and every move, of very different sizes."""
    rng = np.random.default_rng(seed)
    return Prices(PriceList(model), lambda costs, units, tied: rng.exponential(size=len(units)) ** 3)


@settings(
    max_examples=60 if settings().max_examples <= 100 else 1000,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)
@given(st.data(), _LINES, st.integers(0, 2**16), fleets())
def test_random_programs(data: st.DataObject, lines: list[Line], seed: int, fleet: Fleet) -> None:
    if seed % 50 == 0:
        jax.clear_caches()  # a thousand programs leave gigabytes of executables
    args = arguments(seed % 7)
    single = run(lines, args)
    if not single:
        return
    traced = trace(lambda *xs: [e.x for e in run(lines, xs)], *args, state=_state(single, args, seed))
    shares = data.draw(ratios(len(fleet.devices)))
    model = CostModel(fleet)
    prices = random_prices(model, seed) if seed % 8 else Prices.at(model, shares)
    space = Space(traced.graph)
    program = emit(space, solve(space, prices).assignment, prices)
    verify(program, traced.graph)
    for result, entry in zip(ReferenceExecutable(traced, program, shares)(*args), single, strict=True):
        compare_result(result, entry, lines)


def _state(single: Sequence[Entry], args: Sequence[Any], seed: int) -> dict[int | str, Any]:
    """Every other program hands an argument back as state, where a result has its type."""
    found: dict[int | str, Any] = {}
    for out, entry in enumerate(single if seed % 2 else ()):
        for position, arg in enumerate(args):
            if position not in found and entry.shape == arg.shape and entry.x.dtype == arg.dtype:
                found[position] = out
                break
    return found


def compare_result(result: Any, entry: Entry, lines: Sequence[Line]) -> None:
    got, wanted = np.asarray(result), np.asarray(entry.x)
    assert got.shape == wanted.shape and got.dtype == wanted.dtype, lines
    if entry.whole or not entry.float:
        np.testing.assert_array_equal(got, wanted, err_msg=str(lines))
    else:
        largest = float(np.abs(wanted).max(initial=0.0))
        np.testing.assert_allclose(
            got, wanted, rtol=0, atol=1e-4 * largest + 1e-6 * entry.most, err_msg=str(lines)
        )


def test_devices_that_read_different_operands_run_different_executables() -> None:
    """Found by the test above: the first device's stretch is all of `x`, the second's all of `y`.

    Compiled without the operand that it does not read, either function has the same text.
    """
    args = (jnp.arange(4.0), jnp.arange(4.0, 8.0))
    traced = trace(lambda x, y: jnp.concatenate([x, y]), *args, state={})
    program = Program((R, R), (Compute(0, Signature((R, R), (Shard(0),))),), (Shard(0),))
    verify(program, traced.graph)
    (joined,) = ReferenceExecutable(traced, program, (0.5, 0.5))(*args)
    np.testing.assert_array_equal(joined, np.arange(8.0))


# ---------------------------------------------------------------------------------------------------
# The table itself


def test_the_operations_span_the_registry() -> None:
    """Alone, with every first choice, each operation applies; together they make most primitives."""
    args = arguments(0)
    base: list[Line] = [("compare", (3, 0, 0)), ("total", (0, 0, 0, 1)), ("place_of_largest", (0, 0))]
    base += [("truth", (0, 0, 0)), ("truth", (0, 0, 0)), ("counting", (6,)), ("separate", (8, 0))]
    used: set[str] = set()
    for name in OPS:
        for picks in [(k,) * 6 for k in range(12)] + [(0, k, k // 2, k, k // 3, k) for k in range(12)]:
            lines = [*base, (name, picks)]
            made = run(lines, args)
            jaxpr = trace(lambda *xs, lines=lines: [e.x for e in run(lines, xs)], *args, state={})
            used |= {e.primitive for e in jaxpr.graph.all_equations()}
            if len(made) > len(run(base, args)):
                break
        else:
            raise AssertionError(f"{name} never applies")
    assert used <= set(registry()) | {"scan", "while", "cond"}
    assert len(used) >= 60, sorted(used)
