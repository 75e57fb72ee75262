"""The catalogue of device types.

Peaks are the vendors' datasheet figures, dense and without sparsity, matrix rates with float32 accumulation
where the datasheet tells. Achieved fractions were measured on some types; the rest take the median of those:

- float32 matrix products: NeuSight (sitar-lab/NeuSight, MIT), the fastest `torch.bmm` or `Linear` over 0.2
  ms, TF32 off;
- tensor-core matrix products: aiconfigurator (ai-dynamo/aiconfigurator, Apache-2.0), bfloat16 GEMM tables,
  the 20th fastest shape over 0.1 ms, median over the collections;
- memory bandwidth: NeuSight, elementwise kernels over 0.2 ms, median of the bytes moved per second.

Launch times are assumed (`DEFAULT_LAUNCH_S`). A memory of "16 GB" counts as 16 × 10⁹ bytes: what remains of
the true size is left to the driver.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from statistics import median
from types import MappingProxyType

from shardwright.cost.device import DeviceType
from shardwright.ir.errors import InputError

NO = None


@dataclass(frozen=True, slots=True)
class _Sheet:
    """A datasheet: TFLOP/s by precision (`fp64` as a multiple of fp32), memory in GB and GB/s."""

    name: str
    fp32: float
    tf32: float | None
    fp16: float | None
    bf16: float | None
    fp64: float
    memory: float
    bandwidth: float
    note: str = ""


@dataclass(frozen=True, slots=True)
class _Chip:
    """The rest of a datasheet: multiprocessors, CUDA compute capability, board power in W, clocks in MHz."""

    sms: int
    capability: float | None
    board: float
    base: float | None
    boost: float | None


@dataclass(frozen=True, slots=True)
class _Measured:
    """What was measured on a type: matrix products in TFLOP/s, elementwise kernels in GB/s."""

    fp32_matmul: float | None = None
    tensor_matmul: float | None = None
    elementwise: float | None = None


# fp64 is the architecture's ratio, tensor cores included: 1/2 on P100, V100, B200 and MI300X; 1 on A100,
# H100, H200 and MI250X; 1/32 on P4 and Turing; 1/64 on GA102 and Ada. XLA does not choose AMD's TF32.
# fmt: off
_SHEETS = (
    #      name               fp32    tf32    fp16    bf16    fp64   GB   GB/s
    _Sheet("P100-PCIE-16GB",   9.3,   NO,     18.7,   NO,     1/2,   16,   732, "float16 is the vector rate"),
    _Sheet("P4",               5.5,   NO,     NO,     NO,     1/32,   8,   192),
    _Sheet("V100-PCIE-32GB",  14.0,   NO,    112,     NO,     1/2,   32,   900),
    _Sheet("V100-SXM2-16GB",  15.7,   NO,    125,     NO,     1/2,   16,   900),
    _Sheet("V100-SXM2-32GB",  15.7,   NO,    125,     NO,     1/2,   32,   900),
    _Sheet("T4",               8.1,   NO,     65,     NO,     1/32,  16,   320, "sustains less than boost"),
    _Sheet("RTX-2080Ti",      13.4,   NO,     53.8,   NO,     1/32,  11,   616),
    _Sheet("Titan-RTX",       16.3,   NO,    130.5,   NO,     1/32,  24,   672),
    _Sheet("RTX-3090",        35.6,   35.6,   71,     71,     1/64,  24,   936),
    _Sheet("RTX-4090",        82.6,   82.6,  165.2,  165.2,   1/64,  24,  1008),
    _Sheet("RTX-A6000",       38.7,   77.4,  154.8,  154.8,   1/64,  48,   768),
    _Sheet("A10",             31.2,   62.5,  125,    125,     1/64,  24,   600),
    _Sheet("A40",             37.4,   74.8,  149.7,  149.7,   1/64,  48,   696),
    _Sheet("A100-PCIE-40GB",  19.5,  156,    312,    312,     1,     40,  1555),
    _Sheet("A100-SXM-40GB",   19.5,  156,    312,    312,     1,     40,  1555),
    _Sheet("A100-PCIE-80GB",  19.5,  156,    312,    312,     1,     80,  1935),
    _Sheet("A100-SXM-80GB",   19.5,  156,    312,    312,     1,     80,  2039),
    _Sheet("L4",              30.3,   60.5,  121,    121,     1/64,  24,   300, "sustains less than boost"),
    _Sheet("L40S",            91.6,  183,    362,    362,     1/64,  48,   864),
    _Sheet("H100-PCIE-80GB",  51.2,  378,    756,    756,     1,     80,  2000),
    _Sheet("H100-SXM-80GB",   66.9,  494.7,  989.4,  989.4,   1,     80,  3350),
    _Sheet("H200-SXM",        66.9,  494.7,  989.4,  989.4,   1,    141,  4800),
    _Sheet("GH200-96GB",      66.9,  494.7,  989.4,  989.4,   1,     96,  4000),
    _Sheet("B200-SXM",        80.0, 1125,   2250,   2250,     1/2,  180,  8000),
    _Sheet("GB200",           80.0, 1250,   2500,   2500,     1/2,  186,  8000, "one GPU of the board"),
    _Sheet("MI250X",          47.9,   NO,    383,    383,     1,    128,  3277, "JAX sees its two dies"),
    _Sheet("MI300X",         163.4,   NO,   1307.4, 1307.4,   1/2,  192,  5300),
)

# Boards and clocks as the vendors' datasheets and architecture whitepapers give them; where these give no
# base clock, None.
_CHIPS: Mapping[str, _Chip] = {
    #                       SMs   cc     W   base  boost
    "P100-PCIE-16GB": _Chip( 56,  6.0,  250, 1126, 1303),
    "P4":             _Chip( 20,  6.1,   75,  886, 1114),
    "V100-PCIE-32GB": _Chip( 80,  7.0,  250, 1230, 1380),
    "V100-SXM2-16GB": _Chip( 80,  7.0,  300, 1290, 1530),
    "V100-SXM2-32GB": _Chip( 80,  7.0,  300, 1290, 1530),
    "T4":             _Chip( 40,  7.5,   70,  585, 1590),
    "RTX-2080Ti":     _Chip( 68,  7.5,  250, 1350, 1545),
    "Titan-RTX":      _Chip( 72,  7.5,  280, 1350, 1770),
    "RTX-3090":       _Chip( 82,  8.6,  350, 1395, 1695),
    "RTX-4090":       _Chip(128,  8.9,  450, 2235, 2520),
    "RTX-A6000":      _Chip( 84,  8.6,  300, 1410, 1800),
    "A10":            _Chip( 72,  8.6,  150,  885, 1695),
    "A40":            _Chip( 84,  8.6,  300, 1305, 1740),
    "A100-PCIE-40GB": _Chip(108,  8.0,  250,  765, 1410),
    "A100-SXM-40GB":  _Chip(108,  8.0,  400, 1095, 1410),
    "A100-PCIE-80GB": _Chip(108,  8.0,  300, 1065, 1410),
    "A100-SXM-80GB":  _Chip(108,  8.0,  400, 1275, 1410),
    "L4":             _Chip( 58,  8.9,   72,  795, 2040),
    "L40S":           _Chip(142,  8.9,  350, 1110, 2520),
    "H100-PCIE-80GB": _Chip(114,  9.0,  350, 1095, 1755),
    "H100-SXM-80GB":  _Chip(132,  9.0,  700, NO,   1980),
    "H200-SXM":       _Chip(132,  9.0,  700, NO,   1980),
    "GH200-96GB":     _Chip(132,  9.0,  700, NO,   1980),
    "B200-SXM":       _Chip(148, 10.0, 1000, NO,   NO),
    "GB200":          _Chip(148, 10.0, 1200, NO,   NO),
    "MI250X":         _Chip(220,   NO,  560, NO,   1700),
    "MI300X":         _Chip(304,   NO,  750, NO,   2100),
}
# fmt: on

_MEASURED: Mapping[str, _Measured] = {
    "P100-PCIE-16GB": _Measured(fp32_matmul=8.92, elementwise=522.2),
    "V100-PCIE-32GB": _Measured(fp32_matmul=14.01, elementwise=796.7),
    "T4": _Measured(fp32_matmul=7.04, elementwise=232.7),
    "A100-PCIE-40GB": _Measured(fp32_matmul=19.07, elementwise=1329.1),
    "A100-SXM-80GB": _Measured(tensor_matmul=278.4),
    "L40S": _Measured(tensor_matmul=265.9),
    "H100-SXM-80GB": _Measured(tensor_matmul=831.8),
    "H200-SXM": _Measured(tensor_matmul=827.7),
    "B200-SXM": _Measured(tensor_matmul=1672.6),
    "GB200": _Measured(tensor_matmul=1883.5),
}

ALIASES: Mapping[str, str] = MappingProxyType(
    {
        "P100-16GB": "P100-PCIE-16GB",
        "V100-16GB": "V100-SXM2-16GB",
        "V100-32GB": "V100-SXM2-32GB",
        "A6000": "RTX-A6000",
        "A100-40GB": "A100-SXM-40GB",
        "A100-80GB": "A100-SXM-80GB",
        "H100-80GB": "H100-SXM-80GB",
        "H200": "H200-SXM",
        "GH200": "GH200-96GB",
        "B200": "B200-SXM",
    }
)
"""Short names and the types they stand for."""


@cache
def catalogue() -> Mapping[str, DeviceType]:
    """Every type by its full name, in the order of the table."""
    matmul = _fractions((m.fp32_matmul, s.fp32) for s, m in _measured_sheets())
    tensor = _fractions((m.tensor_matmul, s.bf16) for s, m in _measured_sheets())
    elementwise = _fractions((m.elementwise, s.bandwidth) for s, m in _measured_sheets())
    typical = (median(matmul), median(tensor), median(elementwise))
    return MappingProxyType({sheet.name: _device_type(sheet, *typical) for sheet in _SHEETS})


def device_type(name: str, *, place: str) -> DeviceType:
    """The type of a full or short name.

    Raises:
        InputError: at `place`, no such type; the remedy lists the nearest names.
    """
    found = catalogue().get(ALIASES.get(name, name))
    if found is None:
        names = {known.lower(): known for known in (*catalogue(), *ALIASES)}
        near = get_close_matches(name.lower(), names, n=4, cutoff=0.5)
        hint = "The nearest names are " if near else "The catalogue has "
        listed = ", ".join(names[match] for match in near or sorted(names))
        inline = "or describe it inline: {name, flops, memory_bandwidth, memory}"
        raise InputError(
            place=place,
            reason=f"'{name}' is not in the catalogue of device types",
            remedy=f"{hint}{listed}; {inline}",
        )
    return found


def _measured_sheets() -> tuple[tuple[_Sheet, _Measured], ...]:
    return tuple((sheet, _MEASURED[sheet.name]) for sheet in _SHEETS if sheet.name in _MEASURED)


def _fractions(pairs: Iterable[tuple[float | None, float | None]]) -> list[float]:
    """Achieved over peak, at most 1, of every pair that has both."""
    return [min(achieved / peak, 1.0) for achieved, peak in pairs if achieved and peak]


def _device_type(sheet: _Sheet, matmul: float, tensor: float, elementwise: float) -> DeviceType:
    """The type of a datasheet, its own measurements taking the place of the typical fractions given."""
    own, chip = _MEASURED.get(sheet.name, _Measured()), _CHIPS[sheet.name]

    def fraction(achieved: float | None, peak: float | None, typical: float) -> float:
        return min(achieved / peak, 1.0) if achieved and peak else typical

    def flop_per_s(tera: float | None) -> float | None:
        return None if tera is None else tera * 1e12

    measured = [
        label
        for label, value in (
            ("float32 matmul (NeuSight)", own.fp32_matmul),
            ("tensor matmul (aiconfigurator)", own.tensor_matmul),
            ("memory bandwidth (NeuSight)", own.elementwise),
        )
        if value is not None
    ]
    achieved = (
        f"measured: {', '.join(measured)}" if measured else "achieved fractions: median of the measured types"
    )
    return DeviceType(
        name=sheet.name,
        float32_flop_per_s=sheet.fp32 * 1e12,
        memory_bandwidth_byte_per_s=sheet.bandwidth * 1e9,
        memory_bytes=round(sheet.memory * 1e9),
        tf32_flop_per_s=flop_per_s(sheet.tf32),
        float16_flop_per_s=flop_per_s(sheet.fp16),
        bfloat16_flop_per_s=flop_per_s(sheet.bf16),
        float64_flop_per_s=sheet.fp32 * sheet.fp64 * 1e12,
        matmul_efficiency=fraction(own.fp32_matmul, sheet.fp32, matmul),
        tensor_efficiency=fraction(own.tensor_matmul, sheet.bf16, tensor),
        bandwidth_efficiency=fraction(own.elementwise, sheet.bandwidth, elementwise),
        measured=bool(measured),
        source="; ".join(filter(None, ("vendor datasheet", achieved, sheet.note))),
        sm_count=chip.sms,
        board_power_w=float(chip.board),
        base_clock_hz=chip.base and chip.base * 1e6,
        boost_clock_hz=chip.boost and chip.boost * 1e6,
        compute_capability=chip.capability,
    )
