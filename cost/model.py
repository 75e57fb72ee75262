"""Prices of instructions on a fleet: roofline for kernels, alpha-beta for exchanges.

A kernel takes launch + max(flop / achieved flop rate, bytes / achieved bandwidth) on each device class
(on those that were measured, products also what it takes to rearrange an operand);
its flops and its sharded operands shrink with the share, what is replicated does not. Operands and
results that XLA keeps in registers (an elementwise chain, a reduction's input) move no bytes: `Traffic`
says which of an equation's tensors do. Nothing here is priced in elements.

On device types that the kernel model knows (`follows_kernel_model`) the achieved flop rate of a contraction
is the one that `cost/kernels/seconds.py` predicts for its very shape, and bandwidths are that model's; on
others both are constants of the type. The kernel model's dispatch does not count: it is eager PyTorch's,
where a compiled step pays `launch_s`.

The rate of a sharded contraction is taken at the local shape of the even share, and holds for all shares: a
secant through the origin. Only so is the price `constant + linear * share`, which the linear program, the
floors and the search need, and which sums over shares to the whole. At other shares it misses what tiles,
waves and a floor of latency make of the shape: docs/kernels.md has figures.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from shardwright.cost.device import DeviceType
from shardwright.cost.fleet import DeviceClass, Fleet
from shardwright.cost.kernels.contractions import Sizes, like_linear, product_sizes, sharded_size
from shardwright.cost.kernels.products import Products, follows_kernel_model, kernel_dtype, local_sizes
from shardwright.cost.kernels.seconds import bandwidths
from shardwright.cost.lines import (
    Beats,
    Exchange,
    Exchanges,
    Grouped,
    Kernel,
    Kernels,
    Line,
    kernel_lines,
    precision,
)
from shardwright.cost.moves import strategies
from shardwright.cost.op_classes import PRODUCTS, op_class, turned_elements
from shardwright.cost.share_cost import CostStack, Floats, ShareCost
from shardwright.cost.stages import staged_cost
from shardwright.cost.topology import Topology, host_link
from shardwright.cost.traffic import Traffic
from shardwright.ir.collectives import registry as collectives
from shardwright.ir.graph import Equation, Form, TensorType
from shardwright.ir.placement import Placement
from shardwright.ir.registry import registry, rule_of
from shardwright.ir.rules import Rule, Signature
from shardwright.ir.stages import layers_of


@dataclass(slots=True)
class CostModel:
    """Prices every instruction for one fleet, in the fleet's device classes.

    Attributes:
        fleet: the fleet.
        products: of its types of device at least; models of parts of one fleet may share them.
        assumptions: what had to be assumed, in words, collected while pricing.
        classes: the fleet's device classes.
        types: device type of every class.
        counts: devices of every class.
        class_of: class of every device.
        topology: how the devices reach each other.
    """

    fleet: Fleet
    products: Products | None = None
    assumptions: dict[str, None] = field(default_factory=dict[str, None])
    classes: tuple[DeviceClass, ...] = field(init=False)
    types: tuple[DeviceType, ...] = field(init=False)
    counts: NDArray[np.int64] = field(init=False)
    class_of: NDArray[np.int64] = field(init=False)
    topology: Topology = field(init=False)
    _modelled: tuple[int, ...] = field(init=False)
    _launch_s: Floats = field(init=False)
    _turned_per_s: Floats = field(init=False)
    _stream_byte_per_s: Floats = field(init=False)
    _product_byte_per_s: Floats = field(init=False)
    _trip_s: Floats = field(init=False)
    _trip_byte_per_s: Floats = field(init=False)
    _products: Products = field(init=False)
    _in_products: NDArray[np.intp] = field(init=False)
    _moves: dict[Exchange, ShareCost] = field(init=False)
    _transfers: dict[tuple[str, str, int], ShareCost] = field(init=False)
    _free: ShareCost = field(init=False)
    _never: ShareCost = field(init=False)
    _kernels: dict[Kernel, ShareCost] = field(init=False)
    _beats: dict[Beats, ShareCost] = field(init=False)
    _priced: list[tuple[Kernels, CostStack]] = field(init=False)
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
        self._moves, self._transfers, self._of_form = {}, {}, {}
        self._kernels, self._beats, self._priced = {}, {}, []
        self._modelled = tuple(i for i, device in enumerate(self.types) if follows_kernel_model(device))
        modelled = [self.types[i] for i in self._modelled]
        self._products = self.products or Products(tuple(dict.fromkeys(modelled)))
        self._in_products = np.array([self._products.types.index(t) for t in modelled], dtype=np.intp)
        self._launch_s = np.array([device.launch_s for device in self.types])
        self._turned_per_s = np.array([device.turned_per_s for device in self.types])
        both = [
            bandwidths(device) if i in self._modelled else (device.bandwidth_byte_per_s,) * 2
            for i, device in enumerate(self.types)
        ]
        self._stream_byte_per_s, self._product_byte_per_s = np.array(both).T
        trips = [self._trip(c) for c in classes]
        self._trip_s, self._trip_byte_per_s = np.array(trips).T
        for c in classes:
            if not c.type.measured:
                self.assumptions[f"achieved rates of {c.type.name} are assumed, not measured"] = None
        self.assumptions.update(dict.fromkeys(self.topology.assumptions))

    def _trip(self, of: DeviceClass) -> tuple[float, float]:
        """Seconds, and bytes per second, of a trip to host memory and back.

        Both ways count, one after the other. A device without a link of its own has no other memory than the
        host's: nothing is gained there, and a copy each way is the least that it takes.
        """
        link = host_link(of.type, self.fleet.devices[of.members[0]].host_link)
        if link is None:
            return 2 * of.type.launch_s, of.type.bandwidth_byte_per_s / 4
        return 2 * (of.type.launch_s + link.latency_s), link.bandwidth_byte_per_s / 2

    @property
    def trip_byte_per_s(self) -> float:
        """What all devices together can bring to host memory and back."""
        return float(self._trip_byte_per_s @ self.counts)

    @property
    def trip_s(self) -> float:
        """What a trip of next to nothing takes them."""
        return float(self._trip_s.max())

    @property
    def bandwidth_byte_per_s(self) -> Floats:
        """Of every device's memory, as streams through it reach it."""
        return self._stream_byte_per_s[self.class_of]

    @property
    def known_products(self) -> Products:
        """Seconds of products known so far, to be shared with models of parts of the fleet."""
        return self._products

    def kernel(self, equation: Equation, signature: Signature, traffic: Traffic) -> ShareCost:
        """`compute` by the equation's registered rule, remembered."""
        key = (equation.form, signature, traffic)
        found = self._of_form.get(key)
        if found is None:
            found = self._of_form[key] = self.compute(equation, rule_of(equation), signature, traffic)
        return found

    def compute(self, equation: Equation, rule: Rule, signature: Signature, traffic: Traffic) -> ShareCost:
        """Cost of one equation on local shards; one object for equal kernels."""
        (kernel,) = kernel_lines(equation, rule, (signature,), traffic)
        return self.cost(kernel)

    def cost(self, line: Line) -> ShareCost:
        """Cost of one instruction; one object for equal ones."""
        if line is None:
            return self._free
        if isinstance(line, Exchange):
            return self._exchange(line)
        if isinstance(line, Beats):
            return self._staged(line)
        found = self._kernels.get(line)
        if found is None:
            priced = ((stack, kernels.numbers.get(line)) for kernels, stack in self._priced)
            known = next(((stack, row) for stack, row in priced if row is not None), None)
            stack, row = known or (self.kernels(Kernels([line])), 0)
            found = ShareCost(stack.constant[row], stack.linear[row], stack.product[row])
            self._kernels[line] = found
        return found

    def costs(self, lines: Sequence[Line] | Grouped) -> CostStack:
        """Costs of many instructions, as one stack; of a price list that many models price, grouped once."""
        grouped = lines if isinstance(lines, Grouped) else Grouped.of(lines)
        stacks = [self._exchanges(each) for each in grouped.exchanges]
        stacks += [CostStack.of([self._staged(each) for each in grouped.beats])] if grouped.beats else []
        stacks.append(self.kernels(grouped.kernels))
        self._priced.append((grouped.kernels, stacks[-1]))
        return CostStack.joined(stacks).take(grouped.order)

    def _staged(self, line: Beats) -> ShareCost:
        found = self._beats.get(line)
        if found is None:
            found = self._beats[line] = staged_cost(self, line)
        return found

    def _exchanges(self, some: Exchanges) -> CostStack:
        """Costs of moves by one strategy, or of as many instructions that cost nothing."""
        if not some.kind or len(self.class_of) == 1:
            free = np.zeros((len(some.which), 1, len(self.types)))
            return CostStack(free, free, free)
        entry = strategies()[some.kind, some.strategy]
        if not entry.supported(self.topology):
            stack = CostStack.of([self._never] * len(some.nbytes))
        elif self.fleet.fitted:
            stack = CostStack.of([self._transfer(some.kind, some.strategy, each) for each in some.nbytes])
        else:
            stack = entry.prices(self.topology, list(some.nbytes), len(self.types))
        return stack.take(some.which)

    def kernels(self, some: Kernels) -> CostStack:
        """Costs of many kernels, as one stack: the rows are arithmetic and memory."""
        if not some.lines:
            nothing = np.zeros((0, 1, len(self.types)))
            return CostStack(nothing, nothing, nothing)
        rates = np.array([[self._rate(device, *kind) for device in self.types] for kind in some.kinds])
        compute = some.flop / rates[some.kind]
        for (dtype, linear), products in some.products.items() if self._modelled else ():
            local = products.local(len(self.class_of))
            part = (local / products.sizes).prod(axis=1)
            known = self._products.of(dtype, linear, _sizes(local))[:, self._in_products]
            compute[products.at[:, None], self._modelled] = known / part[:, None]
        cut, trips = some.sharded, some.trips
        launch = np.where(trips, self._trip_s, self._launch_s) * some.launches
        byte_per_s = np.where(some.contracts, self._product_byte_per_s, self._stream_byte_per_s)
        turning = some.turned / self._turned_per_s
        turning_part = np.where(some.turned_split, turning, 0.0)
        byte_per_s = np.where(trips, self._trip_byte_per_s, byte_per_s)
        constant = np.stack(
            [
                launch + np.where(cut, 0.0, compute) + (turning - turning_part),
                launch + some.whole_bytes / byte_per_s,
            ],
            axis=1,
        )
        linear = np.stack([np.where(cut, compute, 0.0) + turning_part, some.split_bytes / byte_per_s], axis=1)
        return CostStack(constant, linear, np.zeros_like(linear))

    def products_of(self, kernels: Kernels) -> dict[tuple[str, bool], list[Sizes]]:
        """The products that `costs` of these will ask for: parts of a fleet `learn` theirs together."""
        if not self._modelled:
            return {}
        devices = len(self.class_of)
        return {key: _sizes(products.local(devices)) for key, products in kernels.products.items()}

    def learn(self, wanted: Mapping[tuple[str, bool], Sequence[Sizes]]) -> None:
        """Price products ahead, all of a kind in one go."""
        for (dtype, linear), shapes in wanted.items():
            self._products.of(dtype, linear, shapes)

    def overheads(self, equation: Equation, traffic: Traffic) -> tuple[Floats, Floats]:
        """Seconds of a launch, and bytes per second through memory, on every class."""
        # A fused elementwise equation joins its consumer's kernel: only what writes memory is launched.
        if _kind(equation) == "host":  # its bytes are counted on both sides
            return self._trip_s, 2 * self._trip_byte_per_s
        launch = self._launch_s * any(traffic.outs)
        contracts = _kind(equation) == "contraction"
        return launch, self._product_byte_per_s if contracts else self._stream_byte_per_s

    def arithmetic_s(
        self, equation: Equation, flop: float, ways: Sequence[Sequence[tuple[Signature, float]]]
    ) -> Floats:
        """Seconds of arithmetic of the whole equation at the rates that its parts have: (ways, classes).

        Args:
            equation: what is computed.
            flop: how many operations it has.
            ways: to cut it, each one mesh axis after another: the signature, and the share that is left.
        """
        given = precision(equation)
        dtype = equation.input_types[0].dtype if equation.inputs else "float32"
        found = op_class(equation)
        rates = np.array([self._rate(device, dtype, given, found) for device in self.types])
        seconds = np.tile(flop / rates + turned_elements(equation) / self._turned_per_s, (len(ways), 1))
        products = self.products_in(equation, flop, ways)
        if products is None:
            return seconds
        kind, shapes = products
        priced = self._products.of(*kind, shapes)[:, self._in_products]
        parts = (np.array(shapes) / np.array(product_sizes(equation, flop))).prod(axis=1)
        seconds[:, list(self._modelled)] = priced / parts[:, None]
        return seconds

    def peak_rates(self, equation: Equation, flop: float) -> Floats:
        """Operations per second that no part of a product exceeds by `arithmetic_s`, on every class."""
        dtype, given = equation.input_types[0].dtype, precision(equation)
        found = op_class(equation)
        rates = np.array([self._rate(device, dtype, given, found) for device in self.types])
        used = kernel_dtype(dtype, given) if self._modelled and product_sizes(equation, flop) else None
        if used is not None:
            rates[list(self._modelled)] = self._products.peaks(used)[self._in_products]
        return rates

    def products_in(
        self, equation: Equation, flop: float, ways: Sequence[Sequence[tuple[Signature, float]]]
    ) -> tuple[tuple[str, bool], list[Sizes]] | None:
        """The products that `arithmetic_s` asks for, and of which kind; None where it asks for none."""
        sizes = product_sizes(equation, flop) if self._modelled else None
        used = kernel_dtype(equation.input_types[0].dtype, precision(equation)) if sizes else None
        if sizes is None or used is None:
            return None
        shapes: list[Sizes] = []
        for cuts in ways:
            local = sizes
            for signature, share in cuts:
                local = local_sizes(local, sharded_size(signature), share)
            shapes.append(local)
        return (used, like_linear(equation)), shapes

    def _rate(self, device: DeviceType, dtype: str, given: str | None, found: str) -> float:
        if found not in PRODUCTS:
            return device.vector_rate(dtype) * device.class_factor(found)
        rate, assumption = device.flop_rate(dtype, given)
        if assumption:
            self.assumptions[assumption] = None
        return rate * device.class_factor(found)

    def strategies(self, kind: str, pre: Placement, post: Placement) -> tuple[str, ...]:
        """The strategies of a move that make sense on this fleet; there is one at least."""
        names = collectives()[kind].strategies
        if collectives()[kind].local:
            return names
        return tuple([n for n in names if strategies()[kind, n].supported(self.topology)])

    def move(
        self, kind: str, strategy: str, tensor: TensorType | int, pre: Placement, post: Placement
    ) -> ShareCost:
        """Cost of one move of a tensor over all devices of the fleet; infinite if it makes no sense there.

        Args:
            kind: the collective.
            strategy: how it is carried out.
            tensor: what is moved, or how many bytes it has.
            pre, post: its placements before and after.
        """
        if collectives()[kind].local or len(self.class_of) == 1:
            return self._free
        return self._exchange(Exchange(kind, strategy, tensor if isinstance(tensor, int) else tensor.nbytes))

    def _exchange(self, line: Exchange) -> ShareCost:
        if len(self.class_of) == 1:
            return self._free
        found = self._moves.get(line)
        if found is None:
            supported = strategies()[line.kind, line.strategy].supported(self.topology)
            found = self._moves[line] = self._transfer(*line) if supported else self._never
        return found

    def exchanges(self, kind: str, strategy: str, nbytes: Sequence[int]) -> CostStack:
        """Costs of one move of many tensors; see `move`."""
        if collectives()[kind].local or len(self.class_of) == 1:
            return CostStack.of([self._free] * len(nbytes))
        return self._exchanges(Exchanges(kind, strategy, tuple(nbytes), np.arange(len(nbytes))))

    def _transfer(self, kind: str, strategy: str, nbytes: int) -> ShareCost:
        key = kind, strategy, nbytes
        if key not in self._transfers:
            topology = self.topology
            if self.fleet.fitted:
                topology = Topology.of(self.fleet.under(f"{kind}.{strategy}", nbytes), self.classes)
            self._transfers[key] = strategies()[kind, strategy].price(topology, nbytes, len(self.types))
        return self._transfers[key]


def kernel_key(equation: Equation, flop: float) -> tuple[object, ...]:
    """Equal for equations of `flop` operations whose kernels cost the same."""
    types = (equation.input_types, equation.output_types)
    shape = like_linear(equation), turned_elements(equation), layers_of(equation)
    return equation.primitive, flop, precision(equation), types, shape, op_class(equation)


def _sizes(local: NDArray[np.int64]) -> list[Sizes]:
    return [(b, m, n, k) for b, m, n, k in local.tolist()]


def _kind(equation: Equation) -> str:
    op = registry().get(equation.primitive)
    return "unknown" if op is None else op.kind
