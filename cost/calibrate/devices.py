"""Rates of a device from timed kernels: a roofline with a rate for each class of operations.

A kernel takes launch + max(flop / rate, bytes / bandwidth), as `shardwright.cost.model` has it; the launch,
the rates of the classes (`shardwright.cost.op_classes`) and the bandwidth are fitted together, to logarithms
of times, with a loss that forgives single outliers. What 16-bit and TF32 products gain over float32 is read
off one large product that is timed in all of them. Pieces of training steps are fitted with the kernels:
there the model's sum over equations stands for what kernels really take in each other's company, and products
are in TF32 where JAX uses it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import least_squares

from shardwright.cost.calibrate.estimate import Array, Estimate, margins, rounded, spread
from shardwright.cost.device import DeviceType
from shardwright.cost.op_classes import OP_CLASSES, PRODUCTS
from shardwright.ir.errors import InputError

MOST_ERROR = 0.6
MOST_SPREAD = 0.35
#: How much all pieces of steps together weigh in a fit, against all single kernels together.
PIECES_COUNT = 4.0
#: By which factor a fitted number may differ from what it started at.
FURTHEST = 100.0
#: An element that is rearranged is taken to cost as much as so many bytes, before it is fitted.
TURNING_BYTES = 16.0
#: Devices whose times typically differ by less are of one type.
SAME = 0.2
#: float32 products that run so much faster at JAX's default precision than at the highest use TF32.
TF32_GAIN = 1.3


@dataclass(frozen=True, slots=True)
class Kernel:
    """A kernel, or an equation of a step, as the cost model sees it.

    Attributes:
        op_class: one of `OP_CLASSES`.
        arithmetic: what a product's operands are multiplied in: "float32", "default" (float32 operands at
            JAX's default precision), "float16", "bfloat16".
        flop: floating point operations.
        nbytes: read and written.
        launches: 1, or 0 if it joins another kernel.
        turned: elements of an operand that is rearranged first.
    """

    op_class: str
    flop: float
    nbytes: float
    launches: float = 1.0
    arithmetic: str = "float32"
    turned: float = 0.0


@dataclass(frozen=True, slots=True)
class KernelTimes:
    """A timed compiled function: its kernels, and seconds without its start, one per repetition.

    `piece`: it is one of a step, not a kernel alone.
    """

    kernels: tuple[Kernel, ...]
    seconds: tuple[float, ...]
    piece: bool = False


@dataclass(frozen=True, slots=True)
class DeviceFit:
    """What was found out about a device.

    Attributes:
        launch_s, matmul_flop_per_s, vector_flop_per_s, byte_per_s: the roofline; the two rates are those of
            the classes "product" and "other".
        classes: FLOP/s of the other classes that were timed.
        gains: how many times as fast as in float32 products are in other arithmetic.
        error: root mean square of the logarithms of predicted over measured.
        spread: typical spread of repeated runs.
    """

    launch_s: Estimate
    matmul_flop_per_s: Estimate
    vector_flop_per_s: Estimate
    byte_per_s: Estimate
    classes: Mapping[str, Estimate]
    gains: Mapping[str, float]
    error: float
    spread: float

    def complaint(self) -> str | None:
        """Why the fit is not to be trusted, None if it is."""
        if self.spread > MOST_SPREAD:
            return f"repeated runs of the same kernel differ by ±{self.spread:.0%}"
        if self.error > MOST_ERROR:
            return f"launch time, rates and a bandwidth miss the times of kernels by {self.error:.0%}"
        return None

    def as_type(
        self,
        name: str,
        memory_bytes: int,
        source: str,
        resuming: tuple[float, float, float] = (0.0, 0.0, 0.0),
    ) -> DeviceType:
        """The device type that has these rates; float32 is the larger of its two rates, as a peak.

        Args:
            name: of the type.
            memory_bytes: of its memory.
            source: where this comes from.
            resuming: `resume_s`, `restart_s` and `resume_over_s` of the type.
        """
        resume_s, restart_s, resume_over_s = map(rounded, resuming)
        product, other = self.matmul_flop_per_s.value, self.vector_flop_per_s.value
        peak = rounded(max(product, other, *(rate.value for rate in self.classes.values())))
        rates = {arithmetic: rounded(gain * product) for arithmetic, gain in self.gains.items()}

        def part(rate: float) -> float:
            return min(1.0, rounded(rate / peak))

        return DeviceType(
            name=name,
            float32_flop_per_s=peak,
            memory_bandwidth_byte_per_s=rounded(self.byte_per_s.value),
            memory_bytes=memory_bytes,
            tf32_flop_per_s=rates["default"] if self.gains.get("default", 0.0) > TF32_GAIN else None,
            float16_flop_per_s=rates.get("float16"),
            bfloat16_flop_per_s=rates.get("bfloat16"),
            launch_s=rounded(self.launch_s.value),
            matmul_efficiency=part(product),
            vector_efficiency=part(other),
            resume_s=resume_s,
            restart_s=restart_s,
            resume_over_s=resume_over_s,
            measured=True,
            source=source,
            class_efficiencies=tuple((name, part(rate.value)) for name, rate in self.classes.items()),
        )


def fit_device(times: Sequence[KernelTimes]) -> DeviceFit:
    """The roofline through kernels of a device; some of the classes "product" and "other" must be there.

    Raises:
        InputError: the kernels do not say enough.
    """
    gains = _gains(times)
    roof = [t for t in times if t.piece or all(k.arithmetic == "float32" for k in t.kernels)]
    seconds = np.array([np.median(t.seconds) for t in roof])
    kernels = [k for t in roof for k in t.kernels]
    firsts = np.cumsum([0, *(len(t.kernels) for t in roof)])[:-1]
    flop, nbytes, launches, turned = (
        np.array([getattr(k, name) for k in kernels]) for name in ("flop", "nbytes", "launches", "turned")
    )
    present = {k.op_class for k in kernels if k.flop}
    if len(roof) < 8 or not {"product", "other"} <= present:
        raise InputError(
            place="calibrate",
            reason="too few kernels were timed to fit a device",
            remedy="Time at least eight, products and others among them",
        )
    # What float32 products gain where JAX uses TF32; elsewhere the precisions differ by noise.
    gain = {"default": gains["default"]} if gains.get("default", 0.0) > TF32_GAIN else {}
    flop = flop / np.array([gain.get(k.arithmetic, 1.0) for k in kernels])
    classes = ("product", "other", *(c for c in OP_CLASSES if c in present - {"product", "other"}))
    class_of = np.array([classes.index(k.op_class) if k.flop else 1 for k in kernels])
    turns = bool(turned.any())
    # Plans are made of pieces of steps: these count, and single kernels tell apart what pieces mix.
    whole = np.array([t.piece for t in roof])
    # The longer a piece takes, the more of a step it is.
    share = np.where(whole, seconds, 0.0) / max(float(seconds[whole].sum()), 1e-300)
    weight = np.where(whole, np.sqrt(np.maximum(PIECES_COUNT * (~whole).sum() * share, 0.1)), 1.0)

    def predicted(values: Array) -> Array:
        launch, bandwidth, *rates = np.exp(values)
        turning = turned / rates.pop() if turns else turned
        rate = np.array(rates)[class_of]
        busy = np.maximum(flop / rate + turning, nbytes / bandwidth)
        return np.add.reduceat(launch * launches + busy, firsts)

    def residual(values: Array) -> Array:
        return weight * np.log(predicted(values) / seconds)

    # A rate starts from the fastest that a kernel alone ran; one that only pieces tell of, from its like.
    alone = seconds[~whole]

    def fastest(work: Array) -> float:
        return float((np.add.reduceat(work, firsts)[~whole] / alone).max(initial=0.0))

    rates = [fastest(np.where(class_of == c, flop, 0.0)) for c in range(len(classes))]
    rates = [rate or rates[0 if c in PRODUCTS else 1] for c, rate in zip(classes, rates, strict=True)]
    turning = [max(fastest(nbytes), 1.0) / TURNING_BYTES] if turns else []
    start = np.log([max(float(seconds.min()) / 2, 1e-9), max(fastest(nbytes), 1.0), *rates, *turning])
    # What nothing waits for could be anything; it stays near where it started.
    near = (start - np.log(FURTHEST), start + np.log(FURTHEST))
    found = least_squares(residual, start, bounds=near, loss="soft_l1", f_scale=0.2)
    width = margins(np.asarray(found.jac), residual(found.x))
    launch, bandwidth, *fitted = (
        Estimate(float(np.exp(v)), float(np.exp(v - w)), float(np.exp(v + w)))
        for v, w in zip(found.x, np.minimum(width, 50.0), strict=True)
    )
    names: list[str] = [*classes, *(["transposition"] if turns else [])]
    by_class = dict(zip(names, fitted, strict=True))
    return DeviceFit(
        launch,
        by_class.pop("product"),
        by_class.pop("other"),
        bandwidth,
        by_class,
        gains,
        float(np.sqrt(np.average(np.square(residual(found.x) / weight), weights=weight**2))),
        float(np.median([spread(t.seconds) for t in roof])),
    )


def _gains(times: Sequence[KernelTimes]) -> dict[str, float]:
    """How many times as fast as in float32 the same products are in other arithmetic."""
    singles = [(t.kernels[0], float(np.median(t.seconds))) for t in times if not t.piece]
    plain: dict[tuple[str, float], float] = {}
    for kernel, seconds in singles:
        if kernel.arithmetic == "float32":
            plain.setdefault((kernel.op_class, kernel.flop), seconds)
    return {
        k.arithmetic: plain[k.op_class, k.flop] / seconds
        for k, seconds in singles
        if k.arithmetic != "float32" and (k.op_class, k.flop) in plain
    }


def group_devices(
    per_device: Sequence[Sequence[KernelTimes]], alike: Callable[[int, int], bool]
) -> list[tuple[DeviceFit, tuple[int, ...]]]:
    """Devices that resemble the first of their group, fitted together.

    Args:
        per_device: the same kernels, timed on each device.
        alike: whether two devices, by index, may be of one type at all.
    """
    groups: list[list[int]] = []
    for device, times in enumerate(per_device):
        for group in groups:
            if alike(group[0], device) and _same(per_device[group[0]], times):
                group.append(device)
                break
        else:
            groups.append([device])
    return [(fit_device(_pooled([per_device[d] for d in group])), tuple(group)) for group in groups]


def _same(mine: Sequence[KernelTimes], others: Sequence[KernelTimes]) -> bool:
    """Whether products, other kernels and pieces of steps take about as long on one device as on another."""
    found: dict[str, list[float]] = {}
    for one, other in zip(mine, others, strict=True):
        kind = "piece" if one.piece else "product" if one.kernels[0].op_class in PRODUCTS else "other"
        found.setdefault(kind, []).append(float(np.median(one.seconds) / np.median(other.seconds)))
    return all(abs(np.log(np.median(ratios))) < np.log1p(SAME) for ratios in found.values())


def _pooled(per_device: Sequence[Sequence[KernelTimes]]) -> list[KernelTimes]:
    return [
        KernelTimes(same[0].kernels, tuple(s for t in same for s in t.seconds), same[0].piece)
        for same in zip(*per_device, strict=True)
    ]
