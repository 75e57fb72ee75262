"""Cases for the conformance of collectives: every kind and strategy, many dtypes, dimensions, groups."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import jax
import numpy as np

from shardwright.backends.layout import from_numpy, members, stretches, to_numpy
from shardwright.ir import collectives
from shardwright.ir.dtypes import dtype_of, is_key
from shardwright.ir.graph import TensorType
from shardwright.ir.placement import REDUCE_OPS, OwnRatios, Partial, Placement, R, Shard
from shardwright.ir.program import Group, Move

#: The first is tried on everything, the second with empty shares too, the rest on uneven ones.
DTYPES = (
    *("float32", "int32", "bfloat16", "bool", "float16", "uint8", "complex64", "key<fry>"),
    # Without anything infinite, and integers that are none of numpy's.
    *("float8_e4m3fn", "int4"),
)


@dataclass(frozen=True)
class Case:
    move: Move
    tensor: TensorType
    ratios: tuple[float, ...]

    def __str__(self) -> str:
        return f"{self.move} of {self.tensor} at {self.ratios}"


def ratio_sets(devices: int) -> list[tuple[float, ...]]:
    """Uneven, with an empty device, all on one device."""
    uneven = [i + 1.0 for i in range(devices)]
    empty = [0.0 if i == 1 else 1.0 for i in range(devices)]
    alone = [1.0 if i == devices - 1 else 0.0 for i in range(devices)]
    return [tuple(x / sum(row) for x in row) for row in (uneven, empty, alone)]


def placements(tensor: TensorType, devices: int, *, units: bool) -> list[Placement]:
    shards: list[Placement] = [Shard(d) for d in range(len(tensor.shape))]
    if units:
        even = [d for d, size in enumerate(tensor.shape) if size and size % 2 == 0]
        own = OwnRatios(1, ratio_sets(devices)[0][::-1])
        shards += [Shard(d, 2, None if number else own) for number, d in enumerate(even)]
    ordered = not tensor.dtype.startswith(("key", "complex"))
    return [R, *shards, *(Partial(op) for op in REDUCE_OPS if op == "sum" or ordered)]


def cases(devices: int, *, local: bool, dtypes: Sequence[str] = DTYPES, every: bool = True) -> Iterator[Case]:
    """Every collective (local ones or not), strategy, pair of placements, dtype, shape, ratios and group.

    Without `every`, not the whole product of these: see `_in_turn`.
    """
    shapes = {dtype: [(6, 5, 4)] for dtype in dtypes}
    shapes["float32"] += [(), (1,), (0, 3), (3, 0), (7,)]
    groups: list[Group] = [None] + ([(0, devices - 1)] if devices > 2 else [])
    for kind, collective in collectives.registry().items():
        if collective.local != local:
            continue
        turn = itertools.count()
        for dtype in dtypes:
            for shape in shapes[dtype]:
                tensor = TensorType(shape, dtype)
                thorough = dtype == "float32" and shape == (6, 5, 4)
                empty = dtype in DTYPES[:2] and shape == (6, 5, 4)
                pairs = [
                    (pre, post)
                    for pre, post in itertools.product(placements(tensor, devices, units=thorough), repeat=2)
                    if collective.allows(pre, post)
                    and not (is_key(dtype) and Partial("sum") in (pre, post))
                    and (tensor.shape or not isinstance(post, Shard))
                ]
                places = [
                    (ratios, group)
                    for ratios in ratio_sets(devices)[: None if empty else 1]
                    for group in (groups if thorough else [None])
                    if kind != "send" or group is not None or devices == 2
                ]
                if every or not places:
                    chosen = itertools.product(pairs, collective.strategies, places)
                else:
                    chosen = _in_turn(pairs, collective.strategies, places, thorough, turn)
                for (pre, post), strategy, (ratios, group) in chosen:
                    where = (0, 1) if kind == "send" and group is None else group
                    roots = (
                        (members(where, devices)[0], members(where, devices)[-1])
                        if collective.rooted
                        else (None,)
                    )
                    for root in roots:
                        yield Case(Move(kind, 0, pre, post, strategy, where, root), tensor, ratios)


def _in_turn(
    pairs: Sequence[tuple[Placement, Placement]],
    strategies: Sequence[str],
    places: Sequence[tuple[tuple[float, ...], Group]],
    thorough: bool,
    turn: Iterator[int],
) -> Iterator[tuple[tuple[Placement, Placement], str, tuple[tuple[float, ...], Group]]]:
    """Every pair by every strategy at the first place and at one of the others, or every pair at some place.

    Also of the latter every strategy has its turn.
    """
    first, *others = places
    if thorough:
        for pair, strategy in itertools.product(pairs, strategies):
            yield pair, strategy, first
            if others:
                yield pair, strategy, others[next(turn) % len(others)]
    elif pairs:
        for number in range(max(len(pairs), len(strategies))):
            place = places[next(turn) % len(places)]
            yield pairs[number % len(pairs)], strategies[number % len(strategies)], place


def before(case: Case) -> list[Any]:
    """Local arrays of all devices before the move, None outside the group; sums are exact.

    Of maxima and minima every device has some that are not a number, which no other may hide.
    """
    return list(_held(case.tensor, case.move.pre, case.move.group, case.ratios))


@lru_cache(256)  # whatever becomes of it, and by which strategy
def _held(tensor: TensorType, pre: Placement, group: Group, ratios: tuple[float, ...]) -> tuple[Any, ...]:
    rng = np.random.default_rng(0)
    devices = members(group, len(ratios))
    lengths = stretches(tensor, pre, group, ratios)
    result: list[Any] = [None] * len(ratios)
    # What all hold is drawn once; shards and partial values are each device's own.
    whole = _draw(rng, tensor, tensor.shape)
    for position, device in enumerate(devices):
        shape = list(tensor.shape)
        if isinstance(pre, Shard):
            shape[pre.dim] = lengths[position]
        part = whole if pre == R else _draw(rng, tensor, tuple(shape))
        if tensor.is_float and pre in (Partial("max"), Partial("min")):
            which = np.arange(part.size).reshape(part.shape) % (len(devices) + 1)
            part = jax.device_put(np.where(which == position, to_numpy(part).dtype.type(np.nan), part))
        result[device] = part
    return tuple(result)


def _draw(rng: np.random.Generator, tensor: TensorType, shape: tuple[int, ...]) -> Any:
    if is_key(tensor.dtype):
        return from_numpy(rng.integers(0, 2**32, (*shape, 2), np.uint32), tensor.dtype)
    high = {"bool": 2, "float8_e4m3fn": 3}.get(tensor.dtype, 9)
    return jax.device_put(rng.integers(0, high, shape).astype(dtype_of(tensor.dtype)))  # compiles nothing


def expected(case: Case, arrays: list[Any]) -> list[Any]:
    """numpy arrays after the move, by the collective's own definition; None outside the group."""
    move = case.move
    devices = members(move.group, len(case.ratios))
    root = None if move.root is None else devices.index(move.root)
    shards = [to_numpy(arrays[d]) for d in devices]
    lengths = stretches(case.tensor, move.post, move.group, case.ratios)
    after = collectives.registry()[move.kind].reference(shards, move.pre, move.post, lengths, root)
    result: list[Any] = [None] * len(case.ratios)
    for device, array in zip(devices, after, strict=True):
        result[device] = array
    return result


def same(got: Any, wanted: Any) -> bool:
    if wanted is None or got is None:
        return got is wanted
    a = to_numpy(got)
    if a.shape != wanted.shape or a.dtype != wanted.dtype:
        return False
    return bool(np.all((a == wanted) | ((a != a) & (wanted != wanted))))
