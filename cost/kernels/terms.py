"""The terms of the kernel model: seconds from sizes, constants and datasheets, all arrays.

Everything here works on many kernels at once, on as many cards: that is what the fit and the planner need.
`docs/kernels.md` derives each term; `shardwright.cost.kernels.seconds` chooses the constants.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardwright.cost.device import DeviceType

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
#: Pascal's TLB reaches a quarter as far as Volta's and later ones, and is asked for every 32-byte sector,
#: where Volta's L1, which knows virtual addresses, asks it for lines of 128. Assumed: four is the ratio of
#: the two sizes as Jia et al. (arXiv:1804.06826) are remembered to give them; one Pascal card cannot tell.
_VOLTA, _SHORT_TLB = 7.0, 4.0
#: Share of its peak that the HBM2 controller of capability 6.0 delivers, against later ones: V100, of 1.23
#: times GP100's peak, delivers 1.5 times as much. Assumed: the 1.5 is NVIDIA's (Tesla V100 architecture
#: whitepaper, WP-08608) from memory, not looked up.
_FIRST_HBM2, _FIRST_HBM2_STREAM = 6.0, 900 / 732 / 1.5

# What a datasheet that tells nothing else is taken to mean.
_SM_FLOP_PER_S = 0.18e12
DEFAULT_CAPABILITY = 8.0

BINARY = ("add", "sub", "mul", "div", "pow", "max", "min")
SCALAR = ("addu", "subu", "mulu", "divu", "powu")
UNARY = ("gelu", "relu", "tanh", "exp", "log", "sqrt", "rsqrt", "sigmoid", "neg", "abs")
# What was not measured is priced as its nearest relative.
PRICED_AS = {"sub": "add", "max": "add", "min": "add", "subu": "addu"} | dict.fromkeys(UNARY[3:], "tanh")
FAMILY = {"bmm": "matmul", "linear": "matmul", "softmax": "softmax", "layernorm": "layernorm"}


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
            capability=device.compute_capability or DEFAULT_CAPABILITY,
            board_w=device.board_power_w or np.inf,
            floor=min(base / boost, 1.0) if base and boost else 0.0,
        )


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
    itemsize: Array | float = 4,
    tensor: NDArray[np.bool_] | bool = False,
    linear: NDArray[np.bool_] | None = None,
    memory: bool = True,
) -> Array:
    """Seconds on the device of b products of m×k by k×n.

    Args:
        c, own, card: constants and datasheets, one of each or one per product.
        b, m, n, k: sizes, one entry per product.
        itemsize: bytes of an element.
        tensor: whether the product runs on tensor cores.
        linear: whether k is the last dimension of both operands in memory, as in PyTorch's Linear; by default
            of a single product, not of batched ones, as they were measured.
        memory: whether reading and writing the three matrices counts.
    """
    single, capability = b == 1, np.asarray(card.capability)
    transposed = single if linear is None else linear & single
    sm_rate = card.matrix / card.sms * np.exp(own["clk"] + np.where(tensor, c.get("tensor", 0.0), 0.0))
    ragged = (n % 4 != 0) | (k % 4 != 0)
    slow = (
        1 + np.where(single, c["ragged_single"], c["ragged_batch"]) * ragged * np.exp(own["un"])
    ) * np.where(transposed, np.exp(c["transposed"] + own["tn"]), 1.0)
    short = np.where(capability >= _VOLTA, 1.0, _SHORT_TLB)
    misses = np.maximum(1 - 2 ** c["tlb_log2_bytes"] / (itemsize * k * short), 0.0) * short
    slow = slow * (1 + np.where(transposed, c["tlb"] * np.exp(own["kt"]) * misses, 0.0))
    nbytes = itemsize * b * (m * n + m * k + n * k)
    dram = nbytes / product_byte_per_s(c, card)
    joule = c["energy"] * np.where(capability >= FRUGAL_SINCE, FRUGAL, 1.0) * 1e-12
    joule = joule * np.where(tensor, TENSOR_POWER, 1.0)
    watt = np.maximum(np.asarray(card.board_w) - IDLE_W, 0.25 * np.asarray(card.board_w))
    # The base clock holds where the power alone would ask for less.
    joule_s = np.minimum(joule * card.flop_per_s / watt, 1 / np.maximum(card.floor, 1e-3)) / card.matrix
    # Tensor cores have deep pipelines: a step's latency is a share of a large tile's time on every card.
    deep = np.exp(c.get("tensor_latency", 0.0)) * 2 * 128 * 128 / sm_rate

    def cheapest(tiles: Sequence[int], split: int, at: NDArray[np.intp]) -> Array:
        """The cheapest of all tiles at a split for the products `at`; arrays are (tiles, products)."""

        def of(value: NDArray[Any] | float) -> NDArray[Any]:
            array = np.asarray(value)
            return array[at] if array.ndim else array

        constants = [(*TILES[t], np.exp(c[f"tile{t}"]), np.exp(c[f"latency{t}"])) for t in tiles]
        columns, rows, fit, e_tile, tile_latency = np.array(constants).T[:, :, None]
        sms, depth, rate = of(card.sms), np.ceil(k[at] / 8), of(sm_rate)
        # What keeps a library's batched products to larger tiles than would suit them.
        kept = (columns < 128) * of(own["sn"]) + (rows < 128) * of(own["sr"])
        reduction = np.ceil(depth / split) * 8
        blocks = b[at] * np.ceil(m[at] / rows) * np.ceil(n[at] / columns) * split
        pace = 2 * columns * rows / rate * slow[at] / e_tile * np.exp(np.where(single[at], 0.0, kept))
        floor = np.where(of(tensor), of(deep), of(np.exp(own["lat"])) * 1e-9 * tile_latency)
        full = np.floor(blocks / (sms * fit))
        rest = np.ceil((blocks - full * sms * fit) / sms)
        square = floor * floor
        packed = _root(fit * pace, square)
        waves = full * packed + np.where(rest > 0, _root(rest * pace, square), 0.0)
        each = blocks / sms
        smooth = np.where(each > fit, each / fit * packed, _root(np.maximum(each, 1.0) * pace, square))
        compute = (c["waves"] * waves + (1 - c["waves"]) * smooth) * (reduction + c["prologue"])
        small = 1 + c["small_tile_energy"] * (32 / rows + 32 / columns - 0.5)
        power = 2 * blocks * columns * rows * reduction * of(joule_s) * small
        moved = (np.broadcast_to(dram[at], compute.shape),) if memory else ()
        time_s = _maximum8(compute, power, *moved)
        if split > 1:
            partial_sums = of(itemsize) * (m * n)[at] * split / (0.8 * of(card.byte_per_s))
            time_s = time_s + (c["split_us"] * 1e-6 + partial_sums)
        return time_s.min(axis=0)

    best = cheapest(range(len(TILES)), 1, np.arange(len(b)))
    for split in SPLITS:
        alone = np.flatnonzero(single & (k >= split * 64))
        if len(alone):
            best[alone] = np.minimum(best[alone], cheapest(_SPLIT_TILES, split, alone))
    return np.maximum(best, 2 * b * m * n * k / card.matrix)


def product_byte_per_s(c: Constants, card: Card) -> Array | float:
    """Bandwidth that a product's operands are read at, once each."""
    return card.byte_per_s * np.exp(c["dram"])


def elementwise_work(
    c: Constants, own: Own, card: Card, name: str, b: Array, h: Array, *, itemsize: int = 4
) -> Array:
    """Seconds on the device of one elementwise kernel."""
    tensors = 3 if name in BINARY else 2
    dram = tensors * itemsize * b * h / (delivered(card) * np.exp(c["stream"] + own["bw"]))
    arithmetic = np.exp(c[f"flop_{PRICED_AS.get(name, name)}"]) * b * h / card.flop_per_s
    return (dram**4 + arithmetic**4) ** 0.25


def row_work(c: Constants, own: Own, card: Card, op: str, b: Array, h: Array, *, itemsize: int = 4) -> Array:
    """Seconds on the device of a softmax or layernorm over the last axis."""
    long = np.clip(np.log2(h / 1024) * 4, 0, 1)  # beyond 1024 a block, not a warp, takes a row
    passes = np.exp(c[f"{op}_stream"] + c[f"{op}_long"] * long)
    dram = 2 * itemsize * b * h * passes / (delivered(card) * np.exp(own["row_bw"]))
    per_row = np.exp(c[f"{op}_row"] + c[f"{op}_row_long"] * long + own["row"]) * 1e-9 * b / card.sms
    per_element = np.exp(c[f"{op}_flop"] + own["row"]) * b * h / card.flop_per_s
    return ((per_row + per_element) ** 2 + dram**2) ** 0.5


def delivered(card: Card) -> Array | float:
    """Bytes per second that a memory of the card's peak and generation can deliver."""
    return card.byte_per_s * np.where(np.asarray(card.capability) == _FIRST_HBM2, _FIRST_HBM2_STREAM, 1.0)


def _root(value: Array, square: Array) -> Array:
    """The hypotenuse over a side and the square of the other; `numpy.hypot` takes six times as long."""
    return np.sqrt(value * value + square)


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
    hats: list[Array] = []
    for left, weight, knots in _hats_of(table, card, shape):
        hat, row = np.zeros((len(left), knots)), np.arange(len(left))
        hat[row, left], hat[row, left + 1] = 1 - weight, weight
        hats.append(hat)
    pairs = [(a[:, :, None] * z[:, None, :]).reshape(len(a), -1) for a, z in combinations(hats, 2)]
    return np.concatenate(pairs, axis=1)


def _hats_of(table: str, card: Card, shape: Sequence[Array]) -> list[tuple[NDArray[np.intp], Array, int]]:
    """Of each of a table's log2 sizes: the knot to the left, the weight of the next, how many there are."""
    if len(shape) == 4:
        b, m, n, k = shape
        blocks = b * np.ceil(m / 64) * np.ceil(n / 64) / card.sms
        sizes: dict[str, Array] = {"b": b, "m": m, "n": n, "k": k, "blocks": blocks}
    else:
        sizes = {"rows": shape[0], "h": shape[1]}
    found: list[tuple[NDArray[np.intp], Array, int]] = []
    for name in _CORRECTED[table]:
        knots = np.array(_KNOTS[name], dtype=np.float64)
        x = np.clip(np.log2(sizes[name]), knots[0], knots[-1])
        left = np.clip(np.searchsorted(knots, x) - 1, 0, len(knots) - 2)
        found.append((left, (x - knots[left]) / (knots[left + 1] - knots[left]), len(knots)))
    return found


def correction_factor(table: str, values: Array, card: Card, shape: Sequence[Array]) -> Array:
    """What the device's part is multiplied by: the exponential of `correction_basis` times values."""
    total, begin = np.zeros(len(shape[0])), 0
    for (a, left, knots_a), (z, right, knots_z) in combinations(_hats_of(table, card, shape), 2):
        # Of the hat functions of a size two neighbours are not zero.
        for near, weight_a in ((a, 1 - left), (a + 1, left)):
            row = begin + near * knots_z
            total += weight_a * ((1 - right) * values[row + z] + right * values[row + z + 1])
        begin += knots_a * knots_z
    return np.exp(np.clip(total, -0.7, 0.7))
