"""Prices of instructions on a fleet: roofline for kernels, alpha-beta for exchanges.

A kernel takes launch + max(flop / achieved flop rate, bytes / achieved bandwidth) on each device class;
its flops and its sharded operands shrink with the share, what is replicated does not. Operands and
results that XLA keeps in registers (an elementwise chain, a reduction's input) move no bytes: `Traffic`
says which of an equation's tensors do. Nothing here is priced in elements.

On device types that the kernel model knows (`follows_kernel_model`) the achieved flop rate of a contraction
is the one that `cost/kernels.py` predicts for its very shape, and bandwidths are that model's; on others both
are constants of the type. The kernel model's dispatch does not count: it is eager PyTorch's,
where a compiled step pays `launch_s`.

The rate of a sharded contraction is taken at the local shape of the even share, and holds for all shares: a
secant through the origin. Only so is the price `constant + linear * share`, which the linear program, the
floors and the search need, and which sums over shares to the whole. At other shares it misses what tiles,
waves and a floor of latency make of the shape: docs/kernels.md has figures.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import ceil

import numpy as np

from shardwright.cost.catalogue import catalogue
from shardwright.cost.contractions import Sizes, even_share, like_linear, product_sizes, sharded_size
from shardwright.cost.device import DeviceType, arithmetic
from shardwright.cost.fleet import DeviceClass, Fleet
from shardwright.cost.kernels import DTYPES, bandwidths, products_s
from shardwright.cost.moves import strategies
from shardwright.cost.share_cost import Floats, ShareCost
from shardwright.cost.topology import Topology
from shardwright.ir.collectives import registry as collectives
from shardwright.ir.graph import Equation, Form, TensorType
from shardwright.ir.placement import Placement, Shard
from shardwright.ir.rules import Rule, Signature, flop_count, registry, rule_of

#: Primitives that only rename or reinterpret memory.
ALIASES = frozenset(
    {"reshape", "squeeze", "copy", "stop_gradient", "optimization_barrier", "random_wrap", "random_unwrap"}
)


def follows_kernel_model(device: DeviceType) -> bool:
    """Whether kernels are priced by shape: types of the catalogue, and others that state multiprocessors.

    What was measured on a device of the fleet's own (`measured: true` in a fleet file) stands as it is.
    """
    known = catalogue().get(device.name) == device
    return device.sm_count is not None and (known or not device.measured)


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
        topology: how the devices reach each other.
    """

    fleet: Fleet
    assumptions: dict[str, None] = field(default_factory=dict[str, None])
    classes: tuple[DeviceClass, ...] = field(init=False)
    types: tuple[DeviceType, ...] = field(init=False)
    counts: np.typing.NDArray[np.int64] = field(init=False)
    class_of: np.typing.NDArray[np.int64] = field(init=False)
    topology: Topology = field(init=False)
    _modelled: tuple[int, ...] = field(init=False)
    _launch_s: Floats = field(init=False)
    _stream_byte_per_s: Floats = field(init=False)
    _product_byte_per_s: Floats = field(init=False)
    _products: dict[tuple[str, Sizes, bool], Floats] = field(init=False)
    _moves: dict[tuple[str, str, int, Placement, Placement], ShareCost] = field(init=False)
    _free: ShareCost = field(init=False)
    _never: ShareCost = field(init=False)
    _kernels: dict[tuple[object, ...], ShareCost] = field(init=False)
    _of_form: dict[tuple[Form, Signature, Traffic], ShareCost] = field(init=False)

    def __post_init__(self) -> None:
        classes = self.classes = self.fleet.classes
        self.types = tuple(c.type for c in classes)
        self.counts = np.array([len(c.members) for c in classes], dtype=np.int64)
        self.class_of = np.zeros(len(self.fleet.devices), dtype=np.int64)
        for c in classes:
            self.class_of[list(c.members)] = c.index
        self.topology = Topology.of(self.fleet)
        self._free = ShareCost.free(len(classes))
        self._never = ShareCost.fixed([np.inf] * len(classes))
        self._moves, self._kernels, self._of_form, self._products = {}, {}, {}, {}
        self._modelled = tuple(i for i, device in enumerate(self.types) if follows_kernel_model(device))
        self._launch_s = np.array([device.launch_s for device in self.types])
        both = [
            bandwidths(device) if i in self._modelled else (device.bandwidth_byte_per_s,) * 2
            for i, device in enumerate(self.types)
        ]
        self._stream_byte_per_s, self._product_byte_per_s = np.array(both).T
        for c in classes:
            if not c.type.measured:
                self.assumptions[f"achieved rates of {c.type.name} are assumed, not measured"] = None
        self.assumptions.update(dict.fromkeys(self.topology.assumptions))

    def kernel(self, equation: Equation, signature: Signature, traffic: Traffic) -> ShareCost:
        """`compute` by the equation's registered rule, remembered."""
        key = (equation.form, signature, traffic)
        found = self._of_form.get(key)
        if found is None:
            found = self._of_form[key] = self.compute(equation, rule_of(equation), signature, traffic)
        return found

    def compute(self, equation: Equation, rule: Rule, signature: Signature, traffic: Traffic) -> ShareCost:
        """Cost of one equation on local shards; one object for equal kernels."""
        flop = flop_count(rule, equation)
        key = (*kernel_key(equation, flop), signature, traffic)
        if key not in self._kernels:
            self._kernels[key] = self._compute(equation, flop, signature, traffic)
        return self._kernels[key]

    def _compute(self, equation: Equation, flop: float, signature: Signature, traffic: Traffic) -> ShareCost:
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
        share = even_share(tensors, placements, len(self.class_of))
        compute = self.arithmetic_s(equation, flop, ((signature, share),))
        launch, byte_per_s = self.overheads(equation, traffic)
        constant = np.stack([launch + (0.0 if sharded else compute), launch + whole_bytes / byte_per_s])
        linear = np.stack([compute if sharded else np.zeros_like(compute), split_bytes / byte_per_s])
        return ShareCost(constant, linear, np.zeros_like(linear))

    def overheads(self, equation: Equation, traffic: Traffic) -> tuple[Floats, Floats]:
        """Seconds of a launch, and bytes per second through memory, on every class."""
        # A fused elementwise equation joins its consumer's kernel: only what writes memory is launched.
        launch = self._launch_s * any(traffic.outs)
        contracts = _kind(equation) == "contraction"
        return launch, self._product_byte_per_s if contracts else self._stream_byte_per_s

    def arithmetic_s(
        self, equation: Equation, flop: float, cuts: Sequence[tuple[Signature, float]]
    ) -> Floats:
        """Seconds of arithmetic of the whole equation on every class, at the rates that its parts have.

        Args:
            equation: what is computed.
            flop: how many operations it has.
            cuts: how it is cut, one mesh axis after another: the signature, and the share that is left.
        """
        precision = _precision(equation)
        rates = np.array([self._rate(device, equation, precision) for device in self.types])
        seconds = flop / rates
        sizes = product_sizes(equation, flop) if self._modelled else None
        used = _kernel_dtype(equation.input_types[0].dtype, precision) if sizes else None
        if sizes is None or used is None:
            return seconds
        local, ways = sizes, {sizes}
        for signature, share in cuts:
            local = _local_sizes(local, sharded_size(signature), share)
            ways = {_local_sizes(way, k, share) for way in ways for k in (None, *range(len(sizes)))} | {local}
        key = (used, local, like_linear(equation))
        if key not in self._products:
            # All ways to cut a product are asked for sooner or later: one call prices them.
            self._price_products(used, sorted(ways), like_linear(equation))
        part = float(np.prod([a / b for a, b in zip(local, sizes, strict=True)]))
        seconds[list(self._modelled)] = self._products[key] / part
        return seconds

    def _price_products(self, dtype: str, shapes: Sequence[Sizes], linear: bool) -> None:
        """Remember seconds of products, memory aside, on the classes that follow the kernel model."""
        types = [self.types[i] for i in self._modelled]
        # TF32 is allowed, not demanded: a card without it uses float32.
        used = ["float32" if dtype == "tf32" and t.tf32_flop_per_s is None else dtype for t in types]
        prices = products_s(types, used, shapes, linear=linear, memory=False)
        self._products.update(
            ((dtype, shape, linear), price) for shape, price in zip(shapes, prices.T, strict=True)
        )

    def _rate(self, device: DeviceType, equation: Equation, precision: str | None) -> float:
        dtype = equation.input_types[0].dtype if equation.inputs else "float32"
        if _kind(equation) != "contraction":
            return device.vector_rate(dtype)
        rate, assumption = device.flop_rate(dtype, precision)
        if assumption:
            self.assumptions[assumption] = None
        return rate

    def strategies(self, kind: str, pre: Placement, post: Placement) -> tuple[str, ...]:
        """The strategies of a move that make sense on this fleet; there is one at least."""
        names = collectives()[kind].strategies
        if collectives()[kind].local:
            return names
        return tuple([n for n in names if strategies()[kind, n].supported(self.topology, (pre, post))])

    def move(
        self, kind: str, strategy: str, tensor: TensorType, pre: Placement, post: Placement
    ) -> ShareCost:
        """Cost of one move of a tensor over all devices of the fleet; infinite if it makes no sense there."""
        if collectives()[kind].local or len(self.class_of) == 1:
            return self._free
        key = (kind, strategy, tensor.nbytes, pre, post)
        if key not in self._moves:
            supported = strategy in self.strategies(kind, pre, post)
            seen = self.fleet.under(f"{kind}.{strategy}", tensor.nbytes)
            topology = self.topology if seen is self.fleet else Topology.of(seen)
            entry = strategies()[kind, strategy]
            price = entry.price(topology, tensor.nbytes, len(self.types)) if supported else self._never
            self._moves[key] = price
        return self._moves[key]


def kernel_key(equation: Equation, flop: float) -> tuple[object, ...]:
    """Equal for equations of `flop` operations whose kernels cost the same."""
    types = (equation.input_types, equation.output_types)
    return equation.primitive, flop, _precision(equation), types, like_linear(equation)


def _kind(equation: Equation) -> str:
    op = registry().get(equation.primitive)
    return "unknown" if op is None else op.kind


def _local_sizes(sizes: Sizes, cut: int | None, share: float) -> Sizes:
    """Sizes of a device's part if it holds `share` of size `cut`."""
    b, m, n, k = (max(ceil(size * share - 1e-9), 1) if i == cut else size for i, size in enumerate(sizes))
    return b, m, n, k


def _kernel_dtype(dtype: str, precision: str | None) -> str | None:
    """What such operands are multiplied in, in the kernel model's words; None where it has none."""
    used, passes = arithmetic(dtype, precision)
    return None if passes != 1 or used not in DTYPES or dtype.startswith("complex") else used


def _precision(equation: Equation) -> str | None:
    """The operation's own precision, the less precise one where the operands differ."""
    precision = equation.params.get("precision")
    if precision is None:
        return None
    both = precision if isinstance(precision, tuple) else (precision,)
    return min((str(getattr(p, "name", p)) for p in both), key=_order)


def _order(name: str) -> int:
    return {"DEFAULT": 0, "HIGH": 1, "HIGHEST": 2}.get(name, 0)
