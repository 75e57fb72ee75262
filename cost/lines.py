"""Instructions as price lists name them: what a price depends on, whatever the fleet.

Many equations under many signatures cost the same. A price list therefore names each instruction by what
its price depends on, and every fleet, and every part of one, prices the same list as one stack of arrays.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from shardwright.cost.kernels.contractions import Sizes, like_linear, product_sizes, sharded_size
from shardwright.cost.kernels.products import kernel_dtype
from shardwright.cost.op_classes import HOST, PRODUCTS, op_class, turned_elements
from shardwright.cost.traffic import ALIASES, Traffic, traffic
from shardwright.ir.graph import Equation, Graph, TensorType
from shardwright.ir.host import is_reload
from shardwright.ir.placement import R, Shard
from shardwright.ir.regions import boundary
from shardwright.ir.registry import rule_of
from shardwright.ir.rules import Rule, Signature, flop_count
from shardwright.ir.stages import Layers, in_stages, layers_of


class Kernel(NamedTuple):
    """The local computation of an equation.

    Attributes:
        dtype: of the first operand.
        precision: the operation's own.
        op_class: see `OP_CLASSES`; of `HOST` the bytes are those that go each way.
        flop: operations of the whole equation.
        launches: whether it writes memory: what does not joins its consumer's kernel.
        sharded: whether each device computes its part only.
        split_bytes: of tensors through memory that a device holds a stretch of.
        whole_bytes: of tensors through memory that a device holds whole.
        units: of the axis that is cut; 0 if none is.
        sizes: of the product, None if it is none.
        cut: which of the sizes is cut.
        linear: see `contractions.like_linear`.
        turned: elements of an operand that is rearranged.
        turned_split: whether a device holds a stretch of that operand.
    """

    dtype: str
    precision: str | None
    op_class: str
    flop: float
    launches: bool
    sharded: bool
    split_bytes: int
    whole_bytes: int
    units: int
    sizes: Sizes | None
    cut: int | None
    linear: bool
    turned: int = 0
    turned_split: bool = False


class Exchange(NamedTuple):
    """A move of a tensor over all devices by one strategy, whatever dimension it is cut along."""

    kind: str
    strategy: str
    nbytes: int


class Beats(NamedTuple):
    """Layers done on one piece of the batch after another: see `shardwright.ir.stages`.

    Attributes:
        kernels: of one layer on one piece, and how often it has each.
        length: number of layers.
        pieces: of the batch.
        handed_bytes: what is carried on of one piece.
        sharded: whether the layers are cut, so that devices are stages.
        units: how many layers there are to cut; 0 if they are not.
    """

    kernels: tuple[tuple[Kernel, float], ...]
    length: int
    pieces: int
    handed_bytes: int
    sharded: bool

    @property
    def units(self) -> int:
        return self.length if self.sharded else 0


#: A line of a price list; None is one that costs nothing.
Line: TypeAlias = Kernel | Exchange | Beats | None


@dataclass(frozen=True, slots=True)
class Exchanges:
    """Exchanges by one strategy, or as many lines that cost nothing (kind and strategy are empty).

    Attributes:
        nbytes: of tensors, each once; `which` says whose they are.
    """

    kind: str
    strategy: str
    nbytes: tuple[int, ...]
    which: NDArray[np.intp]

    @staticmethod
    def of(kind: str, strategy: str, lines: Sequence[Exchange | None]) -> Exchanges:
        """Lines of one kind and strategy."""
        nbytes: dict[int, int] = {}
        which = [0 if line is None else nbytes.setdefault(line.nbytes, len(nbytes)) for line in lines]
        return Exchanges(kind, strategy, tuple(nbytes), np.array(which, dtype=np.intp))


@dataclass(frozen=True, slots=True, eq=False)
class ProductLines:
    """Kernels that are matrix products, of one dtype and one layout.

    Attributes:
        at: their numbers.
        sizes: (products, 4), of the whole products.
        cut: which of the sizes is cut; -1 for none.
        units: of the axis that is cut; 0 if none is.
    """

    at: NDArray[np.intp]
    sizes: NDArray[np.int64]
    cut: NDArray[np.intp]
    units: NDArray[np.int64]

    def local(self, devices: int) -> NDArray[np.int64]:
        """(products, 4): sizes on the device that has most units if `devices` have equal ratios."""
        share = np.where(self.units > 0, -(-self.units // devices) / np.maximum(self.units, 1), 1.0)
        found, rows = self.sizes.copy(), np.flatnonzero(self.cut >= 0)
        part = self.sizes[rows, self.cut[rows]] * share[rows]
        found[rows, self.cut[rows]] = np.maximum(np.ceil(part - 1e-9), 1)
        return found


class Kernels:
    """Kernels as columns, for all parts of a fleet that price them; arrays are (kernels, 1).

    Attributes:
        lines: the kernels.
        kinds: dtype, precision and class, each once.
        kind: which of these a kernel is.
        flop, launches, sharded, split_bytes, whole_bytes, turned, turned_split: see `Kernel`.
        trips, contracts: whether a kernel is a trip to host memory, or a product.
        products: by dtype of the kernel model and `Kernel.linear`, those that it may price.
    """

    def __init__(self, lines: Sequence[Kernel]) -> None:
        self.lines = tuple(lines)
        columns = list(zip(*lines, strict=True)) or [()] * len(Kernel._fields)
        by_name = dict(zip(Kernel._fields, columns, strict=True))
        kinds: dict[tuple[str, str | None, str], int] = {}
        given = zip(by_name["dtype"], by_name["precision"], by_name["op_class"], strict=True)
        self.kind = np.array([kinds.setdefault(kind, len(kinds)) for kind in given], dtype=np.intp)
        self.kinds = tuple(kinds)

        def column(name: str) -> NDArray[Any]:
            return np.array(by_name[name])[:, None]

        self.flop, self.launches, self.sharded = map(column, ("flop", "launches", "sharded"))
        self.split_bytes, self.whole_bytes = map(column, ("split_bytes", "whole_bytes"))
        self.turned, self.turned_split = map(column, ("turned", "turned_split"))
        self.trips = np.array([kind[2] == HOST for kind in kinds], dtype=np.bool_)[self.kind][:, None]
        self.contracts = np.array([kind[2] in PRODUCTS for kind in kinds], dtype=np.bool_)[self.kind][:, None]
        used = [kernel_dtype(dtype, given) for dtype, given, _ in kinds]
        groups: dict[tuple[str, bool], list[int]] = {}
        for number, line in enumerate(lines):
            dtype = None if line.sizes is None else used[self.kind[number]]
            if dtype is not None:
                groups.setdefault((dtype, line.linear), []).append(number)
        self.products = {key: self._products(numbers) for key, numbers in groups.items()}

    def _products(self, numbers: Sequence[int]) -> ProductLines:
        some = [self.lines[number] for number in numbers]
        return ProductLines(
            np.array(numbers, dtype=np.intp),
            np.array([line.sizes for line in some], dtype=np.int64),
            np.array([-1 if line.cut is None else line.cut for line in some], dtype=np.intp),
            np.array([line.units for line in some], dtype=np.int64),
        )

    @cached_property
    def numbers(self) -> Mapping[Kernel, int]:
        """Of every kernel, its number."""
        return {line: number for number, line in enumerate(self.lines)}


@dataclass(frozen=True, slots=True)
class Grouped:
    """Lines by how they are priced: worked out once, for all parts of a fleet.

    Attributes:
        exchanges: all that are no kernels and no stages.
        beats: stages.
        kernels: all others.
        order: positions of the lines in exchanges, stages and kernels, one after another.
    """

    exchanges: tuple[Exchanges, ...]
    beats: tuple[Beats, ...]
    kernels: Kernels
    order: NDArray[np.intp]

    @staticmethod
    def of(lines: Sequence[Line]) -> Grouped:
        """Lines, grouped."""
        places: list[int] = []
        kernels: list[Kernel] = []
        beats: list[Beats] = []
        own: list[int] = []
        staged: list[int] = []
        groups: dict[tuple[str, str], tuple[list[int], list[Exchange | None]]] = {}
        for k, line in enumerate(lines):
            if isinstance(line, Kernel):
                own.append(k)
                kernels.append(line)
                continue
            if isinstance(line, Beats):
                staged.append(k)
                beats.append(line)
                continue
            key = ("", "") if line is None else (line.kind, line.strategy)
            at, moves = groups.setdefault(key, ([], []))
            at.append(k)
            moves.append(line)
        for at, _ in groups.values():
            places.extend(at)
        order = np.argsort(np.array([*places, *staged, *own], dtype=np.intp))
        exchanges = tuple([Exchanges.of(*key, moves) for key, (_, moves) in groups.items()])
        return Grouped(exchanges, tuple(beats), Kernels(kernels), order)


def kernel_lines(
    equation: Equation, rule: Rule, signatures: Iterable[Signature], traffic: Traffic
) -> Iterator[Kernel | Beats | None]:
    """The kernel of an equation under each signature; None where it costs nothing."""
    layers = layers_of(equation)
    if layers is not None:
        whole, cut = beats_of(layers, sharded=False), beats_of(layers, sharded=True)
        yield from (cut if in_stages(signature) else whole for signature in signatures)
        return
    if equation.primitive in ALIASES:
        yield from (None for _ in signatures)
        return
    flop = flop_count(rule, equation)
    tensors = (*equation.input_types, *equation.output_types)
    moved = traffic.moved(equation)
    if is_reload(equation):
        # Its bytes go out and come back: the link has a rate for both together.
        moved = moved._replace(nbytes=(moved.nbytes[0], 0))
    launches = any(traffic.outs)
    dtype = equation.input_types[0].dtype if equation.inputs else "float32"
    found = op_class(equation)
    given, sizes, linear = precision(equation), product_sizes(equation, flop), like_linear(equation)
    turned = turned_elements(equation)
    #: Many signatures cost the same: one object for equal kernels.
    known: dict[tuple[object, ...], Kernel] = {}
    for signature in signatures:
        split, units, sharded = 0, 0, False
        through, placements = moved.under(signature.outs[0]), signature.ins + signature.outs
        for tensor, nbytes, placement, like in zip(tensors, through, placements, moved.cut_like, strict=True):
            if isinstance(placement, Shard):
                units = units if sharded else units_of(tensor, placement)
                sharded = True
            if isinstance(placements[like], Shard):
                split += nbytes
        cut = sharded_size(signature) if sizes is not None else None
        part = turned > 0 and isinstance(signature.ins[0], Shard)
        key = sharded, split, units, cut, part, through is moved.nbytes
        kernel = known.get(key)
        if kernel is None:
            whole = sum(through) - split
            kernel = known[key] = Kernel(
                dtype,
                given,
                found,
                flop,
                launches,
                sharded,
                split,
                whole,
                units,
                sizes,
                cut,
                linear,
                turned,
                part,
            )
        yield kernel


#: Units, sizes, cut and layout of a kernel that is no product.
_UNCUT = 0, None, None, False


def beats_of(layers: Layers, *, sharded: bool) -> Beats:
    """What layers cost, whole on a device or as stages."""
    kernels: dict[Kernel, float] = {}
    for _, kernel, times in kernels_in(layers.graph):
        kernels[kernel] = kernels.get(kernel, 0.0) + times
    for atom, going in zip(layers.graph.outputs, layers.outs, strict=True):
        if isinstance(going, str):
            # What is added up so far is read, and so is what is added to it; the sum is written.
            adding = Kernel(
                atom.type.dtype, None, "other", atom.type.size, False, False, 0, 3 * atom.type.nbytes, *_UNCUT
            )
            kernels[adding] = kernels.get(adding, 0.0) + 1
    carried = layers.graph.inputs[layers.consts : layers.consts + layers.carries]
    handed_bytes = sum(value.type.nbytes for value in carried)
    return Beats(tuple(kernels.items()), layers.length, layers.pieces, handed_bytes, sharded)


def kernels_in(graph: Graph, times: float = 1.0) -> Iterator[tuple[Equation, Kernel, float]]:
    """The kernels of a graph on one device, those of loops with it, and how often each runs."""
    stored = traffic(graph)
    for equation in graph.equations:
        trips = boundary(equation).trips if equation.regions else ()
        for region, trip in zip(equation.regions, trips, strict=True):
            yield from kernels_in(region, times * (trip or 1))
        if not equation.regions:
            whole = Signature((R,) * len(equation.inputs), (R,) * len(equation.outputs))
            (kernel,) = kernel_lines(equation, rule_of(equation), (whole,), stored[equation])
            if isinstance(kernel, Kernel):
                yield equation, kernel, times


def units_of(tensor: TensorType, placement: Shard) -> int:
    """Units of the axis that a placement cuts."""
    return tensor.shape[placement.dim] // placement.unit


def precision(equation: Equation) -> str | None:
    """The operation's own precision, the less precise one where the operands differ."""
    given = equation.params.get("precision")
    if given is None:
        return None
    both = given if isinstance(given, tuple) else (given,)
    return min((str(getattr(p, "name", p)) for p in both), key=_order)


def _order(name: str) -> int:
    return {"DEFAULT": 0, "HIGH": 1, "HIGHEST": 2}.get(name, 0)
