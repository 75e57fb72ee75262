"""The kernel model: published points, ceilings, monotonicity, datasheet-only cards, clear errors."""

import hashlib
import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import shardwright
from shardwright.cost.catalogue import catalogue
from shardwright.cost.catalogue import device_type as catalogue_type
from shardwright.cost.device import DeviceType
from shardwright.cost.document import Entry
from shardwright.cost.kernels.constants import CORRECTIONS, OWN, SHARED
from shardwright.cost.kernels.seconds import (
    ELEMENTWISE,
    PRODUCTS,
    kernel_s,
    own_constants,
    products_s,
    work_s,
)
from shardwright.ir.errors import InputError

ROOT = Path(__file__).resolve().parent.parent
CARDS = ("A100-PCIE-40GB", "P100-PCIE-16GB", "V100-PCIE-32GB", "T4")
NAMES = [*CARDS, "L4", "H100-SXM-80GB", "MI300X"]
SHAPES = {
    "matmul": (4, 96, 200, 300),
    "softmax": (512, 1000),
    "layernorm": (512, 1000),
} | {f"elementwise:{name}": (512, 1000) for name in ELEMENTWISE}
BARE = DeviceType("bare", 15e12, 800e9, 16_000_000_000)

# NeuSight (sitar-lab/NeuSight, commit 6945927, MIT), milliseconds on each of CARDS, float32, TF32 off.
PUBLISHED = [
    ("matmul", (1, 65536, 50272, 1536), (615.9, 1452, 726.2, 3167)),
    ("matmul", (60, 128, 115, 676), (0.1509, 0.2497, 0.1481, 0.2806)),
    ("matmul", (58, 64, 73, 186), (0.05855, 0.07674, 0.06901, 0.09698)),
    ("elementwise:add", (8331, 1755), (0.1442, 0.3365, 0.2282, 0.732)),
    ("elementwise:gelu", (8331, 1755), (0.1029, 0.2335, 0.1627, 0.5147)),
    ("softmax", (8192, 1280), (0.1064, 0.2797, 0.16, 0.371)),
    ("layernorm", (8192, 1024), (0.08307, 0.2148, 0.1433, 0.3274)),
]


@pytest.mark.parametrize(("op", "shape", "times"), PUBLISHED, ids=lambda value: str(value))
def test_published_points(op: str, shape: tuple[int, ...], times: tuple[float, ...]) -> None:
    for card, milliseconds in zip(CARDS, times, strict=True):
        assert kernel_s(card, op, shape) == pytest.approx(milliseconds * 1e-3, rel=0.4), card


@pytest.mark.parametrize("card", catalogue())
def test_no_card_beats_its_datasheet_and_large_products_come_near(card: str) -> None:
    device = catalogue()[card]
    peaks = {"float32": device.float32_flop_per_s, "tf32": device.tf32_flop_per_s}
    peaks |= {"float16": device.float16_flop_per_s, "bfloat16": device.bfloat16_flop_per_s}
    for dtype, peak in peaks.items():
        reached = 2 * 8192 * 4096 * 4096 / work_s(device, "matmul", (1, 8192, 4096, 4096), dtype)
        assert 0.25 * (peak or device.float32_flop_per_s) < reached
        assert reached <= 1.0001 * (peak or device.float32_flop_per_s)
    moved = 12 * 2**28 / kernel_s(card, "elementwise:add", (2**16, 2**12))
    assert 0.6 < moved / device.memory_bandwidth_byte_per_s < 1


@pytest.mark.parametrize("op", SHAPES)
@pytest.mark.parametrize("device", [*NAMES, BARE], ids=str)
@pytest.mark.parametrize("dtype", ["float32", "tf32", "float16", "bfloat16"])
def test_every_op_takes_seconds(op: str, device: DeviceType | str, dtype: str) -> None:
    assert 5e-6 < kernel_s(device, op, SHAPES[op], dtype) < 5e-3
    assert 1e-6 < kernel_s(device, op, (1,) * len(SHAPES[op]), dtype) < 2e-4


SIZE = st.integers(1, 6000)


@given(st.sampled_from(NAMES), st.sampled_from([1, 2, 7, 64]), SIZE, SIZE, SIZE, st.booleans())
def test_doubling_a_product_never_makes_it_cheaper(
    card: str, b: int, m: int, n: int, k: int, half: bool
) -> None:
    dtype = "float16" if half else "float32"
    assert kernel_s(card, "matmul", (b, m, n, k), dtype) <= kernel_s(
        card, "matmul", (b, 2 * m, 2 * n, 2 * k), dtype
    )


@given(st.sampled_from(NAMES), st.sampled_from(sorted(set(SHAPES) - {"matmul"})), SIZE, SIZE)
def test_doubling_another_kernel_never_makes_it_cheaper(card: str, op: str, b: int, h: int) -> None:
    assert kernel_s(card, op, (b, h)) <= kernel_s(card, op, (2 * b, 2 * h))


@given(st.sampled_from(NAMES), st.tuples(*[st.sampled_from([64, 256, 1024, 4096])] * 3), st.integers(0, 2))
def test_each_dimension_counts(card: str, sizes: tuple[int, ...], axis: int) -> None:
    """Within what another tile or an idle multiprocessor is worth."""
    larger = tuple(4 * size if i == axis else size for i, size in enumerate(sizes))
    assert 0.9 * kernel_s(card, "matmul", (8, *sizes)) <= kernel_s(card, "matmul", (8, *larger))


# --- cards that nobody measured: drawn datasheets ---------------------------------------------------------

DTYPES = ("float32", "tf32", "float16", "bfloat16")
DATASHEETS = st.builds(
    DeviceType,
    name=st.just("drawn"),
    float32_flop_per_s=st.floats(3e12, 150e12),
    memory_bandwidth_byte_per_s=st.floats(150e9, 10e12),
    memory_bytes=st.just(16_000_000_000),
    tf32_flop_per_s=st.none() | st.floats(150e12, 1200e12),
    float16_flop_per_s=st.none() | st.floats(150e12, 2500e12),
    sm_count=st.none() | st.integers(10, 320),
    board_power_w=st.none() | st.floats(50, 1400),
    base_clock_hz=st.none() | st.floats(0.5e9, 2e9),
    boost_clock_hz=st.just(2e9),
    compute_capability=st.none() | st.sampled_from([5.2, 6.0, 6.1, 7.0, 7.5, 8.0, 8.6, 8.9, 9.0, 10.0, 12.0]),
)
PRODUCT = st.tuples(st.sampled_from([1, 2, 7, 64]), *[st.integers(1, 9000)] * 3)
PAIR = st.tuples(st.integers(1, 20000), st.integers(1, 9000))


def peak(device: DeviceType, dtype: str) -> float:
    rates = {"tf32": device.tf32_flop_per_s, "float16": device.float16_flop_per_s}
    rates |= {"bfloat16": device.bfloat16_flop_per_s}
    return rates.get(dtype) or device.float32_flop_per_s


@given(DATASHEETS, PRODUCT, st.sampled_from(DTYPES))
def test_no_drawn_datasheet_is_beaten_or_wasted_by_products(
    device: DeviceType, shape: tuple[int, ...], dtype: str
) -> None:
    b, m, n, k = shape
    time_s = work_s(device, "matmul", shape, dtype)
    assert 2 * b * m * n * k / time_s <= 1.0001 * peak(device, dtype)
    # The operands of a product can be read no faster than memory allows, unless caches hold them.
    nbytes = (2 if "16" in dtype else 4) * b * (m * k + k * n + m * n)
    assert nbytes / time_s <= device.memory_bandwidth_byte_per_s
    double = work_s(device, "matmul", (b, 2 * m, 2 * n, 2 * k), dtype)
    assert time_s <= double


@given(DATASHEETS, PAIR, st.sampled_from(sorted(set(SHAPES) - {"matmul"})), st.sampled_from(DTYPES))
def test_no_drawn_datasheet_moves_more_than_its_bandwidth(
    device: DeviceType, shape: tuple[int, int], op: str, dtype: str
) -> None:
    b, h = shape
    time_s = kernel_s(device, op, shape, dtype)
    assert 2 * (2 if "16" in dtype else 4) * b * h / time_s <= device.memory_bandwidth_byte_per_s
    assert time_s <= kernel_s(device, op, (2 * b, 2 * h), dtype)


@given(DATASHEETS, st.sampled_from(DTYPES))
def test_large_products_of_drawn_datasheets_reach_a_credible_part_of_the_peak(
    device: DeviceType, dtype: str
) -> None:
    """A quarter of the peak at least, unless the board's power or the memory stands in the way."""
    credible = replace(device, board_power_w=None, memory_bandwidth_byte_per_s=10e12, sm_count=None)
    reached = 2 * 8192.0**3 / work_s(credible, "matmul", (1, 8192, 8192, 8192), dtype)
    assert reached > 0.25 * peak(credible, dtype)


@given(
    DATASHEETS,
    st.tuples(*[st.floats(1, 4)] * 4),
    st.sampled_from(["matmul", "elementwise:add", "softmax", "layernorm"]),
    PRODUCT,
    st.sampled_from(DTYPES),
)
def test_a_card_that_is_better_in_every_figure_is_not_slower(
    device: DeviceType, factors: tuple[float, ...], op: str, shape: tuple[int, ...], dtype: str
) -> None:
    """All but the generation grows; quantisation may cost a little."""
    compute, memory, sms, power = factors

    def grow(value: float | None, factor: float) -> float | None:
        return value and value * factor

    better = replace(
        device,
        float32_flop_per_s=device.float32_flop_per_s * compute,
        tf32_flop_per_s=grow(device.tf32_flop_per_s, compute),
        float16_flop_per_s=grow(device.float16_flop_per_s, compute),
        memory_bandwidth_byte_per_s=device.memory_bandwidth_byte_per_s * memory,
        board_power_w=grow(device.board_power_w, power * compute),
        sm_count=device.sm_count and round(device.sm_count * min(sms, compute)),
    )
    sizes = shape if op == "matmul" else shape[1:3]
    assert work_s(better, op, sizes, dtype) <= 1.1 * work_s(device, op, sizes, dtype)


def test_catalogue_ranks_as_its_datasheets_do() -> None:
    """Of two cards of one maker, the one with more of everything wins, generations included."""
    cards = [card for name, card in catalogue().items() if not name.startswith("MI")]
    for slow, fast in itertools.permutations(cards, 2):
        figures = (
            (slow.float32_flop_per_s, fast.float32_flop_per_s),
            (slow.memory_bandwidth_byte_per_s, fast.memory_bandwidth_byte_per_s),
            (slow.sm_count or 0, fast.sm_count or 0),
            (slow.board_power_w or 0, fast.board_power_w or 0),
            (slow.compute_capability or 0, fast.compute_capability or 0),
            *((peak(slow, dtype), peak(fast, dtype)) for dtype in DTYPES),
        )
        if any(ours > theirs for ours, theirs in figures):
            continue
        for dtype in DTYPES:
            for op, shape in (("matmul", (1, 4096, 4096, 4096)), ("matmul", (96, 512, 512, 64))):
                assert work_s(fast, op, shape, dtype) <= 1.15 * work_s(slow, op, shape, dtype), (slow, fast)


def test_products_priced_together_cost_what_they_cost_alone() -> None:
    names, dtypes = ("A100-40GB", "T4", "P4"), ("tf32", "float32", "float32")
    types = [catalogue_type(name, place="test") for name in names]
    shapes = [(1, 4096, 1000, 77), (96, 128, 128, 64), (1, 1, 1, 1)]
    together = products_s(types, dtypes, shapes)
    alone = [[work_s(d, "matmul", s, t) for s in shapes] for d, t in zip(types, dtypes, strict=True)]
    assert np.allclose(together, alone, rtol=1e-12)


def test_tiles_and_waves_quantise() -> None:
    """On a datasheet-only card, so without tables: a row beyond whole tiles, a block beyond a wave."""
    device = DeviceType("quantised", 14e12, 900e9, 1 << 34, sm_count=80, compute_capability=7.1)
    one = work_s(device, "matmul", (20, 512, 512, 4096))
    assert work_s(device, "matmul", (20, 511, 512, 4096)) == pytest.approx(one, rel=1e-6)
    assert work_s(device, "matmul", (20, 513, 512, 4096)) > 1.02 * one
    waves = [work_s(device, "matmul", (b, 128, 128, 4096)) for b in (80, 160, 161, 320)]
    assert waves == sorted(waves)
    assert waves[2] > 1.1 * waves[1]


def test_a_datasheet_is_enough_and_more_of_it_counts() -> None:
    shape = (1, 8192, 4096, 4096)
    time_s = kernel_s(BARE, "matmul", shape)
    assert 0.5 * 15e12 < 2 * 8192 * 4096 * 4096 / time_s < 15e12
    weak = DeviceType("weak", 15e12, 800e9, 16_000_000_000, board_power_w=70.0)
    assert kernel_s(weak, "matmul", shape) > 1.5 * time_s
    sturdy = replace(weak, base_clock_hz=1.4e9, boost_clock_hz=1.6e9)
    assert kernel_s(sturdy, "matmul", shape) < kernel_s(weak, "matmul", shape)
    fast = DeviceType("fast", 30e12, 1600e9, 16_000_000_000)
    assert kernel_s(fast, "matmul", shape) < time_s
    assert kernel_s(fast, "elementwise:add", (8192, 8192)) < kernel_s(BARE, "elementwise:add", (8192, 8192))
    assert work_s(BARE, "matmul", shape) < time_s


def test_matrix_rates_count_and_a_lack_is_priced_as_float32() -> None:
    shape = (1, 4096, 4096, 4096)
    single, tf32, half = (kernel_s("A100-40GB", "matmul", shape, d) for d in ("float32", "tf32", "bfloat16"))
    assert half < tf32 < 0.4 * single
    t4 = catalogue()["T4"]
    assert t4.bfloat16_flop_per_s is None
    assert kernel_s(t4, "matmul", shape, "bfloat16") > 2 * kernel_s(t4, "matmul", shape, "float16")


def test_constants_of_unmeasured_cards() -> None:
    types = catalogue()
    assert own_constants(types["A100-SXM-80GB"]) == OWN["A100-PCIE-40GB"]
    assert own_constants(types["V100-SXM2-32GB"]) == OWN["V100-PCIE-32GB"]
    newer = own_constants(types["H100-SXM-80GB"])
    assert newer["lat"] == OWN["A100-PCIE-40GB"]["lat"]
    pascal = own_constants(types["P4"])
    assert [pascal[key] for key in PRODUCTS] == [OWN["P100-PCIE-16GB"][key] for key in PRODUCTS]
    assert pascal["bw"] != OWN["P100-PCIE-16GB"]["bw"]
    between = own_constants(replace(BARE, compute_capability=6.6))
    for key in between:
        values = [0.0, *(own[key] for own in OWN.values())]
        assert min(values) <= between[key] <= max(values)
    assert not any(card.startswith("A100-SXM") for card in CORRECTIONS)


def test_constants_are_those_that_the_fit_wrote() -> None:
    text = (ROOT / "cost" / "kernels" / "constants.py").read_text()
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    assert f"Constants: `{digest}`" in (ROOT / "docs" / "kernels.md").read_text()
    assert set(OWN) == set(CORRECTIONS) == set(CARDS)
    assert {"tensor", "tensor_latency", "energy"} <= set(SHARED)


def test_new_keys_of_a_device_type_are_read() -> None:
    keys = {"sms": 80, "board_power": "250 W", "base_clock": "1230 MHz", "boost_clock": "1.38 GHz"}
    given_keys = {"name": "x", "flops": "14 TFLOP/s", "memory_bandwidth": "900 GB/s", "memory": "32 GB"}
    device = DeviceType.from_entry(Entry(given_keys | keys | {"compute_capability": 7.0}, "test"))
    assert (device.sm_count, device.board_power_w, device.base_clock_hz) == (80, 250.0, 1.23e9)
    assert DeviceType.from_entry(Entry(device.to_dict(), "test")) == device
    with pytest.raises(InputError, match="compute capability"):
        DeviceType.from_entry(Entry(given_keys | {"compute_capability": "new"}, "test"))


@pytest.mark.parametrize(
    ("device", "op", "shape", "dtype", "reason", "remedy"),
    [
        ("A101", "matmul", (1, 2, 3, 4), "float32", "'A101' is not in the catalogue", "A10"),
        ("T4", "matmull", (1, 2, 3, 4), "float32", "'matmull' is no op", "matmul"),
        ("T4", "elementwise:ad", (2, 3), "float32", "no elementwise op", "elementwise:add"),
        ("T4", "elementwise", (2, 3), "float32", "no elementwise op", "elementwise:"),
        ("T4", "softmax:x", (2, 3), "float32", "part after the colon", "Write 'softmax'"),
        ("T4", "matmul", (2, 3, 4), "float32", "has 3 sizes", "Give (b, m, n, k)"),
        ("T4", "softmax", (2, 0), "float32", "has the size 0", "at least 1"),
        ("T4", "softmax", (2, 2.5), "float32", "has the size 2.5", "whole numbers"),
        ("T4", "softmax", (2, True), "float32", "has the size True", "whole numbers"),
        ("T4", "softmax", (2, 3), "float8", "'float8' is no dtype", "float16"),
    ],
)
def test_bad_input(
    device: str, op: str, shape: tuple[int, ...], dtype: str, reason: str, remedy: str
) -> None:
    with pytest.raises(InputError) as caught:
        kernel_s(device, op, shape, dtype)
    assert reason in caught.value.reason
    assert remedy in caught.value.remedy
    assert "kernel_s" in caught.value.place


def test_it_is_exported() -> None:
    for name in ("kernel_s", "DeviceType"):
        assert name in shardwright.__all__
    assert shardwright.kernel_s is kernel_s
