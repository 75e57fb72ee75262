"""The symbolic profile of a step: work, traffic and memory by equation and by layer; nothing is run.

Flops are those of the rules, bytes read and written what `cost/traffic.py` says goes through memory, both
times the iterations of the loops around. Memory over time is the layout of `cost/memory/buffers.py`.
Rematerialised regions are in the step as JAX differentiated it: what runs twice is there twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from shardwright.cost.memory.buffers import Layout, layout
from shardwright.cost.roles import NO_LAYER, roles
from shardwright.cost.share_cost import Floats
from shardwright.cost.traffic import traffic
from shardwright.ir.graph import Graph, Value
from shardwright.ir.regions import boundary
from shardwright.ir.registry import rule_of
from shardwright.ir.rules import flop_count

#: What memory over time is split into, in order.
ROLES = ("arguments", "saved", "gradient", "temporary")


@dataclass(frozen=True, slots=True)
class EquationRow:
    """One equation of a step.

    Attributes:
        equation: its number; "12.0.3" is equation 3 of region 0 of equation 12.
        primitive: its primitive.
        layer: see `cost/roles.py`.
        part: see `shardwright.ir.graph.Equation`.
        runs: how often it runs in a step; a while counts as one iteration, a cond as every branch once.
        flop: operations of all runs.
        read_bytes, written_bytes: through memory, of all runs.
        source: JAX's source information.
    """

    equation: str
    primitive: str
    layer: str
    part: str
    runs: float
    flop: float
    read_bytes: float
    written_bytes: float
    source: object = None


@dataclass(frozen=True, slots=True)
class LayerRow:
    """What equations and tensors of one layer add up to.

    Attributes:
        layer: its name.
        flop, read_bytes, written_bytes: of its equations.
        parameter_bytes, gradient_bytes, optimizer_bytes: of its tensors.
        saved_bytes: what its forward part makes and the backward part reads, as JAX sees it.
        held_bytes: scratch buffers of its equations that are alive at the peak, saved or not.
        temporary_bytes: those of them that are neither saved activations nor gradients.
    """

    layer: str
    flop: float
    read_bytes: float
    written_bytes: float
    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    saved_bytes: int
    held_bytes: int
    temporary_bytes: int


@dataclass(frozen=True, slots=True)
class StepProfile:
    """A step on one device.

    Attributes:
        equations: rows in order, regions behind their equation.
        layers: rows in order of appearance.
        parameter_bytes, optimizer_bytes: of the state.
        gradient_bytes: of all gradients, whether or not they live at the same time.
        data_bytes: of inputs that are no state, and constants.
        saved_bytes: what the forward part keeps for the backward part, as JAX's residuals.
        unread_bytes: what of that no backward equation reads; a compiler drops it.
        arguments_bytes: held throughout: state, data and what is handed out beside the state.
        scratch_bytes: the arena that holds everything else.
        peak_bytes: both.
        over_time: (kernels, 4): bytes alive by `ROLES` while each kernel runs.
        layout: where the bytes are.
        compiler: whose layout that is, see `shardwright.ir.graph.Graph`.
    """

    equations: tuple[EquationRow, ...]
    layers: tuple[LayerRow, ...]
    parameter_bytes: int
    optimizer_bytes: int
    gradient_bytes: int
    data_bytes: int
    saved_bytes: int
    unread_bytes: int
    arguments_bytes: int
    scratch_bytes: int
    peak_bytes: int
    over_time: Floats
    layout: Layout
    compiler: str

    @property
    def flop(self) -> float:
        """Operations of a step."""
        return sum(row.flop for row in self.equations)


def profile_step(graph: Graph) -> StepProfile:
    """The profile of a whole step on one device."""
    found, laid_out = roles(graph), layout(graph)
    rows = tuple(_rows(graph, "", 1.0, None))
    data = _nbytes((*found.data, *graph.constants))
    return StepProfile(
        equations=rows,
        layers=_layers(graph, rows, laid_out),
        parameter_bytes=_nbytes(found.parameters),
        optimizer_bytes=_nbytes(found.optimizer),
        gradient_bytes=_nbytes(found.gradients),
        data_bytes=data,
        saved_bytes=sum(tensor.nbytes for tensor, _ in graph.residuals),
        unread_bytes=sum(tensor.nbytes for tensor, value in graph.residuals if value is None),
        arguments_bytes=laid_out.arguments_bytes,
        scratch_bytes=laid_out.scratch_bytes,
        peak_bytes=laid_out.peak_bytes,
        over_time=_over_time(laid_out),
        layout=laid_out,
        compiler=graph.compiler,
    )


def _nbytes(values: Iterable[Value]) -> int:
    return sum(value.type.nbytes for value in values)


def _rows(graph: Graph, prefix: str, runs: float, layer: str | None) -> Iterator[EquationRow]:
    through = traffic(graph)
    layer_of = roles(graph).layer_of if layer is None else {}
    for equation in graph.equations:
        name = f"{prefix}{equation.index}"
        where = layer_of.get(equation, layer or NO_LAYER)
        if equation.regions:
            trips = boundary(equation).trips
            yield EquationRow(
                name, equation.primitive, where, equation.part, runs, 0.0, 0.0, 0.0, equation.source
            )
            for number, (region, trip) in enumerate(zip(equation.regions, trips, strict=True)):
                yield from _rows(region, f"{name}.{number}.", runs * (1 if trip is None else trip), where)
            continue
        nbytes = through[equation].moved(equation).nbytes
        read, written = sum(nbytes[: len(equation.inputs)]), sum(nbytes[len(equation.inputs) :])
        flop = flop_count(rule_of(equation), equation)
        yield EquationRow(
            name,
            equation.primitive,
            where,
            equation.part,
            runs,
            runs * flop,
            runs * read,
            runs * written,
            equation.source,
        )


def _layers(graph: Graph, rows: Iterable[EquationRow], laid_out: Layout) -> tuple[LayerRow, ...]:
    found = roles(graph)
    names = dict.fromkeys(
        (*map(found.layer_of_value.__getitem__, found.parameters), *found.layer_of.values())
    )
    sums = {name: [0.0] * 9 for name in names}

    def add(layer: str, column: int, amount: float) -> None:
        sums.setdefault(layer, [0.0] * 9)[column] += amount

    for row in rows:
        add(row.layer, 0, row.flop)
        add(row.layer, 1, row.read_bytes)
        add(row.layer, 2, row.written_bytes)
    of_value = found.layer_of_value
    for column, values in (
        (3, found.parameters),
        (4, found.gradients),
        (5, found.optimizer),
        (6, found.saved),
    ):
        for value in values:
            add(of_value.get(value, NO_LAYER), column, value.type.nbytes)
    peak = laid_out.peak_kernel
    for buffer in laid_out.buffers:
        if buffer.first <= peak <= buffer.last:
            layer = NO_LAYER if buffer.equation is None else found.layer_of.get(buffer.equation, NO_LAYER)
            add(layer, 7, buffer.nbytes)
            if buffer.role == "temporary":
                add(layer, 8, buffer.nbytes)
    return tuple(
        LayerRow(name, flop, read, written, *map(int, nbytes))
        for name, (flop, read, written, *nbytes) in sums.items()
    )


def _over_time(laid_out: Layout) -> Floats:
    change = np.zeros((laid_out.kernels + 1, len(ROLES)))
    change[0, 0] = laid_out.arguments_bytes
    for buffer in laid_out.buffers:
        column = ROLES.index(buffer.role)
        change[buffer.first, column] += buffer.nbytes
        change[buffer.last + 1, column] -= buffer.nbytes
    return change.cumsum(axis=0)[: laid_out.kernels]
