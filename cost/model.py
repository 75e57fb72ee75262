"""Prices of instructions on a fleet: roofline for kernels, alpha-beta for exchanges.

A kernel takes launch + max(flop / achieved flop rate, bytes / achieved bandwidth) on each device class;
its flops and its sharded operands shrink with the share, what is replicated does not. Operands and
results that XLA keeps in registers (an elementwise chain, a reduction's input) move no bytes: `Traffic`
says which of an equation's tensors do. Nothing here is priced in elements.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import ceil

import numpy as np

from shardwright.cost.device import DeviceType
from shardwright.cost.fleet import DeviceClass, Fleet
from shardwright.cost.moves import Ring, prices
from shardwright.cost.share_cost import ShareCost
from shardwright.ir.collectives import registry as collectives
from shardwright.ir.graph import Equation, TensorType
from shardwright.ir.placement import Placement, Shard
from shardwright.ir.rules import Rule, Signature, flop_count, registry, rule_of

#: Primitives that only rename or reinterpret memory.
ALIASES = frozenset(
    {"reshape", "squeeze", "copy", "stop_gradient", "optimization_barrier", "random_wrap", "random_unwrap"}
)


@dataclass(frozen=True, slots=True)
class Traffic:
    """Which operands and results of an equation go through memory."""

    ins: tuple[bool, ...]
    outs: tuple[bool, ...]


@dataclass(slots=True)
class CostModel:
    """Prices every instruction for one fleet, in the fleet's device classes.

    Attributes:
        fleet: the fleet.
        assumptions: what had to be assumed, in words, collected while pricing.
        classes: the fleet's device classes.
        types: device type of every class.
        counts: devices of every class.
        class_of: class of every device.
        ring: the ring through all devices.
    """

    fleet: Fleet
    assumptions: dict[str, None] = field(default_factory=dict[str, None])
    classes: tuple[DeviceClass, ...] = field(init=False)
    types: tuple[DeviceType, ...] = field(init=False)
    counts: np.typing.NDArray[np.int64] = field(init=False)
    class_of: np.typing.NDArray[np.int64] = field(init=False)
    ring: Ring = field(init=False)
    _moves: dict[tuple[str, str, int, Placement, Placement], ShareCost] = field(init=False)
    _free: ShareCost = field(init=False)
    _floors: dict[ShareCost, float] = field(init=False)
    _kernels: dict[tuple[object, ...], ShareCost] = field(init=False)
    _of_equation: dict[tuple[Equation, Signature, Traffic], ShareCost] = field(init=False)

    def __post_init__(self) -> None:
        classes = self.classes = self.fleet.classes
        self.types = tuple(c.type for c in classes)
        self.counts = np.array([len(c.members) for c in classes], dtype=np.int64)
        self.class_of = np.zeros(len(self.fleet.devices), dtype=np.int64)
        for c in classes:
            self.class_of[list(c.members)] = c.index
        self.ring = Ring.of(self.fleet)
        self._free = ShareCost.free(len(classes))
        self._moves, self._kernels, self._of_equation, self._floors = {}, {}, {}, {}
        for c in classes:
            if not c.type.measured:
                self.assumptions[f"achieved rates of {c.type.name} are assumed, not measured"] = None

    def kernel(self, equation: Equation, signature: Signature, traffic: Traffic) -> ShareCost:
        """`compute` by the equation's registered rule, remembered."""
        key = (equation, signature, traffic)
        if key not in self._of_equation:
            self._of_equation[key] = self.compute(equation, rule_of(equation), signature, traffic)
        return self._of_equation[key]

    def compute(self, equation: Equation, rule: Rule, signature: Signature, traffic: Traffic) -> ShareCost:
        """Cost of one equation on local shards; one object for equal kernels."""
        flop, precision = flop_count(rule, equation), _precision(equation)
        types = (equation.input_types, equation.output_types)
        key = (equation.primitive, flop, precision, types, signature, traffic)
        if key not in self._kernels:
            self._kernels[key] = self._compute(equation, flop, precision, signature, traffic)
        return self._kernels[key]

    def _compute(
        self, equation: Equation, flop: float, precision: str | None, signature: Signature, traffic: Traffic
    ) -> ShareCost:
        if equation.primitive in ALIASES:
            return self._free
        placements = (*signature.ins, *signature.outs)
        tensors = (*equation.input_types, *equation.output_types)
        through = (*traffic.ins, *traffic.outs)
        sharded = any(isinstance(p, Shard) for p in placements)
        split_bytes = whole_bytes = 0
        for tensor, placement, counts in zip(tensors, placements, through, strict=True):
            if counts and isinstance(placement, Shard):
                split_bytes += tensor.nbytes
            elif counts:
                whole_bytes += tensor.nbytes
        rates = np.array([self._rate(device, equation, precision) for device in self.types])
        bandwidth = np.array([device.bandwidth_byte_per_s for device in self.types])
        # A fused elementwise equation joins its consumer's kernel: only what writes memory is launched.
        launch = np.array([device.launch_s for device in self.types]) * any(traffic.outs)
        compute, memory = flop / rates, split_bytes / bandwidth
        constant = np.stack([launch + (0.0 if sharded else compute), launch + whole_bytes / bandwidth])
        linear = np.stack([compute if sharded else np.zeros_like(compute), memory])
        return ShareCost(constant, linear, np.zeros_like(linear))

    def _rate(self, device: DeviceType, equation: Equation, precision: str | None) -> float:
        op = registry().get(equation.primitive)
        dtype = equation.input_types[0].dtype if equation.inputs else "float32"
        if op is None or op.kind != "contraction":
            return device.vector_rate(dtype)
        rate, assumption = device.flop_rate(dtype, precision)
        if assumption:
            self.assumptions[assumption] = None
        return rate

    def move(
        self, kind: str, strategy: str, tensor: TensorType, pre: Placement, post: Placement
    ) -> ShareCost:
        """Cost of one move of a tensor over all devices of the fleet."""
        if collectives()[kind].local or len(self.class_of) == 1:
            return self._free
        key = (kind, strategy, tensor.nbytes, pre, post)
        if key not in self._moves:
            seen = self.fleet.under(f"{kind}.{strategy}", tensor.nbytes)
            ring = self.ring if seen is self.fleet else Ring.of(seen)
            self._moves[key] = prices()[kind, strategy](ring, tensor.nbytes, len(self.types))
        return self._moves[key]

    def floor(self, cost: ShareCost) -> float:
        """What `cost` is at least, whatever the shares."""
        if cost not in self._floors:
            self._floors[cost] = cost.floor(self.counts)
        return self._floors[cost]

    def floor_within(self, cost: ShareCost, units: int | None, low: float, high: float) -> float:
        """What `cost` is at least if the largest ratio of a device is between `low` and `high`.

        Args:
            cost: of an instruction.
            units: of the axis it cuts: rounding gives a device its ratio rounded up or down to whole units,
                and some device has the average at least. None where the ratios themselves matter.
            low: least that the largest ratio can be.
            high: most that it can be.
        """
        if not cost.varies:
            return self.floor(cost)
        if units is not None:
            low = max(int(units * low + 1e-9), ceil(units / len(self.class_of))) / units
            high = min(int(units * high + 1e-9) + 1, units) / units
        return cost.floor_within(self.counts, low, high)


def _precision(equation: Equation) -> str | None:
    """The operation's own precision, the less precise one where the operands differ."""
    precision = equation.params.get("precision")
    if precision is None:
        return None
    both = precision if isinstance(precision, tuple) else (precision,)
    return min((str(getattr(p, "name", p)) for p in both), key=_order)


def _order(name: str) -> int:
    return {"DEFAULT": 0, "HIGH": 1, "HIGHEST": 2}.get(name, 0)
