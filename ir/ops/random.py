"""Random numbers: JAX's default generator hashes each element's position, so a stretch can be made alone.

Partitionable threefry2x32 (the dtype `key<fry>`) gives element i of an array the hash of the 64-bit
counter i under the key. A device hashes the *global* positions of its stretch and gets exactly what a
single device would have there; the rank is never folded in. Other generators, and threefry with
`jax_threefry_partitionable=False`, run replicated.
"""

from __future__ import annotations

import math
import sys
from typing import Any

from shardwright.ir.graph import Equation
from shardwright.ir.ops.axes import aligned, names, string
from shardwright.ir.registry import Extent, Local, OpDef, register, replicated_rule
from shardwright.ir.rules import Rule

_THREEFRY = "key<fry>"

#: Generators of which a batch of keys is split, and has numbers folded in, as its keys are one by one.
_ONE_BY_ONE = (_THREEFRY, "key<rbg>")
_IN_BATCHES = "the generator makes other keys in a batch than one by one"

#: Integer operations of one threefry2x32 hash: 20 rounds of an addition, a rotation and an xor, and keys.
_HASH_FLOP = 100.0


def _partitionable() -> bool:
    """JAX's own setting; a graph can be read where JAX is not loaded, and there the default holds."""
    jax = sys.modules.get("jax")
    return jax is None or bool(jax.config.jax_threefry_partitionable)


def _bits(equation: Equation) -> Rule:
    key, output = equation.input_types[0], equation.output_types[0]
    if key.dtype != _THREEFRY:
        return replicated_rule(equation, f"the generator of {key.dtype} cannot be started at a position")
    if not _partitionable():
        return replicated_rule(equation, "jax_threefry_partitionable is off")
    letters = names("e", output.rank)
    return Rule(string([letters[: key.rank]], [letters]), reduce=None, flop_per_point=_HASH_FLOP)


def _localize_bits(local: Local, keys: Any) -> Any:
    jax, jnp = local.jax, local.jax.numpy
    batch = len(local.inputs[0])
    wanted = local.outputs[0][batch:]
    if all(extent.whole for extent in wanted):
        return local.bind(keys, **local.params)
    if not _partitionable():  # a plan made under another setting: right all the same
        every = local.bind(keys, **local.params)
        whole = [(0, extent.length) for extent in local.outputs[0][:batch]]
        bounds = [*whole, *((extent.offset, extent.offset + extent.length) for extent in wanted)]
        return jax.lax.slice(every, *zip(*bounds, strict=True))
    # Flat arrays: XLA compiles the hash of several dimensions far more slowly (minutes on a CPU).
    shape = tuple(extent.length for extent in local.outputs[0])
    high, low = (jnp.broadcast_to(count, shape).ravel() for count in _positions(jax, wanted))
    data = jax.random.key_data(keys)
    one, two = data[..., 0], data[..., 1]
    if batch:
        each = (*data.shape[:-1], *[1] * len(wanted))
        one, two = (jnp.broadcast_to(half.reshape(each), shape).ravel() for half in (one, two))
    first, second = (
        bits.reshape(shape) for bits in jax.extend.random.threefry2x32_p.bind(one, two, high, low)
    )
    width = local.params["bit_width"]
    if width == 64:
        return (first.astype("uint64") << jnp.uint64(32)) | second.astype("uint64")
    mixed = first ^ second
    return mixed if width == 32 else mixed.astype(f"uint{width}")


def _positions(jax: Any, dims: tuple[Extent, ...]) -> tuple[Any, Any]:
    """Row-major position of every local element in the whole array, as high and low 32 bits."""
    jnp = jax.numpy
    shape = tuple(extent.length for extent in dims)
    high, low = jnp.zeros(shape, "uint32"), jnp.zeros(shape, "uint32")
    small = math.prod(extent.size for extent in dims) <= 2**32
    for dim, extent in enumerate(dims):
        stride = math.prod(later.size for later in dims[dim + 1 :])
        if small:
            index = jax.lax.broadcasted_iota("uint32", shape, dim)
            low = low + index * jnp.uint32(stride) + jnp.uint32(extent.offset * stride)
            continue
        index = jnp.arange(extent.length, dtype="uint32")
        term_high, term_low = _multiply(jnp, index, stride)
        start = extent.offset * stride
        term_high, term_low = _add(
            jnp, term_high, term_low, jnp.uint32(start >> 32), jnp.uint32(start & _LOW)
        )
        spread = [-1 if i == dim else 1 for i in range(len(dims))]
        high, low = _add(jnp, high, low, term_high.reshape(spread), term_low.reshape(spread))
    return high, low


_LOW = 0xFFFFFFFF


def _multiply(jnp: Any, index: Any, stride: int) -> tuple[Any, Any]:
    """64-bit product of 32-bit numbers with a constant, by 16-bit halves (JAX may lack 64-bit integers)."""
    high, low = jnp.zeros_like(index), jnp.zeros_like(index)
    for shift in range(0, 64, 16):
        digit = (stride >> shift) & 0xFFFF
        if digit:
            for half, place in ((index & 0xFFFF, shift), (index >> 16, shift + 16)):
                product = half * jnp.uint32(digit)
                high, low = _add(jnp, high, low, *_shifted(jnp, product, place))
    return high, low


def _shifted(jnp: Any, value: Any, place: int) -> tuple[Any, Any]:
    """`value << place` for a multiple of 16, as high and low 32 bits."""
    zero = jnp.zeros_like(value)
    if place >= 64:
        return zero, zero
    if place >= 32:
        return value << (place - 32), zero
    return (value >> (32 - place) if place else zero), value << place


def _add(jnp: Any, high: Any, low: Any, other_high: Any, other_low: Any) -> tuple[Any, Any]:
    total = low + other_low
    return high + other_high + (total < low).astype("uint32"), total


register(OpDef("random_bits", _bits, "random", localize=_localize_bits))


def _one_by_one(equation: Equation) -> bool:
    """Whether there is no batch of keys or numbers, or its keys are made one by one."""
    batch = any(each.rank for each in equation.input_types)
    return not batch or equation.output_types[0].dtype in _ONE_BY_ONE


def _per_key(equation: Equation) -> Rule:
    """Keys are made from keys, or numbers, one by one; operands of one element stretch."""
    output = equation.output_types[0]
    letters = names("e", output.rank)
    ins = [aligned(tensor, output, letters) for tensor in equation.input_types]
    return Rule(string(ins, [letters] * len(equation.outputs)), reduce=None, flop_per_point=_HASH_FLOP)


for _name in ("random_seed", "random_clone", "threefry2x32"):
    register(OpDef(_name, _per_key, "random"))


def _fold_in(equation: Equation) -> Rule:
    return _per_key(equation) if _one_by_one(equation) else replicated_rule(equation, _IN_BATCHES)


register(OpDef("random_fold_in", _fold_in, "random"))


def _split(equation: Equation) -> Rule:
    if not _one_by_one(equation):
        return replicated_rule(equation, _IN_BATCHES)
    letters = names("e", equation.inputs[0].type.rank)
    new = [f"s{i}!" for i in range(equation.output_types[0].rank - len(letters))]
    return Rule(string([letters], [[*letters, *new]]), reduce=None, flop_per_point=_HASH_FLOP)


register(OpDef("random_split", _split, "random"))


def _wrap(equation: Equation) -> Rule:
    """Between a key and the numbers it consists of, which stay together."""
    before, after = equation.inputs[0].type, equation.output_types[0]
    letters = names("e", min(before.rank, after.rank))
    ins = [*letters, *(f"d{i}!" for i in range(before.rank - len(letters)))]
    outs = [*letters, *(f"d{i}!" for i in range(after.rank - len(letters)))]
    return Rule(string([ins], [outs]), reduce=None, flop_per_point=0.0)


register(OpDef("random_wrap", _wrap, "random"))
register(OpDef("random_unwrap", _wrap, "random"))


def _sequential(equation: Equation) -> Rule:
    return replicated_rule(equation, "the generator carries a state from one number to the next")


register(OpDef("rng_bit_generator", _sequential, "random"))
