"""Seconds of one kernel on one type of device, from its datasheet and a table of fitted constants.

A kernel takes `(dispatch^p + work^p)^(1/p)`: what the host needs to start it, and what the device needs to
run it. The work is a roofline whose ceilings depend on the shape (`docs/kernels.md` derives each term):

- matrix products: the cheapest of a few thread-block tiles, each priced as rounds of blocks over the
  multiprocessors (tile and wave quantisation), with a floor of latency per step of the reduction, against
  DRAM traffic and against the board's power; a single product may also split its reduction;
- elementwise kernels: DRAM traffic against arithmetic;
- softmax and layernorm: DRAM traffic against rows per multiprocessor and arithmetic per element.

`SHARED` constants hold for every device. A few more differ between measured devices (`OWN`), and measured
devices have a correction by size (`CORRECTIONS`). A device that was not measured takes the `OWN` constants of
the measured device nearest in compute capability, and a correction only from its own chip.
`bench/fit_kernels.py` fits all of it, writes `kernel_constants.py`, and reports the errors, among them those
on each measured device as if it had not been measured.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import lru_cache
from itertools import combinations
from statistics import median

import numpy as np
from numpy.typing import NDArray

from shardwright.cost.catalogue import catalogue
from shardwright.cost.catalogue import device_type as catalogue_type
from shardwright.cost.device import DeviceType
from shardwright.cost.kernel_constants import CORRECTIONS, OWN, SHARED
from shardwright.ir.errors import InputError

Array = NDArray[np.float64]
Constants = Mapping[str, float]
Own = Mapping[str, Array] | Mapping[str, float]

# Columns, rows and warps of a thread block's tile of the output, and how many blocks fit a multiprocessor
# (255 registers a thread at most): the shapes of cuBLAS's and CUTLASS's single-precision kernels.
TILES = ((128, 128, 2), (128, 64, 4), (64, 64, 8), (32, 128, 4), (32, 32, 8), (64, 32, 8))
SPLITS = (2, 4, 8, 16, 32)
_SPLIT_TILES = (0, 1, 2, 4)

#: Power that a board draws whatever it computes: memory, leakage, regulators. Assumed.
IDLE_W = 20.0
#: Energy of an operation against 12 and 7 nm chips, from this compute capability on (TSMC: N5 takes 30 % less
#: power than N7). Assumed: no such device was measured.
FRUGAL_SINCE, FRUGAL = 8.9, 0.7
#: Board power of the tensor cores at full rate against that of the float32 units. Assumed: L40S reaches 266
#: of 362 TFLOP/s in bfloat16 (aiconfigurator).
TENSOR_POWER = 0.5
#: Pascal's TLB reaches a quarter as far as Volta's and later ones (Jia et al., arXiv:1804.06826, table 3.1).
_SHORT_TLB_BEFORE, _SHORT_TLB = 7.0, 4.0

# What a datasheet that tells nothing else is taken to mean.
_SM_FLOP_PER_S = 0.18e12
_DEFAULT_CAPABILITY = 8.0

_BINARY = ("add", "sub", "mul", "div", "pow", "max", "min")
_SCALAR = ("addu", "subu", "mulu", "divu", "powu")
_UNARY = ("gelu", "relu", "tanh", "exp", "log", "sqrt", "rsqrt", "sigmoid", "neg", "abs")
# What was not measured is priced as its nearest relative.
_PRICED_AS = {"sub": "add", "max": "add", "min": "add", "subu": "addu"} | dict.fromkeys(_UNARY[3:], "tanh")
FAMILY = {"bmm": "matmul", "linear": "matmul", "softmax": "softmax", "layernorm": "layernorm"}
#: Own constants of matrix products: clock, TLB, latency, transposed, ragged and narrow operands.
PRODUCTS = ("clk", "kt", "lat", "tn", "un", "sn")
ELEMENTWISE = (*_BINARY, *_SCALAR, *_UNARY)
_SHAPES = {"matmul": "b, m, n, k", "elementwise": "b, h", "softmax": "b, h", "layernorm": "b, h"}
_DTYPE_BYTES = {"float32": 4, "tf32": 4, "float16": 2, "bfloat16": 2}


@dataclass(frozen=True, slots=True)
class Card:
    """What the model takes from a datasheet; every field may be an array with one entry per kernel.

    Attributes:
        flop_per_s: peak of single precision; `matrix` holds the one of the products' dtype.
        matrix: peak of the matrix products' dtype, FLOP/s.
        byte_per_s: peak of the memory.
        sms: multiprocessors.
        capability: compute capability.
        board_w: board power; infinite where unknown.
        floor: base clock over boost clock: what the vendor sustains within the board power; 0 if unknown.
    """

    flop_per_s: Array | float
    matrix: Array | float
    byte_per_s: Array | float
    sms: Array | float
    capability: Array | float
    board_w: Array | float
    floor: Array | float

    @classmethod
    def of(cls, device: DeviceType, dtype: str = "float32") -> Card:
        """The card of a device type. A dtype that it lacks is priced at its float32 rate."""
        single = device.float32_flop_per_s
        rates = {
            "tf32": device.tf32_flop_per_s,
            "float16": device.float16_flop_per_s,
            "bfloat16": device.bfloat16_flop_per_s,
        }
        base, boost = device.base_clock_hz, device.boost_clock_hz
        return cls(
            flop_per_s=single,
            matrix=rates.get(dtype) or single,
            byte_per_s=device.memory_bandwidth_byte_per_s,
            sms=float(device.sm_count or max(round(single / _SM_FLOP_PER_S), 1)),
            capability=device.compute_capability or _DEFAULT_CAPABILITY,
            board_w=device.board_power_w or np.inf,
            floor=min(base / boost, 1.0) if base and boost else 0.0,
        )


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
    asked = _checked(device_type, op, shape, dtype, place=f"kernel_s({op!r})")
    return _seconds(*asked)[0]


def work_s(device_type: DeviceType | str, op: str, shape: Sequence[int], dtype: str = "float32") -> float:
    """The device's part of `kernel_s`: what a kernel adds to a queue that the host keeps filled."""
    return _seconds(*_checked(device_type, op, shape, dtype, place=f"work_s({op!r})"))[1]


@lru_cache(maxsize=1 << 16)
def _seconds(
    device: DeviceType, kind: str, name: str, sizes: tuple[int, ...], dtype: str
) -> tuple[float, float]:
    """Seconds with and without dispatch.

    The most that the kernel or any of its halves takes: neither alignment nor a table makes what is twice as
    large cheaper.
    """
    kept = 1 if kind == "matmul" else 0
    halves = [sizes]
    while max(halves[-1][kept:]) > 1:
        halves.append((*sizes[:kept], *(max(size // 2, 1) for size in halves[-1][kept:])))
    shape = tuple(np.array(column, dtype=np.float64) for column in zip(*halves, strict=True))
    work, dispatch = _parts(device, kind, name, shape, dtype)
    return float(joined(SHARED, _group(kind, name, sizes[0]), work, dispatch).max()), float(work.max())


def _group(kind: str, name: str, b: float) -> str:
    """Which constants of dispatch a kernel takes."""
    if kind == "matmul":
        return "linear" if b == 1 else "bmm"
    return _PRICED_AS.get(name, name) if kind == "elementwise" else kind


def _parts(
    device: DeviceType, kind: str, name: str, shape: tuple[Array, ...], dtype: str
) -> tuple[Array, Array | float]:
    """Seconds on the device and of dispatch, of kernels that share a dispatch group."""
    card, own, itemsize = Card.of(device, dtype), own_constants(device), _DTYPE_BYTES[dtype]
    if kind == "matmul":
        work = matmul_work(
            SHARED, own, card, *shape, itemsize=itemsize, tensor=bool(card.matrix > card.flop_per_s)
        )
    elif kind == "elementwise":
        work = elementwise_work(SHARED, own, card, name, *shape, itemsize=itemsize)
    else:
        work = row_work(SHARED, own, card, kind, *shape, itemsize=itemsize)
    group = _group(kind, name, float(shape[0][0]))
    table = kind if kind == "elementwise" else group
    correction = CORRECTIONS.get(_same_chip(device), {}).get(table) if dtype == "float32" else None
    if correction is not None:
        work = work * correction_factor(table, np.array(correction) * 1e-3, card, shape)
        if kind == "matmul":
            work = np.maximum(work, 2 * shape[0] * shape[1] * shape[2] * shape[3] / card.matrix)
    return work, dispatch_s(SHARED, own, card, group)


# --- the terms: of arrays, so that the fit evaluates thousands of kernels at once --------------------------


def joined(c: Constants, group: str, work: Array, dispatch: Array | float) -> Array:
    """Dispatch and work overlap in part: between their maximum and their sum."""
    family = FAMILY.get(group, "elementwise")
    p = c[f"join_{family}"]
    return (work**p + dispatch**p) ** (1 / p)


def dispatch_s(c: Constants, own: Own, card: Card, group: str) -> Array | float:
    """Seconds that the host takes to start a kernel: fewer with newer cards, which sit in newer hosts."""
    family = FAMILY.get(group, "elementwise")
    newer = np.minimum(card.capability, 9.0) - 7.0
    return np.exp(c[f"dispatch_{group}"] + c[f"dispatch_newer_{family}"] * newer + own[f"ov_{family}"])


def matmul_work(
    c: Constants,
    own: Own,
    card: Card,
    b: Array,
    m: Array,
    n: Array,
    k: Array,
    *,
    itemsize: int = 4,
    tensor: bool = False,
) -> Array:
    """Seconds on the device of b products of m×k by k×n; a single one has its right side transposed."""
    single = b == 1
    sm_rate = card.matrix / card.sms * np.exp(own["clk"] + (c["tensor"] if tensor else 0.0))
    ragged = (n % 4 != 0) | (k % 4 != 0)
    slow = (
        1 + np.where(single, c["ragged_single"], c["ragged_batch"]) * ragged * np.exp(own["un"])
    ) * np.where(single, np.exp(c["transposed"] + own["tn"]), 1.0)
    slow = slow * np.exp((c["narrow"] + own["sn"]) * np.clip(np.log2(64 / n), 0, 1))
    reach = np.where(np.asarray(card.capability) >= _SHORT_TLB_BEFORE, 1.0, _SHORT_TLB)
    misses = np.clip(itemsize * k * reach / 2 ** c["tlb_log2_bytes"] - 1, 0, 6)
    slow = slow * (1 + np.where(single, c["tlb"] * np.exp(own["kt"]) * misses, 0.0))
    latency = np.exp(own["lat"]) * 1e-9
    dram = itemsize * b * (m * n + m * k + n * k) / (card.byte_per_s * np.exp(c["dram"]))
    joule = c["energy"] * np.where(np.asarray(card.capability) >= FRUGAL_SINCE, FRUGAL, 1.0) * 1e-12
    watt = np.maximum(np.asarray(card.board_w) - IDLE_W, 0.25 * np.asarray(card.board_w))
    joule = joule * (TENSOR_POWER if tensor else 1.0)
    # The base clock holds where the power alone would ask for less.
    joule_s = np.minimum(joule * card.flop_per_s / watt, 1 / np.maximum(card.floor, 1e-3)) / card.matrix
    steps = np.ceil(k / 8) * 8

    def seconds(tile: int, split: int, at: NDArray[np.intp]) -> Array:
        columns, rows, fit = TILES[tile]
        sms, reduction = _at(card.sms, at), steps[at]
        if split > 1:
            reduction = np.ceil(np.ceil(k[at] / 8) / split) * 8
        blocks = b[at] * np.ceil(m[at] / rows) * np.ceil(n[at] / columns) * split
        pace = 2 * columns * rows / _at(sm_rate, at) * slow[at] / np.exp(c[f"tile{tile}"])
        if tensor:  # deep pipelines: a step's latency is a share of a large tile's time on every card
            floor = np.exp(c["tensor_latency"]) * 2 * 128 * 128 / _at(sm_rate, at)
        else:
            floor = _at(latency, at) * np.exp(c[f"latency{tile}"])
        full = np.floor(blocks / (sms * fit))
        rest = np.ceil((blocks - full * sms * fit) / sms)
        packed = np.hypot(fit * pace, floor)
        waves = full * packed + np.where(rest > 0, np.hypot(rest * pace, floor), 0.0)
        each = blocks / sms
        smooth = np.where(each > fit, each / fit * packed, np.hypot(np.maximum(each, 1.0) * pace, floor))
        compute = (c["waves"] * waves + (1 - c["waves"]) * smooth) * (reduction + c["prologue"])
        small = 1 + c["small_tile_energy"] * (32 / rows + 32 / columns - 0.5)
        power = 2 * blocks * columns * rows * reduction * _at(joule_s, at) * small
        time = _maximum8(compute, power, dram[at])
        if split > 1:
            partial_sums = itemsize * (m * n)[at] * split / (0.8 * _at(card.byte_per_s, at))
            time = time + c["split_us"] * 1e-6 + partial_sums
            time = np.where(k[at] >= split * 64, time, np.inf)
        return time

    everything = np.arange(len(b))
    candidates = [seconds(tile, 1, everything) for tile in range(len(TILES))]
    alone = np.flatnonzero(single)
    if len(alone):
        best = np.full(len(b), np.inf)
        best[alone] = np.min([seconds(t, s, alone) for t in _SPLIT_TILES for s in SPLITS], axis=0)
        candidates.append(best)
    return np.maximum(np.min(candidates, axis=0), 2 * b * m * n * k / card.matrix)


def elementwise_work(
    c: Constants, own: Own, card: Card, name: str, b: Array, h: Array, *, itemsize: int = 4
) -> Array:
    """Seconds on the device of one elementwise kernel."""
    tensors = 3 if name in _BINARY else 2
    dram = tensors * itemsize * b * h / (card.byte_per_s * np.exp(c["stream"] + own["bw"]))
    arithmetic = np.exp(c[f"flop_{_PRICED_AS.get(name, name)}"]) * b * h / card.flop_per_s
    return (dram**4 + arithmetic**4) ** 0.25


def row_work(c: Constants, own: Own, card: Card, op: str, b: Array, h: Array, *, itemsize: int = 4) -> Array:
    """Seconds on the device of a softmax or layernorm over the last axis."""
    long = np.clip(np.log2(h / 1024) * 4, 0, 1)  # beyond 1024 a block, not a warp, takes a row
    passes = np.exp(c[f"{op}_stream"] + c[f"{op}_long"] * long)
    dram = 2 * itemsize * b * h * passes / (card.byte_per_s * np.exp(own["row_bw"]))
    per_row = np.exp(c[f"{op}_row"] + c[f"{op}_row_long"] * long + own["row"]) * 1e-9 * b / card.sms
    per_element = np.exp(c[f"{op}_flop"] + own["row"]) * b * h / card.flop_per_s
    return ((per_row + per_element) ** 2 + dram**2) ** 0.5


def _at(value: Array | float, at: NDArray[np.intp]) -> Array:
    array = np.asarray(value, dtype=np.float64)
    return array[at] if array.ndim else np.full(len(at), float(array))


def _maximum8(*terms: Array) -> Array:
    """A smooth maximum: the 8-norm."""
    peak = np.maximum.reduce(terms)
    total = np.zeros_like(peak)
    for term in terms:
        ratio = term / peak
        ratio = ratio * ratio
        ratio = ratio * ratio
        total += ratio * ratio
    return peak * np.sqrt(np.sqrt(np.sqrt(total)))


# --- corrections: tables over pairs of log2 sizes, linear between their knots ------------------------------

_KNOTS: Mapping[str, tuple[float, ...]] = {
    "b": (0, 3, 5, 7, 9, 12),
    "m": (4, 5, 6, 7, 9, 12),
    "n": (2, 4, 5, 6, 7, 9, 12, 15),
    "k": (2, 5, 7, 9, 12, 14, 16),
    "blocks": (-5, -2, 0, 2, 4, 8),
    "rows": (0, 4, 7, 10, 13, 16, 20),
    "h": (2, 5, 7, 9, 10, 11, 12, 14),
}
_CORRECTED = {
    "bmm": ("b", "m", "n", "k", "blocks"),
    "linear": ("m", "n", "k", "blocks"),
    "elementwise": ("rows", "h"),
    "softmax": ("rows", "h"),
    "layernorm": ("rows", "h"),
}


def correction_basis(table: str, card: Card, shape: Sequence[Array]) -> Array:
    """One row per kernel: products of hat functions of each pair of a table's log2 sizes."""
    if len(shape) == 4:
        b, m, n, k = shape
        blocks = b * np.ceil(m / 64) * np.ceil(n / 64) / card.sms
        sizes: dict[str, Array] = {"b": b, "m": m, "n": n, "k": k, "blocks": blocks}
    else:
        sizes = {"rows": shape[0], "h": shape[1]}
    hats = [_hats(np.log2(sizes[name]), np.array(_KNOTS[name])) for name in _CORRECTED[table]]
    pairs = [(a[:, :, None] * z[:, None, :]).reshape(len(a), -1) for a, z in combinations(hats, 2)]
    return np.concatenate(pairs, axis=1)


def correction_factor(table: str, values: Array, card: Card, shape: Sequence[Array]) -> Array:
    """What the device's part is multiplied by."""
    return np.exp(np.clip(correction_basis(table, card, shape) @ values, -0.7, 0.7))


def _hats(x: Array, knots: Array) -> Array:
    x = np.clip(x, knots[0], knots[-1])
    left = np.clip(np.searchsorted(knots, x) - 1, 0, len(knots) - 2)
    weight = (x - knots[left]) / (knots[left + 1] - knots[left])
    hats = np.zeros((len(x), len(knots)))
    row = np.arange(len(x))
    hats[row, left], hats[row, left + 1] = 1 - weight, weight
    return hats


# --- which constants a device takes ------------------------------------------------------------------------


def own_constants(device: DeviceType, own: Mapping[str, Constants] = OWN) -> dict[str, float]:
    """The constants that differ between devices.

    A measured device has its own, and lends them to those of its compute capability. Other devices take, of
    the constants of matrix products, those of the newest measured device if they are newer than it, else the
    median; of the rest (dispatch, memory), a mean with weights that fall by e for each step of capability.
    """
    if device.name in own:
        return dict(own[device.name])
    types = catalogue()
    wanted = device.compute_capability or _DEFAULT_CAPABILITY
    known = {name: types[name].compute_capability or _DEFAULT_CAPABILITY for name in own}
    gaps = {name: abs(capability - wanted) for name, capability in known.items()}
    nearest = min(gaps, key=gaps.__getitem__)
    if gaps[nearest] == 0:
        return dict(own[nearest])
    newest = wanted > max(known.values())
    weights = {name: math.exp(-gap) for name, gap in gaps.items()}
    total = sum(weights.values())
    found: dict[str, float] = {}
    for key in own[nearest]:
        if key not in PRODUCTS:
            found[key] = sum(weights[name] * own[name][key] for name in own) / total
        else:
            found[key] = own[nearest][key] if newest else median(own[name][key] for name in own)
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
