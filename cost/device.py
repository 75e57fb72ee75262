"""What is known about one type of device, and the rates it reaches.

Peak rates come from datasheets or the user; *achieved* rates are peaks times a measured fraction. A rate
that has to be assumed comes with a sentence saying so, which the plan lists.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from fractions import Fraction
from functools import partial
from typing import Any, cast

from shardwright.cost.document import Entry
from shardwright.cost.op_classes import OP_CLASSES, PRODUCTS
from shardwright.cost.quantity import BANDWIDTH, COMPUTE, DURATION, MEMORY, Kind, format_quantity

DEFAULT_LAUNCH_S = 5e-6
"""Time to start one kernel: assumed, the order of an asynchronous CUDA launch."""

POWER = Kind("power", "W", {"W": Fraction(1), "kW": Fraction(1000)}, ("kW", "W"), "250 W")
CLOCK = Kind(
    "clock",
    "Hz",
    {"Hz": Fraction(1), "kHz": Fraction(10**3), "MHz": Fraction(10**6), "GHz": Fraction(10**9)},
    ("GHz", "MHz"),
    "1410 MHz",
)


@dataclass(frozen=True, slots=True)
class DeviceType:
    """A type of device. Rates are dense peaks in FLOP/s (a multiply-add is two).

    Attributes:
        name: the type's name, unique in a fleet.
        float32_flop_per_s: vector rate of single precision.
        memory_bandwidth_byte_per_s: peak of the device's own memory.
        memory_bytes: size of that memory.
        tf32_flop_per_s: matrix rate with float32 operands rounded to TF32; None where XLA does not use it
            (cards before Ampere, and other makers').
        float16_flop_per_s, bfloat16_flop_per_s: matrix rates with float32 accumulation; None where unknown or
            lacking.
        float64_flop_per_s: matrix rate of double precision; None where unknown.
        launch_s: time to start a kernel.
        matmul_efficiency: fraction of `float32_flop_per_s` that large float32 matrix products reach.
        tensor_efficiency: the same for the TF32, float16 and bfloat16 rates.
        bandwidth_efficiency: fraction of the memory bandwidth that large elementwise kernels reach.
        measured: whether any of these fractions was measured on this very type.
        source: where the numbers come from.
        sm_count: multiprocessors (AMD: compute units); None: one for each 0.18 TFLOP/s of single precision.
        board_power_w: power of the whole board; None: compute is never throttled.
        base_clock_hz, boost_clock_hz: the board power never throttles below their ratio; None: no such floor.
        compute_capability: CUDA's, as a number (8.6): which measured device's constants the kernel model
            takes, and how fast the host is taken to be; None counts as 8.0.
        resume_s: what it takes, besides its kernels, to go from an exchange into a compiled segment and
            from it into the next exchange: start, host work, caches that refill, devices that share cores and
            are not ready at the same time.
        vector_efficiency: fraction of `float32_flop_per_s` that everything but products reaches.
        price_per_hour: what an hour of it costs, in whatever currency; None where unknown. Types that
            differ in it alone are one.
        class_efficiencies: fraction of `float32_flop_per_s` that a class of operations reaches
            (`OP_CLASSES`), where it was measured; others have that of products, or of everything else.
        restart_s, resume_over_s: the shortest segments take `restart_s` in place of `resume_s`, those whose
            kernels take `resume_over_s` or longer all of it, and others something in between.
    """

    name: str
    float32_flop_per_s: float
    memory_bandwidth_byte_per_s: float
    memory_bytes: int
    tf32_flop_per_s: float | None = None
    float16_flop_per_s: float | None = None
    bfloat16_flop_per_s: float | None = None
    float64_flop_per_s: float | None = None
    launch_s: float = DEFAULT_LAUNCH_S
    matmul_efficiency: float = 1.0
    tensor_efficiency: float = 1.0
    bandwidth_efficiency: float = 1.0
    measured: bool = False
    source: str = "given in the fleet"
    sm_count: int | None = None
    board_power_w: float | None = None
    base_clock_hz: float | None = None
    boost_clock_hz: float | None = None
    compute_capability: float | None = None
    vector_efficiency: float = 1.0
    resume_s: float = 0.0
    price_per_hour: float | None = field(default=None, compare=False)
    class_efficiencies: tuple[tuple[str, float], ...] = ()
    restart_s: float = 0.0
    resume_over_s: float = 0.0

    def class_factor(self, op_class: str) -> float:
        """How much faster than products, or than all other operations, those of a class are."""
        found = dict(self.class_efficiencies).get(op_class)
        if found is None:
            return 1.0
        return found / (self.matmul_efficiency if op_class in PRODUCTS else self.vector_efficiency)

    @property
    def is_card(self) -> bool:
        """Whether it has memory of its own, apart from the host's: types do that state multiprocessors."""
        return self.sm_count is not None

    @property
    def lacks_bfloat16(self) -> bool:
        """Whether it is a card that multiplies bfloat16 as float32: with a rate of neither that nor TF32."""
        return self.is_card and self.bfloat16_flop_per_s is None and self.tf32_flop_per_s is None

    @property
    def turned_per_s(self) -> float:
        """Elements per second at which products rearrange an operand; infinite where it is not known."""
        found = dict(self.class_efficiencies).get("transposition")
        return math.inf if found is None else found * self.float32_flop_per_s

    def flop_rate(self, dtype: str, precision: str | None = None) -> tuple[float, str | None]:
        """The achieved rate of a large matrix product or convolution, and the assumption behind it, if any.

        Args:
            dtype: of the operands, as JAX spells it ("float32", "bfloat16").
            precision: the operation's own, as JAX spells it: None, a `lax.Precision` ("DEFAULT", "HIGH",
                "HIGHEST" and their synonyms) or a `lax.DotAlgorithmPreset` ("TF32_TF32_F32"). It matters to
                float32 and complex64 only: unless HIGHEST is asked for, XLA allows TF32 on CUDA devices
                that have it (XLA, `GetBlasComputationType`: up to precision 1, which is HIGH).

        Returns:
            FLOP/s, and None or a sentence for the plan's list of assumptions.
        """
        float32 = self.float32_flop_per_s * self.matmul_efficiency
        used, passes = arithmetic(dtype, precision)
        if used == "float32":
            return float32, None
        if used == "tf32":
            # Allowed, not demanded: a card without it, or faster without it, uses float32.
            tf32 = (self.tf32_flop_per_s or 0.0) * self.tensor_efficiency / passes
            return max(float32, tf32), None
        peaks = {
            "float16": (self.float16_flop_per_s, self.tensor_efficiency),
            "bfloat16": (self.bfloat16_flop_per_s, self.tensor_efficiency),
            "float64": (self.float64_flop_per_s, self.matmul_efficiency),
        }
        peak, efficiency = peaks.get(used, (None, 1.0))
        if peak is None:
            assumption = f"no {used} matrix rate is known for {self.name}: priced at its float32 rate"
            return float32, assumption
        return peak * efficiency / passes, None

    def vector_rate(self, dtype: str = "float32") -> float:
        """FLOP/s of everything that is no matrix product: the vector rate of single or double precision."""
        if dtype in ("float64", "complex128") and self.float64_flop_per_s is not None:
            return min(self.float64_flop_per_s, self.float32_flop_per_s) * self.vector_efficiency
        return self.float32_flop_per_s * self.vector_efficiency

    @property
    def bandwidth_byte_per_s(self) -> float:
        """The achieved memory bandwidth."""
        return self.memory_bandwidth_byte_per_s * self.bandwidth_efficiency

    @classmethod
    def from_entry(cls, entry: Entry) -> DeviceType:
        """The type that a mapping of a fleet file describes; see `_KEYS` for the grammar.

        Raises:
            InputError: a missing or unknown key, or a value that is none.
        """
        given = entry.mapping(
            required=_REQUIRED,
            optional=("reserve", *(key for key in _KEYS if key not in _REQUIRED)),
            elsewhere=dict.fromkeys(("count", "host_link"), "beside 'type', not into it"),
        )
        reserve = given.pop("reserve", None)
        values: dict[str, Any] = {
            _KEYS[key].attribute: _KEYS[key].read(value) for key, value in given.items()
        }
        if reserve is not None:
            values["memory_bytes"] = _without(values["memory_bytes"], reserve)
        return cls(**values)

    def to_dict(self) -> dict[str, object]:
        """The mapping that `from_entry` reads back to an equal type; defaults are left out."""
        defaults = {each.name: each.default for each in fields(self)}
        values = {key: (spec, getattr(self, spec.attribute)) for key, spec in _KEYS.items()}
        return {
            key: spec.write(value)
            for key, (spec, value) in values.items()
            if value != defaults[spec.attribute]
        }


# What float32 operands are multiplied in, and in how many passes, by lower-case precision. The names are
# those of `jax.lax.Precision`, with its synonyms, and `jax.lax.DotAlgorithmPreset`.
_FLOAT32_ARITHMETIC: Mapping[str, tuple[str, int]] = {
    **dict.fromkeys(("default", "fastest", "bfloat16", "high", "bfloat16_3x", "tensorfloat32"), ("tf32", 1)),
    **dict.fromkeys(("highest", "float32", "f32_f32_f32"), ("float32", 1)),
    "f64_f64_f64": ("float64", 1),
    "tf32_tf32_f32": ("tf32", 1),
    "tf32_tf32_f32_x3": ("tf32", 3),
    **dict.fromkeys(("bf16_bf16_f32", "bf16_bf16_bf16"), ("bfloat16", 1)),
    "bf16_bf16_f32_x3": ("bfloat16", 3),
    "bf16_bf16_f32_x6": ("bfloat16", 6),
    "bf16_bf16_f32_x9": ("bfloat16", 9),
    **dict.fromkeys(("f16_f16_f32", "f16_f16_f16"), ("float16", 1)),
}


def arithmetic(dtype: str, precision: str | None) -> tuple[str, int]:
    """What operands of this dtype are multiplied in where a device can, and in how many passes."""
    if dtype in ("float32", "complex64"):
        unknown = (f"{dtype} (precision {precision})", 1)
        return _FLOAT32_ARITHMETIC.get((precision or "default").lower(), unknown)
    return "float64" if dtype == "complex128" else dtype, 1


@dataclass(frozen=True, slots=True)
class _Key:
    """A key of an inline device type: the attribute it sets, how it is read and how it is written."""

    attribute: str
    read: Callable[[Entry], object]
    write: Callable[[Any], object]


def _quantity(attribute: str, kind: Kind) -> _Key:
    return _Key(attribute, partial(Entry.quantity, kind=kind), partial(format_quantity, kind=kind))


def _bytes(entry: Entry) -> int:
    size = int(entry.quantity(MEMORY))
    if size < 1:
        raise entry.error("is less than a byte", f"Give the size of the memory, as in '{MEMORY.example}'")
    return size


def _without(memory_bytes: int, entry: Entry) -> int:
    """What is left for plans of a memory of which so much is for others."""
    reserve = _bytes(entry)
    if reserve >= memory_bytes:
        has = format_quantity(memory_bytes, MEMORY)
        raise entry.error(f"leaves nothing of a memory of {has}", "Reserve less than the memory")
    return memory_bytes - reserve


def _capability(entry: Entry) -> float:
    value = entry.value
    if isinstance(value, bool) or not isinstance(value, int | float) or not 1 <= cast("float", value) <= 20:
        raise entry.error("is no compute capability", "Write a number from 1 to 20, such as 8.6")
    return float(cast("float", value))


def _same(value: Any) -> object:
    return value


def _class_efficiencies(entry: Entry) -> tuple[tuple[str, float], ...]:
    found = entry.mapping(required=(), optional=tuple(OP_CLASSES))
    return tuple((name, rate.fraction()) for name, rate in found.items())


_REQUIRED = ("name", "flops", "memory_bandwidth", "memory")
_KEYS: Mapping[str, _Key] = {
    "name": _Key("name", Entry.text, _same),
    "flops": _quantity("float32_flop_per_s", COMPUTE),
    "memory_bandwidth": _quantity("memory_bandwidth_byte_per_s", BANDWIDTH),
    "memory": _Key("memory_bytes", _bytes, partial(format_quantity, kind=MEMORY)),
    "tf32": _quantity("tf32_flop_per_s", COMPUTE),
    "float16": _quantity("float16_flop_per_s", COMPUTE),
    "bfloat16": _quantity("bfloat16_flop_per_s", COMPUTE),
    "float64": _quantity("float64_flop_per_s", COMPUTE),
    "launch": _quantity("launch_s", DURATION),
    "resume": _quantity("resume_s", DURATION),
    "restart": _quantity("restart_s", DURATION),
    "resume_over": _quantity("resume_over_s", DURATION),
    "matmul_efficiency": _Key("matmul_efficiency", Entry.fraction, _same),
    "tensor_efficiency": _Key("tensor_efficiency", Entry.fraction, _same),
    "vector_efficiency": _Key("vector_efficiency", Entry.fraction, _same),
    "bandwidth_efficiency": _Key("bandwidth_efficiency", Entry.fraction, _same),
    "class_efficiencies": _Key("class_efficiencies", _class_efficiencies, dict),
    "measured": _Key("measured", Entry.flag, _same),
    "source": _Key("source", Entry.text, _same),
    "sms": _Key("sm_count", partial(Entry.count, most=4096), _same),
    "board_power": _quantity("board_power_w", POWER),
    "base_clock": _quantity("base_clock_hz", CLOCK),
    "boost_clock": _quantity("boost_clock_hz", CLOCK),
    "compute_capability": _Key("compute_capability", _capability, _same),
    "price_per_hour": _Key("price_per_hour", Entry.price, _same),
}
