"""Seconds of one kernel on one type of device, from its datasheet and a table of fitted constants.

A kernel takes `(dispatch^p + work^p)^(1/p)`: what the host needs to start it, and what the device needs to
run it. The work is a roofline whose ceilings depend on the shape (`docs/kernels.md` derives each term):

- matrix products: the cheapest of a few thread-block tiles, each priced as rounds of blocks over the
  multiprocessors (tile and wave quantisation), with a floor of latency per step of the reduction, against
  DRAM traffic and against the board's power; a single product may also split its reduction;
- elementwise kernels: DRAM traffic against arithmetic;
- softmax and layernorm: DRAM traffic against rows per multiprocessor and arithmetic per element.

`SHARED` constants hold for every device. A few more differ between measured devices (`OWN`), and measured
devices have a correction by size (`CORRECTIONS`). A device that was not measured takes what `own_constants`
infers from the measured ones, and a correction only from its own chip.
`bench/fit_kernels.py` fits all of it, writes `constants.py`, and reports the errors, among them those
on each measured device as if it had not been measured.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from difflib import get_close_matches
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from shardwright.cost.catalogue import catalogue
from shardwright.cost.catalogue import device_type as catalogue_type
from shardwright.cost.device import DeviceType
from shardwright.cost.kernels.constants import CORRECTIONS, OWN, SHARED
from shardwright.cost.kernels.terms import (
    BINARY,
    DEFAULT_CAPABILITY,
    PRICED_AS,
    SCALAR,
    UNARY,
    Array,
    Card,
    Constants,
    correction_factor,
    delivered,
    dispatch_s,
    elementwise_work,
    joined,
    matmul_work,
    product_byte_per_s,
    row_work,
)
from shardwright.ir.errors import InputError

# Cards that differ by no more in capability run the same kernels. How many devices of value zero the mean
# over measured ones is drawn by.
_GENERATION = 0.25
_UNKNOWN = 3

#: Own constants of matrix products: clock, TLB, latency, transposed and ragged operands, and what batched
#: products lose on tiles of fewer than 128 columns and of fewer than 128 rows.
PRODUCTS = ("clk", "kt", "lat", "tn", "un", "sn", "sr")
ELEMENTWISE = (*BINARY, *SCALAR, *UNARY)
_SHAPES = {"matmul": "b, m, n, k", "elementwise": "b, h", "softmax": "b, h", "layernorm": "b, h"}
_DTYPE_BYTES = {"float32": 4, "tf32": 4, "float16": 2, "bfloat16": 2}
#: What the kernel model multiplies in.
DTYPES = tuple(_DTYPE_BYTES)


def kernel_s(device_type: DeviceType | str, op: str, shape: Sequence[int], dtype: str = "float32") -> float:
    """Seconds of one forward kernel that is started alone, dispatch by the host included.

    Args:
        device_type: a type, or its name in the catalogue. Peaks and bandwidth are enough; multiprocessors,
            board power, clocks and compute capability make it better.
        op: "matmul" (b, m, n, k: b products of m×k by k×n), "elementwise:NAME" (b, h: `add`, `mul` and their
            like take two tensors, `addu` and its like a tensor and a scalar, `gelu` and its like one tensor),
            "softmax" (b, h) or "layernorm" (b, h), both over h.
        shape: the sizes, all at least 1.
        dtype: "float32" (TF32 off), "tf32", "float16" or "bfloat16". A type that a card lacks is priced at
            its float32 rate.

    Raises:
        InputError: unknown type, op or dtype, or a shape that is none.
    """
    device, kind, name, sizes, dtype = _checked(device_type, op, shape, dtype, place=f"kernel_s({op!r})")
    group = _group(kind, name, sizes[0])
    sheet = _sheet(device, dtype)
    dispatch = dispatch_s(SHARED, sheet.own, sheet.card, group)
    return float(joined(SHARED, group, np.array(_work_s(device, kind, name, sizes, dtype)), dispatch))


def work_s(device_type: DeviceType | str, op: str, shape: Sequence[int], dtype: str = "float32") -> float:
    """The device's part of `kernel_s`: what a kernel adds to a queue that the host keeps filled."""
    return _work_s(*_checked(device_type, op, shape, dtype, place=f"work_s({op!r})"))


def products_s(
    devices: Sequence[DeviceType],
    dtypes: Sequence[str],
    shapes: Sequence[tuple[int, ...]],
    *,
    linear: bool = True,
    memory: bool = True,
) -> Array:
    """`work_s` of matrix products, (devices, shapes), in one go: the planner prices thousands.

    Args:
        devices: types of device.
        dtypes: what each of them multiplies in.
        shapes: (b, m, n, k), all at least 1.
        linear: whether k is the last dimension of both operands of single products, as `kernel_s` has it.
        memory: whether reading and writing the matrices counts.
    """
    numbers, following = _halved(shapes)
    sizes = np.array(list(numbers), dtype=np.float64).T
    sheets = [_sheet(device, dtype) for device, dtype in zip(devices, dtypes, strict=True)]

    def repeat(values: Sequence[float]) -> Array:
        return np.repeat(np.array(values, dtype=np.float64), sizes.shape[1])

    card = Card(*(repeat([getattr(sheet.card, f.name) for sheet in sheets]) for f in fields(Card)))
    work = matmul_work(
        SHARED,
        {key: repeat([sheet.own[key] for sheet in sheets]) for key in PRODUCTS},
        card,
        *np.tile(sizes, len(sheets)),
        itemsize=repeat([_DTYPE_BYTES[dtype] for dtype in dtypes]),
        tensor=np.asarray(card.matrix) > np.asarray(card.flop_per_s),
        linear=np.full(len(sheets) * sizes.shape[1], linear),
        memory=memory,
    ).reshape(len(sheets), -1)
    for row, sheet in zip(work, sheets, strict=True):
        for table, at in (("linear", (sizes[0] == 1) & linear), ("bmm", sizes[0] > 1)):
            if table in sheet.tables and at.any():
                part = tuple(sizes[:, at])
                row[at] *= correction_factor(table, sheet.tables[table], sheet.card, part)
        row[:] = np.maximum(row, 2 * sizes.prod(axis=0) / sheet.card.matrix)
    # The dearest of a shape and its halves counts: of two, of four, of eight at once.
    while (following != following[following]).any():
        work = np.maximum(work, work[:, following])
        following = following[following]
    work = np.maximum(work, work[:, following])
    return work[:, [numbers[shape] for shape in shapes]]


def peak_flop_per_s(device: DeviceType, dtype: str) -> float:
    """What `products_s` never exceeds."""
    return float(_sheet(device, dtype).card.matrix)


def _halved(shapes: Sequence[tuple[int, ...]]) -> tuple[dict[tuple[int, ...], int], NDArray[np.intp]]:
    """Products of these shapes, of their halves, the halves of those …, each once; and the half of each.

    `_halves` says why. Batches are not halved; what cannot be is its own half.
    """
    numbers: dict[tuple[int, ...], int] = {}
    halves: list[tuple[int, ...]] = []
    for shape in shapes:
        while shape not in numbers:
            numbers[shape] = len(numbers)
            b, m, n, k = shape
            shape = (b, m // 2 or 1, n // 2 or 1, k // 2 or 1)
            halves.append(shape)
    return numbers, np.array([numbers[half] for half in halves], dtype=np.intp)


def bandwidths(device: DeviceType) -> tuple[float, float]:
    """Bytes per second of a large elementwise kernel, and of the operands of a matrix product."""
    sheet = _sheet(device, "float32")
    stream = float(delivered(sheet.card)) * math.exp(SHARED["stream"] + sheet.own["bw"])
    return stream, float(product_byte_per_s(SHARED, sheet.card))


@lru_cache(maxsize=1 << 16)
def _work_s(device: DeviceType, kind: str, name: str, sizes: tuple[int, ...], dtype: str) -> float:
    if kind == "matmul":
        return float(products_s([device], [dtype], [sizes])[0, 0])
    sheet, itemsize = _sheet(device, dtype), _DTYPE_BYTES[dtype]
    shape = tuple(np.array(_halves(sizes), dtype=np.float64).T)
    if kind == "elementwise":
        work = elementwise_work(SHARED, sheet.own, sheet.card, name, *shape, itemsize=itemsize)
    else:
        work = row_work(SHARED, sheet.own, sheet.card, kind, *shape, itemsize=itemsize)
    if kind in sheet.tables:
        work = work * correction_factor(kind, sheet.tables[kind], sheet.card, shape)
    return float(work.max())


def _halves(sizes: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Sizes, their half, the half of that …

    The dearest of them counts: neither alignment nor a table makes what is twice as large cheaper.
    """
    halves = [sizes]
    while max(halves[-1]) > 1:
        halves.append(tuple(max(size // 2, 1) for size in halves[-1]))
    return halves


def _group(kind: str, name: str, b: float) -> str:
    """Which constants of dispatch a kernel takes."""
    if kind == "matmul":
        return "linear" if b == 1 else "bmm"
    return PRICED_AS.get(name, name) if kind == "elementwise" else kind


@dataclass(frozen=True, slots=True)
class _Sheet:
    """A device as the terms take it: its datasheet at a dtype, its own constants, its correction tables."""

    card: Card
    own: Mapping[str, float]
    tables: Mapping[str, Array]


@lru_cache(maxsize=1 << 10)
def _sheet(device: DeviceType, dtype: str) -> _Sheet:
    tables = CORRECTIONS.get(_same_chip(device), {}) if dtype == "float32" else {}
    return _Sheet(
        Card.of(device, dtype),
        own_constants(device),
        {table: np.array(values) * 1e-3 for table, values in tables.items()},
    )


# --- which constants a device takes ------------------------------------------------------------------------


def own_constants(device: DeviceType, own: Mapping[str, Constants] = OWN) -> dict[str, float]:
    """The constants that differ between devices.

    A measured device has its own, and lends them to those of its compute capability; of the constants of
    matrix products, whose kernels a library has by generation, to those within `_GENERATION` of it and to
    all that are newer than any measured one. What is left is a mean over the measured devices, drawn towards
    zero, the value of a device of which nothing is known: products count all devices alike, the rest
    (dispatch, memory) with weights that fall by e for each step of capability.
    """
    if device.name in own:
        return dict(own[device.name])
    types = catalogue()
    wanted = device.compute_capability or DEFAULT_CAPABILITY
    known = {name: types[name].compute_capability or DEFAULT_CAPABILITY for name in own}
    gaps = {name: abs(capability - wanted) for name, capability in known.items()}
    nearest = min(gaps, key=gaps.__getitem__)
    if gaps[nearest] == 0:
        return dict(own[nearest])
    same_kernels = gaps[nearest] <= _GENERATION or wanted > max(known.values())
    weights = {name: math.exp(-gap) for name, gap in gaps.items()}
    found: dict[str, float] = {}
    for key in own[nearest]:
        if key not in PRODUCTS:
            known_part = sum(weights[name] * own[name][key] for name in own)
            found[key] = known_part / (sum(weights.values()) + math.exp(-1))
        elif same_kernels:
            found[key] = own[nearest][key]
        else:
            found[key] = sum(own[name][key] for name in own) / (len(own) + _UNKNOWN)
    return found


def _same_chip(device: DeviceType) -> str:
    """The measured device with the same chip (compute capability and multiprocessors), or nothing."""
    if device.name in OWN:
        return device.name
    chip = (device.compute_capability, device.sm_count)
    types = catalogue()
    same = (name for name in OWN if (types[name].compute_capability, types[name].sm_count) == chip)
    return next(same, "")


# --- what a caller may ask for -----------------------------------------------------------------------------


def _one_of(names: Sequence[str] | Mapping[str, object], given: str) -> str:
    near = get_close_matches(given, list(names), n=3)
    return f"Use one of {', '.join(near or names)}"


def _checked(
    device_type: DeviceType | str, op: str, shape: Sequence[int], dtype: str, *, place: str
) -> tuple[DeviceType, str, str, tuple[int, ...], str]:
    device = catalogue_type(device_type, place=place) if isinstance(device_type, str) else device_type
    kind, name = _checked_op(op, place)
    sizes = _checked_shape(kind, shape, place)
    if dtype not in _DTYPE_BYTES:
        reason, remedy = f"'{dtype}' is no dtype of the kernel model", _one_of(tuple(_DTYPE_BYTES), dtype)
        raise InputError(place=place, reason=reason, remedy=remedy)
    return device, kind, name, sizes, dtype


def _checked_op(op: str, place: str) -> tuple[str, str]:
    kind, _, name = op.partition(":")
    if kind not in _SHAPES:
        ops = ("matmul", "elementwise:add", "softmax", "layernorm")
        raise InputError(place=place, reason=f"'{op}' is no op of the kernel model", remedy=_one_of(ops, op))
    if kind == "elementwise" and name not in ELEMENTWISE:
        full = tuple(f"elementwise:{known}" for known in ELEMENTWISE)
        raise InputError(place=place, reason=f"'{op}' is no elementwise op", remedy=_one_of(full, op))
    if kind != "elementwise" and name:
        raise InputError(place=place, reason=f"'{op}' has a part after the colon", remedy=f"Write '{kind}'")
    return kind, name


def _checked_shape(kind: str, shape: Sequence[int], place: str) -> tuple[int, ...]:
    names = _SHAPES[kind]
    sizes = tuple(shape)
    if len(sizes) != len(names.split(", ")):
        raise InputError(
            place=place, reason=f"the shape {sizes} has {len(sizes)} sizes", remedy=f"Give ({names})"
        )
    for size in sizes:
        if not _is_size(size):
            raise InputError(
                place=place,
                reason=f"the shape {sizes} has the size {size!r}",
                remedy=f"Give ({names}) as whole numbers of at least 1",
            )
    return tuple(int(size) for size in sizes)


def _is_size(value: object) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool) and int(value) >= 1
